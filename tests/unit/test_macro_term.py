"""A term of leadership, with a fake bus: asks in, answers out, instances that accept or know better."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from serai.bench.stand_in_instances import easy_report
from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAnswers,
    AdmissionAsk,
    AdmissionRequest,
    Decision,
    InstanceOwner,
    InstanceState,
    TakeInstance,
)
from serai.contracts.codec import decode, encode
from serai.contracts.drain import SleepAnswer, SleepRequest
from serai.macro_scheduler import term as term_module
from serai.macro_scheduler.group import Drain, Group, GroupSettings, Scale, Sleep, Wake
from serai.macro_scheduler.owner_keys import OwnerKeys
from serai.macro_scheduler.scaling import ScalingSettings
from serai.macro_scheduler.term import Term
from serai.runtime.bus import BusError, Message
from unit.fakes import FakeBus, record_of

REPLY = "_INBOX_ingress.1.admission.1"
UNHEARD = "_INBOX_test.x.unheard.1"


class Owners:
    """The bucket of owners."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, int]] = {}
        self.away = 0

    async def get(self, key: str) -> tuple[bytes, int] | None:
        if self.away:
            self.away -= 1
            raise BusError("no answer")
        return self.values.get(key)

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        if revision != self.values.get(key, (b"", 0))[1]:
            return False
        self.values[key] = (value, revision + 1)
        return True


class Place:
    """A term over instances that the test plays."""

    def __init__(self, instances: int = 2) -> None:
        self.bus = FakeBus()
        self.owners = Owners()
        self.sessions = [f"s{number}" for number in range(instances)]
        self.obeyed = dict.fromkeys(self.sessions, 0)
        self.sequence = 1
        self.held = True
        self.deposed: list[str] = []
        for session in self.sessions:
            self.bus.answers[f"take.{session}"] = self._taker(session)
        self.term = Term(
            "m",
            1,
            Group(GroupSettings(owner="me-1")),
            self.bus,
            OwnerKeys(self.owners),
            lambda: self.held,
            self.deposed.append,
            UNHEARD,
        )

    def _taker(self, session: str) -> Callable[[bytes], bytes]:
        def take(payload: bytes) -> bytes:
            epoch = decode(TakeInstance, payload).epoch
            accepted = epoch >= self.obeyed[session]
            self.obeyed[session] = max(epoch, self.obeyed[session])
            self.sequence += 1
            report = easy_report(session, self.obeyed[session], 0, self.sequence, 1)
            return encode(InstanceState(report, [], accepted))

        return take

    async def begin(self) -> None:
        await self.term.begin([record_of(session, kv_tokens_max=100_000) for session in self.sessions])

    def ask(self, *request_ids: str, withdrawn: list[str] | None = None, **more: Any) -> list[AdmissionAnswer]:
        asks = [AdmissionAsk(one, 100, **more) for one in request_ids]
        self.term.on_admission(Message("admission.m", encode(AdmissionRequest(asks, withdrawn or [])), REPLY))
        return self.answers()

    def answers(self) -> list[AdmissionAnswer]:
        self.last = self.bus.take()
        return [
            answer
            for one in self.last
            if one.subject == REPLY
            for answer in decode(AdmissionAnswers, one.payload).answers
        ]

    def report(self, session: str, **changes: Any) -> None:
        self.sequence += 1
        view = self.term.group.views[session]
        report = easy_report(session, self.obeyed[session], view.sequence, self.sequence, 1)
        self.term.on_report(msgspec.structs.replace(report, **changes))


def run(story: Callable[[Place], Coroutine[Any, Any, None]], instances: int = 2) -> None:
    async def main() -> None:
        place = Place(instances)
        try:
            async with asyncio.timeout(10):
                await story(place)
        finally:
            await place.term.end()

    asyncio.run(main())


