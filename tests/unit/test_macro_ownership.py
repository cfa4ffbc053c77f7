"""Whose an instance is: one owner per epoch, whatever leaders, KV and messages do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serai.contracts.admission import InstanceOwner
from serai.macro_scheduler.ownership import (
    COUNT_MAX,
    Claim,
    Deposed,
    Ownership,
    OwnershipEffect,
    Say,
    claim,
    instance_epoch,
    leader_epoch_of,
    next_leader_epoch,
)

FIRST = instance_epoch(1, 0)


def test_an_epoch_names_its_leaders_epoch() -> None:
    assert leader_epoch_of(instance_epoch(7, 5)) == 7
    assert instance_epoch(8, 0) > instance_epoch(7, COUNT_MAX)
    assert instance_epoch(2**32 - 1, COUNT_MAX) < 2**53
    for leader, count in ((0, 0), (2**32, 0), (1, -1), (1, COUNT_MAX + 1)):
        with pytest.raises(ValueError, match="limits of an epoch"):
            instance_epoch(leader, count)


def test_a_claim_is_above_what_kv_and_the_instance_know() -> None:
    assert claim(None, "s", "m", 1) == InstanceOwner("s", "m", FIRST)
    assert claim(InstanceOwner("s", "x", FIRST + 4), "s", "m", 1).epoch == FIRST + 5
    assert claim(None, "s", "m", 1, heard=FIRST + 9).epoch == FIRST + 10
    assert claim(InstanceOwner("s", "x", FIRST + 4), "s", "m", 2).epoch == instance_epoch(2, 0)
    assert claim(InstanceOwner("s", "x", 5), "s", "m", 1).epoch == FIRST


def test_a_leader_that_was_deposed_can_claim_nothing() -> None:
    later = instance_epoch(3, 0)
    with pytest.raises(Deposed, match="s obeys epoch 3145728, of leader's epoch 3: 2 is over"):
        claim(InstanceOwner("s", "x", later), "s", "m", 2)
    with pytest.raises(Deposed):
        claim(None, "s", "m", 2, heard=later)


def test_a_new_leader_is_above_the_lease_and_above_what_instances_obey() -> None:
    assert next_leader_epoch(0, 0) == 1
    assert next_leader_epoch(4, 0) == 5
    assert next_leader_epoch(0, instance_epoch(9, 3)) == 10, "KV forgot, the instances did not"


def test_from_claim_to_lease() -> None:
    ours = Ownership(beat_s=1.0)
    assert ours.want("s", "m", 0.0) == (Claim("s", "m", 0),)
    assert ours.want("s", "m", 0.0) == ()
    assert ours.owned("s", "m", FIRST, 0.1) == (Say("s", "m", FIRST),)
    assert ours.epoch_of("s") is None, "the instance has not said yes"
    assert ours.answered("s", FIRST, True, 0.2)
    assert ours.epoch_of("s") == FIRST
    assert not ours.answered("s", FIRST, True, 1.2), "a beat's answer is no news"


def test_it_is_said_again_each_beat_and_a_lost_word_too() -> None:
    ours = Ownership(beat_s=1.0)
    ours.want("s", "m", 0.0)
    ours.owned("s", "m", FIRST, 0.0)
    assert ours.next_due_s() == 1.0
    assert ours.due(0.9) == []
    assert ours.due(1.0) == [Say("s", "m", FIRST)]
    ours.answered("s", FIRST, True, 1.1)
    assert ours.due(2.0) == [Say("s", "m", FIRST)]


def test_a_claim_that_is_lost_or_not_answered_is_made_again() -> None:
    ours = Ownership(beat_s=1.0)
    ours.want("s", "m", 0.0)
    ours.not_owned("s", FIRST + 3, 0.0)
    assert ours.due(0.4) == []
    assert ours.due(0.5) == [Claim("s", "m", FIRST + 3)]
    assert ours.due(5.4) == []
    assert ours.due(5.5) == [Claim("s", "m", FIRST + 3)]


def test_an_instance_that_obeys_somebody_else_gets_no_leases() -> None:
    ours = _owner_of_s()
    ours.reported("s", FIRST + 1, 1.0)
    assert ours.epoch_of("s") is None
    assert ours.due(1.5) == [Claim("s", "m", FIRST + 1)]


def test_an_instance_that_refuses_us_gets_no_leases() -> None:
    ours = _owner_of_s()
    assert not ours.answered("s", FIRST + 1, False, 1.0)
    assert ours.epoch_of("s") is None


def test_an_instance_that_fell_back_is_told_at_once() -> None:
    ours = _owner_of_s()
    ours.reported("s", 0, 0.3)
    assert ours.epoch_of("s") is None
    assert ours.due(0.3) == [Say("s", "m", FIRST)]


def test_a_move_takes_leases_from_the_old_owner_at_once() -> None:
    ours = _owner_of_s()
    assert ours.want("s", "other", 1.0) == (Claim("s", "other", FIRST),)
    assert ours.epoch_of("s") is None
    assert ours.owner_of("s") == "other"
    assert ours.owned("s", "m", FIRST + 1, 1.0) == (), "a claim for an owner that is not wanted any more"


def test_who_has_left_is_forgotten() -> None:
    ours = _owner_of_s()
    ours.forget("s")
    assert (ours.epoch_of("s"), ours.owner_of("s"), ours.next_due_s()) == (None, None, None)
    assert not ours.answered("s", FIRST, True, 1.0)


def test_a_beat_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="the beat is 0 s"):
        Ownership(0)


def _owner_of_s() -> Ownership:
    ours = Ownership(beat_s=1.0)
    ours.want("s", "m", 0.0)
    ours.owned("s", "m", FIRST, 0.0)
    ours.answered("s", FIRST, True, 0.0)
    return ours


# -- every interleaving ------------------------------------------------------------------------------------------------


@dataclass
class Instance:
    """An agent's gate, as far as owners go: it obeys the highest epoch, and of one epoch the first owner."""

    epoch: int = 0
    owner: str = ""

    def take(self, owner: str, epoch: int) -> bool:
        if epoch < self.epoch or (epoch == self.epoch and owner != self.owner):
            return False
        self.epoch, self.owner = epoch, owner
        return True


