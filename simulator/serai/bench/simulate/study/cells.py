"""One cell of a study: a serving system on a cluster of the PaDG paper, under one workload and one seed. Pure.

A cell says everything that its result depends on, so that its text names the result.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache

from serai.performance.latency_model import LatencyModel
from serai.simulator.fast.paper_clusters import CLUSTERS, PROMPT_TOKENS_MAX
from serai.simulator.fast.presets import Overheads, with_overheads
from serai.simulator.outcomes import SloTarget

MODELS = ("llama-30b", "codellama-34b", "qwen2-72b")
CONTEXT_TOKENS = 16384

TARGETS = {"alpaca": SloTarget(1.0, 0.1), "sharegpt": SloTarget(5.0, 0.1), "longbench": SloTarget(15.0, 0.1)}
"""The paper's targets by dataset (its Table 4)."""

MEAN_TOKENS = {"alpaca": (20.63, 163.80), "sharegpt": (343.76, 237.20), "longbench": (2686.89, 101.78)}
"""Mean prompt and answer, for the reference rate only."""

V0 = Overheads(step_s=0.018, mixed_s=0.012)
"""An engine as the paper's baselines were (vLLM 0.7): what a step costs beside the GPU's work."""
V1 = Overheads(step_s=0.002)
"""An engine of today, that prepares a step while another runs."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a comparison takes place: cluster, model, lengths (or trace), target, number of instances, overheads."""

    cluster: str
    model: str
    dataset: str
    slo: SloTarget
    instances: int
    overheads: Overheads = V0

    @property
    def name(self) -> str:
        """For people: what differs from the paper's set-up is told."""
        words = [self.cluster, self.model, self.dataset]
        if self.slo != TARGETS.get(self.dataset, self.slo):
            words.append(f"{self.slo.ttft_s:g} s {self.slo.tpot_s * 1000:g} ms")
        if self.instances != CLUSTERS[self.cluster].instances(self.model):
            words.append(f"N={self.instances}")
        if self.overheads != V0:
            words.append(f"{(self.overheads.step_s or 0) * 1000:g} ms a step")
        return " ".join(words)


def paper_slice(cluster: str, model: str, dataset: str, slo: SloTarget | None = None) -> Slice:
    """As the paper's main runs had it."""
    return Slice(cluster, model, dataset, slo or TARGETS[dataset], CLUSTERS[cluster].instances(model))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A serving system of a comparison. `options` change a macro-scheduled policy, by the names of its fields;
    `prefill` is the number of prefill instances of a disaggregated system."""

    system: str
    options: tuple[tuple[str, float | str | bool], ...] = ()
    prefill: int = 0

    @property
    def name(self) -> str:
        """For people."""
        words = [self.system, *(f"{name}={value}" for name, value in self.options)]
        return " ".join([*words, *([f"{self.prefill} prefill"] if self.prefill else [])])


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives. Requests count that arrive in `counted_s`, after `lead_s` and before `tail_s`, in which the same
    load goes on. Where the slice's `dataset` is a trace, it is replayed: the seed is a part of it, and rate and CV are
    its own."""

    rate_per_s: float
    seed: int
    cv: float = 1.0
    counted_s: float = 60.0
    lead_s: float = 15.0
    tail_s: float = 10.0

    @property
    def whole_s(self) -> float:
        """From the first arrival to the last."""
        return self.lead_s + self.counted_s + self.tail_s


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. Status that macro-scheduled policies get is `delay_s` late, and a share `loss` of it never comes."""

    where: Slice
    candidate: Candidate
    load: Load
    delay_s: float = 0.0
    loss: float = 0.0

    def text(self) -> str:
        """All of it, the same for equal cells."""
        return json.dumps(asdict(self), sort_keys=True)


def long_enough(load: Load, requests: int, longest_s: float = 600.0) -> Load:
    """`load` for as long as `requests` need to arrive, if that is longer; at most `longest_s`."""
    counted_s = min(longest_s, max(load.counted_s, requests / load.rate_per_s))
    return replace(load, counted_s=float(math.ceil(counted_s)))


@cache
def reference_rate_per_s(where: Slice) -> float:
    """The rate at which instances that never waited and never switched would just keep `where`'s TPOT: a yardstick, so
    that rates of different slices can be compared. Mean lengths; as many sequences as TPOT, KV and slots allow."""
    return float(f"{where.instances / sum(_mean_work_s(where)):.3g}")


@cache
def decode_share(where: Slice) -> float:
    """Of an instance's work for a mean request, the share that is decoding."""
    prefill_s, decode_s = _mean_work_s(where)
    return decode_s / (prefill_s + decode_s)


def _mean_work_s(where: Slice) -> tuple[float, float]:
    """An instance's time for a request of mean lengths: its share of prefill batches, and of full decode steps."""
    prompt, output = MEAN_TOKENS[where.dataset]
    prompt = min(prompt, PROMPT_TOKENS_MAX.get(where.model, CONTEXT_TOKENS))
    model = with_overheads(CLUSTERS[where.cluster].latency_model(where.model), where.overheads)
    context = prompt + output / 2
    room = max(1, min(256, int(model.kv_capacity_tokens() / context)))
    # Prefills take from the same time, so only a part of TPOT is the decode step's.
    sequences = _largest(model, room, context, 0.8 * where.slo.tpot_s)
    return model.prefill_s(round(prompt), batch=4) / 4, output * model.decode_step_s(sequences, context) / sequences


def _largest(model: LatencyModel, room: int, context: float, step_s: float) -> int:
    low, high = 1, room
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if model.decode_step_s(middle, context) <= step_s else (low, middle - 1)
    return low