def test_asks_that_came_together_are_answered_together() -> None:
    async def story(place: Place) -> None:
        await place.begin()
        answers = place.ask("a", "b", "c")
        assert [(one.request_id, one.decision) for one in answers] == [(id, Decision.ADMIT) for id in "abc"]
        assert all(one.lease and one.lease.epoch == place.obeyed[one.session] for one in answers)
        assert [one.reply for one in place.last if one.subject == REPLY] == [f"{UNHEARD}.1"]
        assert place.term.explain("b")
        assert place.term.picture()[0].startswith("m: 2 of 2 instances obey")

    run(story)


def test_it_is_silent_when_the_lease_is_not_young_and_refers_elsewhere_before_an_instance_obeys() -> None:
    async def story(place: Place) -> None:
        assert [one.decision for one in place.ask("a")] == [Decision.UNKNOWN]
        await place.begin()
        place.held = False
        assert place.ask("b") == []

    run(story)


def test_an_ask_that_none_of_its_instances_may_have_is_for_another_policy() -> None:
    async def story(place: Place) -> None:
        await place.begin()
        assert [one.decision for one in place.ask("a", excluded=["s0", "s1", "s9"])] == [Decision.UNKNOWN]
        assert [one.session for one in place.ask("b", excluded=["s0"])] == ["s1"]

    run(story)


def test_who_waits_gets_a_place_when_a_report_makes_room() -> None:
    async def story(place: Place) -> None:
        await place.begin()
        place.report("s0", waiting=5, waiting_prefill_s=3.0, laxity_s=0.1)
        assert [one.decision for one in place.ask("a", slo_ttft_s=2.0)] == [Decision.WAIT]
        assert [one.decision for one in place.ask("a", slo_ttft_s=2.0)] == [Decision.WAIT]
        place.report("s0")
        assert [(one.request_id, one.decision) for one in place.answers()] == [("a", Decision.ADMIT)]

    run(story, instances=1)


def test_what_an_ingress_that_has_gone_asked_for_is_forgotten() -> None:
    async def story(place: Place) -> None:
        await place.begin()
        place.report("s0", waiting=5, waiting_prefill_s=3.0, laxity_s=0.1)
        place.ask("a", slo_ttft_s=2.0)
        place.ask("b", slo_ttft_s=2.0)
        assert len(place.term.group.pending) == 2
        place.term.on_unheard(2)  # Of the message that told `b` to wait; `a` was the same ingress's.
        assert len(place.term.group.pending) == 0
        place.term.on_unheard(2)
        place.report("s0")
        assert place.answers() == []

    run(story, instances=1)


def test_a_withdrawn_lease_is_given_back() -> None:
    async def story(place: Place) -> None:
        await place.begin()
        (answer,) = place.ask("a")
        view = place.term.group.views[answer.session]
        assert view.leases
        place.ask(withdrawn=["a"])
        assert not view.leases

    run(story)


@pytest.mark.parametrize(("wrong", "field"), [({"waited_s": -1.0}, "waited_s"), ({"slo_ttft_s": 0.0}, "slo_ttft_s")])
def test_an_ask_that_cannot_be_is_refused_with_the_field(wrong: dict[str, Any], field: str) -> None:
    async def story(place: Place) -> None:
        await place.begin()
        (answer,) = place.ask("a", **wrong)
        assert answer.decision is Decision.REFUSE
        assert answer.reason.startswith(field)
        place.term.on_admission(Message("admission.m", b"{", REPLY))
        assert place.answers() == []

    run(story)


def test_an_instance_that_knows_a_higher_epoch_of_ours_is_taken_above_it() -> None:
    async def story(place: Place) -> None:
        place.obeyed["s0"] = 1 << 20 | 7
        await place.begin()
        assert place.obeyed["s0"] == 1 << 20 | 8
        assert decode(InstanceOwner, place.owners.values["s0"][0]).epoch == 1 << 20 | 8
        assert place.deposed == []

    run(story)


def test_an_instance_of_a_later_leader_deposes_this_one() -> None:
    async def story(place: Place) -> None:
        place.owners.values["s0"] = (encode(InstanceOwner("s0", "other", 9 << 20)), 4)
        place.term.join(record_of("s0"))
        while not place.deposed:
            await asyncio.sleep(0.01)
        assert "s0 obeys epoch" in place.deposed[0]

    run(story, instances=1)


