"""The placement programme: which options, how many of each, and on which nodes. Pure; see docs/placement.md.

`solve` answers with the best placement found in its time, never with nothing: without OR-tools or without time it is
the greedy one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence

from serai.placer.counts import Counts
from serai.placer.demand import ModelDemand
from serai.placer.fleet import Fleet
from serai.placer.greedy import greedy
from serai.placer.options import Option
from serai.placer.packing import pack
from serai.placer.placement import Level, Objective, Placement, Rules, Running, SolveLimits, Status
from serai.placer.problem import Problem, make_problem
from serai.placer.scoring import greedy_levels, missing, served_shares

TIME_SHARES = {"replicas": 0.1, "worst share": 0.5, "total": 0.6, "cost": 1.0, "latency": 1.0}
"""Of the time that is left, for each level in turn."""


def solve(
    fleet: Fleet,
    demands: Sequence[ModelDemand],
    options: Sequence[Option],
    running: Sequence[Running] = (),
    rules: Rules | None = None,
    limits: SolveLimits | None = None,
    objective: Objective = "max-min",
    *,
    clock: Callable[[], float] | None = None,
) -> Placement:
    """The best placement found within `limits`. `clock` tells seconds; without one only the solver's own time counts.

    Raises BadDemand, BadRules or BadRunning for input that contradicts itself; a demand that cannot be met is no error:
    it gets what there is, and `Placement.missing` says what is lacking.
    """
    limits = limits or SolveLimits()
    watch = _Watch(clock)
    problem = make_problem(fleet, demands, options, running, rules or Rules(), objective)
    first = greedy(problem)
    placed = pack(problem, first.of)
    first_plan_s = watch.spent_s
    levels = greedy_levels(problem, placed, first.of, objective)
    status: Status = "greedy"
    if limits.time_s > 0 and _has_solver() and problem.cells:
        solved = _solve_levels(problem, first, limits, objective, watch)
        if solved is not None:
            levels, counts = solved
            placed = pack(problem, counts)
            status = "optimal" if all(level.proved for level in levels) else "feasible"
    domains = {node.name: node.domain for node in fleet.nodes}
    return Placement(
        placed=placed,
        served_share=served_shares(problem, placed),
        levels=tuple(levels),
        status=status,
        solve_s=watch.spent_s,
        first_plan_s=first_plan_s,
        missing=missing(problem, placed, options, domains),
    )


class _Watch:
    """How much time is gone: by the clock, or what the solver said it took."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self._began_s = 0.0 if clock is None else clock()
        self.told_s = 0.0

    @property
    def spent_s(self) -> float:
        return self.told_s if self._clock is None else self._clock() - self._began_s


def _has_solver() -> bool:
    return importlib.util.find_spec("ortools") is not None


def read_solver() -> None:
    """Reads OR-tools, which takes a second or two, so that no placement waits for it."""
    if _has_solver():
        importlib.import_module("ortools.sat.python.cp_model")


def _solve_levels(
    problem: Problem, first: Counts, limits: SolveLimits, objective: Objective, watch: _Watch
) -> tuple[list[Level], list[int]] | None:
    """Level after level, each held for the next. None when not even the first one was found."""
    # Here, since OR-tools takes a second to be read and not everyone has it.
    from serai.placer.search import Search

    search = Search(problem, first, objective, limits)
    levels: list[Level] = []
    for name in search.goals:
        level = search.improve(name, (limits.time_s - watch.spent_s) * TIME_SHARES[name])
        if level is None:
            break
        watch.told_s += level.solve_s
        levels.append(level)
    return (levels, search.counts) if levels else None
