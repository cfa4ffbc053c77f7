"""What belongs together when a placement is carried out: engines that start, and those that end for them. Pure.

A start on free GPUs is a change by itself. An exchange ends engines of a pool for one that starts there. Where an
engine ends for another and the placement has it start elsewhere, it only moves: both are one change, with whatever ends
for it there, since each half alone would look bad.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serai.placer.options import Option
from serai.placer.picture import Instance, ModelFacts, Picture, failed_key
from serai.placer.placement import Placed

SEVERAL_NODES = "pool agents run engines of one node only; this one needs several"


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine that starts, and where."""

    option: Option
    pool: str


@dataclass(frozen=True, slots=True)
class Change:
    """Engines that end, and engines that start; done together or not at all."""

    stops: tuple[Instance, ...]
    starts: tuple[Seat, ...]

    @property
    def models(self) -> frozenset[str]:
        """Of engines that end or start."""
        return frozenset([one.model for one in self.stops] + [seat.option.model for seat in self.starts])

    @property
    def moved(self) -> frozenset[str]:
        """Models that have an engine somewhere else, or another one, afterwards."""
        return frozenset(one.model for one in self.stops) & frozenset(seat.option.model for seat in self.starts)

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(sorted({one.pool for one in self.stops} | {seat.pool for seat in self.starts}))

    @property
    def gpus_taken(self) -> int:
        """GPUs that somebody has now."""
        return sum(one.option.gpus for one in self.stops)

    @property
    def load_s(self) -> float:
        """Until all of it serves: what makes room by moving loads first."""
        first = max((seat.option.load_s for seat in self.starts if seat.option.model in self.moved), default=0.0)
        rest = max((seat.option.load_s for seat in self.starts if seat.option.model not in self.moved), default=0.0)
        return first + rest

    def gpus_more(self, pool: str) -> int:
        """That a pool needs beside those that end there; negative where it has GPUs to spare afterwards."""
        taken = sum(one.option.gpus for one in self.stops if one.pool == pool)
        return sum(seat.option.gpus for seat in self.starts if seat.pool == pool) - taken


@dataclass(frozen=True, slots=True)
class Unseated:
    """A start that nothing can be done for now, and why."""

    option: Option
    why: str


class Changes:
    """Of one picture and one placement's starts and stops."""

    def __init__(self, picture: Picture, facts: Mapping[str, ModelFacts]) -> None:
        self._picture = picture
        self._facts = facts
        self._pools = {pool.name: pool for pool in picture.pools}
        self._free = {pool.name: pool.gpus for pool in picture.pools}
        for one in picture.instances:
            self._free[one.pool] = self._free.get(one.pool, 0) - one.option.gpus

    def of(self, starts: Sequence[Placed], stops: Sequence[Instance]) -> tuple[list[Change], list[Unseated]]:
        """Single changes, and starts that have no place."""
        found: list[Change] = []
        unseated: list[Unseated] = []
        crowded: list[Placed] = []
        for placed in starts:
            option = placed.option
            if len(placed.nodes) != 1:
                unseated.append(Unseated(option, SEVERAL_NODES))
            elif why := self._no_engine(option):
                unseated.append(Unseated(option, why))
            elif (pool := self._seat(placed)) is not None:
                self._free[pool] -= option.gpus
                found.append(Change((), (Seat(option, pool),)))
            else:
                crowded.append(placed)
        waiting = list(stops)
        for placed in crowded:
            change = self._exchange(placed, waiting)
            if change is None:
                unseated.append(Unseated(placed.option, f"there is no room on {placed.nodes[0][0]} now"))
            else:
                found.append(change)
        return found, unseated

    def _seat(self, placed: Placed) -> str | None:
        """A pool with room for it: the one that the solver chose, unless another has the weights at hand, or the
        engine has failed there."""
        option, chosen, free = placed.option, placed.nodes[0][0], self._free
        fits = [
            pool.name
            for pool in self._picture.pools
            if pool.gpu == option.gpu and free[pool.name] >= option.gpus and self._can_start(option.model, pool.name)
        ]
        warm = self._picture.warm.get(option.model, ())
        return min(fits, key=lambda name: (name not in warm, name != chosen, free[name], name), default=None)

    def _no_engine(self, option: Option) -> str:
        """Why no pool could start it, whatever else runs there; empty = one could."""
        facts = self._facts.get(option.model)
        if facts is None:
            return "nothing is known of its model"
        of_kind = [pool for pool in self._picture.pools if pool.gpu == option.gpu]
        if any(facts.engine in pool.engines for pool in of_kind):
            return ""
        there = ", ".join(sorted({engine for pool in of_kind for engine in pool.engines})) or "none"
        return f"no pool with {option.gpu} has the engine `{facts.engine}` (there is {there})"

    def _can_start(self, model: str, pool: str) -> bool:
        """Whether the pool has its engine, may have its requests, and has not failed with it lately."""
        facts, there = self._facts[model], self._pools.get(pool)
        if there is None or facts.engine not in there.engines or failed_key(model, pool) in self._picture.failed:
            return False
        allowed = facts.demand.providers_allowed
        return not allowed or there.provider in allowed

    def _exchange(self, placed: Placed, stops: list[Instance]) -> Change | None:
        """Takes from `stops` those of the pool that must end for it."""
        option, pool, free = placed.option, placed.nodes[0][0], self._free
        if pool not in free or not self._can_start(option.model, pool):
            return None
        room = free[pool]
        taken: list[Instance] = []
        for one in sorted((one for one in stops if one.pool == pool), key=lambda one: (one.in_flight, one.id)):
            if room >= option.gpus:
                break
            taken.append(one)
            room += one.option.gpus
        if room < option.gpus:
            return None
        for one in taken:
            stops.remove(one)
        free[pool] = room - option.gpus
        return Change(tuple(taken), (Seat(option, pool),))


def joined(changes: Sequence[Change]) -> list[Change]:
    """Those together in which one ends what another starts elsewhere."""
    ends = {one.model for change in changes for one in change.stops}
    moved = ends & {seat.option.model for change in changes for seat in change.starts}
    groups: list[tuple[set[str], list[Change]]] = []
    for change in changes:
        shared, members = set(change.models & moved), [change]
        apart = []
        for group in groups:
            if group[0] & shared:
                shared |= group[0]
                members = group[1] + members
            else:
                apart.append(group)
        groups = [*apart, (shared, members)]
    return [_one(members) for _, members in groups]


def _one(changes: Sequence[Change]) -> Change:
    stops = tuple(one for change in changes for one in change.stops)
    return Change(stops, tuple(seat for change in changes for seat in change.starts))
