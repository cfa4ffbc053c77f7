"""Which instances a group has, in which macro-instances, and since when they obey: mitosis, ownership and scaling put
together. Pure: takes `now_s`.

An instance that comes is placed by `mitosis`, claimed and told by `ownership`; it may get leases once `epoch_of` knows
it. A move from one macro-instance to another goes the same way, so for a moment it gets none, and what it has runs on.
With scaling, the group's load is looked at now and then, and instances are wished for, or drained by a deadline.

A new leader makes its macro-instances anew from the sessions it finds. That costs nothing: which window an instance is
in, it knows itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from serai.macro_scheduler import mitosis
from serai.macro_scheduler.mitosis import Bounds, Drain, Macro, Move, Plan, Scale, Sleep, Wake, Way
from serai.macro_scheduler.ownership import Claim, Ownership, Say
from serai.macro_scheduler.scaling import Load, Scaling, ScalingSettings

REASONS_KEPT = 100
DRAIN_AGAIN_S = 5.0
"""A session that was told to drain and has not gone is told again so often."""
SETTLE_EVERY_S = 5.0
"""How often holes that the dead have left are looked at: an instance that is back within this time moves nobody."""


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """How a group shares out its instances."""

    bounds: Bounds = field(default_factory=Bounds)
    beat_s: float = 1.0
    """How often each instance is told whom it obeys."""
    scaling: ScalingSettings | None = None
    """None: instances come and go as others decide."""
    drains: bool = True
    """Whether an instance that is not needed is drained from here; else that is only wished for."""


class Noted(NamedTuple):
    """One change, for people."""

    at_s: float
    why: str


MembershipEffect = Claim | Say | Drain | Sleep | Wake | Scale


class Membership:
    """One group's. `leader` names this process and its term: no other leader ever has the same name."""

    def __init__(self, settings: MembershipSettings, leader: str) -> None:
        self.settings = settings
        self.macros: tuple[Macro, ...] = ()
        """Those that serve, in the order in which they were made; none is empty, and none has draining members."""
        self.draining: dict[str, float] = {}
        """Sessions that were told to end what they have, and by when."""
        self._drain_again_s: dict[str, float] = {}
        self.notes: list[Noted] = []
        """The last changes and their reasons."""
        self._leader = leader
        self._serial = 0
        self._macro_of: dict[str, Macro] = {}
        self._ownership = Ownership(settings.beat_s)
        self._scaling = None if settings.scaling is None else Scaling(settings.scaling)
        self._wished: list[float] = []
        """When each instance was wished for that has not come."""
        self._asleep: dict[str, None] = {}
        self._settle_at_s: float | None = None

    # -- what instances do ---------------------------------------------------------------------------------------

    def joined(self, session: str, now_s: float) -> list[MembershipEffect]:
        """It serves this model, and does not drain. Nothing happens when that is known."""
        if session in self._macro_of or session in self.draining:
            return []
        self._asleep.pop(session, None)
        if self._wished:
            self._wished.pop(0)
        return self._follow(mitosis.joined(self.macros, session, self.settings.bounds, self._serial + 1), now_s)

    def gone(self, session: str, now_s: float) -> None:
        """It has left, or drains by a word of its own or of others: nothing new goes there, and it is told no more."""
        self.draining.pop(session, None)
        self._drain_again_s.pop(session, None)
        self._asleep.pop(session, None)
        self._ownership.forget(session)
        if session in self._macro_of:
            self._follow(mitosis.left(self.macros, session), now_s)
            self._settle_at_s = self._settle_at_s or now_s + SETTLE_EVERY_S

    def slept(self, session: str, now_s: float) -> None:
        """It has drained, and its engine sleeps: it can be woken instead of starting another."""
        self.gone(session, now_s)
        self._asleep[session] = None

    def owned(self, session: str, owner: str, epoch: int, now_s: float) -> list[MembershipEffect]:
        """A claim went through."""
        return list(self._ownership.owned(session, owner, epoch, now_s))

    def not_owned(self, session: str, epoch: int, now_s: float) -> None:
        """A claim was lost to `epoch`, or KV did not answer (0)."""
        self._ownership.not_owned(session, epoch, now_s)

    def answered(self, session: str, epoch: int, accepted: bool, now_s: float) -> bool:
        """An instance has said whom it obeys. True when it has just become ours: its state is where to begin."""
        return self._ownership.answered(session, epoch, accepted, now_s)

    def reported(self, session: str, epoch: int, now_s: float) -> None:
        """A report tells the epoch that an instance obeys."""
        self._ownership.reported(session, epoch, now_s)

    # -- time ----------------------------------------------------------------------------------------------------

    def due(self, now_s: float) -> list[MembershipEffect]:
        """What is to be said or claimed again now, and merges after losses."""
        effects: list[MembershipEffect] = [*self._drains_again(now_s)]
        if self._settle_at_s is not None and now_s >= self._settle_at_s:
            self._settle_at_s = None
            effects += self._follow(mitosis.settled(self.macros, self.settings.bounds), now_s)
        effects += self._ownership.due(now_s)
        return effects

    def next_due_s(self) -> float | None:
        """When `due` has something to do."""
        times = [self._ownership.next_due_s(), self._settle_at_s, *self._drain_again_s.values()]
        return min([at_s for at_s in times if at_s is not None], default=None)

    @property
    def evaluation_due_s(self) -> float | None:
        """When the load is to be looked at next; None: never."""
        return None if self._scaling is None else self._scaling.due_s

    def evaluate(self, load: Load, remaining_s: Mapping[str, float], now_s: float) -> list[MembershipEffect]:
        """What the load asks for. `remaining_s`: until each instance has ended what it has, as predicted."""
        if self._scaling is None:
            return []
        word = self._scaling.evaluate(load, now_s)
        if word is None or word.scale is None:
            return []
        self._note(now_s, (f"{word.scale.change:+d}: {word.scale.why}",))
        if word.scale.change > 0:
            return self._wish(word.scale, now_s)
        if not self.settings.drains:
            return [word.scale]
        return [word.scale, *self._shrink(remaining_s, now_s)]

    @property
    def starting(self) -> int:
        """Wished for and not here; a wish that nobody fulfils is forgotten after twice the time of a start."""
        return len(self._wished)

    def resumed(self, wanted: int, now_s: float) -> None:
        """Another leader has wanted so many instances until now: those that are not here start, by its wish."""
        if self._scaling is not None and wanted:
            self._scaling.resumed(now_s)
            self._wished = [now_s] * max(0, wanted - len(self._macro_of))

    def forget_old_wishes(self, now_s: float) -> None:
        """Before the load is looked at."""
        if self._scaling is not None:
            limit_s = 2 * self._scaling.settings.start_s
            self._wished = [at_s for at_s in self._wished if now_s - at_s < limit_s]

    # -- views ---------------------------------------------------------------------------------------------------

    def macro_of(self, session: str) -> Macro | None:
        """Where it serves; None when it does not, or drains."""
        return self._macro_of.get(session)

    def epoch_of(self, session: str) -> int | None:
        """With which epoch leases may be given to it now; None: none may."""
        return self._ownership.epoch_of(session) if session in self._macro_of else None

    def owner_name(self, serial: int) -> str:
        """What an instance of that macro-instance is told whom it obeys."""
        return f"{self._leader}/{serial}"

    @property
    def heard(self) -> int:
        """The highest epoch that any instance has told."""
        return self._ownership.heard

    # -- inside --------------------------------------------------------------------------------------------------

    def _drains_again(self, now_s: float) -> Iterator[Drain]:
        """A word that was lost would leave an instance idle for ever; one that was heard changes nothing."""
        for session, at_s in self._drain_again_s.items():
            if now_s >= at_s:
                self._drain_again_s[session] = now_s + DRAIN_AGAIN_S
                yield Drain(session, 0, max(0.0, self.draining[session] - now_s))

    def _wish(self, scale: Scale, now_s: float) -> list[MembershipEffect]:
        """Sleepers are woken before others are started."""
        woken = list(self._asleep)[: scale.change]
        for session in woken:
            del self._asleep[session]
        self._wished += [now_s] * scale.change
        rest = scale.change - len(woken)
        wakes: list[MembershipEffect] = [Wake(session) for session in woken]
        return [*wakes, Scale(rest, scale.why)] if rest else wakes

    def _shrink(self, remaining_s: Mapping[str, float], now_s: float) -> list[MembershipEffect]:
        scaling = self.settings.scaling
        assert scaling is not None
        least = scaling.instances_min
        way = Way.SLEEP if scaling.sleeps else Way.LEAVE
        plan = mitosis.shrunk(self.macros, self.settings.bounds, scaling.drain_s, remaining_s, way, least)
        return self._follow(plan, now_s)

    def _follow(self, plan: Plan, now_s: float) -> list[MembershipEffect]:
        effects: list[MembershipEffect] = []
        for effect in plan.effects:
            match effect:
                case Move(session, _, target):
                    effects += self._ownership.want(session, self.owner_name(target), now_s)
                case Drain(session, _, deadline_s):
                    self.draining[session] = now_s + deadline_s
                    self._drain_again_s[session] = now_s + DRAIN_AGAIN_S
                    effects.append(effect)
                case Sleep() | Wake() | Scale():
                    effects.append(effect)
                case _:
                    assert_never(effect)
        self.macros = plan.macros
        self._macro_of = {session: macro for macro in plan.macros for session in macro.members}
        self._serial = max([self._serial, *[macro.serial for macro in plan.macros]])
        self._note(now_s, plan.reasons)
        return effects

    def _note(self, now_s: float, reasons: tuple[str, ...]) -> None:
        self.notes += [Noted(now_s, why) for why in reasons]
        del self.notes[:-REASONS_KEPT]
