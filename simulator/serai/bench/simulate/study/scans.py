"""Scans of rates as jobs: one candidate on one slice, and the best of several for disaggregated systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serai.bench.simulate.study.cells import Candidate, Cell, Load, Slice, long_enough, reference_rate_per_s
from serai.bench.simulate.study.systems import Result
from serai.simulator.goodput import LEVELS, GoodputScan
from serai.simulator.rising_scan import RisingScan, ScanPlan, rising_rates

SHARES = (0.15, 0.35, 0.5, 0.65, 0.8, 0.95, 1.1, 1.25, 1.45, 1.65, 1.85)
"""Rates of the coarse scan, as shares of the slice's reference rate."""
QUICK_SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a scan may cost."""

    seeds: tuple[int, ...] = (1, 2, 3)
    shares: tuple[float, ...] = SHARES
    rounds: int = 2
    counted_s: float = 35.0
    requests_min: int = 400
    levels: tuple[float, ...] = LEVELS


QUICK = Effort(seeds=(1,), shares=QUICK_SHARES, rounds=0, counted_s=20.0, requests_min=200)
FULL = Effort()


class ScanJob:
    """Goodput of one candidate on one slice. Every candidate is asked the same coarse rates."""

    def __init__(self, where: Slice, candidate: Candidate, effort: Effort, *, cv: float = 1.0) -> None:
        self.where = where
        self.candidate = candidate
        self.results: dict[Cell, Result] = {}
        self._effort = effort
        self._cv = cv
        rates = rising_rates(reference_rate_per_s(where), effort.shares)
        self._scan = RisingScan(ScanPlan(rates, effort.seeds, effort.levels, rounds=effort.rounds))

    def wanted(self) -> list[Cell]:
        """The scan's next runs."""
        return [self._cell(rate, seed) for rate, seed in self._scan.wanted()]

    def learn(self, cell: Cell, result: Result) -> None:
        """One point more."""
        self.results[cell] = result
        self._scan.learn(cell.load.rate_per_s, cell.load.seed, result.attainment)

    def scans(self) -> dict[float, GoodputScan]:
        """What was found, by level."""
        return self._scan.results()

    def _cell(self, rate: float, seed: int) -> Cell:
        effort = self._effort
        load = Load(rate, seed, self._cv, effort.counted_s)
        return Cell(self.where, self.candidate, long_enough(load, effort.requests_min, 120.0))


def best_of(jobs: Sequence[ScanJob], level: float) -> ScanJob:
    """The one with the highest goodput at `level`; the one that attains most where none holds."""

    def worth(job: ScanJob) -> tuple[float, float]:
        scan = job.scans()[level]
        attained = [point.attainment for point in scan.curve]
        return scan.highest_held_per_s or 0.0, sum(attained)

    return max(jobs, key=worth)
