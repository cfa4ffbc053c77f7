"""Per-request logs of real vLLM 0.19 under a trace: `profiles/llmservingsim/bench`, RTX 4090 and RTX PRO 6000.

The logs say when each request was scheduled, gave its first token and its last, so at every moment the running batch
is known. The model predicts the step time at that moment; a request's predicted TPOT is its decode time divided by
the steps that fit into it. Fitted on Llama-3.1-8B on the RTX PRO 6000; judged on Qwen3-32B at TP 2 on the same GPU and
on Llama-3.1-8B on the RTX 4090, a GPU the fit never saw. The expert-parallel pair of instances is left out: two
engines share one log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from pathlib import Path

import msgspec

from serai.bench.profile.served_fit import profile_from
from serai.bench.report import rounded
from serai.performance.fitting import Block, Parameter, fit
from serai.performance.hardware import GPUS
from serai.performance.latency_model import PrefillChunk, Step
from serai.performance.latency_profile import PCIE_SHARE, PURE_ROOFLINE, LatencyProfile, Provenance
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card

PATH = "profiles/llmservingsim/bench"
ENGINE = "vllm"
FITTED_GPU = "rtx-pro-6000"
LOGS = (
    # folder, GPU, model, TP, held out
    ("RTXPRO6000/Llama-3.1-8B", "rtx-pro-6000", "meta-llama/Llama-3.1-8B", 1, False),
    ("RTXPRO6000/Qwen3-32B", "rtx-pro-6000", "Qwen/Qwen3-32B", 2, True),
    ("RTX4090/Llama-3.1-8B", "rtx-4090", "meta-llama/Llama-3.1-8B", 1, True),
)
CHUNK_TOKENS = 2048
"""`max_num_batched_tokens` of all runs."""
LEAST_OUTPUT = 16
"""Shorter answers say nothing of a mean time per token."""

PARAMETERS = (
    Parameter("linear_compute", 0.7, 0.6, 1.0),
    Parameter("linear_memory", 0.8, 0.6, 1.0),
    Parameter("attention_compute", 0.5, 0.8, 1.0),
    Parameter("attention_memory", 0.8, 0.6, 1.0),
    Parameter("elementwise_memory", 0.5, 0.8, 1.0),
    Parameter("ridge_sharpness", 3.0, 0.3),
    Parameter("kernel_s", 4e-6, 0.7),
    Parameter("step_s", 1e-3, 0.7),
    Parameter("sequence_s", 1.5e-5, 0.7),
)
PCIE_ALL_REDUCE = {"link_bandwidth": PCIE_SHARE, "all_reduce_s": 5e-6}
"""Not fitted (the fitted run has one GPU): all-reduce between two of these GPUs from the newest kernel tables
(aiconfigurator-core 0.12, vLLM 0.24: 5 µs at 8 kB, 3.6 ms at 64 MiB). Other versions and NCCL lie between 0.12 and
0.58 of the link."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request; times on the engine's clock, in seconds."""

    prompt_tokens: int
    output_tokens: int
    scheduled_s: float
    first_token_s: float
    last_token_s: float

    @property
    def tpot_s(self) -> float:
        """Measured mean time per output token after the first."""
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Segment:
    """A span in which the decoding batch does not change."""

    start_s: float
    end_s: float
    sequences: int
    context_tokens: float
    prompt_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ServingLog:
    """One run."""

    gpu: str
    model: str
    tensor: int
    held_out: bool
    requests: list[LoggedRequest]
    segments: list[Segment]
    instance: RooflineModel

    @property
    def judged(self) -> list[LoggedRequest]:
        """The requests long enough to have a mean time per token."""
        return [r for r in self.requests if r.output_tokens >= LEAST_OUTPUT]


@dataclass(frozen=True)
class _Line:
    input_toks: int
    output_toks: int
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


def load_logs(data: Path) -> list[ServingLog]:
    """The runs that have a log. Raises OSError when one is absent."""
    found = []
    for folder, gpu, model, tensor, held_out in LOGS:
        lines = (data / PATH / folder / "vllm" / "requests.jsonl").read_bytes().splitlines()
        requests = [_request(msgspec.json.decode(line, type=_Line)) for line in lines if line.strip()]
        instance = RooflineModel(shipped_card(model), GPUS[gpu], Parallelism(tensor), profile=PURE_ROOFLINE)
        found.append(ServingLog(gpu, model, tensor, held_out, requests, segments(requests), instance))
    return found


def _request(line: _Line) -> LoggedRequest:
    return LoggedRequest(line.input_toks, line.output_toks, line.scheduled_ts, line.first_token_ts, line.last_token_ts)


