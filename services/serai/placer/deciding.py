"""From all that is known to a plan: the fleet that can be used, demand, options, what runs, the solver, the plan. Pure,
but slow: the solver takes seconds of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from serai.contracts.placement import Assignment, PoolRun
from serai.performance.model_card import ModelCard
from serai.performance.shipped_models import shipped_card
from serai.placer.demand import ModelDemand
from serai.placer.fleet import Fleet, Node
from serai.placer.observed import NOTHING_SEEN, Observed, demand_of
from serai.placer.options import Option, Options, make_options
from serai.placer.picture import Instance, ModelFacts, Picture, PoolFacts
from serai.placer.placement import Placement, Rules, Running, SolveLimits
from serai.placer.placement_file import PlacedModel, PlacementFile
from serai.placer.plan import Plan, make_plan
from serai.placer.pools import LIVE, PoolView
from serai.placer.scale_wishes import as_wished
from serai.placer.solve import solve


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known at one moment."""

    file: PlacementFile
    pools: Sequence[PoolView]
    usage: Mapping[str, Observed]
    usage_known: bool = True
    """False: the ledger has not answered lately, so nothing counts as unused."""
    others: Mapping[str, int] = field(default_factory=dict)
    """Sessions of each model that serve and are of no pool."""
    in_flight: Mapping[str, int] = field(default_factory=dict)
    """Requests of each session."""
    moves_last_hour: int = 0
    failed: Mapping[str, float] = field(default_factory=dict)
    warm: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prewarm: frozenset[str] = frozenset()
    ages_s: Mapping[str, float] = field(default_factory=dict)
    """Since an assignment was given out, where that is known."""
    loads_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """What engines of a model took to serve on a kind of GPU, where that was seen."""
    turns: Mapping[str, int] = field(default_factory=dict)
    """As in `plan.Picture`."""
    wished: Mapping[str, int] = field(default_factory=dict)
    """Instances that models' macro-schedulers want."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What came of it."""

    plan: Plan
    placement: Placement
    options: Options
    facts: Mapping[str, ModelFacts]
    instances: tuple[Instance, ...]
    foreign: tuple[str, ...] = ()
    """Engines at pools of models that the file does not name: left alone."""

    @property
    def loads_s(self) -> dict[str, float]:
        """What an engine of each model takes to serve, at least."""
        loads: dict[str, float] = {}
        for option in self.options.feasible:
            loads[option.model] = min(loads.get(option.model, math.inf), option.load_s)
        return loads

    def starts_s(self, cool_down_s: float) -> dict[str, float]:
        """How long who asks for a model that nothing serves has to wait: longer where all GPUs are in use."""
        starts_s = self.loads_s
        for one in self.placement.missing:
            if one.model in starts_s and self.placement.served_share.get(one.model, 1.0) <= 0:
                starts_s[one.model] += cool_down_s
        return starts_s

    @property
    def note(self) -> str:
        """How it was found, for people."""
        placement = self.placement
        if placement.status == "optimal":
            return f"the best there is, proved in {placement.solve_s:.2f} s"
        if placement.status == "feasible":
            return f"found in {placement.solve_s:.2f} s, at most {placement.gap:.1%} from the best"
        return f"by the greedy way, in {placement.solve_s:.2f} s"


def decide(
    situation: Situation,
    generation: int,
    limits: SolveLimits,
    *,
    limited: bool,
    clock: Callable[[], float] | None = None,
) -> Decision:
    """The plan for `situation`. `limited`: nobody looks at it before it is done. Raises BadInput where what is said of
    models, rules and pools contradicts itself."""
    usable = [view for view in situation.pools if not view.problem]
    fleet, foreign = _fleet(usable, situation.file)
    options = _as_loaded(_options(situation, fleet), situation.loads_s)
    instances = _instances(situation, usable, fleet, options)
    facts = _facts(situation, options, instances)
    running = [
        Running(one.id, one.option, ((one.pool, one.option.gpus),), one.pinned, one.age_s)
        for one in instances
        if one.option.gpus
    ]
    rules = Rules(
        quota_gpus=situation.file.quotas,
        horizon_s=situation.file.rules.horizon_s,
        useful_s_min=min(300.0, situation.file.rules.horizon_s),
        worst_share_slack=situation.file.rules.fairness.slack(options.feasible),
    )
    demands = [_without_others(one) for one in facts.values()]
    placement = solve(fleet, demands, options.feasible, running, rules, limits, clock=clock)
    if any(one.what == "capacity" for one in placement.missing):
        # Not everything that may come can be had: first what is expected.
        facts = {name: replace(one, demand=replace(one.demand, requests_s_high=None)) for name, one in facts.items()}
        demands = [_without_others(one) for one in facts.values()]
        placement = solve(fleet, demands, options.feasible, running, rules, limits, clock=clock)
    picture = Picture(
        [PoolFacts(n.name, n.gpu, n.gpus, n.provider, _engines(usable, n.name)) for n in fleet.nodes],
        instances,
        list(facts.values()),
        situation.moves_last_hour,
        situation.failed,
        situation.warm,
        situation.turns,
    )
    plan = make_plan(picture, placement, situation.file.rules, generation, limited=limited)
    return Decision(plan, placement, options, facts, tuple(instances), tuple(foreign))


