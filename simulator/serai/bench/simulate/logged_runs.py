"""Runs of real vLLM 0.19 that were logged request by request, replayed in the fast simulator.

`profiles/llmservingsim/bench` of the data folder: 300 ShareGPT requests at ten sessions a second, with the engine's own
limits in `meta.json`. The simulator gets the logged arrivals and lengths, the engine's limits, and the shipped latency
profile. What differs then is either how long steps take or what runs in them; a second replay with step times taken
from the log itself tells which.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles

import msgspec

from serai.engine_emulator.batching.settings import BatchSettings
from serai.ingress.routing import LeastLoaded
from serai.performance.hardware import GPUS
from serai.performance.latency_model import LatencyModel, PrefillChunk, Step
from serai.performance.latency_profile import profile_for
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card
from serai.simulator.fast.cluster import simulate
from serai.simulator.fast.instance import InstanceSpec
from serai.simulator.fast.routed import Routed
from serai.simulator.fast.run import NS
from serai.simulator.outcomes import Outcomes
from serai.simulator.workloads.workload import BLOCK_TOKENS, Arrival

PATH = "profiles/llmservingsim/bench"
RUNS = (
    # figure's name, folder, GPU, model
    ("rtx4090_8b", "RTX4090/Llama-3.1-8B", "rtx-4090", "meta-llama/Llama-3.1-8B"),
    ("rtxpro6000_8b", "RTXPRO6000/Llama-3.1-8B", "rtx-pro-6000", "meta-llama/Llama-3.1-8B"),
    ("rtxpro6000_32b", "RTXPRO6000/Qwen3-32B", "rtx-pro-6000", "Qwen/Qwen3-32B"),
    (
        "rtxpro6000_30b_a3b",
        "RTXPRO6000/Qwen3-30B-A3B-Instruct-2507",
        "rtx-pro-6000",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
    ),
)
_LEAST_RUNNING = 8
"""Seconds with fewer requests say little of a step's time."""
_LEAST_SECONDS = 20
_BESIDE, _BESIDE_CONTEXT = 64, 1000
"""The decoding sequences beside which a prompt's cost is asked for: it shares the step with some."""


@dataclass(frozen=True)
class _Engine:
    tensor_parallel_size: int
    data_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class _Cache:
    num_kv_tokens: int


@dataclass(frozen=True)
class _Meta:
    engine_kwargs: _Engine
    kv_cache: _Cache | None = None


@dataclass(frozen=True)
class _Line:
    input_toks: int
    output_toks: int
    arrival_time: float
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of each request, in the order of arrival."""

    ttft_s: list[float]
    whole_s: list[float]
    tpot_s: list[float]
    """Of requests with more than one token."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One run: what came, what the engine was told, and what it did."""

    name: str
    arrivals: list[Arrival]
    measured: Latency
    model: RooflineModel
    settings: BatchSettings
    engines: int
    kv_known: bool
    """Whether the log says how large the KV cache was; else it is what fits by the cost model."""
    seconds: list[dict[str, float]]
    """What the engine said of itself each second."""


def load_runs(data: Path) -> list[LoggedRun]:
    """All runs. Raises OSError or msgspec's errors when a log is absent or not one."""
    return [_load(data / PATH / folder / "vllm", name, gpu, model) for name, folder, gpu, model in RUNS]


def _load(folder: Path, name: str, gpu: str, model_name: str) -> LoggedRun:
    meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=_Meta)
    lines = [msgspec.json.decode(line, type=_Line) for line in (folder / "requests.jsonl").read_bytes().splitlines()]
    lines.sort(key=lambda line: line.arrival_time)
    engine = meta.engine_kwargs
    model = RooflineModel(
        shipped_card(model_name), GPUS[gpu], Parallelism(engine.tensor_parallel_size), profile=profile_for(gpu, "vllm")
    )
    with (folder / "timeseries.csv").open(encoding="utf-8") as text:
        seconds = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(text)]
    return LoggedRun(
        name=name,
        arrivals=_arrivals(lines),
        measured=_measured(lines),
        model=model,
        settings=BatchSettings(
            kv_tokens=meta.kv_cache.num_kv_tokens if meta.kv_cache else model.kv_capacity_tokens(),
            sequences_max=engine.max_num_seqs,
            step_tokens_max=engine.max_num_batched_tokens,
        ),
        engines=engine.data_parallel_size,
        kv_known=meta.kv_cache is not None,
        seconds=seconds,
    )


