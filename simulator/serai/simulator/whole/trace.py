"""What happened in a run: its last events as text, and one hash over all of them."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

from serai.simulator.whole.simulated_bus import Passage
from serai.simulator.whole.virtual_loop import START_S, VirtualLoop

KEPT = 400


class Trace:
    """Events in their order. The hash covers every event that was ever noted; only the last are kept."""

    def __init__(self, loop: VirtualLoop, kept: int = KEPT) -> None:
        self._loop = loop
        self._last: deque[tuple[float, str, str]] = deque(maxlen=kept)
        self._hash = blake2b(digest_size=8)
        self.events = 0

    def note(self, who: str, what: str) -> None:
        """Something worth reading happened to `who`."""
        now_s = self._loop.time()
        self.events += 1
        self._hash.update(f"{now_s!r}|{who}|{what}\n".encode())
        self._last.append((now_s - START_S, who, what))

    def deliver(self, passage: Passage) -> None:
        """A message was delivered: only hashed, there are too many to read."""
        if passage.delivered:
            self.events += 1
            self._hash.update(f"{passage.at_s!r}|{passage.connection}|{passage.subject}|".encode())
            self._hash.update(passage.data)

    @property
    def digest(self) -> str:
        """Equal for two runs that did the same, and for no others."""
        return self._hash.hexdigest()

    def last(self, count: int = KEPT) -> list[str]:
        """The last events, oldest first, with the virtual time since the start in seconds."""
        return [f"{at_s:10.4f} {who:<14} {what}" for at_s, who, what in list(self._last)[-count:]]
