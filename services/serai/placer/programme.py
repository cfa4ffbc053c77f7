"""The placement as a constraint programme for OR-tools' CP-SAT, solved level by level. Pure: it computes, nothing else.

`docs/placement.md` has the programme in formulas; the names here are those there. Shares, rates and costs become whole
numbers, always rounded to the careful side, so that no plan promises more than it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from ortools.sat.python import cp_model
from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar, LinearExprT

from serai.placer.classes import NodeClass, fillings, is_chain
from serai.placer.placement import Level, Objective
from serai.placer.problem import Problem

SCALE = 10**9
"""Parts of a share of 1, of the total demand and of the whole cost."""
WHOLE = SCALE - 10**4
"""A share that counts as 1: the parts of a thousand instances, each rounded down, are below it."""


@dataclass(frozen=True, slots=True)
class _Goal:
    """One level: what is made large (or small), and how it is told."""

    name: str
    expression: LinearExprT
    maximise: bool
    unit: float
    """What 1 of the expression is worth in the level's own unit."""


@dataclass(frozen=True, slots=True)
class Improved:
    """A level taken further: the counts, what the programme must hold from now on, and the level as told."""

    counts: list[int]
    held: int
    level: Level


class Programme:
    """One problem's variables and constraints, with earlier levels held; `improve` takes a level further."""

    def __init__(self, problem: Problem, objective: Objective, held: Mapping[str, int]) -> None:
        self.problem = problem
        self._held = held
        self.objective = objective
        self.model = CpModel()
        self.counts = [self.model.new_int_var(0, cell.most, f"n{place}") for place, cell in enumerate(problem.cells)]
        self._by_model = problem.cells_of_model()
        self.hint: list[int] = []
        self._derived: list[tuple[IntVar, Callable[[Sequence[int]], int]]] = []
        """Variables that follow from the counts, and how: the solver starts with all of them."""
        self._lacks: list[Callable[[Sequence[int]], int]] = []
        self._fit_nodes()
        self._limit_models()
        self.short = self._minimum_replicas()
        for name, value in held.items():
            goal = self._goal(name)
            self.model.add(goal.expression >= value if goal.maximise else goal.expression <= value)

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
            self.model.add(sum(size * count for size, count in items) <= nodes.gpus)
            if is_chain(sizes):
                for size in sizes:
                    if size > 1 and any(gpus % size for gpus in nodes.rooms):
                        wanted = sum(other // size * count for other, count in items if other >= size)
                        self.model.add(wanted <= nodes.slots(size))
            else:
                self._list_fillings(place, nodes, sizes, items)

    def _list_fillings(
        self, place: int, nodes: NodeClass, sizes: tuple[int, ...], items: Sequence[tuple[int, LinearExprT]]
    ) -> None:
        """Each node takes one of the ways to fill it."""
        room: list[list[LinearExprT]] = [[] for _ in sizes]
        for gpus, number in nodes.rooms.items():
            ways = fillings(gpus, sizes)
            taken = [self.model.new_int_var(0, number, f"f{place}_{gpus}_{way}") for way in range(len(ways))]
            self.model.add(sum(taken) <= number)
            for way, var in zip(ways, taken, strict=True):
                for column, count in enumerate(way):
                    room[column].append(count * var)
        for column, size in enumerate(sizes):
            self.model.add(sum(count for other, count in items if other == size) <= sum(room[column]))

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
            self._lacks.append(partial(self._short_at, number, held, least))
            self._derived.append((short, self._lacks[-1]))
            found.append(short)
        return found

    def _domains(self, number: int, held: frozenset[str]) -> list[IntVar]:
        """Failure domains that a model newly stands in, counted by class; classes that share domains count them once.
        That instances of a class can be spread over its domains is left to `packing`, which says when they cannot."""
        found: list[IntVar] = []
        everywhere: set[str] = set()
        for domains, places in self._by_domains(number, held).items():
            distinct = self.model.new_int_var(0, len(domains), f"d{number}_{len(found)}")
            self.model.add(distinct <= sum(self.counts[place] for place in places))
            self._derived.append((distinct, partial(_distinct_at, len(domains), places)))
            found.append(distinct)
            everywhere |= domains
        if found:
            self.model.add(sum(found) <= len(everywhere))
        return found

    def _by_domains(self, number: int, held: frozenset[str]) -> dict[frozenset[str], list[int]]:
        groups: dict[frozenset[str], list[int]] = {}
        for place in self._by_model[number]:
            domains = self.problem.classes[self.problem.cells[place].place].domains - held
            if domains:
                groups.setdefault(domains, []).append(place)
        return groups

    def _short_at(self, number: int, held: frozenset[str], least: int, counts: Sequence[int]) -> int:
        groups = self._by_domains(number, held)
        everywhere = len(frozenset().union(*groups))
        stands = sum(_distinct_at(len(domains), places, counts) for domains, places in groups.items())
        return max(0, least - min(everywhere, stands))

    # Levels

    @cached_property
    def _planned(self) -> list[int]:
        """Models that want something and can have it."""
        return [
            number
            for number, demand in enumerate(self.problem.demands)
            if demand.planned_requests_s > 0 and (self._by_model[number] or self.problem.pinned_share[number] > 0)
        ]

    def _parts(self, number: int, scale: float) -> tuple[list[int], int]:
        """A model's served share in parts of `scale`: what one of each of its cells adds, and the pinned part. One
        instance counts for no more than everything: that loses nothing and makes bounds much better."""
        parts = [int(min(1.0, self.problem.cells[place].share) * scale) for place in self._by_model[number]]
        return parts, int(min(1.0, self.problem.pinned_share[number]) * scale)

    def _share(self, number: int, scale: float) -> LinearExprT:
        parts, pinned = self._parts(number, scale)
        counts = [self.counts[place] for place in self._by_model[number]]
        return sum(part * count for part, count in zip(parts, counts, strict=True)) + pinned

    def _share_at(self, number: int, scale: float, counts: Sequence[int]) -> int:
        parts, pinned = self._parts(number, scale)
        own = [counts[place] for place in self._by_model[number]]
        return sum(part * count for part, count in zip(parts, own, strict=True)) + pinned

    @cached_property
    def _worst(self) -> IntVar:
        """t: the share that every model gets."""
        worst = self.model.new_int_var(0, WHOLE, "t")
        for number in self._planned:
            self.model.add(self._share(number, SCALE) >= worst)
        self._derived.append((worst, self._worst_at))
        return worst

    def _worst_at(self, counts: Sequence[int]) -> int:
        return min(WHOLE, *(self._share_at(number, SCALE, counts) for number in self._planned))

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
            served = self.model.new_int_var(0, self._most_served(number), f"s{number}")
            self.model.add(served <= self._share(number, self._weights[number]))
            self._derived.append((served, partial(self._served_at, number)))
            found.append(served)
        return found

    def _most_served(self, number: int) -> int:
        return int(self._weights[number] * WHOLE / SCALE)

    def _served_at(self, number: int, counts: Sequence[int]) -> int:
        return min(self._most_served(number), self._share_at(number, self._weights[number], counts))

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
            self._derived.append((kept, partial(_kept_at, place, cell.running)))
            parts.append((run + start) * self.counts[place] - (start + stop) * kept + stop * cell.running)
        return sum(parts)

    @cached_property
    def _latency(self) -> LinearExprT:
        """Sum over all requests of the worst share's traffic of their latency: each model's flow is divided among its
        instances, none beyond what it serves."""
        flows: list[LinearExprT] = []
        longest = max((cell.option.latency_s for cell in self.problem.cells), default=1.0) or 1.0
        share = self._held.get("worst share", 0) / SCALE
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
                flow = SCALE * max(self._held.get("worst share", 0) / SCALE, 1e-12)
                return _Goal(name, self._latency, False, longest / 1e4 / flow)
            case _:
                return _Goal(name, self._cost, False, self._cost_unit)

    def _is_ideal(self, name: str) -> bool:
        """Whether the start is as good as anything could be, so that there is nothing to search."""
        match name:
            case "replicas":
                return all(lacks(self.hint) == 0 for lacks in self._lacks)
            case "worst share":
                return self._worst_at(self.hint) == WHOLE
            case "total":
                return all(self._served_at(number, self.hint) == self._most_served(number) for number in self._planned)
            case _:
                return False

    def _ideal(self, name: str) -> int:
        return {"replicas": 0, "worst share": WHOLE, "total": sum(map(self._most_served, self._planned))}[name]

    def start_from(self, counts: Sequence[int]) -> None:
        """Begin the search at a placement that is known to be possible."""
        self.hint = list(counts)

    def improve(self, name: str, time_s: float, workers: int, gap: float, seed: int) -> Improved | None:
        """Take one level as far as the time goes. None when nothing was found in it."""
        goal = self._goal(name)
        if self._is_ideal(name):
            best = self._ideal(name)
            return Improved(self.hint, best, Level(name, best * goal.unit, best * goal.unit, True, 0.0))
        self.model.clear_objective()  # type: ignore[no-untyped-call]
        (self.model.maximize if goal.maximise else self.model.minimize)(goal.expression)
        for var, value in zip(self.counts, self.hint, strict=True):
            self.model.add_hint(var, value)
        for var, follows in self._derived:
            self.model.add_hint(var, follows(self.hint))
        solver = CpSolver()
        solver.parameters.max_time_in_seconds = max(time_s, 0.01)
        solver.parameters.num_workers = workers
        solver.parameters.relative_gap_limit = gap
        solver.parameters.random_seed = seed
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        value, bound = round(solver.objective_value), solver.best_objective_bound
        proved = status == cp_model.OPTIMAL and (gap == 0 or abs(bound - value) < 1)
        level = Level(name, value * goal.unit, bound * goal.unit, proved, solver.wall_time)
        return Improved([solver.value(var) for var in self.counts], value, level)


def _distinct_at(domains: int, places: Sequence[int], counts: Sequence[int]) -> int:
    return min(domains, sum(counts[place] for place in places))


def _kept_at(place: int, running: int, counts: Sequence[int]) -> int:
    return min(running, counts[place])
