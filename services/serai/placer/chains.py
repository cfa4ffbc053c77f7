"""Room for one instance more by chains: what stands in its way ends where its model can spare it, or goes to another
place, where in turn something ends that can be spared. Pure.

Taking and giving within one kind of GPU gets stuck: a large model that runs well on few kinds finds them full of single
engines of small models, none of which may end, while other kinds have engines to spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from serai.placer.counts import Counts, weight

_EQUAL = 1e-9
_CHOICES_TRIED = 6
TRIES_MAX = 400
WORK_MAX = 400_000
"""Tries times cells: a large problem is given fewer, for it has a better start from the relaxation."""


@dataclass(frozen=True, slots=True)
class _Spare:
    """An instance that may end, and the requests a second (weighted) that are lost with it."""

    lost: float
    gpus: int
    place: int
    model: int

    @property
    def each(self) -> float:
        return self.lost / self.gpus


@dataclass(frozen=True, slots=True, order=True)
class _Choice:
    """One way to free GPUs: an instance ends, or goes to another cell. By what a freed GPU costs."""

    each: float
    lost: float
    place: int
    to: int = -1
    """-1: it ends."""


class Chains:
    """Of one placement as it is searched for."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._problem = counts.problem
        self._tries = min(TRIES_MAX, WORK_MAX // max(1, len(counts.problem.cells)))

    def seat(self, wanted: int, floor: float, most_lost: float) -> bool:
        """Adds one of the cell `wanted`. Nobody who gives falls below the share `floor`, and less than `most_lost`
        requests a second are lost. False: nothing is changed."""
        if self._tries <= 0:
            return False
        self._tries -= 1
        cell, before = self._problem.cells[wanted], list(self._counts.of)
        busy, lost = {cell.model}, 0.0
        while not self._counts.fits(wanted):
            freed = self._free(cell.place, floor, most_lost - lost, busy)
            if freed is None:
                self._back_to(before)
                return False
            lost += freed
        self._counts.add(wanted)
        return True

    def _back_to(self, before: Sequence[int]) -> None:
        for place, (then, now) in enumerate(zip(before, self._counts.of, strict=True)):
            if then != now:
                self._counts.add(place, then - now)

    def _free(self, node_class: int, floor: float, most_lost: float, busy: set[int]) -> float | None:
        """Takes one instance out of a class, the cheapest way; what that loses, or None."""
        spares = self._spares(floor, busy)
        choices = [_Choice(one.each, one.lost, one.place) for one in spares[node_class]]
        for place in self._counts.filled(node_class):
            if self._problem.cells[place].model not in busy:
                choices += self._moves(place, floor, spares)
        for choice in nsmallest(_CHOICES_TRIED, (choice for choice in choices if choice.lost < most_lost)):
            if self._done(choice, floor, busy):
                busy.add(self._problem.cells[choice.place].model)
                return choice.lost
        return None

    def _spares(self, floor: float, busy: set[int]) -> list[list[_Spare]]:
        """Per class what may end, cheapest first."""
        found: list[list[_Spare]] = [[] for _ in self._problem.classes]
        for place, count in enumerate(self._counts.of):
            cell = self._problem.cells[place]
            if not count or cell.model in busy or self._counts.below_minimum(cell.model):
                continue
            share = self._counts.shares[cell.model]
            if share - cell.share >= floor:
                found[cell.place].append(
                    _Spare(self._lost(cell.model, cell.share), cell.option.gpus, place, cell.model)
                )
        for spares in found:
            spares.sort(key=lambda one: (one.each, one.place))
        return found

    def _lost(self, model: int, share: float) -> float:
        """Requests a second that are not served when a model gets `share` less."""
        now = self._counts.shares[model]
        return weight(self._problem, model) * (min(1.0, now) - min(1.0, now - share))

    def _moves(self, place: int, floor: float, spares: Sequence[Sequence[_Spare]]) -> list[_Choice]:
        """Ways to go elsewhere, or to become smaller."""
        cell, found = self._problem.cells[place], []
        share = self._counts.shares[cell.model]
        for to in self._counts.cells(cell.model):
            other = self._problem.cells[to]
            here = other.place == cell.place
            freed = cell.option.gpus - (other.option.gpus if here else 0)
            if to == place or freed <= 0 or share - cell.share + other.share < floor:
                continue
            room = None if here else self._cheapest(spares[other.place], other.place, other.option.gpus, cell.model)
            if room is None and not here:
                continue
            lost = (room or 0.0) + self._lost(cell.model, cell.share - other.share) + self._pause(place)
            found.append(_Choice(lost / freed, lost, place, to))
        return found

    def _pause(self, place: int) -> float:
        """What moving costs: requests while the new engine loads, spread over the horizon."""
        cell = self._problem.cells[place]
        paused = cell.option.load_s / max(self._problem.rules.horizon_s, cell.option.load_s, 1.0)
        return self._lost(cell.model, cell.share) * paused

    def _cheapest(self, spares: Sequence[_Spare], node_class: int, gpus: int, but: int) -> float | None:
        """What it costs to have `gpus` free in a class, by ending what can be spared; packing aside."""
        left, lost = gpus - self._counts.free_gpus(node_class), 0.0
        for one in spares:
            if left <= 0:
                break
            if one.model != but:
                left -= one.gpus
                lost += one.lost
        return lost if left <= 0 else None

    def _done(self, choice: _Choice, floor: float, busy: set[int]) -> bool:
        """Does it; False = it cannot be done, and nothing is changed."""
        before, model = list(self._counts.of), self._problem.cells[choice.place].model
        self._counts.add(choice.place, -1)
        if choice.to < 0:
            return True
        ending = busy | {model}
        while not self._counts.fits(choice.to):
            spares = self._spares(floor, ending)[self._problem.cells[choice.to].place]
            if not spares:
                self._back_to(before)
                return False
            self._counts.add(spares[0].place, -1)
            # What has given once gives no more in this chain, or the loss would be told too small.
            ending.add(spares[0].model)
            busy.add(spares[0].model)
        self._counts.add(choice.to)
        return True
