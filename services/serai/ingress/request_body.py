"""What the ingress reads of a request's body, and the one edit it makes, for each kind of endpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serai.ingress.endpoints import Body, Dialect, Endpoint
from serai.ingress.form_body import form_with_model, read_form
from serai.ingress.openai_format import ApiError, RequestBody, parsed_object, read_fields, with_model

_STATEFUL = ("previous_response_id", "conversation", "background", "store")


def read_body(endpoint: Endpoint, content_type: str, body: bytes) -> RequestBody:
    """Raises ApiError naming what is wrong."""
    if endpoint.body is Body.MULTIPART:
        return read_form(body, content_type)
    parsed = parsed_object(body)
    if endpoint.dialect is Dialect.RESPONSES:
        refuse_stateful(parsed)
    return read_fields(parsed)


def body_with_model(endpoint: Endpoint, content_type: str, body: bytes, model: str, engine_model: str) -> bytes:
    """`body`, in which the model is called as the engine calls it; every other byte as it was wherever possible."""
    if model == engine_model:
        return body
    if endpoint.body is Body.MULTIPART:
        return form_with_model(body, content_type, engine_model)
    return with_model(body, model, engine_model)


def refuse_stateful(fields: Mapping[str, Any]) -> None:
    """Of the Responses API, what needs an engine that remembers: allocations end, and what their engines remember ends
    with them, so it is refused rather than answered now and forgotten later. Raises ApiError (400)."""
    for name in _STATEFUL:
        if fields.get(name):
            text = (
                f"`{name}` needs responses to be kept, and this gateway keeps none: leave it out, and send the whole "
                f"conversation as `input`."
            )
            raise ApiError(400, text, param=name, code="responses_not_kept")
