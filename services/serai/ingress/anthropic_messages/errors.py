"""Errors in Anthropic's form."""

from __future__ import annotations

import orjson

from serai.ingress.openai_format import ApiError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(error: ApiError, request_id: str | None) -> bytes:
    """The status stays what it was; the type follows from it, as Anthropic's clients expect."""
    return orjson.dumps(_fields(error, request_id))


def error_event(error: ApiError) -> bytes:
    """The end of a stream that is not whole; no `message_stop` follows."""
    return b"event: error\ndata: " + orjson.dumps(_fields(error, None)) + b"\n\n"


def _fields(error: ApiError, request_id: str | None) -> dict[str, object]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    fields: dict[str, object] = {"type": "error", "error": {"type": kind, "message": error.message}}
    if request_id:
        fields["request_id"] = request_id
    return fields
