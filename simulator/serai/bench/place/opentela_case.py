"""OpenTela's placement experiment as a problem for our placer: 24 A100 and 32 GH200, three models, 300 s of arrivals.

Throughput by formula, as the paper's table falls out of it (`N_m` requests, pools of equal instances with a share of
the traffic each):

    rps_m = N_m / max over pools (share · N_m / (instances · rate of one))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serai.bench.profile.placement_test import GPU_COUNTS, WORKLOADS
from serai.performance.latency_profile import PURE_ROOFLINE
from serai.performance.memory import MemoryBudget
from serai.placer.baselines import Allocation, Table
from serai.placer.demand import LengthSpread, ModelDemand
from serai.placer.fleet import Fleet, Node
from serai.placer.options import Measured, Option, OptionSettings, make_options
from serai.placer.placement import Placed

WINDOW_S = 300.0
NODE_GPUS = 4
PARAMETERS = {"13B": 13e9, "34B": 34e9, "70B": 70e9}
SHORT = {workload.model: name for workload, name in zip(WORKLOADS, PARAMETERS, strict=True)}
"""Names as the paper's table has them."""
KINDS = tuple(GPU_COUNTS)
MEASURED = {(w.model, gpu): w.requests / w.measured_s[gpu] for w in WORKLOADS for gpu in KINDS}
"""Requests a second of one instance at the measured parallelism."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal instances of one model, and the share of its traffic that the router sends there."""

    option: Option
    instances: int
    rate: float
    """Requests a second of one instance, by which the pool is scored."""
    share: float


Pools = Mapping[str, Sequence[Pool]]
"""By model."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a placement gives, by formula."""

    rps: Mapping[str, float]
    longest_drain_s: float

    @property
    def total_rps(self) -> float:
        """All models together."""
        return sum(self.rps.values())


def fleet() -> Fleet:
    """Nodes of four."""
    return Fleet(
        [Node(f"{gpu}-{place}", gpu, NODE_GPUS) for gpu in KINDS for place in range(GPU_COUNTS[gpu] // NODE_GPUS)]
    )


def demands() -> tuple[ModelDemand, ...]:
    """The workloads at the rates they arrive at. No targets: it is a drain test, only throughput counts."""
    about = LengthSpread.about
    return tuple(
        ModelDemand(w.model, w.requests / WINDOW_S, about(w.prompt_tokens), about(w.output_tokens)) for w in WORKLOADS
    )


def measured_options() -> tuple[Option, ...]:
    """The parallelism that was measured, with what it was measured to serve."""
    measured = [Measured(w.model, gpu, w.tensor, MEASURED[w.model, gpu]) for w in WORKLOADS for gpu in KINDS]
    return make_options(demands(), fleet(), OptionSettings(only_measured=True), measured=measured).feasible


def predicted_options(settings: OptionSettings, *, textbook: bool = False) -> tuple[Option, ...]:
    """By the cost model alone. `textbook`: peaks only, no communication, all memory, as OpenTela's simulator has it."""
    if not textbook:
        return make_options(demands(), fleet(), settings).feasible
    ideal = replace(settings, ideal_links=True, budget=MemoryBudget(0.9, 0.0), concurrency_max=1000)
    return make_options(demands(), fleet(), ideal, profiles=dict.fromkeys(KINDS, PURE_ROOFLINE)).feasible


def at_measured_parallelism(options: Sequence[Option]) -> tuple[Option, ...]:
    """Those that were measured."""
    wanted = {(w.model, w.tensor) for w in WORKLOADS}
    return tuple(option for option in options if (option.model, option.tensor) in wanted and option.pipeline == 1)


def scored_rate(option: Option, predicted: Mapping[str, float]) -> float:
    """What an option serves by measurement. A split that nobody measured takes the measured one's rate times the
    predicted ratio of the two; `predicted` are predicted rates by option key."""
    tensor = next(w.tensor for w in WORKLOADS if w.model == option.model)
    known = MEASURED[option.model, option.gpu]
    if (option.tensor, option.pipeline) == (tensor, 1):
        return known
    base = replace(option, tensor=tensor, pipeline=1)
    return known * predicted[option.key] / predicted[base.key]


def table(options: Sequence[Option]) -> Table:
    """The measured options as baselines want them."""
    return Table.smallest(demands(), fleet().gpus_by_kind(), options)


def pools_of(allocation: Allocation, given: Table) -> dict[str, list[Pool]]:
    """A baseline's allocation, with traffic in proportion to speed."""
    found: dict[str, list[Pool]] = {}
    for demand, row, options in zip(given.demands, allocation, given.options, strict=True):
        pools = [
            Pool(option, count, option.requests_s, 0.0)
            for count, option in zip(row, options, strict=True)
            if option is not None and count
        ]
        found[demand.model] = _by_speed(pools)
    return found


def pools_of_placed(placed: Sequence[Placed], predicted: Mapping[str, float] | None = None) -> dict[str, list[Pool]]:
    """A placement of ours, with traffic in proportion to (scored) speed."""
    found: dict[str, dict[str, Pool]] = {demand.model: {} for demand in demands()}
    for instance in placed:
        option = instance.option
        rate = option.requests_s if predicted is None else scored_rate(option, predicted)
        pool = found[option.model].get(option.key, Pool(option, 0, rate, 0.0))
        found[option.model][option.key] = replace(pool, instances=pool.instances + 1)
    return {model: _by_speed(list(pools.values())) for model, pools in found.items()}


def weighted(pools: Pools, shares: Mapping[str, Mapping[str, float]]) -> dict[str, list[Pool]]:
    """`pools` with a router's own shares: by short model name, then kind of GPU."""
    return {
        model: [replace(pool, share=shares.get(SHORT[model], {}).get(pool.option.gpu, pool.share)) for pool in own]
        for model, own in pools.items()
    }


def score(pools: Pools) -> Score:
    """By the formula above."""
    rps: dict[str, float] = {}
    longest = 0.0
    for demand in demands():
        requests = demand.requests_s * WINDOW_S
        drains = [pool.share * requests / (pool.instances * pool.rate) for pool in pools[demand.model]]
        drain = max(drains, default=float("inf"))
        rps[SHORT[demand.model]] = requests / drain
        longest = max(longest, drain)
    return Score(rps, longest)


def _by_speed(pools: list[Pool]) -> list[Pool]:
    total = sum(pool.instances * pool.rate for pool in pools)
    return [replace(pool, share=pool.instances * pool.rate / total) for pool in pools]
