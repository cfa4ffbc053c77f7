"""Joins frames on their way out: whatever became ready in one turn of the event loop leaves in one NATS message.

No timer and no added delay: on an idle agent a token leaves in the next turn; on a busy one the tokens of many
streams share a message, which is what keeps the cost per token low.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from serai.runtime.bus import Bus, BusDisconnected, split_by_size

log = structlog.get_logger()


class Source(Protocol):
    """Something with frames to send."""

    reply: str

    def take_frames(self) -> list[bytes]:
        """The encoded frames that are ready, in order; they are the outbox's now."""


class Outbox:
    """Collects sources that have frames; sends once per turn of the loop, one message per ingress."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._ready: dict[int, Source] = {}
        self._scheduled = False
        self._at_once = False
        self.frames_dropped = 0

    @property
    def frame_bytes_max(self) -> int:
        """Largest payload of a frame, so that its message is within the server's limit."""
        return self._bus.message_bytes_max - 1024

    def ready(self, source: Source, *, at_once: bool = False) -> None:
        """`source` has frames; they leave in the next turn of the loop, `at_once` also past the bus's own joining of
        writes: for a frame that somebody waits for more than for the next token."""
        self._ready[id(source)] = source
        if at_once:
            self._at_once = True
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Sends everything that is ready now."""
        self._scheduled = False
        ready, self._ready = self._ready, {}
        at_once, self._at_once = self._at_once, False
        by_ingress: dict[str, tuple[str, list[bytes]]] = {}
        for source in ready.values():
            frames = source.take_frames()
            if frames:
                # Any stream's reply subject reaches its ingress: the frames themselves name their streams. And it is
                # the one subject an agent is always allowed to publish on (NATS allow_responses).
                ingress = source.reply.rpartition(".")[0]
                by_ingress.setdefault(ingress, (source.reply, []))[1].extend(frames)
        for reply, frames in by_ingress.values():
            self._publish(reply, frames, at_once)

    def _publish(self, reply: str, frames: list[bytes], at_once: bool) -> None:
        try:
            for message in split_by_size(frames, self._bus.message_bytes_max):
                self._bus.publish(reply, message, at_once=at_once)
        except BusDisconnected:
            # The gap shows at the receiver; the disconnect callback ends these requests here.
            self.frames_dropped += len(frames)
