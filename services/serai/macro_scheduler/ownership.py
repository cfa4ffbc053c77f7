"""Whose an instance is. Pure: takes `now_s`.

An instance obeys one owner, a macro-instance of one group's leader, and one epoch. Epochs only ever grow. A change of
owner is a compare-and-set of `InstanceOwner` in KV, then the instance is told (`TakeInstance`); its answer, its whole
state, is what the new owner begins with. Leases are given only between the two: after the instance has accepted, and
until it is heard to obey another epoch.

An epoch has two parts: the epoch of the group's leader, and a count below it. So a leader that was deposed and does not
know it yet cannot take an instance back from its successor: all its epochs are lower. KV may lose what it acknowledged:
then the instance still knows, refuses what is not higher, and tells its epoch; and a new leader's epoch is above every
one that it has heard instances tell (`next_leader_epoch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from serai.contracts.admission import InstanceOwner

COUNT_BITS = 20
"""A leader may change owners a million times. Both parts fit into 53 bits, which JSON numbers keep."""
COUNT_MAX = (1 << COUNT_BITS) - 1
LEADER_EPOCH_MAX = (1 << 32) - 1
RETRY_S = 0.5
"""After a claim that was lost, or that KV did not answer."""
CLAIM_S = 5.0
"""A claim that nobody answers is made again after so long."""


class Deposed(RuntimeError):
    """A later leader has this instance; the text says which epochs. Whoever gets this leads no more."""


def instance_epoch(leader_epoch: int, count: int) -> int:
    """The `count`-th epoch, from 0, under a leader. Raises ValueError beyond the limits."""
    if not 0 < leader_epoch <= LEADER_EPOCH_MAX or not 0 <= count <= COUNT_MAX:
        raise ValueError(f"leader's epoch {leader_epoch} and count {count}: beyond the limits of an epoch")
    return leader_epoch << COUNT_BITS | count


def leader_epoch_of(epoch: int) -> int:
    """Under which leader's epoch an instance's epoch was made."""
    return epoch >> COUNT_BITS


def next_leader_epoch(found: int, heard: int) -> int:
    """For whoever becomes leader: above that of the lease it found (0 = none), and above all that instances obey.
    `heard`: the highest epoch in their reports."""
    return max(found, leader_epoch_of(heard)) + 1


def claim(found: InstanceOwner | None, session: str, owner: str, leader_epoch: int, heard: int = 0) -> InstanceOwner:
    """What a leader writes, by compare-and-set, in place of `found`. `heard`: the epoch that the instance is known to
    obey. Raises Deposed when a later leader has written or been obeyed."""
    known = max(0 if found is None else found.epoch, heard)
    if leader_epoch_of(known) > leader_epoch:
        raise Deposed(
            f"{session} obeys epoch {known}, of leader's epoch {leader_epoch_of(known)}: {leader_epoch} is over"
        )
    return InstanceOwner(session, owner, max(known + 1, instance_epoch(leader_epoch, 0)))


class Stage(Enum):
    """How far a change of owner has come."""

    CLAIMING = 0
    """Compare-and-set is on its way."""
    TAKING = 1
    """It is ours in KV; the instance has not said yes."""
    OWNED = 2
    """It obeys us: leases may be given."""
    LOST = 3
    """Somebody else has it, or KV was away; to be claimed again at `due_s`."""


# -- effects -----------------------------------------------------------------------------------------------------------


class Claim(NamedTuple):
    """Compare-and-set to `owner` with an epoch above `heard`; say `owned` or `not_owned`."""

    session: str
    owner: str
    heard: int


class Say(NamedTuple):
    """Tell the instance whom it obeys, first or again."""

    session: str
    owner: str
    epoch: int


OwnershipEffect = Claim | Say


@dataclass(slots=True)
class _Held:
    owner: str
    stage: Stage
    due_s: float
    """When to claim again or to say it again."""
    epoch: int = 0
    heard: int = 0
    """The highest epoch that the instance has told."""


class Ownership:
    """What one leader holds. `owner` names a macro-instance, and must name its leader too: two leaders never use the
    same name."""

    def __init__(self, beat_s: float) -> None:
        if not beat_s > 0:
            raise ValueError(f"the beat is {beat_s} s: must be above 0")
        self._beat_s = beat_s
        self._held: dict[str, _Held] = {}

    def want(self, session: str, owner: str, now_s: float) -> Sequence[OwnershipEffect]:
        """It should be `owner`'s; nothing to do when it is, or is about to be."""
        held = self._held.get(session)
        if held is not None and held.owner == owner:
            return ()
        heard = 0 if held is None else max(held.heard, held.epoch)
        self._held[session] = _Held(owner, Stage.CLAIMING, now_s + CLAIM_S, heard=heard)
        return (Claim(session, owner, heard),)

    def forget(self, session: str) -> None:
        """It has left for good."""
        self._held.pop(session, None)

    def owned(self, session: str, owner: str, epoch: int, now_s: float) -> Sequence[OwnershipEffect]:
        """A claim went through. One for an owner that is not wanted any more changes nothing."""
        held = self._held.get(session)
        if held is None or held.owner != owner or epoch <= held.epoch:
            return ()
        held.stage, held.epoch, held.due_s = Stage.TAKING, epoch, now_s + self._beat_s
        return (Say(session, owner, epoch),)

    def not_owned(self, session: str, epoch: int, now_s: float) -> None:
        """A claim was lost to `epoch`, or KV did not answer (0). It is made again after a while."""
        held = self._held.get(session)
        if held is not None and held.stage is Stage.CLAIMING:
            self._lose(held, epoch, now_s)

    def answered(self, session: str, epoch: int, accepted: bool, now_s: float) -> bool:
        """The instance has said whom it obeys, in answer to `Say`. True when it has just become ours."""
        held = self._held.get(session)
        if held is None or held.stage not in (Stage.TAKING, Stage.OWNED):
            return False
        if accepted and epoch == held.epoch:
            new = held.stage is Stage.TAKING
            held.stage, held.heard = Stage.OWNED, max(held.heard, epoch)
            return new
        if epoch >= held.epoch:
            self._lose(held, epoch, now_s)
        return False

    def reported(self, session: str, epoch: int, now_s: float) -> None:
        """A report tells the epoch that the instance obeys. A higher one than ours: it is not ours any more. A lower
        one from an instance that was ours: it has fallen back to obeying nobody, and is told again at once."""
        held = self._held.get(session)
        if held is None:
            return
        held.heard = max(held.heard, epoch)
        if held.epoch and epoch > held.epoch and held.stage in (Stage.TAKING, Stage.OWNED):
            self._lose(held, epoch, now_s)
        elif held.stage is Stage.OWNED and epoch < held.epoch:
            held.stage, held.due_s = Stage.TAKING, now_s

    def due(self, now_s: float) -> list[OwnershipEffect]:
        """What is to be said or claimed again now."""
        effects: list[OwnershipEffect] = []
        for session, held in self._held.items():
            if held.due_s > now_s:
                continue
            if held.stage in (Stage.TAKING, Stage.OWNED):
                held.due_s = now_s + self._beat_s
                effects.append(Say(session, held.owner, held.epoch))
            else:
                held.stage, held.due_s = Stage.CLAIMING, now_s + CLAIM_S
                effects.append(Claim(session, held.owner, held.heard))
        return effects

    def next_due_s(self) -> float | None:
        """When `due` has something to do."""
        return min([held.due_s for held in self._held.values()], default=None)

    def epoch_of(self, session: str) -> int | None:
        """With which epoch leases may be given to it now; None: none may."""
        held = self._held.get(session)
        return held.epoch if held is not None and held.stage is Stage.OWNED else None

    def owner_of(self, session: str) -> str | None:
        """Whose it is or should become."""
        held = self._held.get(session)
        return None if held is None else held.owner

    @property
    def heard(self) -> int:
        """The highest epoch that any instance has told."""
        return max([held.heard for held in self._held.values()], default=0)

    def _lose(self, held: _Held, epoch: int, now_s: float) -> None:
        held.stage, held.heard, held.due_s = Stage.LOST, max(held.heard, epoch), now_s + RETRY_S
