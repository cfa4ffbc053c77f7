"""How messages travel in the simulation: ordered lanes with a delay, and what can go wrong on them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from serai.simulator.whole.virtual_loop import VirtualLoop

T = TypeVar("T")

Delay = Callable[[Random], float]
"""Draws a one-way delay in seconds."""


def fixed(delay_s: float) -> Delay:
    """Always the same."""
    return lambda chance: delay_s


def between(least_s: float, most_s: float) -> Delay:
    """Evenly from `least_s` to `most_s`."""
    return lambda chance: least_s + (most_s - least_s) * chance.random()


def with_tail(delay_s: float, tail_s: float, share: float) -> Delay:
    """Nearly always `delay_s`; a `share` of messages waits for `tail_s` more on the mean (exponential)."""

    def draw(chance: Random) -> float:
        return delay_s + (chance.expovariate(1 / tail_s) if chance.random() < share else 0.0)

    return draw


LAN = between(0.00005, 0.00015)
"""From a process to the NATS server of its site and back: tenths of a millisecond."""
WAN = between(0.010, 0.015)
"""Between sites."""


@dataclass(slots=True)
class Stress:
    """What core NATS never does to a live connection, as shares of all messages. Only to see what code bears."""

    lost: float = 0.0
    doubled: float = 0.0
    reordered: float = 0.0

    def end(self) -> None:
        """No more of it."""
        self.lost = self.doubled = self.reordered = 0.0

    @property
    def calm(self) -> bool:
        return not (self.lost or self.doubled or self.reordered)


class Lane(Generic[T]):
    """One direction of one connection. What is sent arrives in order, or, once the lane is emptied, never."""

    def __init__(
        self,
        loop: VirtualLoop,
        delay: Delay,
        chance: Random,
        arrive: Callable[[T], None],
        context: Context | None = None,
    ) -> None:
        self._loop = loop
        self._context = context or copy_context()
        """Of the receiver: else its code would run as if on the sender's host."""
        self._delay = delay
        self._chance = chance
        self._arrive = arrive
        self._last_arrival_s = 0.0
        self._epoch = 0
        self._frozen = False
        self._kept: list[T] = []
        self.stress: Stress | None = None
        self.stressed: Callable[[T], bool] = lambda item: True
        """Which items stress may hit: messages, not what a protocol needs to stay alive."""

    def send(self, item: T) -> None:
        """`item` arrives after a delay, and not before what was sent before it."""
        at_s = self._loop.time() + self._delay(self._chance)
        if self.stress is not None and not self.stress.calm and self.stressed(item):
            self._send_under_stress(item, at_s, self.stress)
            return
        self._last_arrival_s = at_s = max(self._last_arrival_s, at_s)
        self._loop.post(at_s, self._context, self._on_arrival, self._epoch, item)

    def freeze(self) -> None:
        """Nothing arrives until `thaw`: a partition that TCP bears, or a process that does not read."""
        self._frozen = True

    def thaw(self) -> None:
        """All that was kept arrives now, in order."""
        self._frozen = False
        kept, self._kept = self._kept, []
        for item in kept:
            self._loop.call_soon(self._on_arrival, self._epoch, item, context=self._context)
        self._last_arrival_s = max(self._last_arrival_s, self._loop.time())

    def clear(self) -> int:
        """Loses all that is on its way. Returns how many items were kept by a freeze."""
        self._epoch += 1
        count = len(self._kept)
        self._kept.clear()
        return count

    @property
    def frozen(self) -> bool:
        return self._frozen

    @property
    def kept(self) -> list[T]:
        """What has come while the lane is frozen."""
        return self._kept

    def _on_arrival(self, epoch: int, item: T) -> None:
        if epoch != self._epoch:
            return
        if self._frozen:
            self._kept.append(item)
        else:
            self._arrive(item)

    def _send_under_stress(self, item: T, at_s: float, stress: Stress) -> None:
        draw = self._chance.random()
        if draw < stress.lost:
            return
        copies = 2 if self._chance.random() < stress.doubled else 1
        if self._chance.random() < stress.reordered:
            at_s += 10 * self._delay(self._chance)
        else:
            self._last_arrival_s = at_s = max(self._last_arrival_s, at_s)
        for _ in range(copies):
            self._loop.post(at_s, self._context, self._on_arrival, self._epoch, item)
