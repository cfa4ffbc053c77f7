"""The engine behind the HTTP: takes generations in, and has one timer for all that is due.

There is no task and no timer per stream: the schedule knows who has tokens when, and the timer waits for its next
moment.
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from serai.engine_emulator.batching.engine import BatchEngine
from serai.engine_emulator.generation import Generation
from serai.engine_emulator.measures import Measures
from serai.engine_emulator.schedule import Schedule


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    by_finish_reason: dict[str, int] = field(default_factory=dict)


class Engine:
    """Says the tokens that `schedule` says are there."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        loop: AbstractEventLoop,
        measures: Measures | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.totals = Totals()
        self.measures = measures or Measures()
        self._schedule = schedule
        self._loop = loop
        self._clock = clock or time.monotonic
        self._inside: set[Generation] = set()
        self._observe_gap = self.measures.between_tokens_s.observe
        self._speaking = False
        self._timer: TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def running(self) -> int:
        """Generations that hold a slot."""
        return self._schedule.running

    @property
    def waiting(self) -> int:
        """Generations that wait for a slot."""
        return self._schedule.waiting

    @property
    def kv_tokens(self) -> int:
        """Tokens that the running generations hold in the KV cache."""
        return self._schedule.kv_tokens

    @property
    def throughput_tokens_s(self) -> float:
        """Tokens said a second, lately; 0 when the schedule does not count them."""
        return self._schedule.throughput_tokens_s

    @property
    def batch(self) -> BatchEngine | None:
        """The batch scheduler, when there is one."""
        return self._schedule.batch

    def submit(self, generation: Generation, slow_factor: float = 1.0) -> None:
        """Take `generation` in; it says its tokens when they are due, at once if that is now. Raises TooLong."""
        now = self._clock()
        generation.slow_factor = slow_factor
        generation.submitted_at = now
        self._schedule.submit(generation, now)
        self._inside.add(generation)
        self.totals.requests += 1
        self.totals.prompt_tokens += generation.completion.answer.prompt_tokens
        self._go_on(now)

    def abort(self, generation: Generation) -> None:
        """The client is gone: the slot is free at once. Does nothing when the generation has ended."""
        if generation in self._inside:
            self.totals.aborted += 1
            self._leave(generation, self._clock())

    def resume(self, generation: Generation) -> None:
        """The client reads again: go on from now."""
        if generation in self._inside and not generation.is_stuck:
            now = self._clock()
            generation.rests = False
            self._schedule.resume(generation, now)
            self._go_on(now)

    def fail(self, generation: Generation) -> None:
        """A fault ended the generation: the slot is free."""
        if generation in self._inside:
            self.totals.failed += 1
            self._leave(generation, self._clock())

    def wake(self) -> None:
        """Something that the schedule goes by has changed from outside."""
        now = self._clock()
        self._schedule.wake(now)
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Say what is due, then have the timer wait for what is due next.

        Saying may end a generation and bring the next request in: that is left to the loop that is already running,
        since a queue of requests that take no time would call itself through here.
        """
        if self._speaking:
            return
        next_at = self._schedule.next_at()
        if next_at is not None and next_at <= now:
            self._speaking = True
            try:
                for generation, tokens in self._schedule.due(now):
                    if generation in self._inside:
                        self._say(generation, tokens, now)
            finally:
                self._speaking = False
        self._arm()

    def _arm(self) -> None:
        next_at = self._schedule.next_at()
        if next_at is None or (self._timer is not None and self._timer_at <= next_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = next_at
        # Whole milliseconds, rounded up: uvloop's timers have no finer grain, and rounding down would spin.
        delay_ms = max(0, ceil((next_at - self._clock()) * 1000))
        self._timer = self._loop.call_later(delay_ms / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._go_on(self._clock())

    def _say(self, generation: Generation, tokens: int, now: float) -> None:
        """`tokens` tokens are there in all: say the new ones, then do the fault or the end if they are reached."""
        if generation.rests or not generation.reply.is_writable():
            generation.rests = True  # `resume` brings it back
            return
        target, said = generation.target, generation.produced
        upto = min(target, tokens)
        if upto > said and (upto == target or generation.completion.stream):
            new = upto - said
            generation.reply.say(said, new)
            generation.produced = upto
            self.totals.generation_tokens += new
            if said:
                self._observe_gap((now - generation.last_at) / new, new)
            else:
                self._measure_first(generation, upto, now)
            generation.last_at = now
        if generation.produced >= target and tokens >= target:
            self._reach_target(generation, tokens, now)

    def _reach_target(self, generation: Generation, tokens: int, now: float) -> None:
        if generation.fault is not None:
            if not generation.reply.reach_fault():
                generation.rests = generation.is_stuck = True
                return
            generation.pass_fault()
            if generation.produced < generation.target:
                self._say(generation, tokens, now)
                return
        self._finish(generation, now)

    def _finish(self, generation: Generation, now: float) -> None:
        totals, reason = self.totals, generation.completion.finish_reason
        totals.finished += 1
        totals.by_finish_reason[reason] = totals.by_finish_reason.get(reason, 0) + 1
        decode_s = now - generation.first_token_at
        self.measures.request_s.observe(now - generation.submitted_at)
        self.measures.decode_s.observe(decode_s)
        if generation.produced > 1:
            self.measures.per_token_s.observe(decode_s / (generation.produced - 1))
        # First the slot, then the answer: who has the answer may count on the slot.
        self._leave(generation, now)
        generation.reply.finish()

    def _measure_first(self, generation: Generation, tokens: int, now: float) -> None:
        """The first token, and with an answer in one piece all the others."""
        measures = self.measures
        measures.first_token_s.observe(generation.first_token_at - generation.submitted_at)
        # A step may have begun, by the schedule, a moment before a request came that still found a place in it.
        measures.queue_s.observe(max(0.0, generation.admitted_at - generation.submitted_at))
        measures.prefill_s.observe(generation.first_token_at - generation.admitted_at)
        if tokens > 1:
            gap = max(0.0, now - generation.first_token_at) / (tokens - 1)
            measures.between_tokens_s.observe(gap, tokens - 1)

    def _leave(self, generation: Generation, now: float) -> None:
        self._inside.discard(generation)
        self._schedule.remove(generation, now)
        if not self._speaking:
            self._arm()
