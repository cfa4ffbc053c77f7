"""What could be started: for each model and GPU kind the ways to split it, with what each needs and gives. Pure.

Memory, divisibility and step times come from the cost model (`serai.performance`); a measured rate takes the place of
the predicted one. What cannot be carries the reason, which is what `explain` shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

from serai.performance.hardware import GIB, GPUS, NO_LINK_COST, UnknownHardware, find_gpu, find_link
from serai.performance.latency_profile import LatencyProfile, ServingHabits, profile_for
from serai.performance.memory import (
    BadParallelism,
    MemoryBudget,
    Parallelism,
    kv_bytes_per_token_per_gpu,
    weight_bytes_per_gpu,
)
from serai.performance.model_card import BadModelConfig, ModelCard
from serai.performance.quantisation import Quantisation, WeightFormat
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card
from serai.placer.capacity import Capacity, CrossingNodes, Traffic, capacity
from serai.placer.demand import BadDemand, LengthSpread, ModelDemand
from serai.placer.fleet import Fleet, Node
from serai.placer.option import Infeasible, Measured, Option

__all__ = ["Infeasible", "Measured", "Option", "OptionSettings", "Options", "make_options"]

FAST_LINK_BYTES_S = 200e9
"""Links between a node's GPUs over which tensor parallelism costs little."""


@dataclass(frozen=True, slots=True)
class OptionSettings:
    """What is tried."""

    engine: str = "vllm"
    tensor: tuple[int, ...] = (1, 2, 4, 8, 16)
    pipeline: tuple[int, ...] = (1, 2, 4)
    data: tuple[int, ...] = (1,)
    budget: MemoryBudget = MemoryBudget()
    concurrency_max: int = 256
    """Sequences an engine runs at once."""
    start_s: float = 40.0
    """Of an engine without its weights: imports, graphs, warm-up. About what vLLM takes."""
    network: str = "infiniband-400g"
    """Between nodes, for pipelines that cross them."""
    ideal_links: bool = False
    """Leave out communication, as the textbook roofline does."""
    only_measured: bool = False
    """Leave out what was not measured."""
    prune: bool = True
    """Leave out what another option of the same model and GPU beats in everything."""


@dataclass(frozen=True, slots=True)
class Options:
    """What could be started, and what could not with the reason."""

    feasible: tuple[Option, ...]
    infeasible: tuple[Infeasible, ...]

    def why_not(self, model: str) -> str:
        """The commonest reason why nothing of `model` can be started; empty when something can."""
        if any(option.model == model for option in self.feasible):
            return ""
        reasons = [way.why for way in self.infeasible if way.model == model]
        return max(set(reasons), key=lambda why: (reasons.count(why), why)) if reasons else "no GPU of an allowed kind"


def make_options(
    demands: Sequence[ModelDemand],
    fleet: Fleet,
    settings: OptionSettings | None = None,
    *,
    measured: Sequence[Measured] = (),
    cards: Mapping[str, ModelCard] | None = None,
    profiles: Mapping[str, LatencyProfile] | None = None,
) -> Options:
    """Every way to run every model on the fleet's GPUs. `cards` are models that do not come with the package,
    `profiles` latency profiles by GPU in place of the shipped ones.

    Raises BadDemand for a model without a card, naming the nearest, and for a measurement on an unknown GPU.
    """
    settings = settings or OptionSettings()
    given = {find_gpu(name).name: _Profile(profile) for name, profile in (profiles or {}).items()}
    maker = _Maker(settings, {(m.model, _gpu(m), m.tensor, m.pipeline): m for m in measured})
    feasible: list[Option] = []
    infeasible: list[Infeasible] = []
    for demand in demands:
        card = _card(demand.model, cards or {})
        allowed = {find_gpu(name).name for name in demand.gpus_allowed}
        for kind in _kinds(fleet):
            if allowed and kind.gpu not in allowed:
                infeasible.append(Infeasible(demand.model, kind.gpu, 0, 0, 0, "", f"{kind.gpu} is not among its GPUs"))
                continue
            profile = given.get(kind.gpu) or _shipped_profile(kind.gpu, settings.engine)
            found = list(maker.ways(demand, card, kind, profile))
            good = [way for way in found if isinstance(way, Option)]
            feasible += _undominated(good) if settings.prune else good
            infeasible += [way for way in found if isinstance(way, Infeasible)]
    return Options(tuple(feasible), tuple(infeasible))


@dataclass(frozen=True, slots=True)
class _Kind:
    """All nodes with one kind of GPU."""

    gpu: str
    largest: int
    """GPUs of the largest node."""
    storage_bytes_s: float
    """Of the slowest."""
    nodes: int


