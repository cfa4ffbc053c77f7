"""The placement file: which models the placer looks after, what is asked of them, and the rules. Read strictly. Pure.

models:
  chat:                       # the name clients ask for
    engine: vllm              # a template of the pool agents
    path: /models/llama-8b    # where they find the weights; else the model's name
    card: llama-3.1-8b        # for the cost model: a shipped name; not needed where `instances` says it all
    slo: {ttft_s: 1.0, tpot_s: 0.05}
    priority: 2
    min_replicas: 1
    demand: {requests_s: 3, prompt_tokens: 800, output_tokens: 200}    # at least; usage may show more
    instances:                # measured by hand, in place of the cost model
      - {gpu: h100, tensor: 1, requests_s: 4.5, load_s: 60}
rules: {mode: by-hand, horizon_s: 1800, quotas: {climate: 8}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

from serai.performance.hardware import UnknownHardware, find_gpu
from serai.performance.model_card import BadModelConfig
from serai.performance.shipped_models import shipped_card
from serai.placer.demand import BadDemand, LengthSpread, ModelDemand
from serai.placer.options import Option
from serai.placer.picture import Fairness, PlanRules
from serai.runtime.fields import BadInput, Fields
from serai.runtime.strict_yaml import NotYaml, lines, load, placed

MODELS_MAX = 2_000
PROMPT_TOKENS, OUTPUT_TOKENS = 500.0, 200.0
"""Taken for a model of which nothing else is known."""


class Mode(StrEnum):
    """Whether somebody has to say yes."""

    BY_HAND = "by-hand"
    AUTOMATIC = "automatic"


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """One model of the file."""

    name: str
    demand: ModelDemand
    """What the file says; its rate is the least that is planned for."""
    engine: str = "vllm"
    path: str = ""
    arguments: tuple[str, ...] = ()
    card: str = ""
    """Shipped name of its dimensions; empty = that of the model."""
    instances: tuple[Option, ...] = ()
    """Measured by hand; empty = the cost model says."""
    lengths_given: bool = False
    """The file says how long prompts and answers are: usage does not change that."""


@dataclass(frozen=True, slots=True)
class Launchable:
    """Something that brings more pool agents, or fewer."""

    launcher: str
    """`slurm` or `kubernetes`."""
    name: str
    """Of the deployment at the site's launcher, or of the workload, `deployment/pool`."""
    gpu: str
    gpus: int
    """Of one pool agent."""
    most: int
    least: int = 0
    namespace: str = "default"
    provider: str = "local"


@dataclass(frozen=True, slots=True)
class PlacementFile:
    """All of it."""

    models: Mapping[str, PlacedModel]
    rules: PlanRules = PlanRules()
    mode: Mode = Mode.BY_HAND
    quotas: Mapping[str, int] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()
    """Sessions, or assignments, that are neither stopped nor moved."""
    demand_window_s: float = 300.0
    """Usage counts for so long."""
    launchables: tuple[Launchable, ...] = ()


def read_placement(text: str, file: str) -> PlacementFile:
    """Raises BadInput: the file, the field, what is wrong, and what to do."""
    try:
        found = load(text)
    except NotYaml as error:
        raise BadInput(file, str(error), "correct the YAML") from error
    try:
        return _read(Fields({} if found is None else found, ""))
    except BadInput as error:
        raise BadInput(placed(file, error.place, lines(text)), error.problem, error.remedy) from error


def _read(top: Fields) -> PlacementFile:
    part = top.part("models")
    names = list(part.names())
    if not 0 < len(names) <= MODELS_MAX:
        raise BadInput("models", f"there are {len(names)}", f"name 1 to {MODELS_MAX}")
    models = {name: _model(name, part.part(name)) for name in names}
    rules = top.part("rules") if top.has("rules") else Fields({}, "rules")
    made = PlacementFile(
        models,
        _rules(rules),
        Mode(rules.choice("mode", Mode)) if rules.has("mode") else Mode.BY_HAND,
        _quotas(rules, models),
        frozenset(rules.texts("pinned")) if rules.has("pinned") else frozenset(),
        rules.number("demand_window_s", 300.0, least=1.0),
        tuple([_launchable(one) for one in top.parts("launch")]) if top.has("launch") else (),
    )
    rules.done()
    top.done()
    _check_quotas(made)
    return made


def _model(name: str, part: Fields) -> PlacedModel:
    asked = part.part("demand") if part.has("demand") else Fields({}, part.at("demand"))
    slo = part.part("slo") if part.has("slo") else Fields({}, part.at("slo"))
    lengths_given = asked.has("prompt_tokens") or asked.has("output_tokens")
    try:
        demand = ModelDemand(
            name,
            asked.number("requests_s", 0.0),
            LengthSpread.about(asked.number("prompt_tokens", PROMPT_TOKENS)),
            LengthSpread.about(asked.number("output_tokens", OUTPUT_TOKENS)),
            requests_s_low=asked.number("requests_s_low") if asked.has("requests_s_low") else None,
            requests_s_high=asked.number("requests_s_high") if asked.has("requests_s_high") else None,
            burstiness_cv=asked.number("burstiness_cv", 1.0),
            prefix_reuse=asked.number("prefix_reuse", 0.0),
            slo_ttft_s=slo.number("ttft_s", None) if slo.has("ttft_s") else math.inf,
            slo_tpot_s=slo.number("tpot_s", None) if slo.has("tpot_s") else math.inf,
            priority=part.number("priority", 1.0),
            min_replicas=part.whole("min_replicas", 0, least=0),
            max_replicas=part.whole("max_replicas") if part.has("max_replicas") else None,
            providers_allowed=tuple(part.texts("providers")) if part.has("providers") else (),
            gpus_allowed=tuple([_gpu(gpu, part.at("gpus")) for gpu in part.texts("gpus")]) if part.has("gpus") else (),
            quantisations=tuple(part.texts("quantisations")) if part.has("quantisations") else (),
            project=part.text("project", ""),
        )
    except BadDemand as error:
        raise BadInput(f"{part.place}.demand: {error.place}", error.problem, error.remedy) from error
    instances = tuple([_instance(name, one) for one in part.parts("instances")]) if part.has("instances") else ()
    made = PlacedModel(
        name,
        demand,
        part.text("engine", "vllm"),
        part.text("path", ""),
        tuple(part.texts("arguments")) if part.has("arguments") else (),
        part.text("card", ""),
        instances,
        lengths_given,
    )
    for one in (asked, slo, part):
        one.done()
    _check_known(made, part)
    return made


