"""What a span says of a request and its answer by OpenTelemetry's GenAI conventions. Pure; read only for spans that are
kept. Never a word of content: numbers, and the engine's own names for things."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from serai.ingress.sent_events import blocks_of, data_of

_TEXT_CHARACTERS_MAX = 200
_ASKED = {
    "max_tokens": ("max_tokens", int),
    "max_completion_tokens": ("max_tokens", int),
    "max_output_tokens": ("max_tokens", int),
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "seed": ("seed", int),
    "frequency_penalty": ("frequency_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "n": ("choice.count", int),
}


def asked(body: bytes, *, stream: bool) -> dict[str, Any]:
    """What a request asked for, numbers only."""
    found: dict[str, Any] = {"gen_ai.request.stream": stream}
    for name, value in _object(body).items():
        if name in _ASKED and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53:
            attribute, kind = _ASKED[name]
            found[f"gen_ai.request.{attribute}"] = kind(value)
    return found


def answered(answer: bytes) -> dict[str, Any]:
    """What an engine said of its answer: a whole one, or the last events of one."""
    found: dict[str, Any] = {}
    reasons: list[str] = []
    for said in _objects(answer):
        for name in ("id", "model"):
            if isinstance(value := said.get(name), str) and value:
                found[f"gen_ai.response.{name}"] = value[:_TEXT_CHARACTERS_MAX]
        choices = said.get("choices")
        ends = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)] if choices else []
        delta = said.get("delta")
        ends += [said.get("stop_reason"), delta.get("stop_reason") if isinstance(delta, dict) else None]
        reasons += [reason[:_TEXT_CHARACTERS_MAX] for reason in ends if isinstance(reason, str)]
    return found | ({"gen_ai.response.finish_reasons": reasons} if reasons else {})


def _objects(answer: bytes) -> Iterator[Mapping[str, Any]]:
    if whole := _object(answer):
        yield whole
        return
    for block in blocks_of(answer):
        said = _object(data_of(block) or b"")
        yield said["response"] if isinstance(said.get("response"), dict) else said


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
