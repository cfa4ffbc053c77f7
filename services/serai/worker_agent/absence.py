"""How long an agent was without NATS, and whether it may come back under its old id. Pure.

Whoever was away for long may have been closed and forgotten meanwhile, by registries that heard nothing of it; and a
session that has left never returns.
"""

from __future__ import annotations


class Absence:
    """From losing NATS until having it again."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lost_at_s: float | None = None

    def lost(self, now: float) -> None:
        """The connection is gone; said again while it is, that changes nothing."""
        if self._lost_at_s is None:
            self._lost_at_s = now

    def lasted_s(self, now: float) -> float:
        """How long it has lasted; 0 = we have NATS."""
        return 0.0 if self._lost_at_s is None else now - self._lost_at_s

    def too_long(self, now: float) -> bool:
        """Whether nothing may be said any more under the old id but that it leaves. Stays so once it is."""
        return self.lasted_s(now) > self._limit_s

    def over(self, now: float) -> bool:
        """NATS is there again. False when it took too long to come back."""
        if self.too_long(now):
            return False
        self._lost_at_s = None
        return True
