"""A placement problem made ready: input checked, nodes in classes, options where they can stand. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serai.performance.hardware import UnknownHardware, find_gpu
from serai.placer.classes import NodeClass, classify
from serai.placer.demand import ModelDemand, checked
from serai.placer.fleet import Fleet, Node
from serai.placer.options import Option
from serai.placer.placement import BadRules, BadRunning, Objective, Rules, Running

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Cell:
    """An option in a class of nodes: how many of it stand there is what a placement decides."""

    model: int
    """Place of the model in `Problem.demands`."""
    option: Option
    place: int
    """Place of the class in `Problem.classes`."""
    share: float
    """Of the model's planned demand that one instance serves."""
    most: int
    """Of them that could be of use and fit."""
    running: int
    """That run there and are not pinned."""
    run_price: float
    """Of one instance over the horizon."""
    start_price: float
    """Of starting one more."""
    stop_price: float
    """Of stopping one that runs."""


@dataclass(frozen=True)
class Problem:
    """Everything the greedy way and the solver need; only what can be is in it."""

    demands: tuple[ModelDemand, ...]
    classes: tuple[NodeClass, ...]
    cells: tuple[Cell, ...]
    pinned: tuple[Running, ...]
    pinned_share: tuple[float, ...]
    """Per model, of its planned demand."""
    pinned_replicas: tuple[int, ...]
    pinned_domains: tuple[frozenset[str], ...]
    quotas: Mapping[str, int]
    """GPUs left to each project that has one."""
    rules: Rules
    movable: tuple[Running, ...]
    """Sessions that may be kept or stopped."""

    def cells_of_model(self) -> list[list[int]]:
        """Places of each model's cells."""
        found: list[list[int]] = [[] for _ in self.demands]
        for place, cell in enumerate(self.cells):
            found[cell.model].append(place)
        return found


def make_problem(
    fleet: Fleet,
    demands: Sequence[ModelDemand],
    options: Sequence[Option],
    running: Sequence[Running],
    rules: Rules,
    objective: Objective,
) -> Problem:
    """The problem, or BadDemand, BadRules or BadRunning for what contradicts itself."""
    demands = checked(demands)
    _check_rules(rules)
    _check_running(fleet, running)
    models = {demand.model: place for place, demand in enumerate(demands)}
    pinned = tuple(session for session in running if session.pinned)
    movable = tuple(session for session in running if not session.pinned)
    _check_pinned(fleet, demands, models, pinned)
    held: Counter[str] = Counter()
    for session in pinned:
        held.update(dict(session.nodes))
    classes = classify(
        [(node, node.gpus - held[node.name]) for node in fleet.nodes],
        {session.nodes[0][0] for session in movable if len(session.nodes) == 1},
        by_provider=any(demand.providers_allowed for demand in demands),
        options=len(options) // max(1, len(fleet.gpus_by_kind())),
    )
    quotas = _quotas(demands, options, pinned, rules)
    runs = _runs(classes, movable)
    choices = _choices(demands, options, movable, objective)
    cells = [
        cell
        for number, demand in enumerate(demands)
        for option in choices[number]
        for place, nodes in enumerate(classes)
        if (cell := _cell(number, demand, option, place, nodes, runs[place][option.key], rules)) is not None
    ]
    by_model = [[s for s in pinned if s.option.model == demand.model] for demand in demands]
    return Problem(
        demands=demands,
        classes=tuple(classes),
        cells=tuple(cells),
        pinned=pinned,
        pinned_share=tuple(
            sum(_share(demand, s.option) for s in sessions) for demand, sessions in zip(demands, by_model, strict=True)
        ),
        pinned_replicas=tuple(len(sessions) for sessions in by_model),
        pinned_domains=tuple(frozenset(fleet.by_name[s.nodes[0][0]].domain for s in sessions) for sessions in by_model),
        quotas=quotas,
        rules=rules,
        movable=movable,
    )


