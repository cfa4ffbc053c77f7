"""One picture, one idea."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serai.simulator.fairness import Fairness
from serai.simulator.goodput import LEVELS, Curve
from serai.simulator.outcomes import NS, LatencyDefinition
from serai.simulator.queues import Course
from serai.simulator.reports.drawing import MARKERS, PALETTE, QUIET, legend, logarithmic, percent, picture

_STYLES = {LatencyDefinition.STRICT: "-", LatencyDefinition.INDUSTRY: "--"}
_PHASES = {"prefill": PALETTE[1], "decode": PALETTE[0], "mixed": PALETTE[3]}
_IDLE = "#EDEDED"
_CDF_POINTS = 1000

Interval = tuple[int, int, str]
"""Begin and end in nanoseconds, and the kind of step: prefill, decode or mixed."""


@dataclass(frozen=True, slots=True)
class PolicyCurve:
    """Attainment against rate of one policy by one definition."""

    policy: str
    definition: LatencyDefinition
    curve: Curve


def attainment_by_rate(
    stem: Path,
    curves: Sequence[PolicyCurve],
    *,
    title: str = "Requests within their target",
    levels: Sequence[float] = LEVELS,
) -> None:
    """Lines by policy; solid by the strict definition, dashed by industry's. Bands: a deviation over seeds each way."""
    policies = list(dict.fromkeys(curve.policy for curve in curves))
    with picture(stem, title) as (figure, axes):
        for level in levels:
            axes.axhline(level, color=QUIET, linewidth=0.8, linestyle=":", zorder=1)
        for curve in curves:
            place = policies.index(curve.policy)
            colour, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
            rates = [point.rate_per_s for point in curve.curve]
            means = [point.attainment for point in curve.curve]
            spreads = [point.spread for point in curve.curve]
            axes.plot(
                rates,
                means,
                color=colour,
                marker=marker,
                linestyle=_STYLES[curve.definition],
                markerfacecolor=colour if curve.definition is LatencyDefinition.STRICT else "white",
                label=f"{curve.policy}, {curve.definition}",
            )
            if any(spreads):
                low = [max(0.0, mean - spread) for mean, spread in zip(means, spreads, strict=True)]
                high = [min(1.0, mean + spread) for mean, spread in zip(means, spreads, strict=True)]
                axes.fill_between(rates, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel("request rate (requests/s)")
        axes.set_ylabel("requests that met TTFT and TPOT")
        axes.set_xlim(left=0)
        percent(axes)
        axes.set_yticks([0.0, 0.25, *levels] if set(levels) == set(LEVELS) else [0.0, 0.25, 0.5, 0.75, 1.0])
        legend(figure, axes)


def phase_timeline(
    stem: Path,
    instances: Mapping[str, Sequence[Interval]],
    begin_s: float,
    end_s: float,
    *,
    title: str = "What each instance did",
) -> None:
    """A bar an instance: prefill, decode, mixed, and idle between. `instances`: intervals by the instance's name."""
    with picture(stem, title, height_in=1.3 + 0.3 * len(instances)) as (figure, axes):
        for row, intervals in enumerate(instances.values()):
            axes.broken_barh([(begin_s, end_s - begin_s)], (row - 0.36, 0.72), color=_IDLE, zorder=2)
            for kind, colour in _PHASES.items():
                spans = _spans(intervals, kind, begin_s, end_s)
                if spans:
                    axes.broken_barh(spans, (row - 0.36, 0.72), color=colour, linewidth=0, zorder=3)
        for kind, colour in _PHASES.items():
            if any(interval[2] == kind for intervals in instances.values() for interval in intervals):
                axes.bar([begin_s], [0], width=0, color=colour, label=kind)
        axes.bar([begin_s], [0], width=0, color=_IDLE, label="idle")
        axes.set_xlim(begin_s, end_s)
        axes.set_ylim(len(instances) - 0.5, -0.5)
        axes.set_yticks(range(len(instances)), list(instances))
        axes.grid(visible=False)
        axes.set_xlabel("time (s)")
        axes.set_ylabel("instance")
        legend(figure, axes)


def latency_cdf(
    stem: Path,
    samples_s: Mapping[str, Sequence[float]],
    slo_s: float,
    *,
    quantity: str = "TTFT",
    title: str | None = None,
) -> None:
    """The share of requests within each latency, by policy. What was never answered is infinite: its curve ends below
    100 %. Latencies are on a logarithmic axis, in milliseconds when the target is below a second."""
    unit, per_s = ("ms", 1000.0) if slo_s < 1 else ("s", 1.0)
    with picture(stem, title or f"{quantity} of all requests") as (figure, axes):
        for place, (name, values) in enumerate(samples_s.items()):
            xs, shares = _cdf(values)
            axes.plot(
                [x * per_s for x in xs],
                shares,
                color=PALETTE[place % len(PALETTE)],
                linestyle=("-", "--", "-.", ":")[place % 4],
                drawstyle="steps-post",
                label=name,
            )
        target = f"target: {slo_s * per_s:g} {unit}"
        axes.axvline(slo_s * per_s, color=QUIET, linewidth=1.0, linestyle=":", label=target)
        logarithmic(axes)
        axes.set_xlabel(f"{quantity} ({unit})")
        axes.set_ylabel("requests")
        percent(axes)
        legend(figure, axes)


def fairness_by_bucket(stem: Path, policies: Mapping[str, Fairness], *, what: str, title: str | None = None) -> None:
    """Attainment by kind of request, a bar a policy. `what` names the kinds, with their unit: `prompt (tokens)`."""
    names = list(dict.fromkeys(bucket.name for fairness in policies.values() for bucket in fairness.buckets))
    counts = {bucket.name: bucket.requests for fairness in policies.values() for bucket in fairness.buckets}
    width = 0.8 / max(1, len(policies))
    # Wide enough for the kinds' names side by side.
    width_in = min(14.0, max(7.0, 2.5 + 0.085 * sum(len(name) + 2 for name in names)))
    with picture(stem, title or "Requests within their target, by kind", width_in=width_in) as (figure, axes):
        for place, (policy, fairness) in enumerate(policies.items()):
            shares = {bucket.name: bucket.attainment for bucket in fairness.buckets}
            axes.bar(
                [number - 0.4 + width * (place + 0.5) for number in range(len(names))],
                [shares.get(name, math.nan) for name in names],
                width=width * 0.92,
                color=PALETTE[place % len(PALETTE)],
                label=f"{policy} (Jain {fairness.jain:.3f})",
            )
        axes.set_xticks(range(len(names)), [f"{name}\n{counts[name]:,}" for name in names])
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(f"{what}; requests below")
        axes.set_ylabel("requests that met TTFT and TPOT")
        percent(axes)
        legend(figure, axes)


def queue_over_time(
    stem: Path, policies: Mapping[str, Course], *, title: str = "Requests that wait for their first token"
) -> None:
    """A line a policy."""
    with picture(stem, title) as (figure, axes):
        for place, (policy, course) in enumerate(policies.items()):
            axes.plot(
                course.times_s,
                course.values,
                color=PALETTE[place % len(PALETTE)],
                linestyle=("-", "--", "-.", ":")[place % 4],
                drawstyle="steps-post",
                linewidth=1.2,
                label=policy,
            )
        axes.set_xlabel("time (s)")
        axes.set_ylabel("requests waiting")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        legend(figure, axes)


def _spans(intervals: Sequence[Interval], kind: str, begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """Begin and length in seconds of the intervals of a kind, cut to the window."""
    cut = ((max(begin / NS, begin_s), min(end / NS, end_s)) for begin, end, of in intervals if of == kind)
    return [(begin, end - begin) for begin, end in cut if begin < end]


def _cdf(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Points of the cumulative share, thinned to what a picture can show, tails kept."""
    finite = sorted(value for value in values if value < math.inf)
    if not finite:
        return [], []
    places = sorted({round(part * (len(finite) - 1) / _CDF_POINTS) for part in range(_CDF_POINTS + 1)})
    # Zero has no place on a logarithmic axis.
    return [max(finite[place], 1e-6) for place in places], [(place + 1) / len(values) for place in places]
