"""Joins frames on their way out: whatever became ready in one turn of the event loop leaves in one NATS message.

On an idle agent a token leaves in the next turn. On a busy one the tokens of many streams share a message, which is
what keeps the cost per token low: between its first and its last frame, a stream's token waits up to `TOKEN_GAP_S`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from serai.runtime.bus import Bus, BusDisconnected, split_by_size

log = structlog.get_logger()


TOKEN_GAP_S = 0.002
"""Tokens leave at most so often. At 1,000 streams a sixth more tokens pass than with one millisecond; twice as long
gains little more, and would begin to show."""

OF_ANY_STREAM = "0"
"""Stands where an ingress's reply subjects have a stream's number: its frames name their streams. A subject that stays
the same, since for each new one the server looks up who may send on it, and who hears it."""


class Source(Protocol):
    """Something with frames to send."""

    reply: str

    def take_frames(self) -> list[bytes]:
        """The encoded frames that are ready, in order; they are the outbox's now."""


class Outbox:
    """Collects sources that have frames; sends what is ready together, one message per ingress."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._ready: dict[int, Source] = {}
        self._scheduled = False
        self._later: asyncio.TimerHandle | None = None
        self._flushed_at_s = 0.0
        self._at_once = False
        self.frames_dropped = 0

    @property
    def frame_bytes_max(self) -> int:
        """Largest payload of a frame, so that its message is within the server's limit."""
        return self._bus.message_bytes_max - 1024

    def ready(self, source: Source, *, at_once: bool = False, patient: bool = False) -> None:
        """`source` has frames; they leave in the next turn of the loop, `at_once` also past the bus's own joining of
        writes: for a frame that somebody waits for more than for the next token. `patient` ones leave with the next
        that are not, or when nothing has left for `TOKEN_GAP_S`."""
        self._ready[id(source)] = source
        if at_once:
            self._at_once = True
        if self._scheduled or (patient and self._later is not None):
            return
        loop = asyncio.get_running_loop()
        wait_s = self._flushed_at_s + TOKEN_GAP_S - loop.time() if patient else 0.0
        if wait_s > 0:
            self._later = loop.call_later(wait_s, self.flush)
        else:
            self._scheduled = True
            loop.call_soon(self.flush)

    def flush(self) -> None:
        """Sends everything that is ready now."""
        self._scheduled = False
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._flushed_at_s = asyncio.get_running_loop().time()
        ready, self._ready = self._ready, {}
        at_once, self._at_once = self._at_once, False
        by_ingress: dict[str, list[bytes]] = {}
        for source in ready.values():
            if frames := source.take_frames():
                by_ingress.setdefault(source.reply.rpartition(".")[0], []).extend(frames)
        for ingress, frames in by_ingress.items():
            self._publish(f"{ingress}.{OF_ANY_STREAM}", frames, at_once)

    def _publish(self, subject: str, frames: list[bytes], at_once: bool) -> None:
        try:
            for message in split_by_size(frames, self._bus.message_bytes_max):
                self._bus.publish(subject, message, at_once=at_once)
        except BusDisconnected:
            # The gap shows at the receiver; the disconnect callback ends these requests here.
            self.frames_dropped += len(frames)