def _runs(classes: Sequence[NodeClass], movable: Sequence[Running]) -> list[Counter[str]]:
    """Sessions by class, then option. One that spans classes belongs to none: it cannot be kept."""
    home = {node.name: place for place, nodes in enumerate(classes) for node in nodes.nodes}
    found: list[Counter[str]] = [Counter() for _ in classes]
    for session in movable:
        places = {home.get(name) for name, _ in session.nodes}
        place = places.pop()
        if place is not None and not places:
            found[place][session.option.key] += 1
    return found


def _share(demand: ModelDemand, option: Option) -> float:
    wanted = demand.planned_requests_s
    return option.requests_s / wanted if wanted > 0 else 0.0


def _choices(
    demands: Sequence[ModelDemand], options: Sequence[Option], movable: Sequence[Running], objective: Objective
) -> list[list[Option]]:
    """Options by model: those worth choosing, and those that run, with what is known of them now."""
    runs = {session.option.key: session.option for session in movable}
    offered: defaultdict[str, dict[str, Option]] = defaultdict(dict)
    for option in options:
        if option.requests_s > 0 and option.gpus >= 1:
            offered[option.model][option.key] = option
    for key, option in runs.items():
        offered[option.model].setdefault(key, option)
    return [
        _worth(list(offered[demand.model].values()), runs, keep_latency=objective == "latency") for demand in demands
    ]


def _worth(options: list[Option], runs: Mapping[str, Option], *, keep_latency: bool) -> list[Option]:
    """Without those that another of the same GPU beats in all that the objective looks at."""

    def rank(option: Option) -> tuple[float, ...]:
        latency = (option.latency_s,) if keep_latency else ()
        return (-option.requests_s / option.gpus, option.gpus, option.gpus_per_node, option.load_s, *latency)

    def beaten(option: Option) -> bool:
        own = rank(option)
        return any(
            other.gpu == option.gpu
            and other.nodes == option.nodes
            and (rank(other), other.key) < (own, option.key)
            and all(a <= b for a, b in zip(rank(other), own, strict=True))
            for other in options
        )

    return [option for option in options if option.key in runs or not beaten(option)]


def _cell(
    number: int, demand: ModelDemand, option: Option, place: int, nodes: NodeClass, runs: int, rules: Rules
) -> Cell | None:
    if option.gpu != nodes.gpu:
        return None
    fitting = nodes.slots(option.gpus_per_node) // option.nodes
    if option.nodes > 1 and max(nodes.rooms) >= 2 * option.gpus_per_node:
        # Stages that share a node would not be what was promised; such an option is for smaller nodes.
        return None
    if not fitting:
        return None
    if demand.providers_allowed and nodes.provider not in demand.providers_allowed:
        return None
    lasts = nodes.ends_in_s is None or nodes.ends_in_s >= option.load_s + rules.useful_s_min
    if not lasts and not runs:
        return None
    share = _share(demand, option)
    useful = 0 if share <= 0 else math.ceil(1 / share - 1e-9)
    most = min(fitting, max(useful, demand.min_replicas, 0))
    if demand.max_replicas is not None:
        most = min(most, demand.max_replicas)
    if not lasts:
        most = min(most, runs)
    hour = rules.gpu_price.get(option.gpu, 1.0) * option.gpus / SECONDS_PER_HOUR
    return Cell(
        model=number,
        option=option,
        place=place,
        share=share,
        most=most,
        running=min(runs, fitting),
        run_price=hour * rules.horizon_s,
        start_price=hour * option.load_s * rules.change_price,
        stop_price=hour * max(option.latency_s, 1.0) * rules.change_price,
    )


# Checks


