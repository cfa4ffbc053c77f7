"""Engines are asked to tell the usage at the end of each stream; who did not ask for it does not see it. Pure."""

from __future__ import annotations

import re
from typing import Any

import orjson

from serai.ingress.endpoints import Body, Dialect, Endpoint
from serai.ingress.openai_format import dumped, loaded

CHOICES_LAST = b"}]}\n\n"
"""Nearly all events end so, and say by that that they are not the usage: a quick look, once per token."""
_OPTIONS = b'"stream_options"'
_OPTIONS_OBJECT = re.compile(_OPTIONS + rb"\s*:\s*\{(\s*\})?")
_ASK = b'"include_usage":true'


def is_hidden(endpoint: Endpoint, stream: bool, body: bytes) -> bool:
    """Whether the engine is to be asked on our own account. Other dialects tell usage in every stream."""
    if not stream or not endpoint.streams or endpoint.dialect is not Dialect.OPENAI or endpoint.body is not Body.JSON:
        return False
    if _OPTIONS not in body:
        return True
    options = orjson.loads(body).get("stream_options")
    return options is None or (isinstance(options, dict) and options.get("include_usage") in (None, False))


def with_usage(body: bytes) -> bytes:
    """`body`, a JSON object with at least one field, asking for usage; every other byte as it was wherever possible."""
    if _OPTIONS not in body:
        place = body.index(b"{") + 1
        return b"".join((body[:place], b'"stream_options":{', _ASK, b"},", body[place:]))
    if len(_OPTIONS_OBJECT.findall(body)) == 1 and b'"include_usage"' not in body:
        edited = _OPTIONS_OBJECT.sub(_asking, body)
        if _asks(orjson.loads(edited).get("stream_options")):
            return edited
    # They stand there with `null` or `false`, or the same words stand elsewhere too.
    fields = loaded(body)
    options = fields.get("stream_options") or {}
    return dumped(fields | {"stream_options": options | {"include_usage": True}})


def _asking(match: re.Match[bytes]) -> bytes:
    return _OPTIONS + b":{" + _ASK + (b"}" if match[1] else b",")


def _asks(options: Any) -> bool:
    return isinstance(options, dict) and options.get("include_usage") is True


def without_usage_event(events: bytes) -> bytes:
    """Whole events without those that have nothing but the usage: the others as they came."""
    if b'"usage":{' not in events and b'"usage": {' not in events:
        return events
    kept = [event for event in _EVENT.findall(events) if b'"usage"' not in event or not _has_only_usage(event)]
    return b"".join(kept)


_EVENT = re.compile(rb".*?(?:\n\r?\n|\Z)", re.DOTALL)


def _has_only_usage(event: bytes) -> bool:
    text = event.strip()
    if not text.startswith(b"data:"):
        return False
    try:
        fields = orjson.loads(text[5:])
    except orjson.JSONDecodeError:
        return False
    return isinstance(fields, dict) and fields.get("choices") == [] and isinstance(fields.get("usage"), dict)