def _arrivals(lines: Sequence[_Line]) -> list[Arrival]:
    """Nobody shares a prefix, but each prompt has keys of its own: who is preempted finds what is left of it."""
    begin = lines[0].arrival_time
    return [
        Arrival(
            round((line.arrival_time - begin) * NS),
            line.input_toks,
            line.output_toks,
            tuple(range(number << 20, (number << 20) + line.input_toks // BLOCK_TOKENS)),
        )
        for number, line in enumerate(lines)
    ]


def _measured(lines: Sequence[_Line]) -> Latency:
    # Arrivals are on the client's clock, the rest on the engine's. The request that was queued soonest after its
    # arrival shows how the clocks differ, within a millisecond or two.
    apart = min(line.queued_ts - line.arrival_time for line in lines)
    return Latency(
        [line.first_token_ts - apart - line.arrival_time for line in lines],
        [line.last_token_ts - apart - line.arrival_time for line in lines],
        [(one.last_token_ts - one.first_token_ts) / (one.output_toks - 1) for one in lines if one.output_toks > 1],
    )


def replayed(run: LoggedRun, model: LatencyModel | None = None) -> tuple[Latency, int]:
    """The run in the simulator, with the shipped step times or those of `model`; and how often it preempted.

    Several engines of one model balance by load, as vLLM's data parallelism does.
    """
    spec = InstanceSpec(model or run.model, run.settings)
    result = simulate([spec] * run.engines, run.arrivals, Routed(LeastLoaded, range(run.engines)))
    return _simulated(result.outcomes), round(result.figures()["preemptions"])


def _simulated(outcomes: Outcomes) -> Latency:
    found = Latency([], [], [])
    for one in outcomes:
        assert one.first_token_ns is not None
        assert one.finished_ns is not None
        found.ttft_s.append((one.first_token_ns - one.arrival_ns) / NS)
        found.whole_s.append((one.finished_ns - one.arrival_ns) / NS)
        if one.output_tokens > 1:
            found.tpot_s.append((one.finished_ns - one.first_token_ns) / NS / (one.output_tokens - 1))
    return found


STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "p50": median,
    "p90": lambda values: quantiles(values, n=10)[-1],
}


def errors(measured: Latency, simulated: Latency) -> dict[tuple[str, str], float]:
    """Relative errors by quantity and statistic."""
    pairs = {
        "ttft": (measured.ttft_s, simulated.ttft_s),
        "e2e": (measured.whole_s, simulated.whole_s),
        "tpot": (measured.tpot_s, simulated.tpot_s),
    }
    return {
        (quantity, name): statistic(said) / statistic(known) - 1
        for quantity, (known, said) in pairs.items()
        for name, statistic in STATISTICS.items()
    }


# Step times from the log itself


@dataclass(frozen=True, slots=True)
class StepFactors:
    """What the log's own steps take, over what the model says."""

    decode: float
    prompt: float


class OwnSteps:
    """`model` with its plain decode steps and what prompts add to them multiplied by factors."""

    def __init__(self, model: RooflineModel, factors: StepFactors) -> None:
        self._model, self._factors = model, factors

    def step_s(self, step: Step) -> float:
        whole = self._model.step_s(step)
        if not step.chunks:
            return whole * self._factors.decode
        plain = self._model.step_s(Step((), step.decode_sequences, step.decode_context_tokens))
        return plain * self._factors.decode + (whole - plain) * self._factors.prompt

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        return self._model.prefill_s(prompt_tokens, cached_tokens, batch) * self._factors.prompt

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        return self._model.decode_step_s(sequences, context_tokens) * self._factors.decode

    def kv_capacity_tokens(self) -> int:
        return self._model.kv_capacity_tokens()

    def kv_bytes_per_token(self) -> float:
        return self._model.kv_bytes_per_token()


def step_factors(run: LoggedRun) -> StepFactors | None:
    """From what the engine said each second: a second holds so many decode steps (tokens said over requests running)
    and the prompts it took; both factors by least squares over all seconds. None where two engines share the log, or
    when it has too few busy seconds."""
    if run.engines > 1:
        return None
    length = round(fmean(arrival.prompt_tokens for arrival in run.arrivals))
    beside = Step((), _BESIDE, _BESIDE * _BESIDE_CONTEXT)
    with_prompt = Step([PrefillChunk(length)], beside.decode_sequences, beside.decode_context_tokens)
    token_s = (run.model.step_s(with_prompt) - run.model.step_s(beside)) / length
    rows: list[tuple[float, float]] = []
    for before, second in pairwise(run.seconds):
        if min(before["running"], second["running"]) < _LEAST_RUNNING or not second["gen_throughput"]:
            continue
        running = (before["running"] + second["running"]) / 2
        step_s = run.model.decode_step_s(round(running), _context_tokens(run, second) / running)
        rows.append((second["gen_throughput"] / running * step_s, second["prompt_throughput"] * token_s))
    return _least_squares(rows) if len(rows) >= _LEAST_SECONDS else None


def _context_tokens(run: LoggedRun, second: Mapping[str, float]) -> float:
    """Tokens in the cache in the middle of a second: as logged, or what the requests then being answered hold."""
    if second["kv_cache_pct"]:
        return second["kv_cache_pct"] / 100 * run.settings.kv_tokens
    at_s = second["t"] - 0.5
    held = 0.0
    for arrival, ttft_s, whole_s in zip(run.arrivals, run.measured.ttft_s, run.measured.whole_s, strict=True):
        since_s = at_s - arrival.at_ns / NS
        if ttft_s <= since_s <= whole_s:
            share = (since_s - ttft_s) / max(1e-9, whole_s - ttft_s)
            held += arrival.prompt_tokens + share * arrival.output_tokens
    return held


def _least_squares(rows: Sequence[tuple[float, float]]) -> StepFactors | None:
    """Factors d and p with d · decode + p · prompts = 1 second, as nearly as can be."""
    dd, pp = sum(d * d for d, _ in rows), sum(p * p for _, p in rows)
    dp, d1, p1 = sum(d * p for d, p in rows), sum(d for d, _ in rows), sum(p for _, p in rows)
    determinant = dd * pp - dp * dp
    if determinant <= 1e-9 * dd * pp:
        return None
    return StepFactors((d1 * pp - p1 * dp) / determinant, (p1 * dd - d1 * dp) / determinant)