def test_a_bucket_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(term_module, "CLAIM_AGAIN_S", 0.01)

    async def story(place: Place) -> None:
        place.owners.away = 3
        await place.begin()
        assert place.term.group.views["s0"].epoch == place.obeyed["s0"] > 0

    run(story, instances=1)


def test_an_instance_that_does_not_answer_joins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(term_module, "REBUILD_S", 0.05)

    async def story(place: Place) -> None:
        mute = place.bus.answers.pop("take.s1")
        await place.begin()
        assert {one.session for one in place.ask("a", "b", "c")} == {"s0"}
        place.bus.answers["take.s1"] = mute
        while "2 of 2" not in place.term.picture()[0]:
            await asyncio.sleep(0.02)

    run(story)


# -- sleep -------------------------------------------------------------------------------------------------------------


class Sleepers(Place):
    """With scaling, and engines that sleep, unless they say that they cannot."""

    def __init__(self, *, why: str = "") -> None:
        super().__init__()
        self.told: list[SleepRequest] = []
        scaling = ScalingSettings(window_s=1.0, evaluate_every_s=0.5, start_s=0.0, sleeps=True)
        self.term = Term(
            "m",
            1,
            Group(GroupSettings(owner="me-1", scaling=scaling)),
            self.bus,
            OwnerKeys(self.owners),
            lambda: self.held,
            self.deposed.append,
            UNHEARD,
        )

        def asked(payload: bytes) -> bytes:
            self.told.append(decode(SleepRequest, payload))
            return encode(SleepAnswer("s1", not why, why))

        for session in self.sessions:
            self.bus.answers[f"sleep.{session}"] = asked

    async def until(self, there: Callable[[], object]) -> None:
        while not there():
            await asyncio.sleep(0.001)


def sleepers(story: Callable[[Sleepers], Coroutine[Any, Any, None]], *, why: str = "") -> None:
    async def main() -> None:
        place = Sleepers(why=why)
        try:
            async with asyncio.timeout(10):
                await place.begin()
                await story(place)
        finally:
            await place.term.end()

    asyncio.run(main())


def test_an_instance_that_is_not_needed_is_put_to_sleep_and_woken_before_another_is_wished_for() -> None:
    async def story(place: Sleepers) -> None:
        place.term._obey([Drain("s1", 1, 30.0), Sleep("s1")])
        await place.until(lambda: place.told)
        assert (place.told[0].asleep, place.told[0].within_s) == (True, 30.0)
        assert not any(one.subject.startswith("drain.") for one in place.bus.take())
        place.term.leave("s1")
        place.term.slept("s1")
        assert place.term.asleep == {"s1"}
        members = place.term.group.macros.members
        effects = members._wish(Scale(2, "busy"), time.monotonic())
        assert effects == [Wake("s1"), Scale(1, "busy")]
        place.term._obey([Wake("s1")])
        await place.until(lambda: len(place.told) == 2)
        assert not place.told[1].asleep
        place.term.join(record_of("s1", kv_tokens_max=100_000))
        assert place.term.asleep == set()

    sleepers(story)


def test_an_engine_that_cannot_sleep_ends() -> None:
    async def story(place: Sleepers) -> None:
        place.term._obey([Drain("s1", 1, 30.0)])
        await place.until(lambda: any(one.subject == "drain.s1" for one in place.bus.published))
        place.term._obey([Drain("s1", 0, 25.0)])
        assert len(place.told) == 1

    sleepers(story, why="its engine cannot sleep")


def test_a_sleeper_that_has_left_is_not_woken() -> None:
    async def story(place: Sleepers) -> None:
        place.term.slept("s1")
        place.term.leave("s1")
        assert place.term.group.macros.members._wish(Scale(1, "busy"), time.monotonic()) == [Scale(1, "busy")]

    sleepers(story)
