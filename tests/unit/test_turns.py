"""Turns as tasks take them: who is woken, who is cancelled at which moment, and what happens while nobody serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from serai.ingress import turns as module
from serai.ingress.queueing import Arrived, Ended, QueueSettings, Refusal
from serai.ingress.turns import ModelTurns, NotServed, Turns


class Sessions:
    """What a test says that the sessions of the model can do."""

    def __init__(self, capacity: int | None = 1) -> None:
        self.room = capacity
        self.changes = 0
        self.looks = 0
        self.is_gap = False
        self.is_expected = True
        self.start_time_s = 0.0

    def serves(self, model: str, now: float) -> bool:
        return not self.is_gap

    def expects(self, model: str) -> bool:
        return self.is_expected

    def start_s(self, model: str) -> float:
        return self.start_time_s

    def capacity(self, model: str, now: float) -> int | None:
        self.looks += 1
        return self.room

    def becomes(self, room: int | None) -> None:
        self.room = room
        self.changes += 1


def run(sessions: Sessions, main: Callable[[ModelTurns, Turns], Awaitable[None]]) -> None:
    async def bounded() -> None:
        turns = Turns(sessions, lambda: sessions.changes)
        turns.settings = QueueSettings(gap_max_s=0.2)
        async with asyncio.timeout(10):
            model = turns.make("m")
            model.look(now())
            await main(model, turns)
        assert (turns.waiting, turns.running) == (0, 0)
        turns.retain(())
        assert turns.get("m") is None

    asyncio.run(bounded())


def now() -> float:
    return asyncio.get_running_loop().time()


def ended(turns: ModelTurns, request: str) -> None:
    turns.end(Ended(request), now(), None)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_whoever_ends_wakes_the_next_and_idle_looks_are_rare() -> None:
    sessions = Sessions()

    async def main(turns: ModelTurns, _: Turns) -> None:
        for number in range(50):
            turns.look(now())
            assert turns.queue.go(Arrived(str(number)), now())
            ended(turns, str(number))
        assert sessions.looks == 1
        assert turns.queue.go(Arrived("a"), now())
        waiting = [asyncio.create_task(turns.wait(Arrived(name))) for name in "bc"]
        await settled()
        ended(turns, "a")
        await settled()
        assert [task.done() for task in waiting] == [True, False]
        ended(turns, "b")
        assert await waiting[1] > 0
        ended(turns, "c")

    run(sessions, main)


def test_more_room_is_noticed_while_somebody_waits_and_after_a_change() -> None:
    sessions = Sessions(0)

    async def main(turns: ModelTurns, _: Turns) -> None:
        waiting = asyncio.create_task(turns.wait(Arrived("a")))
        await settled()
        sessions.room = 1
        assert 0 < await waiting < 5
        sessions.becomes(2)
        await asyncio.sleep(module.LOOK_APART_S * 1.5)
        turns.look(now())
        assert turns.queue.go(Arrived("b"), now())
        for request in "ab":
            ended(turns, request)

    run(sessions, main)


@pytest.mark.parametrize("dispatched", [False, True])
def test_who_is_cancelled_leaves_nothing_even_when_its_turn_comes_in_that_moment(dispatched: bool) -> None:
    async def main(turns: ModelTurns, _: Turns) -> None:
        turns.queue.go(Arrived("a"), now())
        first, second = [asyncio.create_task(turns.wait(Arrived(name))) for name in "bc"]
        await settled()
        if dispatched:
            ended(turns, "a")
        first.cancel()
        await settled()
        assert first.cancelled()
        if not dispatched:
            assert turns.queue.waiting == 1
            ended(turns, "a")
        await second
        ended(turns, "c")

    run(Sessions(), main)


def test_who_waits_too_long_is_told_at_its_time() -> None:
    async def main(turns: ModelTurns, _: Turns) -> None:
        turns.queue.go(Arrived("a"), now())
        began_s = now()
        with pytest.raises(NotServed) as refused:
            await turns.wait(Arrived("b", begin_by_s=began_s + 0.02))
        assert refused.value.refuse.why is Refusal.DEADLINE_PASSED
        assert now() - began_s >= 0.02
        ended(turns, "a")

    run(Sessions(), main)


def test_a_gap_is_waited_out_for_so_long_and_no_longer() -> None:
    sessions = Sessions(0)
    sessions.is_gap = True

    async def main(turns: ModelTurns, _: Turns) -> None:
        began_s = now()
        with pytest.raises(NotServed) as refused:
            await turns.wait(Arrived("a"))
        assert refused.value.refuse.why is Refusal.CLOSED
        assert now() - began_s >= 0.2
        waiting = asyncio.create_task(turns.wait(Arrived("b")))
        await asyncio.sleep(0.1)
        sessions.is_gap, sessions.room = False, 1
        await waiting
        ended(turns, "b")

    run(sessions, main)


def test_when_the_last_session_has_left_nobody_waits_on() -> None:
    sessions = Sessions(0)
    sessions.is_gap, sessions.is_expected = True, False

    async def main(turns: ModelTurns, _: Turns) -> None:
        began_s = now()
        with pytest.raises(NotServed):
            await turns.wait(Arrived("a"))
        assert now() - began_s < 0.2

    run(sessions, main)


def test_at_the_end_all_that_wait_are_told() -> None:
    async def main(turns: ModelTurns, every: Turns) -> None:
        turns.queue.go(Arrived("a"), now())
        waiting = [asyncio.create_task(turns.wait(Arrived(name))) for name in "bc"]
        await settled()
        every.stop()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(one, NotServed) for one in found] == [True, True]
        ended(turns, "a")

    run(Sessions(), main)


def test_who_waits_for_an_engine_that_starts_waits_as_long_as_that_takes() -> None:
    sessions = Sessions(0)
    sessions.is_gap, sessions.start_time_s = True, 10.0

    async def main(model: ModelTurns, turns: Turns) -> None:
        waiting = asyncio.create_task(model.wait(Arrived("r")))
        await asyncio.sleep(0.5)
        assert not waiting.done(), "longer than any gap"
        assert turns.unserved(now()) == {"m": 1}
        sessions.is_gap = False
        sessions.becomes(1)
        await waiting
        assert turns.unserved(now()) == {}
        ended(model, "r")

    run(sessions, main)
