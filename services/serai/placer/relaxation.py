"""The placement with fractions of instances: a linear programme, solved in milliseconds by OR-tools' GLOP. Pure.

It bounds what any placement can reach, says which few cells matter, and its rounded answer is a good place to start.
Large problems only; for small ones CP-SAT needs no help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ortools.linear_solver import pywraplp

from serai.placer.classes import is_chain
from serai.placer.problem import Problem

KERNEL_CELLS = 400
"""Cells that a search on a large problem looks at: those nearest to being worth it."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A level's bound, and for each cell its fraction and how far it is from being worth it (0 is worth it)."""

    bound: float
    counts: tuple[float, ...]
    distance: tuple[float, ...]
    prices: tuple[float, ...]
    """What one GPU more of each class would add to the level."""
    total_price: float
    """What one unit of the total costs, where the total is held."""


class _Relaxation:
    """The linear programme of one level, with earlier levels held."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.lp = pywraplp.Solver.CreateSolver("GLOP")
        self.counts = [self.lp.NumVar(0, cell.most, "") for cell in problem.cells]
        self.infinity = self.lp.infinity()
        self.by_model = problem.cells_of_model()
        self._gpu_rows: list[pywraplp.Constraint] = []
        self._fit_nodes()
        self._limit_models()

    def _fit_nodes(self) -> None:
        by_class: list[list[int]] = [[] for _ in self.problem.classes]
        for place, cell in enumerate(self.problem.cells):
            by_class[cell.place].append(place)
        for nodes, places in zip(self.problem.classes, by_class, strict=True):
            options = {place: self.problem.cells[place].option for place in places}
            row = self._at_most(nodes.gpus, {place: option.gpus for place, option in options.items()})
            self._gpu_rows.append(row)
            sizes = {option.gpus_per_node for option in options.values()}
            for size in sizes if is_chain(tuple(sizes)) else ():
                if any(gpus % size for gpus in nodes.rooms):
                    held = {p: o.gpus_per_node // size * o.nodes for p, o in options.items() if o.gpus_per_node >= size}
                    self._at_most(nodes.slots(size), held)

    def _limit_models(self) -> None:
        for project, quota in self.problem.quotas.items():
            own = {
                place: cell.option.gpus
                for place, cell in enumerate(self.problem.cells)
                if self.problem.demands[cell.model].project == project
            }
            self._at_most(quota, own)
        for number, demand in enumerate(self.problem.demands):
            if demand.max_replicas is not None:
                left = demand.max_replicas - self.problem.pinned_replicas[number]
                self._at_most(left, dict.fromkeys(self.by_model[number], 1))

    def prices(self) -> tuple[float, ...]:
        """Duals of the GPUs of each class, after solving."""
        return tuple(abs(row.dual_value()) for row in self._gpu_rows)

    def _at_most(self, limit: float, coefficients: Mapping[int, float]) -> pywraplp.Constraint:
        row = self.lp.Constraint(-self.infinity, limit)
        for place, coefficient in coefficients.items():
            row.SetCoefficient(self.counts[place], coefficient)
        return row

    def serve(self, worst: float | None) -> pywraplp.Variable | None:
        """Every model at least `worst`; None: as a variable, which is given back."""
        share = self.lp.NumVar(0, 1, "t") if worst is None else None
        for number in self.planned():
            row = self.lp.Constraint((worst or 0.0) - self.problem.pinned_share[number], self.infinity)
            for place in self.by_model[number]:
                row.SetCoefficient(self.counts[place], min(1.0, self.problem.cells[place].share))
            if share is not None:
                row.SetCoefficient(share, -1)
        return share

    def replicas(self) -> None:
        """Every model its minimum, where that was found possible."""
        for number, demand in enumerate(self.problem.demands):
            least = demand.min_replicas - self.problem.pinned_replicas[number]
            if least > 0 and self.by_model[number]:
                row = self.lp.Constraint(least, self.infinity)
                for place in self.by_model[number]:
                    row.SetCoefficient(self.counts[place], 1)

    def total(self) -> pywraplp.LinearExpr:
        """All that is served, weighted, in the level's own unit."""
        parts = []
        for number in self.planned():
            demand = self.problem.demands[number]
            wanted = demand.priority * demand.planned_requests_s
            served = self.lp.NumVar(0, wanted, "")
            row = self.lp.Constraint(-self.infinity, wanted * self.problem.pinned_share[number])
            row.SetCoefficient(served, 1)
            for place in self.by_model[number]:
                row.SetCoefficient(self.counts[place], -wanted * min(1.0, self.problem.cells[place].share))
            parts.append(served)
        return self.lp.Sum(parts)

    def cost(self) -> pywraplp.LinearExpr:
        """Running, starting and stopping."""
        parts = []
        for cell, count in zip(self.problem.cells, self.counts, strict=True):
            parts.append((cell.run_price + cell.start_price) * count)
            if cell.running:
                kept = self.lp.NumVar(0, cell.running, "")
                row = self.lp.Constraint(-self.infinity, 0)
                row.SetCoefficient(kept, 1)
                row.SetCoefficient(count, -1)
                parts.append(cell.stop_price * cell.running - (cell.start_price + cell.stop_price) * kept)
        return self.lp.Sum(parts)

    def planned(self) -> list[int]:
        """Models that want something and can have it."""
        return [
            number
            for number, demand in enumerate(self.problem.demands)
            if demand.planned_requests_s > 0 and (self.by_model[number] or self.problem.pinned_share[number] > 0)
        ]


def relax(problem: Problem, level: str, worst: float, total: float, *, replicas: bool) -> Relaxed | None:
    """The bound of `level` when earlier ones are held at `worst` and `total`; None where there is none to be had."""
    relaxation = _Relaxation(problem)
    if replicas:
        relaxation.replicas()
    share = relaxation.serve(None if level == "worst share" else worst)
    held: pywraplp.Constraint | None = None
    match level:
        case "worst share":
            relaxation.lp.Maximize(share)
        case "total":
            relaxation.lp.Maximize(relaxation.total())
        case "cost":
            held = relaxation.lp.Add(relaxation.total() >= total)
            relaxation.lp.Minimize(relaxation.cost())
        case _:
            return None
    if relaxation.lp.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    return Relaxed(
        bound=relaxation.lp.Objective().Value(),
        counts=tuple(count.solution_value() for count in relaxation.counts),
        distance=tuple(abs(count.reduced_cost()) for count in relaxation.counts),
        prices=relaxation.prices(),
        total_price=0.0 if held is None else abs(held.dual_value()),
    )


def kernel(problem: Problem, relaxed: Relaxed, used: set[int]) -> list[int]:
    """The cells that a search should look at: those in use, those in the relaxed answer, and the nearest others, with
    every model among them."""
    inside = {place for place, count in enumerate(relaxed.counts) if count > 1e-9} | used
    for places in problem.cells_of_model():
        if places and not inside.intersection(places):
            inside.add(min(places, key=lambda place: relaxed.distance[place]))
    # Distances are told in the level's unit for one instance; a GPU's worth makes them comparable.
    others = sorted(
        set(range(len(problem.cells))) - inside,
        key=lambda place: relaxed.distance[place] / problem.cells[place].option.gpus,
    )
    return sorted([*inside, *others[: max(0, KERNEL_CELLS - len(inside))]])
