"""The placement test: does a plan made with predicted speeds hold up under measured ones?

Three models share 24 A100 and 32 GH200 (OpenTela's placement experiment). Every allocation of instances is tried; the
one whose slowest model drains its queue first by *predicted* speeds is then scored with the *measured* time that one
instance needs for a model's whole workload. Ties go to the larger total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from serai.performance.hardware import GPUS, NO_LINK_COST
from serai.performance.latency_profile import PURE_ROOFLINE, LatencyProfile
from serai.performance.memory import MemoryBudget, Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card

GPU_COUNTS = {"a100-sxm-80": 24, "gh200-96": 32}
CONCURRENCY_MAX = 1000
"""Requests one instance holds at most: the limit of the client that made the measurements."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One model's queue: requests of a mean length, on instances of a fixed tensor parallelism."""

    model: str
    tensor: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    measured_s: Mapping[str, float]
    """Seconds that ONE instance needed for all requests, by GPU (OpenTela `bench_placement/calculator.py`)."""


WORKLOADS = (
    Workload(
        *("meta-llama/Llama-2-13b-hf", 1, 33_000, 710, 128),
        {"a100-sxm-80": 6538.165924, "gh200-96": 2617.779327},
    ),
    Workload(
        *("codellama/CodeLlama-34b-hf", 2, 55_650, 1292, 556),
        {"a100-sxm-80": 37231.53667, "gh200-96": 11626.39596},
    ),
    Workload(
        *("meta-llama/Llama-3.3-70B-Instruct", 4, 66_300, 799, 114),
        {"a100-sxm-80": 14897.00265, "gh200-96": 5939.552729},
    ),
)

Allocation = tuple[tuple[int, int], ...]
"""Instances on A100 and on GH200, per workload."""
Seconds = tuple[tuple[float, float], ...]
"""Seconds one instance on A100 and on GH200 needs for the whole queue, per workload."""


@dataclass(frozen=True, slots=True)
class Placement:
    """An allocation and how it does under measured times."""

    allocation: Allocation
    drain_s: float
    """Until the slowest model's queue is empty."""
    total_rps: float


def best_placement(seconds: Seconds) -> Placement:
    """The best allocation by `seconds`, scored with the measured times."""
    chosen = max(allocations(), key=lambda a: _by_speed(a, seconds))
    measured = measured_seconds()
    drain = max(_drain_s(instances, times) for instances, times in zip(chosen, measured, strict=True))
    total = sum(
        w.requests / _drain_s(instances, times) for w, instances, times in zip(WORKLOADS, chosen, measured, strict=True)
    )
    return Placement(chosen, drain, total)


def measured_seconds() -> Seconds:
    """The measured times, in the order of GPU_COUNTS."""
    return tuple((w.measured_s["a100-sxm-80"], w.measured_s["gh200-96"]) for w in WORKLOADS)


def predicted_seconds(profiles: Mapping[str, LatencyProfile] | None = None) -> Seconds:
    """Predicted times, by a profile per GPU or, without, by the textbook roofline: peaks alone, no communication, as
    in OpenTela's simulator."""
    return tuple(
        (
            instance_s(workload, "a100-sxm-80", None if profiles is None else profiles["a100-sxm-80"]),
            instance_s(workload, "gh200-96", None if profiles is None else profiles["gh200-96"]),
        )
        for workload in WORKLOADS
    )


def instance_s(workload: Workload, gpu: str, profile: LatencyProfile | None) -> float:
    """Seconds one instance needs for the whole queue: prompts one after the other, and decode steps of the largest
    batch that the KV cache holds."""
    instance = RooflineModel(
        shipped_card(workload.model),
        GPUS[gpu],
        Parallelism(workload.tensor),
        profile=profile or PURE_ROOFLINE,
        link=None if profile else NO_LINK_COST,
        budget=MemoryBudget(utilisation=0.9, reserve_bytes=0),
    )
    length = workload.prompt_tokens + workload.output_tokens
    batch = max(1, min(CONCURRENCY_MAX, instance.kv_capacity_tokens() // length))
    decode = instance.decode_step_s(batch, workload.prompt_tokens + workload.output_tokens / 2)
    each = instance.prefill_s(workload.prompt_tokens) + workload.output_tokens * decode / batch
    return workload.requests * each


@cache
def allocations() -> tuple[Allocation, ...]:
    """Every allocation that leaves no GPU to spare: what the others leave goes to the first workload (TP 1)."""
    a100, gh200 = GPU_COUNTS["a100-sxm-80"], GPU_COUNTS["gh200-96"]
    found = []
    for on_a100 in _splits(a100):
        for on_gh200 in _splits(gh200):
            allocation = tuple(zip(on_a100, on_gh200, strict=True))
            if all(sum(instances) for instances in allocation):
                found.append(allocation)
    return tuple(found)


def _splits(gpus: int) -> Iterator[tuple[int, int, int]]:
    for large in range(gpus // WORKLOADS[2].tensor + 1):
        left = gpus - large * WORKLOADS[2].tensor
        for middle in range(left // WORKLOADS[1].tensor + 1):
            yield left - middle * WORKLOADS[1].tensor, middle, large


def _drain_s(instances: tuple[int, int], seconds: tuple[float, float]) -> float:
    rate = sum(count / time for count, time in zip(instances, seconds, strict=True))
    return 1 / rate if rate else float("inf")


def _by_speed(allocation: Allocation, seconds: Seconds) -> tuple[float, float]:
    """The slowest model's share of its queue a second, then the requests a second of all."""
    shares = [1 / _drain_s(i, s) for i, s in zip(allocation, seconds, strict=True)]
    return min(shares), sum(share * w.requests for share, w in zip(shares, WORKLOADS, strict=True))
