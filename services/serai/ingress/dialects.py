"""What the ingress itself says in each dialect: errors, the end of a broken stream, signs of life. Pure."""

from __future__ import annotations

import orjson

from serai.ingress.anthropic_messages import errors as anthropic
from serai.ingress.endpoints import Dialect
from serai.ingress.openai_format import DONE, ApiError
from serai.ingress.request_ids import REQUEST_ID
from serai.ingress.responses_api import errors as responses
from serai.ingress.sent_events import blocks_of, data_of, usage_so_far

KEEP_ALIVE: dict[Dialect, bytes] = {
    Dialect.OPENAI: b": keep-alive\n\n",
    Dialect.RESPONSES: b": keep-alive\n\n",
    Dialect.ANTHROPIC: b'event: ping\ndata: {"type": "ping"}\n\n',
}
"""What may stand between any two events and means nothing."""


def request_id_headers(dialect: Dialect, request_id: str) -> dict[str, str]:
    """An answer's headers that name the request: ours, and the one that Anthropic's clients know."""
    ours = {REQUEST_ID: request_id}
    return ours | {"request-id": request_id} if dialect is Dialect.ANTHROPIC else ours


def error_body(dialect: Dialect, error: ApiError) -> bytes:
    """An error object, for an answer of which nothing has been sent."""
    if dialect is Dialect.ANTHROPIC:
        return anthropic.error_body(error, error.request_id)
    return error.body()


def broken_end(dialect: Dialect, error: ApiError, last: bytes) -> bytes:
    """The end of a stream that is not whole, behind its `last` events: one error event, and never what a whole answer
    ends with but OpenAI's `[DONE]`, which only says that nothing more comes."""
    if dialect is Dialect.ANTHROPIC:
        return anthropic.error_event(error)
    if dialect is Dialect.RESPONSES:
        return responses.error_event(error, _next_number(last))
    return usage_so_far(last) + error.event() + DONE


def _next_number(events: bytes) -> int:
    """The sequence number of what follows `events`; 0 when they have none."""
    for block in reversed(blocks_of(events)):
        try:
            event = orjson.loads(data_of(block) or b"null")
        except orjson.JSONDecodeError:
            continue
        if isinstance(event, dict) and isinstance(event.get("sequence_number"), int):
            return int(event["sequence_number"]) + 1
    return 0