def _check_rules(rules: Rules) -> None:
    for name in ("useful_s_min", "horizon_s", "change_price"):
        if not 0 <= getattr(rules, name) < math.inf:
            raise BadRules(f"rules, {name}", f"is {getattr(rules, name)}", "give a number of 0 or more")
    if not 0 <= rules.worst_share_slack <= 1:
        raise BadRules("rules, worst_share_slack", f"is {rules.worst_share_slack}", "give 0 to 1")
    for project, gpus in rules.quota_gpus.items():
        if gpus < 0:
            raise BadRules(f"rules, quota of project `{project}`", f"is {gpus} GPUs", "give 0 or more")
    for gpu, price in rules.gpu_price.items():
        try:
            known = find_gpu(gpu).name
        except UnknownHardware as error:
            raise BadRules("rules, gpu_price", str(error), "write a name of the catalogue") from error
        if known != gpu or not 0 < price < math.inf:
            raise BadRules(f"rules, gpu_price of `{gpu}`", f"is {price}", f"give a price above 0 for `{known}`")


def _check_running(fleet: Fleet, running: Sequence[Running]) -> None:
    used: Counter[str] = Counter()
    seen: set[str] = set()
    for session in running:
        at = f"running session `{session.session}`"
        if session.session in seen:
            raise BadRunning(at, "appears twice", "name every session once")
        seen.add(session.session)
        if sum(gpus for _, gpus in session.nodes) != session.option.gpus or not session.nodes:
            raise BadRunning(at, f"does not hold the {session.option.gpus} GPUs of its option", "correct its nodes")
        for name, gpus in session.nodes:
            used[name] += gpus
            _check_node(at, fleet.by_name.get(name), name, session.option, used[name])


def _check_node(at: str, node: Node | None, name: str, option: Option, used: int) -> None:
    if node is None:
        raise BadRunning(at, f"is on node `{name}`, which is not in the fleet", "leave gone sessions out")
    if node.gpu != option.gpu:
        raise BadRunning(at, f"runs on {option.gpu}, but node `{name}` has {node.gpu}", "correct one of them")
    if used > node.gpus:
        raise BadRunning(at, f"makes {used} GPUs in use on node `{name}`, which has {node.gpus}", "leave one out")


def _check_pinned(
    fleet: Fleet, demands: Sequence[ModelDemand], models: Mapping[str, int], pinned: Sequence[Running]
) -> None:
    for session in pinned:
        number = models.get(session.option.model)
        if number is None:
            continue
        allowed = demands[number].providers_allowed
        for name, _ in session.nodes:
            provider = fleet.by_name[name].provider
            if allowed and provider not in allowed:
                raise BadRules(
                    f"pinned session `{session.session}`",
                    f"is at provider `{provider}`, where `{session.option.model}` may not be",
                    f"unpin it, or allow the provider (allowed: {', '.join(allowed)})",
                )
    for demand in demands:
        count = sum(1 for session in pinned if session.option.model == demand.model)
        if demand.max_replicas is not None and count > demand.max_replicas:
            raise BadRules(
                f"demand of `{demand.model}`, max_replicas",
                f"is {demand.max_replicas}, but {count} sessions are pinned",
                "unpin some, or allow more",
            )


def _quotas(
    demands: Sequence[ModelDemand], options: Sequence[Option], pinned: Sequence[Running], rules: Rules
) -> dict[str, int]:
    """What pinned sessions leave of each quota. Refuses quotas below what minimum replicas or pinned sessions need."""
    smallest: dict[str, int] = {}
    for option in options:
        smallest[option.model] = min(smallest.get(option.model, option.gpus), option.gpus)
    left = {}
    for project, quota in rules.quota_gpus.items():
        own = [demand for demand in demands if demand.project == project]
        names = {demand.model for demand in own}
        held = sum(session.option.gpus for session in pinned if session.option.model in names)
        needed = sum(demand.min_replicas * smallest.get(demand.model, 0) for demand in own)
        if max(held, needed) > quota:
            what = "pinned sessions hold" if held > quota else "minimum replicas need"
            raise BadRules(
                f"rules, quota of project `{project}`",
                f"is {quota} GPUs, but its {what} {max(held, needed)}",
                "raise the quota, or ask for fewer",
            )
        left[project] = quota - held
    return left
