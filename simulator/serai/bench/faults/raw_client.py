"""An HTTP client for misbehaving: it sends any bytes, leaves at any time, and tells exactly what came back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools

from serai.bench.peers import HOST

WHOLE, CUT, SILENT, REFUSED, LEFT = "whole", "cut", "silent", "refused", "left"
"""How an answer ended: as announced; the connection broke; nothing came in time; nobody listens; we left."""
_HEAD_BYTES = 300
_CONNECT_S = 5.0


@dataclass
class Answer:
    """What came back for one request."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    end: str = SILENT
    ms: float = 0.0
    continued: bool = False
    """100 Continue came before."""

    @property
    def json(self) -> Any:
        """The body; None when it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def events(self) -> list[str]:
        """The data of each event of a stream."""
        lines = self.body.decode("utf-8", "replace").splitlines()
        return [line[5:].strip() for line in lines if line.startswith("data:")]

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Those events that are JSON objects."""
        found = []
        for event in self.events:
            with contextlib.suppress(ValueError):
                found.append(json.loads(event))
        return [one for one in found if isinstance(one, dict)]

    @property
    def comments(self) -> list[str]:
        lines = self.body.decode("utf-8", "replace").splitlines()
        return [line for line in lines if line.startswith(":")]

    @property
    def text(self) -> str:
        """The content of all deltas."""
        deltas = [choice.get("delta") or {} for one in self.objects for choice in one.get("choices") or ()]
        return "".join(delta.get("content") or "" for delta in deltas)

    @property
    def is_done(self) -> bool:
        """A stream that ended with its marker."""
        return self.end == WHOLE and bool(self.events) and self.events[-1] == "[DONE]"

    @property
    def has_error_event(self) -> bool:
        return any("error" in one for one in self.objects)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object, if it is one by OpenAI's shape."""
        body = self.json
        error = body.get("error") if isinstance(body, dict) else None
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            return None
        # An own `code` may be missing or null, but is never a number: SDKs compare it with words.
        is_word = isinstance(error.get("type"), str | None) and isinstance(error.get("code"), str | None)
        return error if is_word and "json" in self.headers.get("content-type", "") else None

    def evidence(self) -> dict[str, object]:
        """For the raw results."""
        head = self.body[:_HEAD_BYTES].decode("utf-8", "replace")
        return {"status": self.status, "end": self.end, "ms": round(self.ms, 1), "body_head": head}


class Connection:
    """One connection to a gateway. Use with `async with`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answers: list[Answer] = []
        self._now = Answer()
        self._began_s = time.monotonic()

    async def __aenter__(self) -> Connection:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    async def send(self, data: bytes) -> bool:
        """Whether the other side still takes it."""
        if self._writer is None or self._writer.is_closing():
            return False
        try:
            self._writer.write(data)
            async with asyncio.timeout(_CONNECT_S):
                await self._writer.drain()
        except (OSError, TimeoutError):
            return False
        return True

    async def answer(self, timeout_s: float = 10.0, until: Callable[[Answer], bool] | None = None) -> Answer:
        """The next answer; with `until`, as soon as that holds of what has come of it."""
        if self._reader is None:
            return Answer(end=REFUSED)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._answers:
                    if until is not None and until(self._now):
                        self._now.end = LEFT
                        return self._timed(self._now)
                    data = await self._reader.read(1 << 16)
                    if not data:
                        return self._timed(self._at_eof())
                    self._parser.feed_data(data)
        except TimeoutError:
            self._now.end = SILENT
            return self._timed(self._now)
        except (OSError, httptools.HttpParserError):
            self._now.end = CUT
            return self._timed(self._now)
        return self._timed(self._answers.pop(0))

    def leave(self) -> None:
        """Close at once."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _timed(self, answer: Answer) -> Answer:
        answer.ms = (time.monotonic() - self._began_s) * 1000
        return answer

    def _at_eof(self) -> Answer:
        framed = {"content-length", "transfer-encoding"} & self._now.headers.keys()
        self._now.end = WHOLE if self._now.status and not framed else CUT
        return self._now

    # httptools

    def on_message_begin(self) -> None:
        self._now = Answer(continued=self._now.continued)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._now.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._now.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._now.body += body

    def on_message_complete(self) -> None:
        if self._now.status == 100:
            self._now.continued = True
            return
        self._now.end = WHOLE
        self._answers.append(self._now)
        self._now = Answer()


def request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """A whole request as bytes. A header of `headers` replaces the one that would be sent."""
    fields = {"Host": HOST, "Content-Length": str(len(body))}
    if body:
        fields["Content-Type"] = "application/json"
    lines = "".join(f"{name}: {value}\r\n" for name, value in (fields | dict(headers or {})).items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body