@dataclass(frozen=True, eq=False)
class _Profile:
    """A latency profile as a key: profiles hold lists and cannot be hashed."""

    profile: LatencyProfile


@cache
def _shipped_profile(gpu: str, engine: str) -> _Profile:
    return _Profile(profile_for(gpu, engine))


def _kinds(fleet: Fleet) -> list[_Kind]:
    by_gpu: dict[str, list[Node]] = {}
    for node in fleet.nodes:
        by_gpu.setdefault(node.gpu, []).append(node)
    return [
        _Kind(gpu, max(n.gpus for n in nodes), min(n.storage_bytes_s for n in nodes), len(nodes))
        for gpu, nodes in sorted(by_gpu.items())
    ]


def _gpu(measured: Measured) -> str:
    try:
        return find_gpu(measured.gpu).name
    except UnknownHardware as error:
        raise BadDemand(f"measured profile of `{measured.model}`, gpu", str(error), "correct it") from error


def _card(model: str, cards: Mapping[str, ModelCard]) -> ModelCard:
    if model in cards:
        return cards[model]
    try:
        return shipped_card(model)
    except BadModelConfig as error:
        raise BadDemand(f"model `{model}`", str(error), "give its card") from error


@dataclass(frozen=True, slots=True)
class _Split:
    """How one session is spread."""

    copy: Parallelism
    data: int
    nodes: int

    @property
    def gpus(self) -> int:
        return self.copy.gpus * self.data


@dataclass(frozen=True)
class _Maker:
    settings: OptionSettings
    measured: Mapping[tuple[str, str, int, int], Measured]

    def ways(
        self, demand: ModelDemand, card: ModelCard, kind: _Kind, profile: _Profile
    ) -> Iterator[Option | Infeasible]:
        """All splits over GPUs of one kind, smallest first. A pipeline crosses nodes only with a model that no node
        holds, and lies within one only where links are slow or tensor parallelism alone does not do."""
        fast = find_link(GPUS[kind.gpu].link).bandwidth_bytes_s >= FAST_LINK_BYTES_S
        for name in demand.quantisations or ("",):
            quantisation = _quantisation(demand.model, name, card)
            fits_a_node = False
            for split in self.splits(card, kind):
                if fits_a_node and (split.nodes > 1 or (fast and split.copy.pipeline > 1)):
                    continue
                way = self.way(demand, card, kind, profile, quantisation, split)
                if way is not None:
                    fits_a_node |= split.nodes == 1 and isinstance(way, Option)
                    yield way

    def splits(self, card: ModelCard, kind: _Kind) -> list[_Split]:
        """Within a node first, then over several whole ones."""
        experts = (False, True) if card.experts is not None else (False,)
        found = []
        for tensor, pipeline, data, expert in product(
            self.settings.tensor, self.settings.pipeline, self.settings.data, experts
        ):
            copy = Parallelism(tensor, pipeline, expert)
            if copy.gpus * data <= kind.largest and not (expert and tensor == 1):
                found.append(_Split(copy, data, 1))
            elif data == 1 and tensor == kind.largest and 1 < pipeline <= kind.nodes:
                found.append(_Split(copy, data, pipeline))
        return sorted(found, key=lambda s: (s.nodes, s.copy.pipeline, s.gpus, s.data, s.copy.expert))

    def way(
        self,
        demand: ModelDemand,
        card: ModelCard,
        kind: _Kind,
        profile: _Profile,
        quantisation: Quantisation,
        split: _Split,
    ) -> Option | Infeasible | None:
        """The option, why it is none, or None for what nobody measured when only that counts."""
        settings, copy = self.settings, split.copy
        weights_format = (quantisation.dense if card.experts is None else quantisation.experts).value
        measured = self.measured.get((demand.model, kind.gpu, copy.tensor, copy.pipeline))
        if measured is None and settings.only_measured:
            return None

        def no(why: str) -> Infeasible:
            return Infeasible(demand.model, kind.gpu, copy.tensor, copy.pipeline, split.data, weights_format, why)

        network = settings.network if split.nodes > 1 else ""
        instance = _instance(
            card, kind.gpu, copy, quantisation, profile, network, settings.budget, settings.ideal_links
        )
        if isinstance(instance, str):
            return no(instance)
        found = _capacity(instance, profile.profile.serving, _traffic(demand), settings.concurrency_max, copy.pipeline)
        if measured is not None:
            found = _as_measured(measured, found)
        if isinstance(found, str):
            return no(found)
        weights = weight_bytes_per_gpu(card, copy, quantisation)
        kv = instance.kv_capacity_tokens() * kv_bytes_per_token_per_gpu(card, copy, quantisation)
        return Option(
            model=demand.model,
            gpu=kind.gpu,
            tensor=copy.tensor,
            requests_s=found.requests_s * split.data,
            pipeline=copy.pipeline,
            data=split.data,
            expert=copy.expert,
            quantisation=weights_format,
            nodes=split.nodes,
            latency_s=found.latency_s,
            load_s=settings.start_s + weights * split.gpus / (kind.storage_bytes_s * split.nodes),
            kv_tokens=instance.kv_capacity_tokens() * split.data,
            memory_bytes_per_gpu=weights + settings.budget.reserve_bytes + kv,
            concurrency=found.concurrency * split.data,
            measured=measured is not None,
            why=found.limit,
        )


