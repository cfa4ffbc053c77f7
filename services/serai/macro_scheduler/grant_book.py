"""Places of one instance that ingresses have been given in advance, debited until they are known to be used or over.
Pure: takes `now_s`. When any are given: `granting`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Place(NamedTuple):
    """One on an instance."""

    prefill_s: float
    kv_tokens: int
    until_s: float
    """It is good until then."""


class GrantBook:
    """What was given away of one instance in its present epoch, and not used as far as is known. The oldest counts as
    used first: places are alike, so only how many there are says anything."""

    def __init__(self) -> None:
        self._open: deque[Place] = deque()
        self._counted = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def prefill_s(self) -> float:
        """Debited by all of them."""
        return sum([place.prefill_s for place in self._open])

    @property
    def kv_tokens(self) -> int:
        """Debited by all of them."""
        return sum([place.kv_tokens for place in self._open])

    def give(self, place: Place) -> None:
        """One more."""
        self._open.append(place)

    def counted(self, total: int) -> list[Place]:
        """The instance has had so many requests by them; those that are credited now."""
        more, self._counted = max(0, total - self._counted), max(total, self._counted)
        return [self._open.popleft() for _ in range(min(more, len(self._open)))]

    def over(self, before_s: float) -> list[Place]:
        """Those that were good until before then; they are credited."""
        found = []
        while self._open and self._open[0].until_s < before_s:
            found.append(self._open.popleft())
        return found

    def clear(self) -> None:
        """A new epoch: nothing given before is good for anything."""
        self._open.clear()
        self._counted = 0
