"""Engines that sleep instead of ending: what each kind is asked, and how a session drains, sleeps and wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from serai.contracts.codec import decode, encode
from serai.contracts.drain import SleepAnswer, SleepRequest
from serai.contracts.session_record import Draining, SessionMetadata
from serai.engine_emulator.sleep import Sleep
from serai.runtime.bus import Message
from serai.worker_agent import sleeping as module
from serai.worker_agent.engine.base import NotServing
from serai.worker_agent.engine.emulated import EmulatedEngine
from serai.worker_agent.engine.openai import OpenAiEngine
from serai.worker_agent.engine.sglang import SglangEngine
from serai.worker_agent.engine.vllm import VllmEngine
from serai.worker_agent.sleeping import CannotSleep, EngineSleep, Sleeping
from unit.fakes import FakeBus


def test_vllm_sleeps_when_it_was_started_so_that_it_can() -> None:
    assert VllmEngine().sleep_calls(["vllm", "serve", "m"]) is None
    calls = VllmEngine().sleep_calls(["vllm", "serve", "m", "--enable-sleep-mode"])
    assert calls is not None
    assert (calls.sleep, calls.wake, calls.asks) == ("/sleep?level=1", "/wake_up", "/is_sleeping")
    assert calls.variables == {"VLLM_SERVER_DEV_MODE": "1"}


def test_sglang_sleeps_when_it_was_started_so_that_it_can() -> None:
    assert SglangEngine().sleep_calls(["sglang", "serve"]) is None
    calls = SglangEngine().sleep_calls(["sglang", "serve", "--enable-memory-saver"])
    assert calls is not None
    assert (calls.sleep, calls.wake) == ("/release_memory_occupation", "/resume_memory_occupation")


def test_the_emulated_engine_sleeps_as_the_one_that_it_is_like_and_others_do_not() -> None:
    vllm, sglang = (EmulatedEngine().sleep_calls(["serai", *words]) for words in ((), ("--engine", "sglang")))
    assert vllm is not None
    assert sglang is not None
    assert (vllm.asks, sglang.asks) == ("/is_sleeping", "")
    assert OpenAiEngine().sleep_calls(["any"]) is None


def test_the_emulated_engine_takes_its_time() -> None:
    sleep = Sleep(1.0, 2.0)
    assert (sleep.serves(0.0), sleep.asleep(0.0)) == (True, False)
    sleep.fall(0.0)
    sleep.fall(0.5)
    assert (sleep.serves(0.9), sleep.asleep(0.9)) == (False, False)
    assert (sleep.serves(1.0), sleep.asleep(1.0)) == (False, True)
    sleep.wake(5.0)
    assert (sleep.serves(6.9), sleep.asleep(6.9)) == (False, True)
    assert (sleep.serves(7.0), sleep.asleep(7.0)) == (True, False)


class StandInEngine:
    """An engine that does as it is told, or raises what the test says."""

    def __init__(self) -> None:
        self.asleep = False
        self.refuses: list[Exception] = []

    async def fall(self) -> None:
        if self.refuses:
            raise self.refuses.pop()
        self.asleep = True

    async def wake(self) -> None:
        if self.refuses:
            raise self.refuses.pop()
        self.asleep = False


class StandInDesk:
    def __init__(self) -> None:
        self.in_flight = 0
        self.told: list[str] = []

    def refuse_new(self) -> None:
        self.told.append("refuse")

    def take_again(self) -> None:
        self.told.append("take")

    def hand_over_all(self) -> None:
        self.told.append(f"hand over {self.in_flight}")
        self.in_flight = 0


class Place:
    def __init__(self, *, able: bool = True) -> None:
        self.bus = FakeBus()
        self.engine = StandInEngine()
        self.desk = StandInDesk()
        self.metadata = SessionMetadata(model="m", engine_model="m", engine="emulated")
        self.said: list[SessionMetadata] = []
        self.canary_fails = 0
        self.ends = False
        self.sleeping = Sleeping(
            self.bus,
            "s1",
            self.desk,
            cast(EngineSleep, self.engine) if able else None,
            self.canary,
            lambda: self.metadata,
            self.change,
            lambda: self.ends,
        )

    async def canary(self) -> None:
        if self.canary_fails:
            self.canary_fails -= 1
            raise NotServing("not yet")

    def change(self, metadata: SessionMetadata) -> None:
        self.metadata = metadata
        self.said.append(metadata)

    def ask(self, asleep: bool, within_s: float = 0.0) -> SleepAnswer:
        payload = encode(SleepRequest(asleep, within_s, "not needed"))
        self.sleeping.on_sleep(Message("sleep.s1", payload, "_INBOX_x"))
        return decode(SleepAnswer, self.bus.take()[-1].payload)

    async def until(self, asleep: bool) -> None:
        while self.sleeping.asleep is not asleep or not self.said or self.said[-1].draining is not None:
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WITHDRAWAL_S", 0.0)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.005)


def run(story: Callable[[Place], Coroutine[Any, Any, None]], *, able: bool = True) -> None:
    async def main() -> None:
        place = Place(able=able)
        await place.sleeping.start()
        running = asyncio.create_task(place.sleeping.running())
        try:
            async with asyncio.timeout(5):
                await story(place)
        finally:
            running.cancel()

    asyncio.run(main())


def test_a_session_drains_sleeps_and_wakes() -> None:
    async def story(place: Place) -> None:
        assert place.ask(True, 60.0).accepted
        await place.until(True)
        assert [(one.draining, one.asleep) for one in place.said] == [
            (Draining("not needed", 60.0), False),
            (None, True),
        ]
        assert place.desk.told == ["refuse", "hand over 0"]
        assert place.engine.asleep
        place.canary_fails = 2
        assert place.ask(False).accepted
        await place.until(False)
        assert (place.said[-1].asleep, place.desk.told[-1], place.engine.asleep) == (False, "take", False)

    run(story)


def test_what_runs_may_end_and_what_is_left_is_handed_over() -> None:
    async def story(place: Place) -> None:
        place.desk.in_flight = 3
        place.ask(True, 0.03)
        await place.until(True)
        assert place.desk.told == ["refuse", "hand over 3"]

    run(story)


def test_who_is_wanted_again_before_it_sleeps_serves_on() -> None:
    async def story(place: Place) -> None:
        place.desk.in_flight = 1
        place.ask(True, 60.0)
        while "refuse" not in place.desk.told:
            await asyncio.sleep(0.002)
        place.ask(False)
        while "take" not in place.desk.told:
            await asyncio.sleep(0.002)
        assert (place.desk.in_flight, place.engine.asleep, place.metadata.draining) == (1, False, None)

    run(story)


def test_an_engine_that_does_not_sleep_serves_on_and_one_that_does_not_wake_is_asked_again() -> None:
    async def story(place: Place) -> None:
        place.engine.refuses = [CannotSleep("/sleep was answered 500")]
        place.ask(True)
        while "take" not in place.desk.told:
            await asyncio.sleep(0.002)
        assert (place.metadata.asleep, place.metadata.draining) == (False, None)
        place.ask(True)
        await place.until(True)
        place.engine.refuses = [CannotSleep("/wake_up was answered 500")]
        place.ask(False)
        await place.until(False)
        assert not place.engine.asleep

    run(story)


def test_a_session_that_ends_serves_no_more_whatever_is_wished_of_its_sleep() -> None:
    async def falling(place: Place) -> None:
        place.desk.in_flight = 1
        place.ask(True, 0.02)
        while "refuse" not in place.desk.told:
            await asyncio.sleep(0.002)
        place.ends, place.metadata = True, SessionMetadata("m", "m", "emulated", draining=Draining("it ends", 60.0))
        assert place.ask(False).why == "its session ends"
        await asyncio.sleep(0.05)
        assert (place.desk.told, place.desk.in_flight, place.engine.asleep) == (["refuse"], 1, False)
        assert place.metadata.draining == Draining("it ends", 60.0)

    async def waking(place: Place) -> None:
        place.ask(True)
        await place.until(True)
        place.engine.refuses = [CannotSleep("/wake_up was answered 500")]
        place.ask(False)
        while place.engine.refuses:
            await asyncio.sleep(0.001)
        place.ends = True
        while place.sleeping.asleep:
            await asyncio.sleep(0.002)
        assert "take" not in place.desk.told

    run(falling)
    run(waking)


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    async def story(place: Place) -> None:
        assert "within_s -1" in place.ask(True, -1.0).why
        place.metadata = SessionMetadata("m", "m", "emulated", draining=Draining("it ends", 5.0))
        assert place.ask(True).why == "it is draining: it ends"
        place.sleeping.on_sleep(Message("sleep.s1", b"{", "_INBOX_x"))
        assert not decode(SleepAnswer, place.bus.take()[-1].payload).accepted

    async def unable(place: Place) -> None:
        assert "cannot sleep" in place.ask(True).why

    run(story)
    run(unable, able=False)
