"""The batch scheduler in real time: steps follow each other, and the tokens of one come out together at its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count

from serai.engine_emulator.batching.engine import BatchEngine
from serai.engine_emulator.batching.sequence import Sequence
from serai.engine_emulator.batching.steps import RunningStep
from serai.engine_emulator.faults import FaultKind
from serai.engine_emulator.generation import Generation
from serai.engine_emulator.timing import StepCalendar

_LATE_S_MAX = 0.005
"""Timers come in whole milliseconds: lateness up to this is made good even when steps are shorter than it."""
_SLOWED_STEP_S = 0.001
_THROUGHPUT_STEPS = 40
"""SGLang works out `gen_throughput` every 40 decode steps."""


class BatchedSchedule:
    """Generations as sequences of `batch`. `on_step` is told of each step that has ended."""

    def __init__(self, batch: BatchEngine, on_step: Callable[[RunningStep], None] = lambda step: None) -> None:
        self._batch = batch
        self._on_step = on_step
        self._ids = count()
        self._resumed: deque[Generation] = deque()
        self._slowed: StepCalendar[tuple[Generation, int]] = StepCalendar(_SLOWED_STEP_S)
        self._hung: set[Generation] = set()
        self._throughput = 0.0
        self._tokens = 0
        self._tokens_since_s = 0.0

    @property
    def batch(self) -> BatchEngine:
        return self._batch

    @property
    def running(self) -> int:
        return self._batch.running + len(self._hung)

    @property
    def waiting(self) -> int:
        return self._batch.waiting

    @property
    def kv_tokens(self) -> int:
        return self._batch.kv_tokens_used

    @property
    def throughput_tokens_s(self) -> float:
        return self._throughput if self._batch.running else 0.0

    def submit(self, generation: Generation, now: float) -> None:
        completion = generation.completion
        tokens = completion.tokens
        hangs = generation.fault is not None and generation.fault.kind is FaultKind.HANG
        if hangs:
            tokens = max(1, generation.target)  # it keeps what it holds then
        prompt_tokens = completion.answer.prompt_tokens
        sequence = Sequence(next(self._ids), prompt_tokens, tokens, block_keys=completion.block_keys, owner=generation)
        sequence.keeps_blocks = hangs
        self._batch.submit(sequence, now)
        generation.sequence = sequence
        self.wake(now)

    def remove(self, generation: Generation, now: float) -> None:
        if generation.sequence is None:
            return
        self._batch.abort(generation.sequence, now)
        if generation in self._hung:
            self._hung.discard(generation)
            self._batch.slots_withheld -= 1
        self.wake(now)

    def resume(self, generation: Generation, now: float) -> None:
        self._resumed.append(generation)

    def wake(self, now: float) -> None:
        if self._batch.step is None and self._batch.begin_step(now) is not None:
            self._tokens, self._tokens_since_s = 0, now  # the time it was idle is nobody's throughput

    def next_at(self) -> float | None:
        if self._resumed:
            return 0.0
        step, slowed_at = self._batch.step, self._slowed.next_at()
        if step is None:
            return slowed_at
        return step.ends_at_s if slowed_at is None else min(step.ends_at_s, slowed_at)

    def due(self, now: float) -> Iterator[tuple[Generation, int]]:
        while self._resumed:
            generation = self._resumed.popleft()
            assert generation.sequence is not None
            yield generation, self._batch.produced(generation.sequence)
        while (step := self._batch.step) is not None and step.ends_at_s <= now:
            for sequence in self._end(step, now):
                generation, tokens = sequence.owner, self._batch.produced(sequence)
                if generation.slow_factor == 1.0:
                    yield generation, tokens
                else:
                    took = step.ends_at_s - generation.submitted_at
                    self._slowed.add((generation, tokens), generation.submitted_at + generation.slow_factor * took)
        yield from self._slowed.pop_due(now)

    def _end(self, step: RunningStep, now: float) -> Iterable[Sequence]:
        """End `step` and begin the next, so that what is done with the tokens takes none of its time. Whose tokens
        are there."""
        outcome = self._batch.end_step()
        for sequence in outcome.said_first:
            generation = sequence.owner
            generation.admitted_at = sequence.scheduled_at_s
            generation.first_token_at = sequence.first_token_at_s
        for sequence in outcome.finished:
            if sequence.keeps_blocks:
                self._hung.add(sequence.owner)
                self._batch.slots_withheld += 1
        told = list(chain(outcome.said_first, outcome.decoded))
        self._on_step(step)
        self._measure(len(told), step)
        # Steps follow each other without a gap. Lateness of less than a step is the timer's, and would add up; an
        # engine further behind was held up itself and goes on from now.
        late = now - step.ends_at_s
        self._batch.begin_step(step.ends_at_s if late <= max(step.ends_at_s - step.began_at_s, _LATE_S_MAX) else now)
        return told

    def _measure(self, tokens: int, step: RunningStep) -> None:
        self._tokens += tokens
        if step.kind != "prefill" and self._batch.decode_steps % _THROUGHPUT_STEPS == 0:
            self._throughput = self._tokens / max(1e-6, step.ends_at_s - self._tokens_since_s)
            self._tokens, self._tokens_since_s = 0, step.ends_at_s
