"""The engine behind the HTTP: slots, a queue, and one ticker that lets all streams that are due say their token.

There is no task and no timer per stream: whatever is due stands in one calendar, and one timer waits for its next
step.
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from serai.engine_emulator.completion import Completion
from serai.engine_emulator.faults import Fault, FaultKind
from serai.engine_emulator.timing import FixedTiming, StepCalendar

_TOKENS_PER_STEP_MAX = 64
"""With a token time of 0 a stream could say all at once; this many, then the others have their turn."""


class Reply(Protocol):
    """Where a generation's tokens go."""

    def say(self, first: int, tokens: int) -> None:
        """Tokens `first` … `first + tokens - 1` are there."""

    def reach_fault(self) -> bool:
        """The tokens that come before the fault are said: do it. True when the generation goes on all the same."""

    def finish(self) -> None:
        """All tokens are said."""

    def is_writable(self) -> bool:
        """False while the client does not read: then nothing is said."""


class Generation:
    """One request inside the engine."""

    __slots__ = ("completion", "due_at", "fault", "produced", "reply", "timing")

    def __init__(self, completion: Completion, reply: Reply, fault: Fault | None) -> None:
        self.completion = completion
        self.reply = reply
        self.fault = fault if fault is not None and fault.kind is not FaultKind.SLOW else None
        self.produced = 0
        self.due_at = 0.0
        self.timing: FixedTiming | None = None

    @property
    def target(self) -> int:
        """How many tokens come before the next thing that is no token: the fault, or the end."""
        total = self.completion.tokens
        return total if self.fault is None else min(self.fault.tokens, total)

    @property
    def kv_tokens(self) -> int:
        """How much of the KV cache it holds."""
        return self.completion.answer.prompt_tokens + self.produced


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Engine:
    """Runs at most `max_concurrency` generations at a time, in order of arrival."""

    def __init__(
        self,
        timing: FixedTiming,
        *,
        step_s: float,
        max_concurrency: int,
        loop: AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.totals = Totals()
        self._timing = timing
        self._max_concurrency = max_concurrency
        self._loop = loop
        self._clock = clock
        self._calendar: StepCalendar[Generation] = StepCalendar(step_s)
        self._running: set[Generation] = set()
        self._waiting: dict[Generation, None] = {}
        self._timer: TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def running(self) -> int:
        """Generations that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Generations that wait for a slot."""
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the running generations hold in the KV cache."""
        return sum([generation.kv_tokens for generation in self._running])

    def submit(self, generation: Generation, slow_factor: float = 1.0) -> None:
        """Take `generation` in; it says its tokens when they are due, at once if that is now."""
        generation.timing = self._timing if slow_factor == 1.0 else self._timing.slowed(slow_factor)
        self.totals.requests += 1
        self.totals.prompt_tokens += generation.completion.answer.prompt_tokens
        if len(self._running) < self._max_concurrency:
            self._admit(generation, at_once=True)
        else:
            self._waiting[generation] = None

    def abort(self, generation: Generation) -> None:
        """The client is gone: the slot is free at once. Does nothing when the generation has ended."""
        if generation in self._running or generation in self._waiting:
            self.totals.aborted += 1
            self._waiting.pop(generation, None)
            self._release(generation)

    def resume(self, generation: Generation) -> None:
        """The client reads again: go on from now."""
        if generation in self._running:
            self._schedule(generation, self._clock())

    def fail(self, generation: Generation) -> None:
        """A fault ended the generation: the slot is free."""
        if generation in self._running:
            self.totals.failed += 1
            self._release(generation)

    def _admit(self, generation: Generation, *, at_once: bool) -> None:
        """Give `generation` a slot. With `at_once`, what is due now is said before this returns."""
        assert generation.timing is not None
        self._running.add(generation)
        now = self._clock()
        first_out = 1 if generation.completion.stream else generation.target
        due_at = generation.timing.due_at(first_out, now)
        if at_once and due_at <= now:
            generation.due_at = due_at
            self._step(generation, now)
        else:
            self._schedule(generation, due_at)

    def _schedule(self, generation: Generation, due_at: float) -> None:
        generation.due_at = due_at
        self._calendar.add(generation, due_at)
        self._arm()

    def _arm(self) -> None:
        """Have the one timer wait for the calendar's next step."""
        next_at = self._calendar.next_at()
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
        now = self._clock()
        for generation in self._calendar.pop_due(now):
            if generation in self._running:
                self._step(generation, now)
        self._arm()

    def _step(self, generation: Generation, now: float) -> None:
        """Say the tokens that are due; then the fault, the end, or the next token."""
        if not generation.reply.is_writable():
            return  # `resume` brings it back
        assert generation.timing is not None
        left = generation.target - generation.produced
        tokens = left if not generation.completion.stream else min(left, self._burst(generation.timing))
        if tokens > 0:
            generation.reply.say(generation.produced, tokens)
            generation.produced += tokens
            self.totals.generation_tokens += tokens
        if generation.produced >= generation.target and not self._goes_on(generation):
            return
        self._schedule(generation, self._next_due_at(generation, now))

    def _burst(self, timing: FixedTiming) -> int:
        return 1 if timing.tpot_s > 0 else _TOKENS_PER_STEP_MAX

    def _next_due_at(self, generation: Generation, now: float) -> float:
        assert generation.timing is not None
        if generation.completion.stream:
            return generation.timing.next_due_at(generation.due_at, now)
        return now + generation.timing.tpot_s * (generation.target - generation.produced)

    def _goes_on(self, generation: Generation) -> bool:
        """The target is reached: fault or end. True when there is more to say."""
        if generation.fault is not None:
            if not generation.reply.reach_fault():
                return False
            generation.fault = None
            if generation.produced < generation.target:
                return True
        self.totals.finished += 1
        # First the slot, then the answer: who has the answer may count on the slot.
        self._release(generation)
        generation.reply.finish()
        return False

    def _release(self, generation: Generation) -> None:
        self._running.discard(generation)
        while self._waiting and len(self._running) < self._max_concurrency:
            first = next(iter(self._waiting))
            del self._waiting[first]
            # By the ticker, since a queue of requests that take no time would call itself through here.
            self._admit(first, at_once=False)
