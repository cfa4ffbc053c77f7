"""Mitosis: how the instances of one model are shared out among its macro-instances as they come and go (PaDG, EcoServe
§3.4). Pure: plans from a picture, which carry their reasons.

The rule in plain words:

* A macro-instance grows to N_u instances. The next one splits it: N_l of them, the newcomer among them, become a new
  macro-instance (the 12th with N_u = 11, N_l = 6: 6 + 6; the 7th with N_u = 6, N_l = 3: 4 + 3).
* Whoever comes then refills the original to N_u first, then the new one: the oldest that has room.
* To shrink, instances are taken from the smallest macro-instance down to N_l, then from a larger one, and when two
  together have N_u, they merge. So no more are split and merged than growth demands.
* An instance that dies leaves a hole like one that was taken away; when two macro-instances fit into one after that,
  they merge at the next `settled`.

A move is a change of owner (`ownership`) and nothing else: the engine runs on, and no KV goes anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

INSTANCES_MAX = 1000
"""Of one macro-instance: the scan is linear in them."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many instances a macro-instance may have. Raises ValueError for bounds under which no split can work."""

    lower: int = 6
    """N_l: a new macro-instance starts with so many, and none is shrunk below while a larger one is there."""
    upper: int = 11
    """N_u: no macro-instance has more."""

    def __post_init__(self) -> None:
        if self.lower < 1:
            raise ValueError(f"N_l is {self.lower}: a macro-instance needs at least 1 instance")
        if self.lower >= self.upper:
            raise ValueError(
                f"N_l is {self.lower} and N_u {self.upper}: N_l must be below N_u, or a split would not end"
            )
        if 2 * self.lower > self.upper + 1:
            raise ValueError(
                f"N_l is {self.lower} and N_u {self.upper}: a split of {self.upper + 1} would leave "
                f"{self.upper + 1 - self.lower}, fewer than N_l; use N_l ≤ {(self.upper + 1) // 2}"
            )
        if self.upper > INSTANCES_MAX:
            raise ValueError(f"N_u is {self.upper}: must be at most {INSTANCES_MAX}")


@dataclass(frozen=True, slots=True)
class Macro:
    """One macro-instance as it stands."""

    serial: int
    """Counts the macro-instances of the group as they are made; never used again."""
    members: tuple[str, ...]
    """Sessions, in the order in which they joined; none of them draining."""

    def __len__(self) -> int:
        return len(self.members)


# -- effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """The session changes its owner, by compare-and-set with a higher epoch."""

    session: str
    source: int
    """Serial of its macro-instance; 0 = it has none."""
    target: int


@dataclass(frozen=True, slots=True)
class Drain:
    """The session gets nothing new, and ends what it has by the deadline; who is left then goes on elsewhere: those
    with most left first, their text so far computed as a prompt."""

    session: str
    source: int
    """Serial of its macro-instance; 0 = it has none any more, and is told again."""
    deadline_s: float
    """From now."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Once it has drained, its engine keeps what it needs to be back in seconds, and frees the rest."""

    session: str


@dataclass(frozen=True, slots=True)
class Wake:
    """A sleeping one is wanted again."""

    session: str


@dataclass(frozen=True, slots=True)
class Scale:
    """A wish for whoever starts instances."""

    change: int
    """+1 or more: so many are wanted beside those that start already. −1: one is not needed."""
    why: str


Effect = Move | Drain | Sleep | Wake | Scale


