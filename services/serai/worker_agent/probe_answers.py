"""Answers `probe.<session>`: that we are there, or, on another's behalf, whether a third session is.

Two observers that cannot hear a session may both be on the wrong side of something; a peer in between looks from
elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.session_record import checked_session_id
from serai.contracts.status import ProbeAnswer, ProbeRequest
from serai.contracts.subjects import PROBE
from serai.runtime.bus import Bus, BusDisconnected, BusError, Message, RequestTimeout

log = structlog.get_logger()

ASK_TIMEOUT_S = 0.4
"""Less than the half second that whoever asks us waits."""
ASKS_MAX = 4
"""At once, on others' behalf. More get no answer, which is no evidence either way."""


class ProbeAnswers:
    """Handler of one session's probes. `own_answer` says what we are now."""

    def __init__(self, bus: Bus, session: str, own_answer: Callable[[], ProbeAnswer]) -> None:
        self._bus = bus
        self._session = session
        self._own_answer = own_answer
        self._asking: set[asyncio.Task[None]] = set()

    def on_probe(self, message: Message) -> None:
        if not message.reply:
            return
        try:
            request = decode(ProbeRequest, message.data)
            about = checked_session_id(request.about) if request.about else ""
        except (MalformedMessage, ValueError) as error:
            log.warning("probe.malformed", error=str(error))
            return
        if about in ("", self._session):
            self._answer(message.reply, self._own_answer())
        elif len(self._asking) < ASKS_MAX:
            task = asyncio.get_running_loop().create_task(self._ask(about, message.reply))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    def close(self) -> None:
        """Gives up on what is being asked."""
        for task in self._asking:
            task.cancel()

    async def _ask(self, about: str, reply: str) -> None:
        try:
            answer = await self._bus.request(PROBE.of(about), encode(ProbeRequest()), ASK_TIMEOUT_S)
            told = decode(ProbeAnswer, answer.data)
        except BusDisconnected:
            return
        except (BusError, MalformedMessage) as error:
            log.debug("probe.not_reached", about=about, silent=isinstance(error, RequestTimeout))
            told = ProbeAnswer(about, reached=False)
        self._answer(reply, told if told.session == about else ProbeAnswer(about, reached=False))

    def _answer(self, reply: str, answer: ProbeAnswer) -> None:
        try:
            self._bus.publish(reply, encode(answer), at_once=True)
        except BusDisconnected:
            pass  # Whoever asked has lost us, which is the truth.
