"""What a client has been sent of a stream of events: a copy that is read only when it must be. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

TEXT_CHARACTERS_MAX = 1024 * 1024
"""Longer answers are not kept, and so not continued."""
_RAW_BYTES_MAX = 48 * 1024
"""Kept as it came until there is so much of it: answers of up to some 200 tokens end before anything of them is read,
which costs 2 µs a token; a thousand open streams keep 48 MB at most."""
_PIECES_MAX = 64
"""As separate objects; joined they take a quarter less."""


class Unsound(Exception):
    """The stream cannot be continued; the text says why, for the log."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all events of one stream have in common."""

    id: Any
    created: Any
    model: Any
    system_fingerprint: Any


class Transcript:
    """A copy of the events that went to the client. Reading them waits until there are many, or something breaks."""

    __slots__ = (
        "_blocks",
        "_ends",
        "_length",
        "_raw",
        "_raw_bytes",
        "_told",
        "finished",
        "head",
        "problem",
        "role_said",
        "usage",
    )

    def __init__(self) -> None:
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._blocks: list[str] = []
        self._ends = array("L")
        self._length = 0
        self._told = array("L")
        self.head: Head | None = None
        self.role_said = False
        self.finished = False
        """A finish reason was sent."""
        self.usage: dict[str, Any] | None = None
        """The last one sent."""
        self.problem = ""
        """Why it cannot be continued, when what was sent says so."""

    def add(self, events: bytes) -> None:
        """Once per token: whole events that are being sent."""
        self._raw.append(events)
        self._raw_bytes += len(events)
        if self._raw_bytes > _RAW_BYTES_MAX:
            self.read()
        elif len(self._raw) > _PIECES_MAX:
            self._raw = [b"".join(self._raw)]

    def read(self) -> None:
        """Brings all that is known of the stream up to date."""
        data = b"".join(self._raw)
        self._raw.clear()
        self._raw_bytes = 0
        if self.problem:
            return
        try:
            for block in blocks_of(data):
                self._read_block(block)
        except Unsound as reason:
            self._give_up(str(reason))
        self._blocks = ["".join(self._blocks)]

    @property
    def pieces(self) -> list[str]:
        """The text of each event that had some, in order. Up to date after `read`."""
        text = "".join(self._blocks)
        begins = [0, *self._ends[:-1]]
        return [text[begin:end] for begin, end in zip(begins, self._ends, strict=True)] if self._ends else []

    @property
    def counts(self) -> Sequence[int]:
        """How many tokens the engine said there were, at each of `pieces`; 0 where it said nothing."""
        return self._told

    def _give_up(self, reason: str) -> None:
        self.problem = reason
        self._blocks.clear()
        self._ends, self._told = array("L"), array("L")

    def _read_block(self, block: bytes) -> None:
        data = data_of(block)
        if data is None:
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise Unsound("an event was sent that cannot be read") from None
        if not isinstance(event, dict) or event.get("error"):
            raise Unsound("an event was sent that is no part of an answer")
        if self.head is None:
            self.head = Head(*[event.get(name) for name in ("id", "created", "model", "system_fingerprint")])
        told: Any = 0
        if "usage" in event and isinstance(event["usage"], dict):
            self.usage = event["usage"]
            told = self.usage.get("completion_tokens")
        choices = event.get("choices") or []
        if not isinstance(choices, list):
            raise Unsound("an event was sent whose choices are no list")
        for choice in choices:
            self._read_choice(choice, told if isinstance(told, int) and told > 0 else 0)

    def _read_choice(self, choice: Any, told: int) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0 or choice.get("logprobs") is not None:
            raise Unsound("an event with another choice, or with log probabilities, was sent")
        delta = choice.get("delta")
        if isinstance(delta, dict):
            text = delta.get("content")
            if len(delta) > 1 or text is None:
                self._read_others(delta)
        else:
            text = choice.get("text")
        if choice.get("finish_reason") is not None:
            self.finished = True
        if text:
            self._take_text(text, told)

    def _read_others(self, delta: Mapping[str, Any]) -> None:
        said = [name for name, value in delta.items() if name != "content" and value not in (None, "", [])]
        if "role" in said:
            self.role_said = True
            said.remove("role")
        if said:
            raise Unsound(f"something other than text was sent: {', '.join(said)}")

    def _take_text(self, text: Any, told: int) -> None:
        if not isinstance(text, str):
            raise Unsound("a text was sent that is none")
        self._length += len(text)
        if self._length > TEXT_CHARACTERS_MAX:
            raise Unsound(f"more than {TEXT_CHARACTERS_MAX} characters were sent")
        self._blocks.append(text)
        self._ends.append(self._length)
        self._told.append(told)


def usage_so_far(events: bytes) -> bytes:
    """An event with the usage until now, for a stream that ends broken behind `events`. Nothing unless its engine kept
    telling it (`continuous_usage_stats`): a guess would be taken for a count."""
    data = next((data for block in reversed(blocks_of(events)) if (data := data_of(block))), None)
    try:
        event = orjson.loads(data or b"null")
    except orjson.JSONDecodeError:
        return b""
    if not isinstance(event, dict) or not isinstance(event.get("usage"), dict) or not event.get("choices"):
        return b""
    return sse_event(event | {"choices": []})


# -- SSE -------------------------------------------------------------------------------------------------------------


def sse_event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def blocks_of(events: bytes) -> list[bytes]:
    """The events of `events`, without the empty lines between them."""
    if b"\r" in events:
        events = events.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return [block for block in events.split(b"\n\n") if block and not block.isspace()]


def data_of(block: bytes) -> bytes | None:
    """The data of one event; None when it has none, or is the end marker."""
    if block.startswith(b"data: {") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].lstrip(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    data = b"\n".join(lines)
    return None if not lines or data == b"[DONE]" else data
