"""A lease in KV of any state: the epoch of a group's leader grows with each change of holder."""

from __future__ import annotations

import asyncio

from serai.contracts.admission import GroupLease
from serai.runtime.kv_lease import KvLease
from unit.fakes import Clock
from unit.test_launcher_lease import Keys

LEASE_S = 2.0


class Leader:
    def __init__(self, name: str, keys: Keys, clock: Clock) -> None:
        self.name, self.epoch = name, 0
        self.lease: KvLease[GroupLease] = KvLease(
            keys,
            "m",
            name,
            LEASE_S,
            lambda: clock.now_s,
            lambda beat: GroupLease(self.name, self.epoch, beat),
            self.taken,
            nobody=GroupLease("", 0, 0),
            name="macro",
            acts="macro-scheduler leads the group",
        )

    def taken(self, before: GroupLease) -> None:
        self.epoch = before.epoch + 1

    def beat(self) -> bool:
        return asyncio.run(self.lease.beat())


def test_each_leader_has_a_higher_epoch_than_the_one_before() -> None:
    keys, clock = Keys(), Clock()
    a, b = Leader("a", keys, clock), Leader("b", keys, clock)
    assert a.beat()
    assert not b.beat()
    assert b.lease.why_not == "another macro-scheduler leads the group: a"
    clock.advance(LEASE_S + 0.1)
    assert not a.lease.held
    assert b.beat()
    assert (a.epoch, b.epoch) == (1, 2)
    assert not a.beat()


def test_one_that_gives_it_back_leaves_its_epoch_behind() -> None:
    keys, clock = Keys(), Clock()
    a, b = Leader("a", keys, clock), Leader("b", keys, clock)
    assert a.beat()
    asyncio.run(a.lease.give_back(GroupLease("", a.epoch, a.lease.beats + 1)))
    assert b.beat()
    assert b.epoch == 2


def test_the_same_holder_after_a_short_pause_has_a_new_epoch_only_when_another_held_it_between() -> None:
    keys, clock = Keys(), Clock()
    a = Leader("a", keys, clock)
    assert a.beat()
    clock.advance(LEASE_S * 3)
    assert a.beat()
    assert a.epoch == 1


def test_evidence_that_the_holder_has_gone_is_worth_one_beat() -> None:
    keys, clock = Keys(), Clock()
    a, b = Leader("a", keys, clock), Leader("b", keys, clock)
    assert a.beat()
    b.lease.holder_gone("somebody else")
    assert not b.beat()
    assert b.lease.seen_holder == "a"
    b.lease.holder_gone("a")
    assert b.beat()
    assert (b.epoch, b.lease.seen_holder) == (2, "")
    assert not a.beat()
    b.lease.holder_gone("b")  # Of itself: nothing.
    assert b.beat()
    assert b.epoch == 2