def _instance(model: str, part: Fields) -> Option:
    option = Option(
        model,
        _gpu(part.text("gpu"), part.at("gpu")),
        part.whole("tensor", 1, least=1),
        part.number("requests_s", least=1e-6),
        part.whole("pipeline", 1, least=1),
        part.whole("data", 1, least=1),
        quantisation=part.text("quantisation", "bf16"),
        latency_s=part.number("latency_s", 0.0, least=0.0),
        load_s=part.number("load_s", 60.0, least=0.0),
        measured=True,
        why="measured, by the placement file",
    )
    part.done()
    return option


def _check_known(model: PlacedModel, part: Fields) -> None:
    """A model of which nobody knows what it needs cannot be placed."""
    allowed, measured = model.demand.gpus_allowed, {option.gpu for option in model.instances}
    if measured and allowed and not measured & set(allowed):
        raise BadInput(
            part.at("gpus"),
            f"allows {', '.join(allowed)}, and `instances` are of {', '.join(sorted(measured))}",
            "correct one of them",
        )
    if model.instances:
        return
    try:
        shipped_card(model.card or model.name)
    except BadModelConfig as error:
        remedy = "write `card: NAME` of a shipped model, or `instances:` with what one serves"
        raise BadInput(part.at("card"), str(error), remedy) from error


def _gpu(name: str, place: str) -> str:
    try:
        return find_gpu(name).name
    except UnknownHardware as error:
        raise BadInput(place, str(error), "write a name of the catalogue") from error


_RULES_LEAST = {"margin": 1.0, "moves_per_hour": 1}


def _rules(part: Fields) -> PlanRules:
    given: dict[str, float | int | Fairness | None] = {}
    for item in fields(PlanRules):
        name = item.name
        if not part.has(name):
            continue
        if name == "fairness":
            given[name] = Fairness(part.choice(name, Fairness))
        elif name == "moves_per_hour":
            given[name] = part.whole(name, least=1)
        elif name == "cold_after_s" and part.any(name) == "never":
            given[name] = None
        else:
            given[name] = part.number(name, least=_RULES_LEAST.get(name, 0.0))
    rules = PlanRules(**given)  # type: ignore[arg-type]
    if not 0 < rules.gpu_share_per_change <= 1:
        place = part.at("gpu_share_per_change")
        raise BadInput(place, f"is {rules.gpu_share_per_change:g}", "write a share above 0, at most 1")
    if rules.horizon_s <= 0:
        raise BadInput(part.at("horizon_s"), "is 0", "write seconds above 0")
    if rules.cold_after_s is not None and rules.cold_after_s < rules.cool_down_s:
        raise BadInput(
            part.at("cold_after_s"),
            f"{rules.cold_after_s:g} s is less than cool_down_s, {rules.cool_down_s:g} s: what was started would be "
            "cold before it may be stopped",
            "raise the one or lower the other",
        )
    return rules


def _quotas(part: Fields, models: Mapping[str, PlacedModel]) -> dict[str, int]:
    if not part.has("quotas"):
        return {}
    quotas = part.part("quotas")
    found = {name: quotas.whole(name, least=0) for name in quotas.names()}
    projects = {model.demand.project for model in models.values()} - {""}
    for name in found:
        if name not in projects:
            known = ", ".join(sorted(projects)) or "none"
            raise BadInput(quotas.at(name), f"no model has `project: {name}`", f"name one of the models' ({known})")
    return found


def _check_quotas(made: PlacementFile) -> None:
    """Minimums that the quota forbids contradict it."""
    for project, quota in made.quotas.items():
        ours = [model for model in made.models.values() if model.demand.project == project]
        needs = sum(model.demand.min_replicas * _least_gpus(model.instances) for model in ours)
        if needs > quota:
            names = ", ".join(model.name for model in ours)
            raise BadInput(
                f"rules.quotas.{project}",
                f"is {quota} GPUs, and min_replicas of {names} need {needs}",
                "raise the quota or lower a minimum",
            )


def _least_gpus(instances: Sequence[Option]) -> int:
    return min((option.gpus for option in instances), default=1)


def _launchable(part: Fields) -> Launchable:
    for name in ("gpu", "gpus", "most", "least", "namespace", "provider"):
        part.has(name)  # Known, too, to what a misspelt one is told.
    launcher = part.only(["slurm", "kubernetes"])
    most, least = part.whole("most", least=1), part.whole("least", 0, least=0)
    made = Launchable(
        launcher,
        part.text(launcher),
        _gpu(part.text("gpu"), part.at("gpu")),
        part.whole("gpus", 1, least=1),
        most,
        least,
        part.text("namespace", "default"),
        part.text("provider", "local"),
    )
    part.done()
    if least > most:
        raise BadInput(part.at("least"), f"{least} is more than `most`, {most}", "correct one of them")
    return made