def _as_measured(measured: Measured, predicted: Capacity | str) -> Capacity:
    """The measured rate; latency and concurrency from the cost model where they were not measured."""
    other = predicted if isinstance(predicted, Capacity) else Capacity(0.0, 0.0, 0, "")
    latency = other.latency_s if math.isnan(measured.latency_s) else measured.latency_s
    return Capacity(measured.requests_s, latency, other.concurrency, "measured")


def _traffic(demand: ModelDemand) -> Traffic:
    """Rounded to four digits: a plan a minute later, of about the same traffic, finds what was worked out before."""
    return Traffic(
        _rounded_spread(demand.prompt),
        _rounded_spread(demand.output),
        _rounded(max(1.0, demand.burstiness_cv)),
        round(demand.prefix_reuse, 2),
        demand.slo_ttft_s,
        demand.slo_tpot_s,
    )


def _rounded_spread(spread: LengthSpread) -> LengthSpread:
    return LengthSpread(_rounded(spread.mean), _rounded(spread.p50), _rounded(spread.p90), _rounded(spread.p99))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


_Instance = RooflineModel | CrossingNodes


@lru_cache(maxsize=4096)
def _instance(
    card: ModelCard,
    gpu: str,
    split: Parallelism,
    quantisation: Quantisation,
    profile: _Profile,
    network: str,
    budget: MemoryBudget,
    ideal_links: bool,
) -> _Instance | str:
    """The cost model of one copy, or why there can be none. `network` lies between its stages; empty: they share a
    node."""
    try:
        model = RooflineModel(
            card,
            GPUS[gpu],
            split,
            profile=profile.profile,
            quantisation=quantisation,
            link=NO_LINK_COST if ideal_links else None,
            budget=budget,
        )
    except BadParallelism as error:
        return str(error)
    if model.kv_capacity_tokens() > 0:
        activation_bytes = 2.0 * card.hidden
        return CrossingNodes(model, split.pipeline, activation_bytes, find_link(network)) if network else model
    least = weight_bytes_per_gpu(card, split, quantisation) + budget.reserve_bytes
    room = GPUS[gpu].memory_bytes * budget.utilisation
    if least <= room:
        return f"leaves no room for keys and values on {gpu}"
    return f"needs {least / GIB:.1f} GiB a GPU for weights and engine; {room / GIB:.1f} GiB of {gpu} may be used"


@lru_cache(maxsize=65536)
def _capacity(
    instance: _Instance, habits: ServingHabits, traffic: Traffic, concurrency_max: int, stages: int
) -> Capacity | str:
    return capacity(instance, habits, traffic, concurrency_max, stages)


def _quantisation(model: str, name: str, card: ModelCard) -> Quantisation:
    if not name:
        return card.quantisation
    try:
        return Quantisation.uniform(WeightFormat(name.lower()), card.quantisation.kv)
    except ValueError as error:
        known = ", ".join(item.value for item in WeightFormat)
        raise BadDemand(f"demand of `{model}`, quantisations", f"`{name}` is no format", f"use {known}") from error


def _undominated(options: Sequence[Option]) -> list[Option]:
    """Without those that another one beats: no more GPUs a node, no more in all, no less served by each GPU, no more
    latency. Measured ones stay."""
    return [
        option
        for place, option in enumerate(options)
        if option.measured
        or not any(_beats(other, option, other_place < place) for other_place, other in enumerate(options))
    ]


def _beats(one: Option, other: Option, first: bool) -> bool:
    if one is other:
        return False
    ones = (-one.requests_s / one.gpus, one.gpus, one.gpus_per_node, one.latency_s)
    others = (-other.requests_s / other.gpus, other.gpus, other.gpus_per_node, other.latency_s)
    no_worse = all(a <= b for a, b in zip(ones, others, strict=True))
    return no_worse and (ones != others or first)