@dataclass
class Read:
    """A claim whose leader has read KV and not written yet."""

    claim: Claim
    found: InstanceOwner | None
    revision: int


@dataclass
class Leader:
    number: int
    epoch: int
    ours: Ownership = field(default_factory=lambda: Ownership(beat_s=1.0))
    claims: list[Claim] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    says: list[Say] = field(default_factory=list)
    answers: list[tuple[str, int, bool]] = field(default_factory=list)
    deposed: bool = False

    def obey(self, effects: list[OwnershipEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Claim):
                self.claims.append(effect)
            else:
                self.says.append(effect)


SESSIONS = ("a", "b")
WHICH = st.integers(0, 3)


class Interleavings(RuleBasedStateMachine):
    """Leaders that come without the older ones knowing, a KV that may lose all, words that come late or never."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.kv: dict[str, tuple[InstanceOwner, int]] = {}
        self.revision = 0
        self.lease = 0
        self.instances = {session: Instance() for session in SESSIONS}
        self.leaders: list[Leader] = []
        self.obeyed: dict[tuple[str, int], str] = {}
        self.highest = dict.fromkeys(SESSIONS, 0)

    def _leader(self, which: int) -> Leader:
        return self.leaders[which % len(self.leaders)]

    @precondition(lambda self: len(self.leaders) < 4)
    @rule()
    def another_becomes_leader(self) -> None:
        heard = max(instance.epoch for instance in self.instances.values())
        self.lease = next_leader_epoch(self.lease, heard)
        self.leaders.append(Leader(len(self.leaders), self.lease))

    @precondition(lambda self: self.leaders)
    @rule(which=WHICH, session=st.sampled_from(SESSIONS), macro=st.integers(1, 2))
    def wants(self, which: int, session: str, macro: int) -> None:
        leader = self._leader(which)
        if not leader.deposed:
            leader.obey(list(leader.ours.want(session, f"{leader.number}/{macro}", self.now_s)))

    @precondition(lambda self: any(leader.claims for leader in self.leaders))
    @rule(which=WHICH, last=st.booleans())
    def reads(self, which: int, last: bool) -> None:
        leader = self._leader(which)
        if leader.claims:
            one = leader.claims.pop(-1 if last else 0)
            found, revision = self.kv.get(one.session, (None, 0))
            leader.reads.append(Read(one, found, revision))

    @precondition(lambda self: any(leader.reads for leader in self.leaders))
    @rule(which=WHICH, last=st.booleans())
    def writes(self, which: int, last: bool) -> None:
        leader = self._leader(which)
        if not leader.reads:
            return
        read = leader.reads.pop(-1 if last else 0)
        session = read.claim.session
        current, revision = self.kv.get(session, (None, 0))
        before = (dict(self.kv), {name: (one.epoch, one.owner) for name, one in self.instances.items()})
        try:
            wanted = claim(read.found, session, read.claim.owner, leader.epoch, read.claim.heard)
        except Deposed:
            leader.deposed = True
            leader.ours.not_owned(session, 0, self.now_s)
            return
        if revision != read.revision:
            leader.ours.not_owned(session, 0 if current is None else current.epoch, self.now_s)
            after = (dict(self.kv), {name: (one.epoch, one.owner) for name, one in self.instances.items()})
            assert before == after, "a loser changed something"
            return
        assert leader_epoch_of(wanted.epoch) == leader.epoch, "a leader used another's epochs"
        self.revision += 1
        self.kv[session] = (wanted, self.revision)
        leader.obey(list(leader.ours.owned(session, wanted.owner, wanted.epoch, self.now_s)))

    @precondition(lambda self: any(leader.says for leader in self.leaders))
    @rule(which=WHICH, last=st.booleans(), lost=st.booleans())
    def says(self, which: int, last: bool, lost: bool) -> None:
        leader = self._leader(which)
        if not leader.says:
            return
        say = leader.says.pop(-1 if last else 0)
        if lost:
            return
        instance = self.instances[say.session]
        accepted = instance.take(say.owner, say.epoch)
        leader.answers.append((say.session, instance.epoch, accepted))

    @precondition(lambda self: any(leader.answers for leader in self.leaders))
    @rule(which=WHICH)
    def answers(self, which: int) -> None:
        leader = self._leader(which)
        if leader.answers:
            leader.ours.answered(*leader.answers.pop(0), self.now_s)

    @precondition(lambda self: self.leaders)
    @rule(which=WHICH, session=st.sampled_from(SESSIONS))
    def reports(self, which: int, session: str) -> None:
        self._leader(which).ours.reported(session, self.instances[session].epoch, self.now_s)

    @precondition(lambda self: self.leaders)
    @rule(which=WHICH)
    def all_goes_well(self, which: int) -> None:
        """Whatever this one has on its way gets through."""
        leader = self._leader(which)
        while leader.claims:
            self.reads(leader.number, False)
        while leader.reads:
            self.writes(leader.number, False)
        while leader.says:
            self.says(leader.number, False, False)
        while leader.answers:
            self.answers(leader.number)

    @rule(which=WHICH, by_s=st.sampled_from([0.3, 0.6, 1.1, 6.0]))
    def time_passes(self, which: int, by_s: float) -> None:
        self.now_s += by_s
        for leader in self.leaders:
            if not leader.deposed:
                leader.obey(leader.ours.due(self.now_s))

    @rule()
    def kv_vanishes(self) -> None:
        self.kv.clear()
        self.lease = 0

    @invariant()
    def one_owner_per_epoch(self) -> None:
        for session, instance in self.instances.items():
            assert instance.epoch >= self.highest[session], "an epoch went back"
            self.highest[session] = instance.epoch
            if instance.epoch:
                assert self.obeyed.setdefault((session, instance.epoch), instance.owner) == instance.owner

    @invariant()
    def leases_are_good_only_from_the_owner(self) -> None:
        """A lease counts when its epoch is the one that the instance obeys."""
        for leader in self.leaders:
            for session, instance in self.instances.items():
                if leader.ours.epoch_of(session) == instance.epoch:
                    assert instance.owner == leader.ours.owner_of(session)

    def teardown(self) -> None:
        """Left alone, the latest leader that still leads comes to own what it wants."""
        if not self.leaders:
            return
        leader = self.leaders[-1]
        for session in SESSIONS:
            if leader.ours.owner_of(session) is None or leader.deposed or self.lease != leader.epoch:
                continue
            for _ in range(30):
                self.reports(leader.number, session)
                self.time_passes(0, 1.1)
                self.all_goes_well(leader.number)
            assert leader.ours.epoch_of(session) == self.instances[session].epoch


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
