"""The batch scheduler behind the engine, in a loop whose time stands still until the test moves it."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from typing import cast

import pytest

from serai.engine_emulator.batched_schedule import BatchedSchedule
from serai.engine_emulator.batching.engine import BatchEngine, TooLong
from serai.engine_emulator.batching.settings import BatchMode, BatchSettings
from serai.engine_emulator.completion import Completion
from serai.engine_emulator.engine import Engine
from serai.engine_emulator.faults import Fault, FaultKind
from serai.engine_emulator.generation import Generation
from serai.engine_emulator.measures import Histogram
from serai.engine_emulator.text import answer_to, block_keys
from serai.performance.latency_model import Step
from unit.test_engine_emulator_engine import Loop, Reply


class Steady:
    """A latency model whose every step takes 20 ms, or 100 ms with a prompt in it."""

    def step_s(self, step: Step) -> float:
        return 0.1 if step.chunks else 0.02

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        raise AssertionError

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        raise AssertionError

    def kv_capacity_tokens(self) -> int:
        return 0

    def kv_bytes_per_token(self) -> float:
        return 0.0


@pytest.fixture
def loop() -> Loop:
    return Loop()


def engine_in(loop: Loop, *, slots: int = 8, mode: BatchMode = BatchMode.MIXED, kv_tokens: int = 1600) -> Engine:
    settings = BatchSettings(kv_tokens, mode, sequences_max=slots, step_tokens_max=512)
    schedule = BatchedSchedule(BatchEngine(Steady(), settings))
    return Engine(schedule, loop=cast(AbstractEventLoop, loop), clock=lambda: loop.now)


def generation(reply: Reply, *, tokens: int = 3, stream: bool = True, fault: Fault | None = None) -> Generation:
    answer = answer_to("x" * 64, 0)
    completion = Completion(
        chat=True, stream=stream, include_usage=False, answer=answer, tokens=tokens, finish_reason="length"
    )
    return Generation(completion, reply, fault)


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=0.0021)


def test_tokens_come_at_the_ends_of_steps_and_the_kv_is_free_at_the_end(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    engine.submit(generation(reply))
    assert (engine.running, reply.said) == (1, [])
    loop.advance(1)
    assert reply.said == [(near(0.1), 0, 1), (near(0.12), 1, 1), (near(0.14), 2, 1)]
    assert (reply.finished_at, engine.running, engine.kv_tokens, engine.totals.finished) == (near(0.14), 0, 0, 1)


def test_lateness_of_less_than_a_step_does_not_add_up(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    engine.submit(generation(reply, tokens=101))
    # A timer that always fires a few milliseconds late.
    call_later = loop.call_later
    loop.call_later = lambda delay_s, callback: call_later(delay_s + 0.007, callback)  # type: ignore[method-assign]
    loop.advance(10)
    assert reply.finished_at is not None
    assert 2.1 <= reply.finished_at < 2.12


def test_an_engine_that_was_held_up_for_longer_goes_on_from_now(loop: Loop) -> None:
    held_up_s = 0.0
    settings = BatchSettings(1600, sequences_max=8)
    schedule = BatchedSchedule(BatchEngine(Steady(), settings))
    engine = Engine(schedule, loop=cast(AbstractEventLoop, loop), clock=lambda: loop.now + held_up_s)
    reply = Reply(loop)
    engine.submit(generation(reply, tokens=11))
    loop.advance(0.201)
    assert len(reply.said) == 6
    held_up_s = 5.0  # nothing ran for five seconds
    loop.advance(0.021)
    assert len(reply.said) == 7  # and no burst makes up for it
    loop.advance(1)
    assert reply.finished_at == near(0.3)


def test_a_client_that_does_not_read_gets_all_it_missed_and_holds_nobody_up(loop: Loop) -> None:
    engine, held, other = engine_in(loop), Reply(loop), Reply(loop)
    slow = generation(held, tokens=20)
    engine.submit(slow)
    engine.submit(generation(other, tokens=5))
    loop.advance(0.11)
    held.writable = False
    loop.advance(2)
    assert other.finished_at is not None
    assert (len(held.said), engine.batch is not None and engine.batch.running) == (1, 0)
    held.writable = True
    engine.resume(slow)
    assert [(first, tokens) for _, first, tokens in held.said] == [(0, 1), (1, 19)]
    assert held.finished_at is not None


def test_an_answer_in_one_piece_is_said_at_its_end(loop: Loop) -> None:
    engine, reply = engine_in(loop), Reply(loop)
    engine.submit(generation(reply, stream=False))
    loop.advance(1)
    assert reply.said == [(near(0.14), 0, 3)]
    assert engine.measures.first_token_s.total == near(0.1)
    assert (engine.measures.between_tokens_s.count, engine.measures.between_tokens_s.total) == (2, near(0.04))


def test_an_abort_frees_slot_and_kv_at_once_and_the_next_begins(loop: Loop) -> None:
    engine, first, second = engine_in(loop, slots=1), Reply(loop), Reply(loop)
    gone = generation(first, tokens=50)
    engine.submit(gone)
    engine.submit(generation(second))
    loop.advance(0.15)
    engine.abort(gone)
    engine.abort(gone)
    assert (engine.running, engine.waiting, engine.kv_tokens, engine.totals.aborted) == (0, 1, 0, 1)
    said = len(first.said)
    loop.advance(1)
    assert (len(first.said), second.finished_at is not None) == (said, True)


@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_keeps_slot_and_blocks_until_its_client_leaves(loop: Loop, tokens: int, stream: bool) -> None:
    engine, hung, other = engine_in(loop, slots=1), Reply(loop), Reply(loop)
    hanging = generation(hung, tokens=9, stream=stream, fault=Fault(FaultKind.HANG, tokens=tokens))
    engine.submit(hanging)
    engine.submit(generation(other))
    loop.advance(5)
    assert sum(count for _, _, count in hung.said) == tokens
    assert (hung.faults, engine.running, engine.waiting, other.said) == (1, 1, 1, [])
    assert engine.kv_tokens > 0
    engine.abort(hanging)
    loop.advance(1)
    assert (other.finished_at is not None, engine.running, engine.kv_tokens) == (True, 0, 0)


@pytest.mark.parametrize(("goes_on", "said"), [(True, 4), (False, 2)])
def test_a_fault_comes_after_its_tokens(loop: Loop, goes_on: bool, said: int) -> None:
    engine, reply = engine_in(loop), Reply(loop, goes_on=goes_on)
    engine.submit(generation(reply, tokens=4, fault=Fault(FaultKind.MALFORMED, tokens=2)))
    loop.advance(1)
    assert (len(reply.said), reply.faults, reply.finished_at is not None) == (said, 1, goes_on)


def test_a_slowed_request_is_late_by_its_factor_and_others_are_not(loop: Loop) -> None:
    engine, slow, other = engine_in(loop), Reply(loop), Reply(loop)
    engine.submit(generation(slow), slow_factor=10)
    engine.submit(generation(other))
    loop.advance(5)
    assert slow.said[0][0] == near(1.0)
    assert slow.finished_at is not None
    assert slow.finished_at > 1.3
    assert other.finished_at is not None
    assert other.finished_at < 0.5


def test_a_closed_gate_is_opened_by_waking_the_engine(loop: Loop) -> None:
    engine, reply = engine_in(loop, mode=BatchMode.PHASE_GATED), Reply(loop)
    assert engine.batch is not None
    engine.batch.prefill_open = False
    engine.submit(generation(reply))
    loop.advance(3)
    assert (engine.waiting, reply.said) == (1, [])
    engine.batch.prefill_open = True
    engine.wake()
    loop.advance(1)
    assert reply.finished_at == near(3.14)


def test_what_can_never_fit_leaves_nothing_behind(loop: Loop) -> None:
    engine = engine_in(loop, kv_tokens=64)
    with pytest.raises(TooLong):
        engine.submit(generation(Reply(loop), tokens=100))
    assert (engine.running, engine.waiting, engine.totals.requests) == (0, 0, 0)


def test_throughput_is_that_of_the_last_steps_and_none_when_idle(loop: Loop) -> None:
    engine = engine_in(loop)
    loop.advance(100)
    for _ in range(2):
        engine.submit(generation(Reply(loop), tokens=81))
    loop.advance(0.5 + 0.02 * 60)
    assert engine.throughput_tokens_s == pytest.approx(100, rel=0.25)  # two tokens every 20 ms, but for the prompts
    loop.advance(10)
    assert engine.throughput_tokens_s == 0


def test_histograms_count_by_bucket_as_prometheus_does() -> None:
    histogram = Histogram((0.1, 1.0))
    for value, times in ((0.1, 1), (0.5, 2), (7.0, 1)):
        histogram.observe(value, times)
    assert (histogram.count, histogram.total) == (4, pytest.approx(8.1))
    assert histogram.lines("x", 'm="1"').splitlines()[1:] == [
        'x_bucket{m="1",le="0.1"} 1',
        'x_bucket{m="1",le="1.0"} 3',
        'x_bucket{m="1",le="+Inf"} 4',
        f'x_sum{{m="1"}} {histogram.total}',
        'x_count{m="1"} 4',
    ]


def test_block_keys_are_equal_as_far_as_the_text_is() -> None:
    one, other = block_keys("a" * 64 + "b" * 64 + "c" * 63, 16), block_keys("a" * 64 + "d" * 64 + "b" * 64, 16)
    assert (len(one), len(other)) == (2, 3)
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])  # the same text after another prefix is another block
