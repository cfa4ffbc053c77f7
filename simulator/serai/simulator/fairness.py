"""Whether all kinds of requests are served alike: by when they came, how long they are, and whose they are. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from serai.simulator.outcomes import NS, LatencyDefinition, Outcome, Outcomes, SloTarget, in_columns, met
from serai.simulator.summary import Spread, spread, ttfts_s

PROMPT_EDGES = (128, 512, 2048, 8192, 32768)
"""Bounds of length buckets, in prompt tokens."""
OUTPUT_EDGES = (16, 64, 256, 1024)
SLICES = 10


@dataclass(frozen=True, slots=True)
class Bucket:
    """One kind of request. `served_share`: of the output tokens it asked for, those of finished requests."""

    name: str
    requests: int
    attainment: float
    ttft: Spread
    served_share: float


@dataclass(frozen=True, slots=True)
class Fairness:
    """Buckets that hold requests, in their order, and how far apart they are."""

    by: str
    buckets: tuple[Bucket, ...]

    @property
    def gap(self) -> float:
        """Best attainment less worst: 0 is fair."""
        shares = [bucket.attainment for bucket in self.buckets]
        return max(shares) - min(shares) if shares else math.nan

    @property
    def jain(self) -> float:
        """Jain's index over attainments: 1 is fair, 1 / n is all for one of n."""
        return jain([bucket.attainment for bucket in self.buckets])


def jain(shares: Sequence[float]) -> float:
    """(Σx)² / (n Σx²); 1 when all are 0, NaN without any."""
    if not shares:
        return math.nan
    squares = math.fsum(share * share for share in shares)
    return math.fsum(shares) ** 2 / (len(shares) * squares) if squares > 0 else 1.0


def by_arrival(
    outcomes: Outcomes | Iterable[Outcome], slo: SloTarget, definition: LatencyDefinition, slices: int = SLICES
) -> Fairness:
    """By age: equal slices of the time in which requests came. Whoever came late in an overload waits longest."""
    table = in_columns(outcomes)
    times = table.columns["arrival_ns"]
    if not len(times):
        return Fairness("arrival", ())
    begin = min(times)
    width = max(1, -(-(max(times) - begin + 1) // slices))
    places = [(arrival - begin) // width for arrival in times]
    ends = [f"{(begin + place * width) / NS:.0f}" for place in range(slices + 1)]
    return _fairness("arrival", table, slo, definition, places, lambda place: f"{ends[place]}–{ends[place + 1]} s")


def by_prompt(
    outcomes: Outcomes | Iterable[Outcome],
    slo: SloTarget,
    definition: LatencyDefinition,
    edges: Sequence[int] = PROMPT_EDGES,
) -> Fairness:
    """By tokens of the prompt."""
    table = in_columns(outcomes)
    return _by_length("prompt_tokens", table, slo, definition, edges)


def by_output(
    outcomes: Outcomes | Iterable[Outcome],
    slo: SloTarget,
    definition: LatencyDefinition,
    edges: Sequence[int] = OUTPUT_EDGES,
) -> Fairness:
    """By tokens of the output."""
    table = in_columns(outcomes)
    return _by_length("output_tokens", table, slo, definition, edges)


def by_client(outcomes: Outcomes | Iterable[Outcome], slo: SloTarget, definition: LatencyDefinition) -> Fairness:
    """By whose they are, most requests first."""
    return _by_name("client", in_columns(outcomes), slo, definition)


def by_model(outcomes: Outcomes | Iterable[Outcome], slo: SloTarget, definition: LatencyDefinition) -> Fairness:
    """By the model they ask, most requests first."""
    return _by_name("model", in_columns(outcomes), slo, definition)


def _by_length(
    column: str, table: Outcomes, slo: SloTarget, definition: LatencyDefinition, edges: Sequence[int]
) -> Fairness:
    places = [bisect_right(edges, tokens) for tokens in table.columns[column]]
    names = [
        f"< {edges[0]}",
        *(f"{low}–{high - 1}" for low, high in pairwise(edges)),
        f"≥ {edges[-1]}",
    ]
    return _fairness(column, table, slo, definition, places, lambda place: names[place])


def _by_name(column: str, table: Outcomes, slo: SloTarget, definition: LatencyDefinition) -> Fairness:
    names = table.names(column)
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name] += 1
    order = {name: place for place, name in enumerate(sorted(counts, key=lambda name: (-counts[name], name)))}
    known = list(order)
    return _fairness(column, table, slo, definition, [order[name] for name in names], lambda place: known[place])


def _fairness(
    by: str,
    table: Outcomes,
    slo: SloTarget,
    definition: LatencyDefinition,
    places: Sequence[int],
    name_of: Callable[[int], str],
) -> Fairness:
    judged, waits = met(table, slo, definition), ttfts_s(table, definition)
    asked = table.columns["output_tokens"]
    members: dict[int, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        members[place].append(number)
    return Fairness(
        by,
        tuple(
            Bucket(
                name=name_of(place),
                requests=len(numbers),
                attainment=sum(judged[number] for number in numbers) / len(numbers),
                ttft=spread([waits[number] for number in numbers]),
                served_share=sum(asked[number] for number in numbers if waits[number] < math.inf)
                / sum(asked[number] for number in numbers),
            )
            for place, numbers in sorted(members.items())
        ),
    )
