"""The same timing for every request: slots, a queue, and a calendar of who says its next token when."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from serai.engine_emulator.generation import Generation
from serai.engine_emulator.timing import FixedTiming, StepCalendar

_TOKENS_PER_STEP_MAX = 64
"""With a token time of 0 a stream could say all at once; this many, then the others have their turn."""


class FixedSchedule:
    """Runs at most `slots` generations at a time, in order of arrival. Tokens come in steps of `step_s` seconds."""

    def __init__(self, timing: FixedTiming, *, step_s: float, slots: int) -> None:
        self._timing = timing
        self._slots = slots
        self._burst = 1 if timing.tpot_s > 0 else _TOKENS_PER_STEP_MAX
        self._calendar: StepCalendar[Generation] = StepCalendar(step_s)
        self._at_once: deque[Generation] = deque()
        self._running: dict[Generation, None] = {}
        self._waiting: OrderedDict[Generation, None] = OrderedDict()

    @property
    def batch(self) -> None:
        return None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        return sum([generation.kv_tokens for generation in self._running])

    @property
    def throughput_tokens_s(self) -> float:
        return 0.0

    def submit(self, generation: Generation, now: float) -> None:
        if len(self._running) >= self._slots:
            self._waiting[generation] = None
            return
        self._admit(generation, now)
        # What takes no time is not held up by the length of a step.
        if generation.due_at <= now:
            self._at_once.append(generation)
        else:
            self._calendar.add(generation, generation.due_at)

    def remove(self, generation: Generation, now: float) -> None:
        self._waiting.pop(generation, None)
        self._running.pop(generation, None)
        while self._waiting and len(self._running) < self._slots:
            first, _ = self._waiting.popitem(last=False)
            self._admit(first, now)
            self._calendar.add(first, first.due_at)

    def resume(self, generation: Generation, now: float) -> None:
        if generation in self._running:
            generation.due_at = now
            self._calendar.add(generation, now)

    def wake(self, now: float) -> None:
        pass

    def next_at(self) -> float | None:
        return 0.0 if self._at_once else self._calendar.next_at()

    def due(self, now: float) -> Iterator[tuple[Generation, int]]:
        running, add = self._running, self._calendar.add
        for generation in self._in_order(now):
            if generation not in running:
                continue
            yield generation, (generation.produced + self._burst if generation.completion.stream else generation.target)
            if generation in running and not generation.rests:
                generation.due_at = due_at = self._next_due_at(generation, now)
                add(generation, due_at)

    def _admit(self, generation: Generation, now: float) -> None:
        timing = self._timing_of(generation)
        self._running[generation] = None
        generation.admitted_at = now
        generation.first_token_at = timing.due_at(1, now)
        generation.due_at = timing.due_at(1 if generation.completion.stream else generation.target, now)

    def _in_order(self, now: float) -> Iterator[Generation]:
        while self._at_once:
            yield self._at_once.popleft()
        for generation in self._calendar.pop_due(now):
            yield generation
            while self._at_once:
                yield self._at_once.popleft()

    def _next_due_at(self, generation: Generation, now: float) -> float:
        timing = self._timing_of(generation)
        if generation.completion.stream:
            return timing.next_due_at(generation.due_at, now)
        return now + timing.tpot_s * (generation.target - generation.produced)

    def _timing_of(self, generation: Generation) -> FixedTiming:
        factor = generation.slow_factor
        return self._timing if factor == 1.0 else self._timing.slowed(factor)
