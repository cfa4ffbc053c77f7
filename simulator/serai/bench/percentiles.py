"""Percentiles of samples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def percentile(samples: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of `samples` do not exceed, linear between neighbours; NaN without samples."""
    if not samples:
        return float("nan")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_of(values: Sequence[float]) -> float:
    """The median over rounds, without those that gave no value. NaN when none did."""
    known = [value for value in values if value == value]
    return median(known) if known else float("nan")
