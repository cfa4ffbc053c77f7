"""Slots, queue and ticker, in a loop whose time stands still until the test moves it."""

from __future__ import annotations

import heapq
import itertools
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import cast

import pytest

from serai.engine_emulator.completion import Completion
from serai.engine_emulator.engine import Engine
from serai.engine_emulator.faults import Fault, FaultKind
from serai.engine_emulator.fixed_schedule import FixedSchedule
from serai.engine_emulator.generation import Generation
from serai.engine_emulator.text import answer_to
from serai.engine_emulator.timing import FixedTiming


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Timers in virtual time: the part of an event loop that the engine uses."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, int, Timer, Callable[[], None]]] = []
        self._order = itertools.count()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer()
        heapq.heappush(self._timers, (self.now + delay_s, next(self._order), timer, callback))
        return timer

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer, callback = heapq.heappop(self._timers)
            if not timer.cancelled:
                callback()
        self.now = end


class Reply:
    """Remembers when it was told what."""

    def __init__(self, loop: Loop, *, goes_on: bool = False) -> None:
        self._loop = loop
        self._goes_on = goes_on
        self.said: list[tuple[float, int, int]] = []
        self.finished_at: float | None = None
        self.faults = 0
        self.writable = True

    def say(self, first: int, tokens: int) -> None:
        self.said.append((round(self._loop.now - 100, 3), first, tokens))

    def reach_fault(self) -> bool:
        self.faults += 1
        return self._goes_on

    def finish(self) -> None:
        self.finished_at = round(self._loop.now - 100, 3)

    def is_writable(self) -> bool:
        return self.writable


@pytest.fixture
def loop() -> Loop:
    return Loop()


def engine_in(loop: Loop, *, ttft_s: float = 0.05, tpot_s: float = 0.02, slots: int = 2) -> Engine:
    schedule = FixedSchedule(FixedTiming(ttft_s, tpot_s), step_s=0.001, slots=slots)
    return Engine(schedule, loop=cast(AbstractEventLoop, loop), clock=lambda: loop.now)


def generation(reply: Reply, *, tokens: int = 3, stream: bool = True, fault: Fault | None = None) -> Generation:
    completion = Completion(
        chat=True,
        stream=stream,
        include_usage=False,
        answer=answer_to("x", 0),
        tokens=tokens,
        finish_reason="length",
    )
    return Generation(completion, reply, fault)


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=0.0021)


def test_a_stream_says_each_token_when_it_is_due(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    engine.submit(generation(reply))
    assert (engine.running, reply.said) == (1, [])
    loop.advance(1)
    assert [(near(at), first, tokens) for at, first, tokens in ((0.05, 0, 1), (0.07, 1, 1), (0.09, 2, 1))] == reply.said
    assert reply.finished_at == near(0.09)
    assert (engine.running, engine.totals.finished, engine.totals.generation_tokens) == (0, 1, 3)


def test_an_answer_in_one_piece_takes_as_long_as_its_stream(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    engine.submit(generation(reply, stream=False))
    loop.advance(1)
    assert reply.finished_at == near(0.09)


def test_an_engine_without_delay_answers_before_submit_returns(loop: Loop) -> None:
    engine, reply = engine_in(loop, ttft_s=0, tpot_s=0), Reply(loop)
    engine.submit(generation(reply))
    assert reply.finished_at == 0


def test_a_request_waits_for_a_slot_and_an_abort_frees_it_at_once(loop: Loop) -> None:
    engine = engine_in(loop, slots=1)
    first, second, third = (Reply(loop) for _ in range(3))
    running = generation(first, tokens=1000)
    engine.submit(running)
    engine.submit(generation(second))
    gone = generation(third)
    engine.submit(gone)
    engine.abort(gone)
    assert (engine.running, engine.waiting) == (1, 1)
    loop.advance(1)
    engine.abort(running)
    assert (engine.running, engine.waiting, engine.totals.aborted) == (1, 0, 2)
    said = len(first.said)
    loop.advance(1)
    assert second.finished_at == near(1.09)
    assert (len(first.said), third.said) == (said, [])
    assert (engine.running, engine.kv_tokens) == (0, 0)


def test_aborting_what_has_ended_counts_nothing(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    ended = generation(reply)
    engine.submit(ended)
    loop.advance(1)
    engine.abort(ended)
    assert (engine.totals.aborted, engine.totals.finished) == (0, 1)


def test_a_long_queue_of_requests_that_take_no_time_is_worked_off(loop: Loop) -> None:
    engine = engine_in(loop, ttft_s=0, tpot_s=0, slots=1)
    replies = [Reply(loop) for _ in range(2000)]
    for reply in replies:
        engine.submit(generation(reply, tokens=100))  # more than one step's worth
    loop.advance(60)
    assert all(reply.finished_at is not None for reply in replies)


def test_a_client_that_does_not_read_holds_its_stream_up(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    held = generation(reply)
    engine.submit(held)
    reply.writable = False
    loop.advance(1)
    assert reply.said == []
    reply.writable = True
    engine.resume(held)
    loop.advance(1)
    assert reply.finished_at is not None
    assert [first for _, first, _ in reply.said] == [0, 1, 2]


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_comes_after_its_tokens(loop: Loop, stream: bool) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    engine.submit(generation(reply, tokens=10, stream=stream, fault=Fault(FaultKind.HANG, tokens=2)))
    loop.advance(10)
    assert sum(tokens for _, _, tokens in reply.said) == 2
    assert (reply.faults, reply.finished_at, engine.running) == (1, None, 1)


def test_a_fault_beyond_the_answer_comes_before_its_end(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    engine.submit(generation(reply, tokens=3, fault=Fault(FaultKind.CUT, tokens=99)))
    loop.advance(10)
    assert (len(reply.said), reply.faults, reply.finished_at) == (3, 1, None)


def test_an_answer_may_go_on_after_its_fault(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop, goes_on=True)
    engine.submit(generation(reply, tokens=4, fault=Fault(FaultKind.MALFORMED, tokens=2)))
    loop.advance(10)
    assert [first for _, first, _ in reply.said] == [0, 1, 2, 3]
    assert (reply.faults, engine.totals.finished) == (1, 1)


def test_a_slowed_request_takes_that_much_longer(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    engine.submit(generation(reply, fault=Fault(FaultKind.SLOW, factor=10)), slow_factor=10)
    loop.advance(10)
    assert reply.finished_at == near(0.9)


def test_a_client_that_reads_again_does_not_wake_what_a_fault_has_stopped(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    stuck = generation(reply, tokens=10, fault=Fault(FaultKind.HANG, tokens=2))
    engine.submit(stuck)
    loop.advance(1)
    engine.resume(stuck)
    loop.advance(1)
    assert (reply.faults, len(reply.said)) == (1, 2)
