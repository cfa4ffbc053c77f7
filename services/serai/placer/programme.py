"""The placement as a constraint programme for OR-tools' CP-SAT, solved level by level. Pure: it computes, nothing else.

`docs/placement.md` has the programme in formulas; the names here are those there. Shares, rates and costs become whole
numbers, always rounded to the careful side, so that no plan promises more than it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ortools.sat.python import cp_model
from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar, LinearExprT

from serai.placer.classes import fillings, is_chain
from serai.placer.placement import Level, Objective
from serai.placer.problem import Problem

SCALE = 10**9
"""Parts of a share of 1, of the total demand and of the whole cost."""


@dataclass(frozen=True, slots=True)
class _Goal:
    """One level: what is made large (or small), and how it is told."""

    name: str
    expression: LinearExprT
    maximise: bool
    unit: float
    """What 1 of the expression is worth in the level's own unit."""


class Programme:
    """One problem's variables and constraints; `improve` takes a level further and holds it for the next."""

    def __init__(self, problem: Problem, objective: Objective) -> None:
        self.problem = problem
        self.objective = objective
        self.model = CpModel()
        self.counts = [self.model.new_int_var(0, cell.most, f"n{place}") for place, cell in enumerate(problem.cells)]
        self._by_model = problem.cells_of_model()
        self.hint: list[int] = []
        self._fit_nodes()
        self._limit_models()
        self.short = self._minimum_replicas()

    # Constraints

    def _fit_nodes(self) -> None:
        """What stands in a class must be divisible among its nodes (classes.py)."""
        for place, nodes in enumerate(self.problem.classes):
            items = [
                (cell.option.gpus_per_node, cell.option.nodes * count)
                for cell, count in zip(self.problem.cells, self.counts, strict=True)
                if cell.place == place and cell.most
            ]
            sizes = tuple(sorted({size for size, _ in items}, reverse=True))
            if not sizes:
                continue
            self.model.add(sum(size * count for size, count in items) <= nodes.gpus * nodes.size)
            if is_chain(sizes):
                for size in sizes:
                    if nodes.gpus % size:
                        wanted = sum(other // size * count for other, count in items if other >= size)
                        self.model.add(wanted <= nodes.gpus // size * nodes.size)
                continue
            ways = fillings(nodes.gpus, sizes)
            taken = [self.model.new_int_var(0, nodes.size, f"f{place}_{way}") for way in range(len(ways))]
            self.model.add(sum(taken) <= nodes.size)
            for column, size in enumerate(sizes):
                wanted = sum(count for other, count in items if other == size)
                room = sum(way[column] * var for way, var in zip(ways, taken, strict=True) if way[column])
                self.model.add(wanted <= room)

    def _limit_models(self) -> None:
        """Most replicas of a model, and GPUs of a project."""
        for number, demand in enumerate(self.problem.demands):
            if demand.max_replicas is not None:
                left = demand.max_replicas - self.problem.pinned_replicas[number]
                self.model.add(sum(self.counts[place] for place in self._by_model[number]) <= left)
        for project, quota in self.problem.quotas.items():
            held = [
                cell.option.gpus * count
                for cell, count in zip(self.problem.cells, self.counts, strict=True)
                if self.problem.demands[cell.model].project == project
            ]
            if held:
                self.model.add(sum(held) <= quota)

    def _minimum_replicas(self) -> list[IntVar]:
        """How many replicas, each in a failure domain of its own, a model lacks of its minimum."""
        found = []
        for number, demand in enumerate(self.problem.demands):
            held = self.problem.pinned_domains[number]
            least = demand.min_replicas - len(held)
            if least <= 0 or not self._by_model[number]:
                continue
            short = self.model.new_int_var(0, least, f"short{number}")
            self.model.add(sum(self._domains(number, held)) + short >= least)
            found.append(short)
        return found

    def _domains(self, number: int, held: frozenset[str]) -> list[IntVar]:
        """Failure domains that a model newly stands in, counted by class, or by domain where a class is one."""
        groups: dict[frozenset[str], list[IntVar]] = {}
        for place in self._by_model[number]:
            domains = self.problem.classes[self.problem.cells[place].place].domains - held
            groups.setdefault(domains, []).append(self.counts[place])
        found: list[IntVar] = []
        for domains, counts in groups.items():
            if domains:
                distinct = self.model.new_int_var(0, len(domains), f"d{number}_{len(found)}")
                self.model.add(distinct <= sum(counts))
                found.append(distinct)
        return found

    # Levels

    @cached_property
    def _planned(self) -> list[int]:
        """Models that want something and can have it."""
        return [
            number
            for number, demand in enumerate(self.problem.demands)
            if demand.planned_requests_s > 0 and (self._by_model[number] or self.problem.pinned_share[number] > 0)
        ]

    def _share(self, number: int, scale: float) -> tuple[LinearExprT, int]:
        """A model's served share in parts of `scale`, as an expression and its pinned part. One instance counts for no
        more than everything: that loses nothing and makes bounds much better."""
        own = [
            (int(min(1.0, self.problem.cells[place].share) * scale), self.counts[place])
            for place in self._by_model[number]
        ]
        return sum(part * count for part, count in own), int(min(1.0, self.problem.pinned_share[number]) * scale)

    @cached_property
    def _worst(self) -> IntVar:
        """t: the share that every model gets."""
        worst = self.model.new_int_var(0, SCALE, "t")
        for number in self._planned:
            share, pinned = self._share(number, SCALE)
            self.model.add(share + pinned >= worst)
        return worst

    @cached_property
    def _weights(self) -> dict[int, float]:
        """Each model's part of the weighted demand, in parts of SCALE."""
        demands = self.problem.demands
        total = sum(demands[m].priority * demands[m].planned_requests_s for m in self._planned)
        return {m: demands[m].priority * demands[m].planned_requests_s / total * SCALE for m in self._planned}

    @cached_property
    def _served(self) -> list[IntVar]:
        """What each model is served, weighted, in parts of all weighted demand."""
        found = []
        for number in self._planned:
            weight = self._weights[number]
            share, pinned = self._share(number, weight)
            served = self.model.new_int_var(0, int(weight), f"s{number}")
            self.model.add(served <= share + pinned)
            found.append(served)
        return found

    @cached_property
    def _cost_unit(self) -> float:
        """GPU-hours (priced) in one part of the cost."""
        largest = sum(
            (cell.run_price + cell.start_price) * cell.most + cell.stop_price * cell.running
            for cell in self.problem.cells
        )
        return max(largest, 1e-9) / (SCALE * 100)

    @cached_property
    def _cost(self) -> LinearExprT:
        """Running over the horizon, starting what is not kept, stopping what is not kept."""
        unit, parts = self._cost_unit, []
        for place, cell in enumerate(self.problem.cells):
            run, start, stop = (round(price / unit) for price in (cell.run_price, cell.start_price, cell.stop_price))
            if cell.running == 0:
                parts.append((run + start) * self.counts[place])
                continue
            kept = self.model.new_int_var(0, cell.running, f"k{place}")
            self.model.add(kept <= self.counts[place])
            parts.append((run + start) * self.counts[place] - (start + stop) * kept + stop * cell.running)
        return sum(parts)

    @cached_property
    def _latency(self) -> LinearExprT:
        """Sum over all requests of the worst share's traffic of their latency: each model's flow is divided among its
        instances, none beyond what it serves."""
        flows: list[LinearExprT] = []
        longest = max((cell.option.latency_s for cell in self.problem.cells), default=1.0) or 1.0
        share = self._held_worst / SCALE
        for number in self._planned:
            weight = self._weights[number]
            own: list[IntVar] = []
            for place in self._by_model[number]:
                cell = self.problem.cells[place]
                flow = self.model.new_int_var(0, int(weight * share) + 1, f"l{place}")
                self.model.add(flow <= int(weight * min(1.0, cell.share)) * self.counts[place])
                flows.append(round(1e4 * cell.option.latency_s / longest) * flow)
                own.append(flow)
            wanted = int(weight * max(0.0, min(share, 1.0) - min(1.0, self.problem.pinned_share[number])))
            # Rounded down twice, so that what level one found stays possible.
            self.model.add(sum(own) >= wanted - len(own) * 64)
        return sum(flows)

    def goals(self) -> list[str]:
        """Names of the levels, in order."""
        last = ["cost"] if self.objective == "max-min" else ["latency"]
        total = ["total"] if self.objective == "max-min" else []
        return [*(["replicas"] if self.short else []), *(["worst share", *total, *last] if self._planned else ["cost"])]

    _held_worst = 0

    def _goal(self, name: str) -> _Goal:
        match name:
            case "replicas":
                return _Goal(name, sum(self.short), False, 1.0)
            case "worst share":
                return _Goal(name, self._worst, True, 1 / SCALE)
            case "total":
                demands = self.problem.demands
                total = sum(demands[m].priority * demands[m].planned_requests_s for m in self._planned)
                return _Goal(name, sum(self._served), True, total / SCALE)
            case "latency":
                longest = max((cell.option.latency_s for cell in self.problem.cells), default=1.0) or 1.0
                flow = SCALE * max(self._held_worst / SCALE, 1e-12)
                return _Goal(name, self._latency, False, longest / 1e4 / flow)
            case _:
                return _Goal(name, self._cost, False, self._cost_unit)

    def start_from(self, counts: Sequence[int]) -> None:
        """Begin the search at a placement that is known to be possible."""
        self.hint = list(counts)

    def improve(self, name: str, time_s: float, workers: int, gap: float, seed: int) -> Level | None:
        """Take one level as far as the time goes, hold it from now on, and keep the counts as the next start. None when
        nothing was found in the time."""
        goal = self._goal(name)
        self.model.clear_objective()  # type: ignore[no-untyped-call]
        (self.model.maximize if goal.maximise else self.model.minimize)(goal.expression)
        self.model.clear_hints()  # type: ignore[no-untyped-call]
        for var, value in zip(self.counts, self.hint, strict=False):
            self.model.add_hint(var, value)
        solver = CpSolver()
        solver.parameters.max_time_in_seconds = max(time_s, 0.01)
        solver.parameters.num_workers = workers
        solver.parameters.relative_gap_limit = gap
        solver.parameters.random_seed = seed
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        value, bound = round(solver.objective_value), solver.best_objective_bound
        self.model.clear_objective()  # type: ignore[no-untyped-call]
        self.model.add(goal.expression >= value if goal.maximise else goal.expression <= value)
        if name == "worst share":
            self._held_worst = value
        self.hint = [solver.value(var) for var in self.counts]
        proved = status == cp_model.OPTIMAL and (gap == 0 or abs(bound - value) < 1)
        return Level(name, value * goal.unit, bound * goal.unit, proved, solver.wall_time)