def segments(requests: Sequence[LoggedRequest]) -> list[Segment]:
    """The spans between starts and ends of decoding, with what ran in each."""
    moments = sorted({t for r in requests for t in (r.first_token_s, r.last_token_s)})
    found = []
    for start, end in pairwise(moments):
        middle = (start + end) / 2
        decoding = [r for r in requests if r.first_token_s <= start and r.last_token_s >= end]
        context = sum(_context(r, middle) for r in decoding)
        prompts = sum(r.prompt_tokens * _overlap(r, start, end) for r in requests)
        found.append(Segment(start, end, len(decoding), context, prompts / (end - start)))
    return found


def _context(request: LoggedRequest, moment: float) -> float:
    share = (moment - request.first_token_s) / max(1e-9, request.last_token_s - request.first_token_s)
    return request.prompt_tokens + share * request.output_tokens


def _overlap(request: LoggedRequest, start: float, end: float) -> float:
    """Share of the request's prompt that was processed between `start` and `end`, taken as even in time."""
    span = max(1e-6, request.first_token_s - request.scheduled_s)
    return max(0.0, min(end, request.first_token_s) - max(start, request.scheduled_s)) / span


def step_times_s(log_: ServingLog, profile: LatencyProfile) -> list[float]:
    """Predicted step time in each segment. Prompt tokens that arrive during a step ride in it (at most a chunk), so
    the step is the fixed point of its own length."""
    instance = log_.instance.with_profile(profile)
    found = []
    for segment in log_.segments:
        context = round(segment.context_tokens)
        step = instance.step_s(Step((), max(1, segment.sequences), context))
        for _ in range(4):
            prompt = min(CHUNK_TOKENS, round(segment.prompt_tokens_per_s * step))
            chunks = [PrefillChunk(prompt)] if prompt else []
            step = instance.step_s(Step(chunks, max(1, segment.sequences), context))
        found.append(step)
    return found


def predicted_tpot_s(log_: ServingLog, profile: LatencyProfile) -> list[float]:
    """Predicted time per output token of each judged request, in their order."""
    steps = step_times_s(log_, profile)
    starts = [s.start_s for s in log_.segments]
    counts = [0.0]
    for segment, step in zip(log_.segments, steps, strict=True):
        counts.append(counts[-1] + (segment.end_s - segment.start_s) / step)
    index = {start: i for i, start in enumerate(starts)} | {log_.segments[-1].end_s: len(starts)}
    return [
        (r.last_token_s - r.first_token_s) / (counts[index[r.last_token_s]] - counts[index[r.first_token_s]])
        for r in log_.judged
    ]


def fit_logs(logs: Sequence[ServingLog]) -> LatencyProfile:
    """The profile of the fitted GPU under vLLM, from every judged request of `logs`."""
    measured = [[log(r.tpot_s) for r in run.judged] for run in logs]

    def values(position: Sequence[float]) -> dict[str, float]:
        return {p.name: p.value(x) for p, x in zip(PARAMETERS, position, strict=True)} | PCIE_ALL_REDUCE

    def residuals(position: Sequence[float]) -> list[float]:
        profile = profile_from(values(position), ENGINE, FITTED_GPU)
        return [
            log(predicted) - known
            for run, rows in zip(logs, measured, strict=True)
            for predicted, known in zip(predicted_tpot_s(run, profile), rows, strict=True)
        ]

    start, spreads = [p.start for p in PARAMETERS], [p.spread for p in PARAMETERS]
    position = fit(start, spreads, [Block(residuals, range(len(PARAMETERS)))])
    rounded_values = {name: rounded(value) for name, value in values(position).items()}
    fitted = profile_from(rounded_values, ENGINE, FITTED_GPU)
    errors = [abs(e) for run in logs for e in tpot_errors(run, fitted)]
    note = "all-reduce over PCIe is from kernel tables of vLLM 0.24, not fitted"
    source = f"{PATH}: vLLM 0.19 request logs of {', '.join(f'{run.model} on {run.gpu}' for run in logs)}"
    provenance = Provenance([source], len(errors), rounded(sum(errors) / len(errors)), note)
    return LatencyProfile(FITTED_GPU, ENGINE, fitted.efficiency, fitted.overheads, fitted.serving, provenance)


def tpot_errors(log_: ServingLog, profile: LatencyProfile) -> list[float]:
    """Relative error of each judged request's predicted time per output token."""
    predicted = predicted_tpot_s(log_, profile)
    return [p / r.tpot_s - 1 for p, r in zip(predicted, log_.judged, strict=True)]
