"""Requests that were cancelled here and still run at the engine a second later. Pure: time is an argument.

Engines learn of a client's leaving by the closed connection, and not all of them do. What they go on with takes the
place of somebody's work, and nobody reads it.
"""

from __future__ import annotations

from collections import deque

FREE_WITHIN_S = 1.0
_CANCELLED_MAX = 4096


class Leaks:
    """`cancelled` for each request that was given up; `looked` with what the engine says it has beyond ours."""

    def __init__(self) -> None:
        self._cancelled: deque[float] = deque(maxlen=_CANCELLED_MAX)

    def cancelled(self, now: float) -> None:
        """A request that the engine had was cancelled."""
        self._cancelled.append(now)

    @property
    def waits(self) -> bool:
        """Whether there is something to look for."""
        return bool(self._cancelled)

    def looked(self, beyond: int, now: float) -> int:
        """The engine has so many requests beyond those that we know of. How many of them are found to be cancelled
        ones, newly: each is counted once."""
        due = 0
        while self._cancelled and now - self._cancelled[0] >= FREE_WITHIN_S:
            self._cancelled.popleft()
            due += 1
        return max(0, min(beyond, due))
