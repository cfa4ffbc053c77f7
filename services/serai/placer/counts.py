"""How many instances of each cell, with what follows from it: shares, room, quotas. Pure but for being counted up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from serai.placer.classes import packs
from serai.placer.problem import Problem


class Counts:
    """How many of each cell, with what follows from it: shares, room, quotas."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.of = [0] * len(problem.cells)
        self.shares = list(problem.pinned_share)
        self.replicas = list(problem.pinned_replicas)
        self._sizes: list[Counter[int]] = [Counter() for _ in problem.classes]
        self._used = [0] * len(problem.classes)
        self._quotas = dict(problem.quotas)
        self._by_model = problem.cells_of_model()
        self._by_class: list[list[int]] = [[] for _ in problem.classes]
        for place, cell in enumerate(problem.cells):
            self._by_class[cell.place].append(place)

    def cells(self, model: int) -> Sequence[int]:
        """Places of the model's cells."""
        return self._by_model[model]

    def order(self, model: int, key: Callable[[int], float]) -> None:
        """Try the model's cells in this order."""
        self._by_model[model].sort(key=key)

    def fits(self, place: int) -> bool:
        """Whether one more of the cell is allowed and finds room."""
        cell = self.problem.cells[place]
        demand, nodes = self.problem.demands[cell.model], self.problem.classes[cell.place]
        if self.of[place] >= cell.most:
            return False
        if demand.max_replicas is not None and self.replicas[cell.model] >= demand.max_replicas:
            return False
        if self._quotas.get(demand.project, cell.option.gpus) < cell.option.gpus:
            return False
        if self._used[cell.place] + cell.option.gpus > nodes.gpus:
            return False
        sizes = self._sizes[cell.place]
        wanted = sizes | {cell.option.gpus_per_node: sizes[cell.option.gpus_per_node] + cell.option.nodes}
        return packs(nodes.rooms, wanted)

    def add(self, place: int, change: int = 1) -> None:
        """One more of the cell, or one fewer."""
        cell = self.problem.cells[place]
        self.of[place] += change
        self.shares[cell.model] += change * cell.share
        self.replicas[cell.model] += change
        self._sizes[cell.place][cell.option.gpus_per_node] += change * cell.option.nodes
        self._used[cell.place] += change * cell.option.gpus
        project = self.problem.demands[cell.model].project
        if project in self._quotas:
            self._quotas[project] -= change * cell.option.gpus

    def filled(self, place: int) -> Iterable[int]:
        """Places of the cells of a class that have instances."""
        return [other for other in self._by_class[place] if self.of[other]]

    def free_gpus(self, place: int) -> int:
        """GPUs of a class that nobody has."""
        return self.problem.classes[place].gpus - self._used[place]

    def below_minimum(self, model: int) -> bool:
        """Whether the model may not lose another instance."""
        return self.replicas[model] <= self.problem.demands[model].min_replicas

    def short(self) -> int:
        """Replicas that models lack of their minimum, failure domains aside."""
        return sum(
            max(0, demand.min_replicas - replicas)
            for demand, replicas in zip(self.problem.demands, self.replicas, strict=True)
        )

    def worst(self) -> float:
        """The share of the worst-served model among those that can be served, at most 1."""
        shares = [
            self.shares[number]
            for number, demand in enumerate(self.problem.demands)
            if demand.planned_requests_s > 0 and (self._by_model[number] or self.shares[number])
        ]
        return min(1.0, min(shares, default=1.0))


def weight(problem: Problem, number: int) -> float:
    """Requests a second that a model wants, times its priority."""
    demand = problem.demands[number]
    return demand.priority * demand.planned_requests_s
