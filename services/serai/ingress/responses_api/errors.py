"""Errors inside a stream of Responses' events. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from serai.ingress.openai_format import ApiError


def event_bytes(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    """One event of the API, the `number`th of its stream."""
    numbered = {"type": kind, "sequence_number": number} | fields
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(numbered))


def error_fields(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The API's own `error` event; and in it the object by which OpenAI's clients know that they must raise."""
    told = {"message": message, "type": kind, "param": param, "code": code}
    return {"code": code, "message": message, "param": param, "error": told}


def error_event(error: ApiError, number: int) -> bytes:
    """The end of a stream that is not whole."""
    return event_bytes("error", number, error_fields(error.message, error.kind, error.code, error.param))
