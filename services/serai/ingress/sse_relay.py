"""A stream of events on its way through: only whole events pass, and its end is known from a break. Pure.

Server-sent events end with an empty line; lines end with LF, CR LF or CR. How the last event of an answer looks differs
by dialect, and so there is one kind of relay for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import orjson

from serai.ingress.endpoints import Dialect
from serai.ingress.openai_format import read_usage
from serai.ingress.sent_events import blocks_of, data_of

_HELD_BYTES_MAX = 8 * 1024 * 1024
"""Of one event: the last one of the Responses API has the whole answer in it, and all that the request said."""
_LONG_BYTES = 16 * 1024
"""Longer beginnings are not joined with what comes, nor looked through, before it has an end."""
_TAIL_BYTES = 4096
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
_REMEMBERED = 8
"""So many last pieces are looked through for the usage: the end of a stream may come in as many writes."""


class SseRelay:
    """Lets whole events through and holds back the beginning of the next one, so that a stream that breaks off can
    be ended with an event of ours; and holds back the engine's end marker until the answer is known to be whole.
    Bytes are never changed. Reads the end marker and the usage on the way."""

    __slots__ = ("_held", "_last", "_more", "_more_bytes", "_seam", "done")

    _mark: ClassVar[bytes] = b"[DONE]"
    """Stands in the last event, and seldom elsewhere: a quick look, once per token."""

    def __init__(self) -> None:
        self._held = b""
        self._more: list[bytes] = []
        """What came behind a long `held`."""
        self._more_bytes = 0
        self._seam = b""
        """The last bytes of all that."""
        self._last: deque[bytes] = deque(maxlen=_REMEMBERED)
        self.done = False
        """Whether the engine has said that the answer is whole (`[DONE]`)."""

    def feed(self, data: bytes) -> bytes:
        """The bytes that may go to the client now."""
        if self._held:
            if len(self._held) > _LONG_BYTES and self._goes_on(data):
                return b""
            data = b"".join((self._held, *self._more, data))
            self._held = b""
            self._more.clear()
        if not data.endswith(_EVENT_ENDS) and len(data) < _HELD_BYTES_MAX:
            end = _end_of_last_event(data)
            self._held = data[end:]
            self._more_bytes, self._seam = 0, self._held[-3:]
            data = data[:end]
            if not data:
                return data
        self._last.append(data if len(data) <= _TAIL_BYTES else data[-_TAIL_BYTES:])
        self.done = False
        if self._mark in data and self._says_done(data):
            # Held with what came together with it, which leaves with the end: one write instead of two.
            self.done = True
            self._held = data + self._held
            return b""
        return data

    def _goes_on(self, data: bytes) -> bool:
        """Whether the long event that is held has no end in `data` either; then that is held, too."""
        seam, size = self._seam + data, len(self._held) + self._more_bytes + len(data)
        if self.done or size >= _HELD_BYTES_MAX or _end_of_last_event(seam):
            return False
        self._more.append(data)
        self._more_bytes += len(data)
        self._seam = seam[-3:]
        return True

    def rest(self) -> bytes:
        """What was held back, for a stream that its engine ended as whole."""
        held, self._held = b"".join((self._held, *self._more)), b""
        self._more.clear()
        return held

    def usage(self) -> dict[str, Any] | None:
        """The last `usage` object the engine sent, if it sent one near the end."""
        return read_usage(b"".join(self._last)[-_TAIL_BYTES:])

    def _says_done(self, events: bytes) -> bool:
        # At the start of a line: a model may well write these words itself.
        lines = events.replace(b"\r", b"\n").rstrip(b"\n")
        return lines.rpartition(b"\n")[2] in (b"data: [DONE]", b"data:[DONE]")


class ResponsesRelay(SseRelay):
    """Of the Responses API: one of three events ends an answer, and tells its usage; `[DONE]` may follow it."""

    __slots__ = ("_usage",)

    _mark = b'"response"'
    _ends = ("response.completed", "response.failed", "response.incomplete")

    def __init__(self) -> None:
        super().__init__()
        self._usage: dict[str, Any] | None = None

    def usage(self) -> dict[str, Any] | None:
        return self._usage

    def _says_done(self, events: bytes) -> bool:
        for event in _objects(events, self._mark):
            if event.get("type") in self._ends:
                response = event.get("response")
                self._note(response.get("usage") if isinstance(response, Mapping) else None)
                return True
        return False

    def _note(self, usage: object) -> None:
        if isinstance(usage, dict):
            self._usage = (self._usage or {}) | usage


class AnthropicRelay(ResponsesRelay):
    """Of Anthropic's Messages: the first event tells the prompt's tokens, the last but one the answer's."""

    __slots__ = ()

    _mark = b'"message_'

    def _says_done(self, events: bytes) -> bool:
        for event in _objects(events, self._mark):
            match event.get("type"):
                case "message_start":
                    message = event.get("message")
                    self._note(message.get("usage") if isinstance(message, Mapping) else None)
                case "message_delta":
                    self._note(event.get("usage"))
                case "message_stop":
                    return True
        return False


_RELAYS: dict[Dialect, type[SseRelay]] = {
    Dialect.OPENAI: SseRelay,
    Dialect.RESPONSES: ResponsesRelay,
    Dialect.ANTHROPIC: AnthropicRelay,
}


def relay_of(dialect: Dialect) -> SseRelay:
    """A relay for one stream."""
    return _RELAYS[dialect]()


def _objects(events: bytes, mark: bytes) -> Iterator[Mapping[str, Any]]:
    """The events with `mark` in them, parsed; those that cannot be are no concern of ours."""
    for block in blocks_of(events):
        if mark not in block:
            continue
        try:
            event = orjson.loads(data_of(block) or b"null")
        except orjson.JSONDecodeError:
            continue
        if isinstance(event, dict):
            yield event


def _end_of_last_event(data: bytes) -> int:
    unix, windows, old = data.rfind(b"\n\n"), data.rfind(b"\n\r\n"), data.rfind(b"\r\r")
    return max(unix + 2 if unix >= 0 else 0, windows + 3 if windows >= 0 else 0, old + 2 if old >= 0 else 0)
