"""Arithmetic of times: when a request of fixed timing has its tokens, and what is due in which step."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FixedTiming:
    """The same time to first token and per output token for every request, in seconds."""

    ttft_s: float
    tpot_s: float

    def slowed(self, factor: float) -> FixedTiming:
        """This timing, `factor` times as long."""
        return FixedTiming(self.ttft_s * factor, self.tpot_s * factor)

    def due_at(self, tokens: int, admitted_at: float) -> float:
        """When the first `tokens` tokens of a request admitted at `admitted_at` are all there. At 0: as for 1."""
        return admitted_at + self.ttft_s + max(0, tokens - 1) * self.tpot_s

    def next_due_at(self, due_at: float, now: float) -> float:
        """When the token after the one due at `due_at`, produced at `now`, is due.

        Lateness under one token time is made good, so that the mean stays `tpot_s`; an engine further behind goes on
        from now, since no engine catches up in a burst.
        """
        scheduled = due_at + self.tpot_s
        return scheduled if scheduled > now else now + self.tpot_s


class StepCalendar(Generic[T]):
    """What is due when, in steps of `step_s`: all that falls into one step comes out together."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._steps: list[int] = []
        self._due: dict[int, list[T]] = {}

    def add(self, item: T, due_at: float) -> None:
        """`item` comes out of `pop_due` at the end of the step that holds `due_at`."""
        step = ceil(due_at / self._step_s)
        items = self._due.get(step)
        if items is None:
            heapq.heappush(self._steps, step)
            self._due[step] = [item]
        else:
            items.append(item)

    def next_at(self) -> float | None:
        """When something is due next; None when nothing is."""
        return self._steps[0] * self._step_s if self._steps else None

    def pop_due(self, now: float) -> Iterator[T]:
        """All items due at `now`, in the order of their steps. Items added meanwhile come out if they are due too."""
        while self._steps and self._steps[0] * self._step_s <= now:
            yield from self._due.pop(heapq.heappop(self._steps))