def _fleet(usable: Sequence[PoolView], file: PlacementFile) -> tuple[Fleet, list[str]]:
    """Without the GPUs of engines that are not ours to judge."""
    nodes: list[Node] = []
    foreign: list[str] = []
    for view in usable:
        strange = [run for run in _live(view) if run.assignment.model not in file.models]
        foreign += [f"{run.assignment.model} on {view.name}" for run in strange]
        left = view.gpus - sum(run.assignment.gpus for run in strange)
        if left > 0:
            nodes.append(replace(view.node, gpus=left))
    return Fleet(nodes), foreign


def _live(view: PoolView) -> list[PoolRun]:
    return [run for run in view.report.runs if run.state in LIVE]


def _engines(usable: Sequence[PoolView], pool: str) -> frozenset[str]:
    return frozenset(next(view.report.engines for view in usable if view.name == pool))


def _options(situation: Situation, fleet: Fleet) -> Options:
    """Those measured by hand, and for other models those of the cost model; of one node, as pool agents run them."""
    models = situation.file.models.values()
    kinds = {node.gpu for node in fleet.nodes}
    given = [option for model in models for option in model.instances if _allowed(option, model, kinds)]
    unmeasured = [model for model in models if not model.instances]
    if not unmeasured or not fleet.nodes:
        return Options(tuple(given), ())
    cards: dict[str, ModelCard] = {model.name: shipped_card(model.card or model.name) for model in unmeasured}
    demands = [demand_of(model, situation.usage.get(model.name, NOTHING_SEEN)) for model in unmeasured]
    found = make_options(demands, fleet, cards=cards)
    one_node = [option for option in found.feasible if option.nodes == 1]
    return Options((*given, *one_node), found.infeasible)


def _as_loaded(options: Options, loads_s: Mapping[tuple[str, str], float]) -> Options:
    """With the load times that were seen, in place of those that were predicted."""
    seen = tuple([replace(one, load_s=loads_s.get((one.model, one.gpu), one.load_s)) for one in options.feasible])
    return replace(options, feasible=seen)


def _allowed(option: Option, model: PlacedModel, kinds: set[str]) -> bool:
    return option.gpu in kinds and (not model.demand.gpus_allowed or option.gpu in model.demand.gpus_allowed)


def _instances(situation: Situation, usable: Sequence[PoolView], fleet: Fleet, options: Options) -> list[Instance]:
    found = []
    for view in usable:
        if view.name not in fleet.by_name:
            continue
        for run in _live(view):
            one = run.assignment
            if one.model not in situation.file.models:
                continue
            pinned = situation.file.pinned & {one.id, run.session}
            age_s = situation.ages_s.get(one.id, run.age_s)
            in_flight = situation.in_flight.get(run.session, 0)
            option = _option_of(one, view.gpu, options.feasible)
            found.append(
                Instance(one.id, option, view.name, one, run.state, run.session, age_s, bool(pinned), in_flight)
            )
    return found


def _option_of(one: Assignment, gpu: str, options: Sequence[Option]) -> Option:
    """How it was started; what it serves is taken from the option that is most like it."""
    same = [
        option
        for option in options
        if (option.model, option.gpu, option.tensor, option.pipeline, option.data)
        == (one.model, gpu, one.tensor, one.pipeline, one.data)
    ]
    exact = [option for option in same if option.quantisation == one.quantization]
    if exact or same:
        return (exact or same)[0]
    why = "it is not among the options now, so what it serves is not known"
    return Option(
        one.model, gpu, one.tensor, 0.0, one.pipeline, one.data, quantisation=one.quantization or "bf16", why=why
    )


def _facts(situation: Situation, options: Options, instances: Sequence[Instance]) -> dict[str, ModelFacts]:
    facts = {}
    for model in situation.file.models.values():
        seen = situation.usage.get(model.name, NOTHING_SEEN)
        unused_s = seen.unused_s if situation.usage_known else 0.0
        one_s, elsewhere = _typical(model.name, options, instances), situation.others.get(model.name, 0)
        facts[model.name] = ModelFacts(
            as_wished(demand_of(model, seen), situation.wished.get(model.name), one_s, elsewhere),
            model.engine,
            model.path,
            model.arguments,
            others_requests_s=elsewhere * one_s,
            unused_s=unused_s,
            prewarm=model.name in situation.prewarm,
        )
    return facts


def _typical(model: str, options: Options, instances: Sequence[Instance]) -> float:
    """What one session of the model serves, where nothing is known of it: the least of its options."""
    known = [one.option.requests_s for one in instances if one.model == model]
    known = known or [option.requests_s for option in options.feasible if option.model == model]
    return min(known, default=0.0)


def _without_others(facts: ModelFacts) -> ModelDemand:
    """What is left for the pools, beside sessions that others have started; a model that a burst is predicted for has
    one engine."""
    demand, others = facts.demand, facts.others_requests_s
    if facts.prewarm:
        demand = replace(demand, min_replicas=max(1, demand.min_replicas))
    if others <= 0:
        return demand
    high = demand.requests_s_high
    return replace(
        demand,
        requests_s=max(0.0, demand.requests_s - others),
        requests_s_low=max(0.0, (demand.requests_s_low or 0.0) - others),
        requests_s_high=None if high is None else max(0.0, high - others),
    )
