"""Who acts for a site, when several launchers, or none, could."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from serai.contracts.launcher import KeptRun, LauncherState
from serai.launcher.lease import lease_of
from serai.runtime.bus import BusError
from unit.fakes import Clock

LEASE_S = 60.0


@dataclass
class Keys:
    """One key of a bucket, as NATS has it: revisions go on when the bucket is made anew."""

    value: bytes | None = None
    revision: int = 0
    away: bool = False
    before_update: object = None

    async def get(self, key: str) -> tuple[bytes, int] | None:
        if self.away:
            raise BusError("no answer in 5 s")
        return None if self.value is None else (self.value, self.revision)

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        if self.away:
            raise BusError("no answer in 5 s")
        if revision != (0 if self.value is None else self.revision):
            return False
        self.value, self.revision = value, self.revision + 1
        return True


@dataclass
class Member:
    """A launcher, as far as its lease goes."""

    name: str
    keys: Keys
    clock: Clock
    took: list[LauncherState] = field(default_factory=list)
    runs: list[KeptRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lease = lease_of(
            self.keys, "local", self.name, LEASE_S, lambda: self.clock.now_s, self.state, self.took.append
        )

    def state(self, beat: int) -> LauncherState:
        return LauncherState(self.name, beat, self.runs)

    def beat(self) -> bool:
        return asyncio.run(self.lease.beat())


def two() -> tuple[Clock, Keys, Member, Member]:
    clock, keys = Clock(), Keys()
    return clock, keys, Member("a", keys, clock), Member("b", keys, clock)


def test_the_first_acts_and_the_second_stands_by() -> None:
    clock, _, a, b = two()
    assert a.beat()
    assert a.lease.held
    for _ in range(20):
        clock.advance(10)
        assert a.beat()
        assert not b.beat()
    assert not b.lease.held
    assert b.lease.why_not == "another launcher acts for the site: a"


def test_h14_who_was_killed_is_succeeded_after_the_length_of_a_lease_with_all_it_knew() -> None:
    clock, _, a, b = two()
    a.runs.append(KeptRun("serai.m.0a1b2c3ds0g1xa"))
    assert a.beat()
    assert not b.beat()
    clock.advance(LEASE_S)
    assert not b.beat()
    clock.advance(1)
    assert b.beat()
    assert b.took[0].runs == a.runs
    assert not a.lease.held
    assert not a.beat(), "it finds out before it acts"


def test_nobody_thinks_to_hold_it_by_the_time_another_can_take_it() -> None:
    clock, keys, a, b = two()
    assert a.beat()
    assert not b.beat()
    keys.away = True
    clock.advance(LEASE_S / 2 + 1)
    assert not a.beat()
    assert not a.lease.held
    keys.away = False
    assert not b.beat()


def test_who_goes_of_its_own_will_is_succeeded_at_once() -> None:
    _, _, a, b = two()
    assert a.beat()
    assert not b.beat()
    asyncio.run(a.lease.give_back(LauncherState("", a.lease.beats + 1)))
    assert b.beat()
    asyncio.run(a.lease.give_back(LauncherState("", 99)))
    assert b.beat(), "who has lost it gives nothing back"


def test_h60_h61_a_key_that_vanishes_is_written_again_by_its_holder() -> None:
    _, keys, a, b = two()
    assert a.beat()
    keys.value = None
    assert a.beat()
    assert len(a.took) == 1
    assert not b.beat()


def test_a_state_that_cannot_be_read_is_replaced() -> None:
    _, keys, a, _ = two()
    keys.value = b"{"
    assert a.beat()
    assert a.took == [LauncherState()]


def test_a_race_has_one_winner() -> None:
    _, keys, a, b = two()
    found = asyncio.run(keys.get("local"))
    assert a.beat()

    async def stale(key: str) -> tuple[bytes, int] | None:
        return found

    keys.get = stale  # type: ignore[method-assign]
    assert not b.beat()
    assert not b.lease.held
