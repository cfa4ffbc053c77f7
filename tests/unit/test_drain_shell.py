"""Who hears that a session is to end, and what is done to its desk then."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from serai.contracts.session_record import Draining
from serai.worker_agent.drain import Ending, Reason, Running
from serai.worker_agent.drain_shell import DRAINS, HANDED_OVER, Endings, Notice, drain
from serai.worker_agent.settings import AgentSettings

LONG = Ending(Reason.ALLOCATION_END, 600.0, "its allocation ends")


class FakeDesk:
    """Requests that end when they are handed over, or when the test says so."""

    def __init__(self, *keys: int) -> None:
        self.keys = list(keys)
        self.refuses = False
        self.handed: list[int] = []
        self.on_empty: Any = None

    @property
    def in_flight(self) -> int:
        return len(self.keys)

    def running(self) -> list[Running]:
        return [Running(key, 0.0) for key in self.keys]

    def refuse_new(self) -> None:
        self.refuses = True

    def hand_over(self, keys: Collection[int]) -> None:
        assert self.refuses
        self.handed += keys
        self.end(*keys)

    def end(self, *keys: int) -> None:
        self.keys = [key for key in self.keys if key not in keys]
        if not self.keys:
            self.on_empty()


def test_followers_hear_what_was_said_before_and_after_and_nothing_of_each_other() -> None:
    notice = Notice()
    early = notice.follower()
    notice.give(LONG)
    late = notice.follower()
    early.give(Ending(Reason.ASKED, 5.0))
    notice.forget(late)
    notice.give(Ending(Reason.STOPPING, 1.0))
    reasons = [[told.ending.reason for told, _ in one.words(0)] for one in (notice, early, late)]
    assert reasons == [
        [Reason.ALLOCATION_END, Reason.STOPPING],
        [Reason.ALLOCATION_END, Reason.ASKED, Reason.STOPPING],
        [Reason.ALLOCATION_END],
    ]
    assert early.given.is_set()


def test_a_desk_is_drained_as_soon_as_its_last_request_has_ended() -> None:
    async def run() -> None:
        desk, notice, said = FakeDesk(1, 2), Notice(), list[Draining]()
        notice.give(LONG)
        before = DRAINS.of("allocation_end").value
        async with asyncio.timeout(5):
            draining = asyncio.create_task(drain(desk, notice, said.append, 1.0))  # type: ignore[arg-type]
            while not desk.refuses:
                await asyncio.sleep(0.01)
            desk.end(1, 2)
            await draining
        assert [(one.reason, round(one.remaining_s)) for one in said] == [("its allocation ends", 597)]
        assert desk.handed == []
        assert DRAINS.of("allocation_end").value == before + 1

    asyncio.run(run())


def test_a_later_word_that_leaves_no_time_hands_everything_over_and_is_the_reason_that_counts() -> None:
    async def run() -> None:
        desk, notice = FakeDesk(1, 2, 3), Notice()
        notice.give(LONG)
        drains, handed = DRAINS.of("preempted").value, HANDED_OVER.of().value
        async with asyncio.timeout(5):
            draining = asyncio.create_task(drain(desk, notice, lambda _: None, 1.0))  # type: ignore[arg-type]
            while not desk.refuses:
                await asyncio.sleep(0.01)
            notice.give(Ending(Reason.PREEMPTED, 0.0), final=True)
            await draining
        assert sorted(desk.handed) == [1, 2, 3]
        assert DRAINS.of("preempted").value == drains + 1
        assert HANDED_OVER.of().value == handed + 3

    asyncio.run(run())


class FakeAllocation:
    """A batch system that takes its time to tell."""

    def __init__(self, told: Ending | None, remaining_s: float | None = None) -> None:
        self.asked = asyncio.Event()
        self._told = told
        self._remaining_s = remaining_s

    def remaining_s(self) -> float | None:
        return self._remaining_s

    def grace_s(self) -> float | None:
        return 30.0

    async def ending(self) -> Ending | None:
        await self.asked.wait()
        return self._told


async def words_after(allocation: FakeAllocation, *, stop: bool = False, warned: bool = False) -> list[Ending]:
    """What is given first, and what when the batch system has told. `drain_s` is 20, `engine_stop_s` 5."""
    endings = Endings(AgentSettings(model="m", drain_s=20, engine_stop_s=5), allocation)  # type: ignore[arg-type]
    events = asyncio.Event(), asyncio.Event()
    watching = asyncio.create_task(endings.watching(*events))
    try:
        async with asyncio.timeout(5):
            for event, is_set in zip(events, (stop, warned), strict=True):
                if is_set:
                    event.set()
            await endings.notice.given.wait()
            first = len(endings.notice.words(0))
            allocation.asked.set()
            while stop and allocation._told and len(endings.notice.words(0)) == first:
                await asyncio.sleep(0.01)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return [told.ending for told, _ in endings.notice.words(0)]


def test_a_signal_begins_the_end_before_the_batch_system_has_told() -> None:
    async def run() -> None:
        told = Ending(Reason.PREEMPTED, 90.0, "Slurm: preempted")
        words = await words_after(FakeAllocation(told), stop=True)
        assert [(one.reason, one.left_s, one.requests_s) for one in words[:1]] == [(Reason.STOPPING, 27.0, 20)]
        assert words[1:] == [told]

    asyncio.run(run())


def test_a_signal_to_a_job_with_hours_left_is_a_persons() -> None:
    async def run() -> None:
        words = await words_after(FakeAllocation(Ending(Reason.ALLOCATION_END, 7200.0)), stop=True)
        assert (words[1].reason, words[1].left_s, words[1].requests_s) == (Reason.STOPPING, 27.0, 20)

    asyncio.run(run())


def test_a_warning_gives_what_is_left_of_the_allocation() -> None:
    async def run() -> None:
        words = await words_after(FakeAllocation(None, 180.0), warned=True)
        assert [(one.reason, one.left_s) for one in words] == [(Reason.ALLOCATION_END, 180.0)]

    asyncio.run(run())


def test_the_clock_begins_the_end_by_itself_and_leaves_a_margin() -> None:
    async def run() -> None:
        allocation = FakeAllocation(None, 31.0)
        endings = Endings(AgentSettings(model="m", drain_s=20, engine_stop_s=5), allocation)  # type: ignore[arg-type]
        watching = asyncio.create_task(endings.watching(asyncio.Event(), asyncio.Event()))
        for _ in range(5):
            await asyncio.sleep(0)  # It looks for the first time.
        assert not endings.notice.given.is_set()
        allocation._remaining_s = 15.0
        async with asyncio.timeout(5):
            await endings.notice.given.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        (told, _), *others = endings.notice.words(0)
        assert (told.ending.reason, told.ending.left_s, others) == (Reason.ALLOCATION_END, 10.0, [])

    asyncio.run(run())
