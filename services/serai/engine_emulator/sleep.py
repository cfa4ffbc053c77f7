"""Whether the emulated engine sleeps: it falls asleep and wakes in a set time, and answers nothing meanwhile. Pure."""

from __future__ import annotations

import math


class Sleep:
    """One engine's."""

    def __init__(self, sleep_s: float, wake_s: float) -> None:
        self._sleep_s, self._wake_s = sleep_s, wake_s
        self._wanted = False
        self._done_at_s = -math.inf

    def fall(self, now_s: float) -> None:
        """Asked again it changes nothing."""
        if not self._wanted:
            self._wanted, self._done_at_s = True, now_s + self._sleep_s

    def wake(self, now_s: float) -> None:
        """Asked again it changes nothing."""
        if self._wanted:
            self._wanted, self._done_at_s = False, now_s + self._wake_s

    def asleep(self, now_s: float) -> bool:
        """It has freed what it can; until it has woken."""
        return self._wanted == (now_s >= self._done_at_s)

    def serves(self, now_s: float) -> bool:
        """It takes completions."""
        return not self._wanted and now_s >= self._done_at_s
