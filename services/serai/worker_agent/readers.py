"""Whether those who asked are still there to read the answers.

An ingress that dies sends no CANCEL, and NATS drops what is published to an inbox that is gone without a word, unless
the message names a reply subject: then the server says there that nobody received it. So twice a second one ALIVE
frame goes to each ingress with such a subject, and when it comes back, what that ingress asked for is cancelled: its
engine need not go on for nobody.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import structlog

from serai.contracts.codec import frame_bytes
from serai.contracts.inference import FrameKind
from serai.runtime.bus import Bus, BusDisconnected, Message, Subscription
from serai.worker_agent.desk import Desk
from serai.worker_agent.exchange import Exchange

log = structlog.get_logger()


class Readers:
    """Asks after the ingresses whose requests are on the `desk` of `session`: several may share a connection."""

    def __init__(self, bus: Bus, desk: Desk, session: str) -> None:
        self._bus = bus
        self._desk = desk
        self._prefix = f"{bus.inbox_prefix}.reader.{session}"
        self._numbers: dict[str, int] = {}
        """Of ingresses that were asked after, by their inboxes."""
        self._fresh = itertools.count(1)

    async def start(self) -> Subscription:
        """Subscribes; the caller puts a barrier behind it."""
        return await self._bus.subscribe(f"{self._prefix}.*", self.on_answer)

    def ask(self) -> None:
        """To be called now and then: one question to each ingress."""
        asked: Mapping[str, Exchange] = self._desk.readers()
        # An ingress that is asked after again gets its old number; one that comes later never does.
        self._numbers = {inbox: self._numbers.get(inbox) or next(self._fresh) for inbox in asked}
        for inbox, exchange in asked.items():
            try:
                alive = frame_bytes(FrameKind.ALIVE, exchange.stream, exchange.attempt, 0)
                self._bus.publish(exchange.reply, alive, f"{self._prefix}.{self._numbers[inbox]}")
            except BusDisconnected:
                return  # Ends them all by itself.

    def on_answer(self, message: Message) -> None:
        """The server's word that an ingress is not there. Ingresses themselves do not answer."""
        if not message.no_responders:
            return
        number = message.subject.rpartition(".")[2]
        for inbox, known in self._numbers.items():
            if str(known) == number:
                count = self._desk.cancel_all_of(inbox)
                log.warning("agent.reader_gone", ingress=inbox, cancelled=count)
