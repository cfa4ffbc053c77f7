"""Keys of pools that are no more. Pure: takes `now_s`.

A pool agent that starts anew reads from its key what it is to run, so a key outlives its agent. Jobs that end for good
leave theirs behind. Unknown is not gone: a key is cleared away when its pool has been silent for long while this placer
listened, and nothing that the key names is there any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum, auto

ENDED_KEPT_S = 3600.0
"""All sessions that it named have said that they leave."""
UNKNOWN_KEPT_S = 86_400.0
"""The registry knows nothing of them, or it named none."""


class Fate(Enum):
    """What the registry says of what a key names."""

    THERE = auto()
    """At least one session has not left, whatever is heard of it."""
    LEFT = auto()
    UNKNOWN = auto()


class Leftovers:
    """Keys whose pools are not heard."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def note(self, keys: Iterable[str], heard: Collection[str], now_s: float) -> list[str]:
        """Those that are silent now."""
        silent = {key for key in keys if key not in heard}
        self._since_s = {key: self._since_s.get(key, now_s) for key in silent}
        return sorted(silent)

    def due(self, fates: Mapping[str, Fate], now_s: float) -> list[str]:
        """Those that may be cleared away."""
        return [key for key, fate in fates.items() if self._is_over(key, fate, now_s)]

    def _is_over(self, key: str, fate: Fate, now_s: float) -> bool:
        since_s = self._since_s.get(key)
        if since_s is None or fate is Fate.THERE:
            return False
        return now_s - since_s >= (ENDED_KEPT_S if fate is Fate.LEFT else UNKNOWN_KEPT_S)

    def start_over(self) -> None:
        """There was a time in which nothing was heard."""
        self._since_s.clear()
