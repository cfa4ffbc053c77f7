"""From level to level: CP-SAT on all cells of a small problem, on those that the relaxation points to of a large one.
Pure."""

from __future__ import annotations

from dataclasses import replace

from serai.placer.bounds import total_bound, worst_share_bound
from serai.placer.counts import Counts
from serai.placer.greedy import raised, rounded
from serai.placer.placement import Level, Objective, SolveLimits
from serai.placer.problem import Problem
from serai.placer.programme import SCALE, Programme
from serai.placer.relaxation import KERNEL_CELLS, Relaxed, kernel, relax


class Search:
    """The counts as they get better, and what must be held."""

    def __init__(self, problem: Problem, first: Counts, objective: Objective, limits: SolveLimits) -> None:
        self.counts = list(first.of)
        self.goals = Programme(problem, objective, {}).goals()
        self._problem = problem
        self._first = first
        self._objective = objective
        self._limits = limits
        self._held: dict[str, int] = {}
        self._values: dict[str, float] = {}
        self._large = len(problem.cells) > KERNEL_CELLS

    def improve(self, name: str, time_s: float) -> Level | None:
        """Take one level as far as the time goes; None when nothing was found."""
        relaxed = self._relaxed(name) if self._large else None
        if relaxed is not None and name == "worst share":
            self._round(relaxed)
        if relaxed is not None and name == "total":
            self.counts = raised(self._problem, self.counts)
        cells = list(range(len(self._problem.cells)))
        if relaxed is not None:
            cells = kernel(self._problem, relaxed, {place for place, count in enumerate(self.counts) if count})
        problem = replace(self._problem, cells=tuple(self._problem.cells[place] for place in cells))
        programme = Programme(problem, self._objective, self._held)
        programme.start_from([self.counts[place] for place in cells])
        found = programme.improve(name, time_s, self._limits.workers, self._limits.gap, self._limits.seed)
        if found is None:
            return None
        self.counts = [0] * len(self._problem.cells)
        for place, count in zip(cells, found.counts, strict=True):
            self.counts[place] = count
        self._held[name] = found.held
        if name == "worst share":
            self._held[name] = int(found.held * (1 - self._problem.rules.worst_share_slack))
        self._values[name] = found.level.value
        return found.level if relaxed is None else self._bounded(found.level, relaxed)

    def _relaxed(self, name: str) -> Relaxed | None:
        # Held values were rounded down; the relaxation must not be stricter than the programme.
        worst = self._held.get("worst share", 0) / SCALE
        total = self._values.get("total", 0.0) * (1 - 1e-9)
        return relax(self._problem, name, worst, total, replicas=self._held.get("replicas") == 0)

    def _bounded(self, level: Level, relaxed: Relaxed) -> Level:
        """The level with a bound that holds for all cells: the programme's own only holds for those it looked at."""
        if level.name in ("replicas", "latency") or (level.proved and level.solve_s == 0):
            return level
        bound = relaxed.bound
        if level.name == "worst share":
            bound = min(bound, worst_share_bound(self._problem, relaxed.prices))
        if level.name == "total":
            bound = min(bound, total_bound(self._problem, relaxed.prices, self._held["worst share"] / SCALE))
        return replace(level, bound=bound, proved=abs(bound - level.value) <= 1e-6 * max(abs(bound), 1e-12))

    def _round(self, relaxed: Relaxed) -> None:
        """Start from the relaxation's answer where that is better than the greedy one."""
        other = rounded(self._problem, relaxed.counts, relaxed.distance)
        if (-other.short(), other.worst()) > (-self._first.short(), self._first.worst()):
            self.counts = list(other.of)
