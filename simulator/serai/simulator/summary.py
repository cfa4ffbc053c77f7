"""The figures of one run: latencies by both definitions, attainment, throughput, and what it cost. Pure.

Nothing disappears. A request that was refused or did not finish counts as a miss, and as an infinite latency in
percentiles: a P99 is a number only if 99 % of the requests had an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serai.simulator.outcomes import (
    NS,
    LatencyDefinition,
    Outcome,
    Outcomes,
    SloTarget,
    Window,
    answered_from_ns,
    attainment,
    in_columns,
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in seconds, over all requests; infinite where so many had none. `mean_s` is over those that had."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """By one definition. `tpot` leaves out requests of one token, which have none."""

    attainment: float
    ttft: Spread
    tpot: Spread


@dataclass(frozen=True, slots=True)
class Costs:
    """What the run used in the time that throughput is told for, as its maker counts it: seconds of all GPUs (idle ones
    too) and joules."""

    gpu_s: float
    energy_j: float = math.nan


@dataclass(frozen=True, slots=True)
class Summary:
    """Requests are those that arrived in the window. Throughput is of those that finished in it, whenever they arrived:
    what the system did in that time, also when it falls behind."""

    requests: int
    finished: int
    refused: int
    unfinished: int
    strict: Latencies
    industry: Latencies
    whole: Spread
    """From arrival to the last token."""
    longest_gap: Spread
    """The longest wait between two tokens of a request that asked for several; NaN when it was not watched."""
    preemptions: int
    cached_share: float
    """Of the prompts' tokens, those that came from the prefix cache."""
    span_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    gpu_s_per_1k_tokens: float
    """GPU-seconds per 1,000 tokens said; NaN without costs."""
    energy_j_per_token: float


def summary(
    outcomes: Outcomes | Iterable[Outcome],
    slo: SloTarget,
    *,
    window: Window | None = None,
    costs: Costs | None = None,
) -> Summary:
    """The figures of `outcomes`."""
    everything = in_columns(outcomes)
    counted = everything if window is None else everything.arriving_in(window)
    columns = counted.columns
    refused = sum(columns["refused"])
    finished = sum(1 for end, no in zip(columns["finished_ns"], columns["refused"], strict=True) if end >= 0 and not no)
    span_s, throughput = _throughput(everything, window)
    said = throughput[2] * span_s
    return Summary(
        requests=len(counted),
        finished=finished,
        refused=refused,
        unfinished=len(counted) - finished - refused,
        strict=_latencies(counted, slo, LatencyDefinition.STRICT),
        industry=_latencies(counted, slo, LatencyDefinition.INDUSTRY),
        whole=spread(_whole_s(counted)),
        longest_gap=spread(_longest_gaps_s(counted)),
        preemptions=sum(columns["preemptions"]),
        cached_share=_ratio(sum(columns["cached_tokens"]), sum(columns["prompt_tokens"])),
        span_s=span_s,
        requests_per_s=throughput[0],
        prompt_tokens_per_s=throughput[1],
        output_tokens_per_s=throughput[2],
        gpu_s_per_1k_tokens=math.nan if costs is None else _ratio(costs.gpu_s * 1000, said),
        energy_j_per_token=math.nan if costs is None else _ratio(costs.energy_j, said),
    )


def spread(values_s: Sequence[float]) -> Spread:
    """Percentiles by nearest rank: a value that occurred."""
    ordered = sorted(values_s)
    if not ordered:
        return Spread(math.nan, math.nan, math.nan, math.nan, math.nan)
    finite = [value for value in ordered if value < math.inf]
    p50, p90, p99 = (ordered[math.ceil(share * len(ordered) / 100) - 1] for share in (50, 90, 99))
    return Spread(_ratio(math.fsum(finite), len(finite)), p50, p90, p99, ordered[-1])


def ttfts_s(outcomes: Outcomes, definition: LatencyDefinition) -> list[float]:
    """Seconds to the first token of each request, infinite where there was none."""
    return [
        math.inf if from_ns is None else (from_ns - arrival) / NS
        for from_ns, arrival in zip(answered_from_ns(outcomes, definition), outcomes.columns["arrival_ns"], strict=True)
    ]


def tpots_s(outcomes: Outcomes, definition: LatencyDefinition) -> list[float]:
    """Seconds per token after the first, of each request that asked for more than one."""
    columns = outcomes.columns
    return [
        math.inf if from_ns is None else (finished - from_ns) / (output - 1) / NS
        for from_ns, finished, output in zip(
            answered_from_ns(outcomes, definition), columns["finished_ns"], columns["output_tokens"], strict=True
        )
        if output > 1
    ]


def _latencies(outcomes: Outcomes, slo: SloTarget, definition: LatencyDefinition) -> Latencies:
    return Latencies(
        attainment(outcomes, slo, definition),
        spread(ttfts_s(outcomes, definition)),
        spread(tpots_s(outcomes, definition)),
    )


def _whole_s(outcomes: Outcomes) -> list[float]:
    columns = outcomes.columns
    return [
        math.inf if refused or finished < 0 else (finished - arrival) / NS
        for arrival, finished, refused in zip(
            columns["arrival_ns"], columns["finished_ns"], columns["refused"], strict=True
        )
    ]


def _longest_gaps_s(outcomes: Outcomes) -> list[float]:
    columns = outcomes.columns
    gaps = columns["itl_max_ns"]
    if max(gaps, default=-1) < 0:
        return []
    return [
        math.inf if gap < 0 or finished < 0 else gap / NS
        for gap, finished, output in zip(gaps, columns["finished_ns"], columns["output_tokens"], strict=True)
        if output > 1
    ]


def _throughput(outcomes: Outcomes, window: Window | None) -> tuple[float, tuple[float, float, float]]:
    """The span in seconds, and per second of it: requests finished, tokens of their prompts and of their outputs."""
    columns = outcomes.columns
    if not len(outcomes):
        return 0.0, (math.nan, math.nan, math.nan)
    begin = min(columns["arrival_ns"]) if window is None else window.begin_ns
    end = max(*columns["finished_ns"], *columns["arrival_ns"])
    if window is not None and window.end_ns is not None:
        end = window.end_ns
    done = [
        (prompt, output)
        for prompt, output, finished, refused in zip(
            columns["prompt_tokens"], columns["output_tokens"], columns["finished_ns"], columns["refused"], strict=True
        )
        if begin <= finished <= end and not refused
    ]
    span_s = (end - begin) / NS
    totals = (len(done), sum(prompt for prompt, _ in done), sum(output for _, output in done))
    return span_s, (_ratio(totals[0], span_s), _ratio(totals[1], span_s), _ratio(totals[2], span_s))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
