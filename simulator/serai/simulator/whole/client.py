"""A small OpenAI client in the simulation: sends one chat request, reads the answer, and says how it ended.

It knows what the emulated engine must say, word by word, and so whether an answer that looks whole is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import httptools
import orjson

from serai.engine_emulator.text import answer_to, chat_prompt


class Outcome(StrEnum):
    """How a request ended, as its client saw it. Only UNMARKED is a lie."""

    WHOLE = "whole"
    """All of the text, and the end."""
    REFUSED = "refused"
    """An error status instead of an answer."""
    MARKED = "marked"
    """A stream that broke off with an error event, or with events that are no JSON."""
    CUT = "cut"
    """The connection broke, or could not be made: no HTTP end came."""
    CANCELLED = "cancelled"
    """The client left."""
    UNMARKED = "unmarked"
    """It ended as if it were whole and was not."""
    LATE = "late"
    """It never ended."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asks for, and how it behaves."""

    number: int
    model: str
    prompt: str
    tokens: int
    stream: bool
    leaves_after_s: float | None = None
    """It closes the connection then, whatever has come."""
    pauses_after_s: float | None = None
    """It reads nothing for `pauses_for_s` from then on."""
    pauses_for_s: float = 0.0

    def body(self) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.tokens,
            "stream": self.stream,
        }
        return orjson.dumps(fields)

    def expected_text(self, seed: int) -> str:
        """What an emulated engine with `seed` answers."""
        return answer_to(chat_prompt([("user", self.prompt)]), seed).text(self.tokens)


@dataclass(slots=True)
class ChatResult:
    """What a client has seen of one request."""

    request: ChatRequest
    ingress: str
    started_s: float
    ended_s: float | None = None
    outcome: Outcome | None = None
    status: int = 0
    code: str = ""
    """Of the error object or event, if one came."""
    session: str = ""
    text: str = ""
    done: bool = False
    """`[DONE]` came."""
    answers: int = 0
    """Whole HTTP answers on the connection: more than one is one too many."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """Every step, with its time."""


class ChatConnection(asyncio.Protocol):
    """One connection for one request."""

    def __init__(self, result: ChatResult, expected: str, now: Callable[[], float]) -> None:
        self.result = result
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expected = expected
        self._now = now
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._events = False
        self._pending = b""
        self._malformed = False

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        body = self.result.request.body()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.result.ingress}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)
        self._note("sent")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._malformed = True
            self._finish(Outcome.CUT, f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish(Outcome.CUT, "connection lost")

    # -- for the load --------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The client has had enough."""
        self._finish(Outcome.CANCELLED, "left")

    def pause(self) -> None:
        """Reads no more until `resume`."""
        if self._transport is not None:
            self._note("pauses")
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._note("resumes")
            self._transport.resume_reading()

    def give_up(self) -> None:
        """It should have ended long ago."""
        self._finish(Outcome.LATE, "never ended")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self._events = value.startswith(b"text/event-stream")
            case b"x-serai-session":
                self.result.session = value.decode()

    def on_headers_complete(self) -> None:
        self.result.status = self._parser.get_status_code()
        self._note(f"status {self.result.status}")

    def on_body(self, body: bytes) -> None:
        self._pending += body
        if self._events:
            *whole, self._pending = self._pending.split(b"\n\n")
            for event in whole:
                self._take_event(event)

    def on_message_complete(self) -> None:
        self.result.answers += 1
        if self.over.done():
            return
        if self._events:
            self._end_of_stream()
        else:
            self._end_of_answer()

    # -- judging -------------------------------------------------------------------------------------------------

    def _take_event(self, event: bytes) -> None:
        if event.startswith(b":"):
            self._note(event[1:].decode().strip())
            return
        data = event.removeprefix(b"data:").strip()
        result = self.result
        if data == b"[DONE]":
            result.done = True
            self._note("done")
            return
        try:
            fields = orjson.loads(data)
        except orjson.JSONDecodeError:
            self._malformed = True
            return
        if "error" in fields:
            result.code = str(fields["error"].get("code"))
            self._note(f"error event {result.code}")
        elif fields.get("choices"):
            result.text += fields["choices"][0]["delta"].get("content", "")
            self._note("token")

    def _end_of_stream(self) -> None:
        result = self.result
        if result.code or self._malformed:
            self._finish(Outcome.MARKED, "error event")
        elif result.done and result.text == self._expected:
            self._finish(Outcome.WHOLE, "whole")
        else:
            self._finish(Outcome.UNMARKED, f"{len(result.text)} of {len(self._expected)} characters")

    def _end_of_answer(self) -> None:
        result = self.result
        try:
            fields = orjson.loads(self._pending)
        except orjson.JSONDecodeError:
            self._finish(Outcome.REFUSED, "no JSON")  # Whoever reads it sees that it is none.
            return
        if result.status != 200:
            result.code = str(fields.get("error", {}).get("code"))
            self._finish(Outcome.REFUSED, result.code)
            return
        result.text = fields["choices"][0]["message"]["content"]
        whole = result.text == self._expected and not result.request.stream
        self._finish(Outcome.WHOLE if whole else Outcome.UNMARKED, "one piece")

    def _finish(self, outcome: Outcome, why: str) -> None:
        result = self.result
        if result.outcome is None:
            if not self._expected.startswith(result.text):
                outcome, why = Outcome.UNMARKED, "the text is not the engine's"
            result.outcome = outcome
            result.ended_s = self._now()
            self._note(f"{outcome}: {why}")
            if outcome in (Outcome.CANCELLED, Outcome.LATE) and self._transport is not None:
                self._transport.abort()
        if not self.over.done():
            self.over.set_result(None)

    def _note(self, what: str) -> None:
        self.result.events.append((self._now(), what))


class ChatClient:
    """Sends requests to ingresses by their host names."""

    def __init__(self, *, port: int, engine_seed: int, limit_s: float) -> None:
        self._port = port
        self._engine_seed = engine_seed
        self._limit_s = limit_s
        self.running: dict[int, ChatResult] = {}

    async def ask(self, request: ChatRequest, ingress: str) -> ChatResult:
        """One request, to its end or to `limit_s`."""
        loop = asyncio.get_running_loop()
        result = self.running[request.number] = ChatResult(request, ingress, loop.time())
        expected = request.expected_text(self._engine_seed)
        try:
            async with asyncio.timeout(self._limit_s):
                _, made = await loop.create_connection(
                    lambda: ChatConnection(result, expected, loop.time), ingress, self._port
                )
        except (OSError, TimeoutError):
            result.outcome, result.ended_s = Outcome.CUT, loop.time()
            result.events.append((loop.time(), "no connection"))
            del self.running[request.number]
            return result
        connection = made
        timers = list(self._behaviour(loop, request, connection))
        try:
            await connection.over
        finally:
            for timer in timers:
                timer.cancel()
            connection.close()
            del self.running[request.number]
        return result

    def _behaviour(
        self, loop: asyncio.AbstractEventLoop, request: ChatRequest, connection: ChatConnection
    ) -> list[asyncio.TimerHandle]:
        timers = [loop.call_later(self._limit_s, connection.give_up)]
        if request.leaves_after_s is not None:
            timers.append(loop.call_later(request.leaves_after_s, connection.leave))
        if request.pauses_after_s is not None:
            timers.append(loop.call_later(request.pauses_after_s, connection.pause))
            timers.append(loop.call_later(request.pauses_after_s + request.pauses_for_s, connection.resume))
        return timers
