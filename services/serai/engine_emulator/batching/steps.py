"""What a step is, and what came of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from serai.engine_emulator.batching.sequence import Sequence
from serai.performance.latency_model import Step

StepKind = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class RunningStep:
    """One pass of the engine, from when to when (seconds on the caller's clock)."""

    step: Step
    began_at_s: float
    ends_at_s: float
    kind: StepKind
    prefilled: tuple[tuple[Sequence, int], ...]
    """Whose prompts it works on, and how many tokens of each."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step brought. `decoded` can be read until the engine is called again."""

    said_first: list[Sequence]
    """Those that said their first token."""
    decoded: Collection[Sequence]
    """Those that said one more token, also when it came from recomputing after a preemption."""
    finished: list[Sequence]
    """Those of both that have said everything."""
    preempted: list[Sequence]
    """Those that lost their KV so that this step could begin; they wait again."""


class Decoded(Collection[Sequence]):
    """The sequences that decoded in a step, without a copy of them: who decodes now and did not just say its first
    token, and who has finished."""

    __slots__ = ("_decoding", "_finished", "_first", "_size")

    def __init__(
        self, decoding: Collection[Sequence], first: Collection[Sequence], finished: Collection[Sequence], size: int
    ) -> None:
        self._decoding = decoding
        self._first = first
        self._finished = finished
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        first = set(self._first)
        if not first:
            yield from self._decoding
            yield from self._finished
            return
        for group in (self._decoding, self._finished):
            for sequence in group:
                if sequence not in first:
                    yield sequence

    def __contains__(self, sequence: object) -> bool:
        return (sequence in self._decoding or sequence in self._finished) and sequence not in self._first
