"""Where a worker process of the ingress stands: what it has from its parent, as objects."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path

from serai.ingress.shared_metrics import SharedMetrics
from serai.ingress.supervision import ALIVE_EVERY_S
from serai.ingress.workers import ALIVE, READY, Place


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """`listeners` stay open in the parent: closing them here loses no connection that waits in them."""

    listeners: tuple[socket.socket, ...]
    metrics_listeners: tuple[socket.socket, ...]
    control: socket.socket
    metrics: SharedMetrics

    @classmethod
    def take(cls, place: Place) -> WorkerPlace:
        """Takes what the parent has left open for this process."""
        control = socket.socket(fileno=place.control)
        control.setblocking(False)
        return cls(
            tuple(socket.socket(fileno=number) for number in place.listeners),
            tuple(socket.socket(fileno=number) for number in place.metrics_listeners),
            control,
            SharedMetrics(Path(place.folder), place.slot, place.worker, place.parent),
        )

    def say_ready(self) -> None:
        """Tells the parent that connections are taken."""
        self._say(READY)

    async def saying_alive(self) -> None:
        """Tells it again and again that the event loop turns, until cancelled."""
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            self._say(ALIVE)

    def _say(self, word: bytes) -> None:
        try:
            self.control.send(word)
        except OSError:  # It is gone; `retired` says so, too.
            pass

    async def retired(self) -> None:
        """Returns when the parent has another worker for this place, or is gone."""
        try:
            told = await asyncio.get_running_loop().sock_recv(self.control, 1)
        except OSError:
            told = b""
        if not told:
            self.metrics.is_orphaned = True
