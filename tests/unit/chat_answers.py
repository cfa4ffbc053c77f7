"""Answers of an engine's chat completions, for the tests of what is translated."""

from __future__ import annotations

from typing import Any

import orjson

from serai.ingress.openai_format import DONE
from serai.ingress.sent_events import blocks_of, sse_event

_USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def answer(*, finish_reason: str = "stop", choice: dict[str, Any] | None = None, **message: Any) -> bytes:
    """A whole `chat.completion`."""
    said = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": finish_reason}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 7, "model": "engine-m"}
    return orjson.dumps(head | {"choices": [said | (choice or {})], "usage": _USAGE})


def chunk(finish_reason: str | None = None, **delta: Any) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return _event(choices=choices, usage=None)


def finish(reason: str = "stop") -> bytes:
    return chunk(reason)


def usage() -> bytes:
    return _event(choices=[], usage=_USAGE)


def _event(**fields: Any) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "engine-m"}
    return sse_event(head | fields)


def _call(index: int, **call: Any) -> dict[str, Any]:
    return {"index": index, **call}


_END = [usage(), DONE]
TEXT = [chunk(role="assistant", content=""), chunk(content="Hel"), chunk(content="lö"), finish(), *_END]
THOUGHT = [
    chunk(role="assistant", reasoning_content="hm", reasoning="hm"),
    chunk(reasoning="."),
    chunk(content="Yes"),
    finish(),
    *_END,
]
CALLS = [
    chunk(role="assistant", content="Look"),
    chunk(tool_calls=[_call(0, id="t1", type="function", function={"name": "look", "arguments": ""})]),
    chunk(tool_calls=[_call(0, function={"arguments": '{"a"'})]),
    chunk(tool_calls=[_call(0, function={"arguments": ":1}"})]),
    chunk(tool_calls=[_call(1, id="t2", type="function", function={"name": "go", "arguments": "{}"})]),
    finish("tool_calls"),
    *_END,
]


def events_of(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The names and data of server-sent events; comments are left out."""
    events = []
    for block in blocks_of(data):
        lines = [line for line in block.split(b"\n") if not line.startswith(b":")]
        if lines:
            name, told = lines
            events.append((name.removeprefix(b"event: ").decode(), orjson.loads(told.removeprefix(b"data: "))))
    return events
