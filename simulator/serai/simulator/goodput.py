"""The highest rate that is served well: found by scanning, never by bisection.

Attainment need not fall with the rate: a policy may miss at a low rate and hold at a higher one. So every rate of the
grid is run, the gaps where holding turns into failing (or back) are scanned more finely, and three figures are told:
the highest rate that holds, the lowest that fails, and the highest below which nothing fails. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

LEVELS = (0.5, 0.9, 0.99)
"""P50, P90, P99: shares of requests that must meet their target."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Attainment at one rate, one value a seed."""

    rate_per_s: float
    by_seed: tuple[float, ...]

    @property
    def attainment(self) -> float:
        """The mean over seeds."""
        return fmean(self.by_seed)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; 0 for one."""
        return stdev(self.by_seed) if len(self.by_seed) > 1 else 0.0


Curve = tuple[CurvePoint, ...]
"""Points by rising rate."""


@dataclass(frozen=True, slots=True)
class GoodputScan:
    """What a curve says at one level, by the mean over seeds. None: no rate of the grid did."""

    level: float
    curve: Curve
    highest_held_per_s: float | None
    """The goodput: the highest rate that held, whatever failed below it."""
    lowest_failing_per_s: float | None
    unbroken_per_s: float | None
    """The highest rate that held with every lower one of the curve."""

    @property
    def monotone(self) -> bool:
        """Whether no rate failed below one that held."""
        return self.highest_held_per_s == self.unbroken_per_s

    @property
    def highest_held_by_seed(self) -> tuple[float | None, ...]:
        """The goodput of each seed alone: how much it hangs on chance."""
        seeds = len(self.curve[0].by_seed)
        return tuple(
            max((point.rate_per_s for point in self.curve if point.by_seed[seed] >= self.level), default=None)
            for seed in range(seeds)
        )

    @property
    def open_ended(self) -> bool:
        """Whether the highest rate of the grid still held: the goodput is at least this, and the grid too short."""
        return self.highest_held_per_s == self.curve[-1].rate_per_s


def judged(curve: Iterable[CurvePoint], level: float) -> GoodputScan:
    """The figures of a curve at `level`. A NaN (no request arrived) fails."""
    points = tuple(sorted(curve, key=lambda point: point.rate_per_s))
    if not points:
        raise ValueError("a curve needs at least one rate")
    held = [point.rate_per_s for point in points if _holds(point, level)]
    failing = [point.rate_per_s for point in points if not _holds(point, level)]
    lowest_failing = min(failing, default=None)
    unbroken = [rate for rate in held if lowest_failing is None or rate < lowest_failing]
    return GoodputScan(level, points, max(held, default=None), lowest_failing, max(unbroken, default=None))


def scan(
    rates: Sequence[float],
    run: Callable[[float], float],
    level: float,
    *,
    refinements: int = 0,
    between: int = 3,
) -> GoodputScan:
    """Run every rate, then `refinements` times `between` more in each gap where holding turns."""
    return scan_seeds(rates, lambda rate, _: run(rate), (0,), (level,), refinements=refinements, between=between)[level]


def scan_seeds(
    rates: Sequence[float],
    run: Callable[[float, int], float],
    seeds: Sequence[int],
    levels: Sequence[float] = LEVELS,
    *,
    refinements: int = 0,
    between: int = 3,
    said: Callable[[CurvePoint], None] | None = None,
) -> dict[float, GoodputScan]:
    """The same for several seeds and levels on one curve: a rate that one level asked for serves all. `run` gives the
    attainment of a rate and a seed; `said` hears of each point as it is known."""
    _check(rates, seeds, levels)
    known: dict[float, CurvePoint] = {}
    wanted = sorted(set(rates))
    for round_number in range(refinements + 1):
        for rate in wanted:
            known[rate] = CurvePoint(rate, tuple(run(rate, seed) for seed in seeds))
            if said is not None:
                said(known[rate])
        if round_number < refinements:
            wanted = _between(known, levels, between)
    return {level: judged(known.values(), level) for level in levels}


def _between(known: dict[float, CurvePoint], levels: Sequence[float], between: int) -> list[float]:
    """New rates in each gap whose ends differ at some level. Five digits: a rate that is read should be told."""
    found: set[float] = set()
    for low, high in pairwise(sorted(known)):
        if any(_holds(known[low], level) != _holds(known[high], level) for level in levels):
            inner = (low + (high - low) * part / (between + 1) for part in range(1, between + 1))
            found.update(float(f"{rate:.5g}") for rate in inner)
    return sorted(found - set(known))


def _holds(point: CurvePoint, level: float) -> bool:
    return point.attainment >= level


def _check(rates: Sequence[float], seeds: Sequence[int], levels: Sequence[float]) -> None:
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"a scan needs rates above 0, not {list(rates)}")
    if not seeds:
        raise ValueError("a scan needs a seed")
    if not levels or not all(0 < level <= 1 for level in levels):
        raise ValueError(f"levels are shares above 0 up to 1, not {list(levels)}")
