"""A scan of rates that spends its runs where it matters: upward over a coarse grid with one seed, more finely where
holding turns into failing (or back), and with every seed at the rates that decide. Pure: it asks, others run.

Like `goodput.scan_seeds` it never bisects the whole range: attainment need not fall with the rate, so each rate of the
grid is run from the lowest on, until the lowest level has failed for good (`give_up` rates one after another).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from serai.simulator.goodput import LEVELS, CurvePoint, GoodputScan, judged

Ask = tuple[float, int]
"""A rate and a seed."""


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """What a scan may ask. `rounds` times each gap where a level turns is halved, unless it is narrower than
    `narrow` of its upper rate."""

    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    levels: tuple[float, ...] = LEVELS
    give_up: int = 2
    rounds: int = 2
    narrow: float = 0.03

    def __post_init__(self) -> None:
        if not self.rates or list(self.rates) != sorted(set(self.rates)) or not self.rates[0] > 0:
            raise ValueError(f"a scan needs rising rates above 0, not {list(self.rates)}")
        if not self.seeds or not self.levels:
            raise ValueError("a scan needs a seed and a level")


class RisingScan:
    """One system on one slice. `wanted` says what to run now; `learn` takes the result."""

    def __init__(self, plan: ScanPlan) -> None:
        self._plan = plan
        self._known: dict[float, dict[int, float]] = {}
        self._asked: set[Ask] = set()
        self._grid_left = list(plan.rates)
        self._rounds_left = self._late_rounds_left = plan.rounds

    def wanted(self) -> list[Ask]:
        """What to run now: asked once, so whoever takes it must answer. Empty while answers are awaited, and at the
        end."""
        if self._waiting:
            return []
        asks = self._next()
        self._asked.update(asks)
        return asks

    def learn(self, rate: float, seed: int, attainment: float) -> None:
        """The attainment of one that was asked."""
        if (rate, seed) not in self._asked:
            raise ValueError(f"nobody asked for {rate} with seed {seed}")
        self._known.setdefault(rate, {})[seed] = attainment

    @property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Points by rising rate; those that decide have a value for every seed, others fewer."""
        return tuple(
            CurvePoint(rate, tuple(value for _, value in sorted(self._known[rate].items())))
            for rate in sorted(self._known)
        )

    def results(self) -> dict[float, GoodputScan]:
        """By level."""
        return {level: judged(self.curve, level) for level in self._plan.levels}

    @property
    def _waiting(self) -> int:
        return len(self._asked) - sum(len(seeds) for seeds in self._known.values())

    def _next(self) -> list[Ask]:
        first = self._plan.seeds[0]
        while self._grid_left and not self._failed_for_good():
            rate = self._grid_left.pop(0)
            return [(rate, first)]
        self._grid_left = []
        while self._rounds_left:
            self._rounds_left -= 1
            between = self._between()
            if between:
                return [(rate, first) for rate in between]
        unsure = self._unsure()
        if unsure or len(self._plan.seeds) == 1:
            return unsure
        # Other seeds may have moved a turn into a gap that the first one left wide.
        while self._late_rounds_left:
            self._late_rounds_left -= 1
            between = self._between(self._finest)
            if between:
                return [(rate, seed) for rate in between for seed in self._plan.seeds]
        return []

    def _failed_for_good(self) -> bool:
        lowest = min(self._plan.levels)
        last = [point.attainment for point in self.curve][-self._plan.give_up :]
        return len(last) == self._plan.give_up and all(value < lowest for value in last)

    @property
    def _finest(self) -> float:
        """How near rates are where the first seed turned, and a little more."""
        steps = [high - low for low, high in pairwise(self._plan.rates)]
        return 1.01 * min(steps, default=0.0) / 2.0**self._plan.rounds

    def _between(self, width: float = 0.0) -> list[float]:
        """The middles of gaps that turn and are wider than `width`."""
        found = []
        for low, high in pairwise(self.curve):
            gap = high.rate_per_s - low.rate_per_s
            if self._turns(low, high) and gap > max(width, self._plan.narrow * high.rate_per_s):
                found.append(float(f"{(low.rate_per_s + high.rate_per_s) / 2:.4g}"))
        return [rate for rate in found if rate not in self._known]

    def _turns(self, low: CurvePoint, high: CurvePoint) -> bool:
        return any((low.attainment >= level) != (high.attainment >= level) for level in self._plan.levels)

    def _unsure(self) -> list[Ask]:
        """Seeds that are lacking at the ends of gaps where a level turns. Means may move a turn; then it is asked
        there."""
        deciding: set[float] = set()
        for low, high in pairwise(self.curve):
            if self._turns(low, high):
                deciding |= {low.rate_per_s, high.rate_per_s}
        return [(rate, seed) for rate in sorted(deciding) for seed in self._plan.seeds if seed not in self._known[rate]]


def rising_rates(reference: float, shares: Sequence[float]) -> tuple[float, ...]:
    """Rates as shares of a reference; four digits, so that a rate that is read is the rate that was run."""
    return tuple(float(f"{reference * share:.4g}") for share in shares)