class Way(StrEnum):
    """How the engine of an instance that is taken away ends."""

    LEAVE = "leave"
    SLEEP = "sleep"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, and how the macro-instances stand then."""

    macros: tuple[Macro, ...]
    """In the order in which they were made; none empty."""
    effects: tuple[Effect, ...] = ()
    reasons: tuple[str, ...] = ()

    def then(self, other: Plan) -> Plan:
        """This one, and after it `other`, which began where this one ends."""
        return Plan(other.macros, self.effects + other.effects, self.reasons + other.reasons)


class Unknown(ValueError):
    """A session that is where it cannot be; the text names it."""


# -- growth ------------------------------------------------------------------------------------------------------------


def joined(macros: Sequence[Macro], session: str, bounds: Bounds, serial: int) -> Plan:
    """A session has come. `serial` is given to a new macro-instance, if one is made.

    Raises Unknown when the session is a member already, ValueError when `serial` was used before."""
    place = _place_of(macros, session)
    if place is not None:
        raise Unknown(f"{session} is a member of macro-instance {macros[place].serial} already")
    room = next((macro for macro in macros if len(macro) < bounds.upper), None)
    if room is not None:
        grown = replace(room, members=(*room.members, session))
        return Plan(
            _with(macros, grown),
            (Move(session, 0, room.serial),),
            (f"{session} joins macro-instance {room.serial}, {len(grown)} of at most {bounds.upper}",),
        )
    if macros and serial <= macros[-1].serial:
        raise ValueError(f"serial {serial} was used before: the newest macro-instance is {macros[-1].serial}")
    if not macros:
        return Plan(
            (Macro(serial, (session,)),),
            (Move(session, 0, serial),),
            (f"{session} is the first: it makes macro-instance {serial}",),
        )
    return _split(macros, session, bounds, serial)


def _split(macros: Sequence[Macro], session: str, bounds: Bounds, serial: int) -> Plan:
    """All are full: the newest gives N_l − 1 of its members, those that joined last, to a new one."""
    full = macros[-1]
    stays = len(full) - (bounds.lower - 1)
    leaving = full.members[stays:]
    rest, new = replace(full, members=full.members[:stays]), Macro(serial, (*leaving, session))
    moves = [Move(one, full.serial, serial) for one in leaving]
    why = (
        f"{session} is one more than N_u = {bounds.upper}: macro-instance {full.serial} splits into "
        f"{len(rest)} and {len(new)}, the latter macro-instance {serial}"
    )
    return Plan((*_with(macros, rest), new), (*moves, Move(session, 0, serial)), (why,))


# -- shrinking ---------------------------------------------------------------------------------------------------------


def left(macros: Sequence[Macro], session: str) -> Plan:
    """A session has gone, by itself or by plan. Nothing happens when it was no member."""
    place = _place_of(macros, session)
    if place is None:
        return Plan(tuple(macros))
    macro = macros[place]
    rest = replace(macro, members=tuple([one for one in macro.members if one != session]))
    return Plan(_with(macros, rest), (), (f"{session} has left macro-instance {macro.serial}, {len(rest)} remain",))


def shrunk(
    macros: Sequence[Macro],
    bounds: Bounds,
    drain_s: float,
    remaining_s: Mapping[str, float] | None = None,
    way: Way = Way.LEAVE,
    instances_min: int = 1,
) -> Plan:
    """One instance less: which, and who merges after that. `remaining_s`: predicted time until a session has ended what
    it has; it is the one with least left that goes, and of two the one that joined later. With `instances_min` or
    fewer, nothing is done."""
    if not drain_s >= 0:
        raise ValueError(f"the drain deadline is {drain_s} s: must be at least 0")
    if sum(map(len, macros)) <= max(1, instances_min):
        return Plan(tuple(macros), (), (f"keeps all {sum(map(len, macros))}: the least allowed is {instances_min}",))
    source = _source_of_shrinking(macros, bounds)
    left_s = remaining_s or {}
    order = range(len(source))
    session = source.members[min(order, key=lambda place: (left_s.get(source.members[place], 0.0), -place))]
    ending: tuple[Effect, ...] = (Drain(session, source.serial, drain_s),)
    match way:
        case Way.LEAVE:
            pass
        case Way.SLEEP:
            ending += (Sleep(session),)
        case _:
            assert_never(way)
    less = left(macros, session).macros
    why = f"{session} drains within {drain_s:g} s: macro-instance {source.serial} shrinks to {len(source) - 1}"
    return Plan(less, ending, (why,)).then(settled(less, bounds))


def _source_of_shrinking(macros: Sequence[Macro], bounds: Bounds) -> Macro:
    """The smallest with more than N_l, of equal ones the newest. When none has, the oldest, which will merge."""
    above = [macro for macro in macros if len(macro) > bounds.lower]
    if above:
        return min(above, key=lambda macro: (len(macro), -macro.serial))
    return macros[0]


def settled(macros: Sequence[Macro], bounds: Bounds) -> Plan:
    """Two macro-instances that together have no more than N_u become one: the newer joins the older. Of several such
    pairs the smallest goes first, until there is none."""
    plan = Plan(tuple(macros))
    while (pair := _mergeable(plan.macros, bounds)) is not None:
        plan = plan.then(_merged(plan.macros, *pair))
    return plan


def _mergeable(macros: Sequence[Macro], bounds: Bounds) -> tuple[Macro, Macro] | None:
    pairs = [
        (one, other)
        for place, one in enumerate(macros)
        for other in macros[place + 1 :]
        if len(one) + len(other) <= bounds.upper
    ]
    return min(pairs, key=lambda pair: (len(pair[0]) + len(pair[1]), pair[0].serial, pair[1].serial), default=None)


def _merged(macros: Sequence[Macro], older: Macro, newer: Macro) -> Plan:
    both = replace(older, members=older.members + newer.members)
    without = [macro for macro in macros if macro.serial != newer.serial]
    moves = tuple([Move(session, newer.serial, older.serial) for session in newer.members])
    why = f"macro-instances {older.serial} and {newer.serial} together have {len(both)}: they merge into {older.serial}"
    return Plan(_with(without, both), moves, (why,))


# -- inside ------------------------------------------------------------------------------------------------------------


def _place_of(macros: Sequence[Macro], session: str) -> int | None:
    return next((place for place, macro in enumerate(macros) if session in macro.members), None)


def _with(macros: Sequence[Macro], changed: Macro) -> tuple[Macro, ...]:
    """`changed` in place of the one with its serial; an empty one is not kept."""
    return tuple(
        [one for one in [changed if macro.serial == changed.serial else macro for macro in macros] if one.members]
    )
