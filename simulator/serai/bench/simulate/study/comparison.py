"""Several systems on several slices: their goodput, ratios between them, and averages of ratios. Pure but for `plan`'s
scans, which others run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from serai.bench.simulate.study.cells import Candidate, Slice, decode_share
from serai.bench.simulate.study.scans import Effort, ScanJob, best_of
from serai.bench.simulate.study.systems import prefill_choices
from serai.simulator.fast.presets import DISAGGREGATED
from serai.simulator.goodput import GoodputScan


@dataclass(frozen=True, slots=True)
class Goodput:
    """One system on one slice at one level. None: no rate held."""

    held_per_s: float | None
    failing_per_s: float | None
    monotone: bool
    by_seed: tuple[float | None, ...]
    """The highest rate that each seed held, of those that every seed ran."""
    open_ended: bool


GoodputTable = Mapping[tuple[Slice, str], Mapping[float, Goodput]]
"""By slice and system, then by level."""


@dataclass
class Comparison:
    """The scans of a comparison. Disaggregated systems have several for a slice, of which the best counts."""

    systems: Sequence[str]
    slices: Sequence[Slice]
    effort: Effort
    ratios_max: int = 3
    cv: float = 1.0
    jobs: dict[tuple[Slice, str], list[ScanJob]] = field(default_factory=dict)

    def plan(self) -> list[ScanJob]:
        """All scans that are to be run, slice by slice."""
        for where in self.slices:
            for system in self.systems:
                candidates = candidates_for(system, where, self.ratios_max)
                effort = thrifty(self.effort) if system in DISAGGREGATED else self.effort
                self.jobs[where, system] = [ScanJob(where, one, effort, cv=self.cv) for one in candidates]
        return [job for jobs in self.jobs.values() for job in jobs]

    def table(self) -> GoodputTable:
        """What was found. A system that cannot be built on a slice has no entry there."""
        level = 0.9 if 0.9 in self.effort.levels else min(self.effort.levels)
        return {
            key: {at: told(scan) for at, scan in best_of(jobs, level).scans().items()}
            for key, jobs in self.jobs.items()
            if jobs
        }


def thrifty(effort: Effort) -> Effort:
    """For disaggregated systems, of which only the order is asked: one seed, one round."""
    return replace(effort, seeds=effort.seeds[:1], rounds=min(1, effort.rounds))


def candidates_for(system: str, where: Slice, most: int) -> list[Candidate]:
    """`system` itself, or, disaggregated, with the `most` numbers of prefill instances nearest to where both kinds
    would have as much to do."""
    if system not in DISAGGREGATED:
        return [Candidate(system)]
    balanced = (1 - decode_share(where)) * where.instances
    choices = sorted(prefill_choices(system, where), key=lambda prefill: (abs(prefill - balanced), prefill))
    return [Candidate(system, prefill=prefill) for prefill in sorted(choices[:most])]


def told(scan: GoodputScan) -> Goodput:
    """A scan's figures."""
    seeds = max(len(point.by_seed) for point in scan.curve)
    full = [point for point in scan.curve if len(point.by_seed) == seeds]
    by_seed = tuple(
        max((point.rate_per_s for point in full if point.by_seed[seed] >= scan.level), default=None)
        for seed in range(seeds)
    )
    return Goodput(scan.highest_held_per_s, scan.lowest_failing_per_s, scan.monotone, by_seed, scan.open_ended)


def ratio(table: GoodputTable, where: Slice, ours: str, other: str, level: float) -> float:
    """Goodput of `ours` over that of `other`; NaN where one of them has none."""
    ours_held = _held(table, where, ours, level)
    other_held = _held(table, where, other, level)
    return ours_held / other_held if ours_held and other_held else math.nan


def average_ratio(
    table: GoodputTable, slices: Iterable[Slice], ours: str, others: Sequence[str], level: float
) -> tuple[float, int]:
    """The mean of ratios over slices and others, as the paper averages, and of how many. Slices in which one of the two
    has no goodput are left out, as the paper leaves failing cases out."""
    known = [
        value for where in slices for other in others if math.isfinite(value := ratio(table, where, ours, other, level))
    ]
    return (fmean(known) if known else math.nan), len(known)


def ratio_range(
    table: GoodputTable, slices: Iterable[Slice], ours: str, other: str, level: float
) -> tuple[float, float]:
    """The lowest and the highest mean of ratios that one seed alone gives; NaN without."""
    places = list(slices)
    seeds = max((len(found[level].by_seed) for found in table.values()), default=0)
    means = [
        mean for seed in range(seeds) if math.isfinite(mean := _seed_mean(table, places, ours, other, level, seed))
    ]
    return (min(means), max(means)) if means else (math.nan, math.nan)


def _seed_mean(table: GoodputTable, slices: Sequence[Slice], ours: str, other: str, level: float, seed: int) -> float:
    known = []
    for where in slices:
        pair = [_of_seed(table, where, system, level, seed) for system in (ours, other)]
        if pair[0] and pair[1]:
            known.append(pair[0] / pair[1])
    return fmean(known) if known else math.nan


def _of_seed(table: GoodputTable, where: Slice, system: str, level: float, seed: int) -> float | None:
    found = table.get((where, system))
    if found is None:
        return None
    by_seed = found[level].by_seed
    return by_seed[seed] if seed < len(by_seed) else by_seed[0]


def _held(table: GoodputTable, where: Slice, system: str, level: float) -> float | None:
    found = table.get((where, system))
    return None if found is None else found[level].held_per_s
