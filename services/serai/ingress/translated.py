"""Endpoints that an engine does not have, answered through its chat completions: a request that looks like a
`POST /v1/chat/completions` to whatever answers it, and tells its client what comes in the words the client knows.

Retries, continuation, accounting and back-pressure lie below and know nothing of it; decision 0010 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from serai.contracts.session_record import SessionRecord
from serai.ingress.anthropic_messages import request as messages_request
from serai.ingress.anthropic_messages import token_counts
from serai.ingress.anthropic_messages.answer import MessageAnswer
from serai.ingress.chat_answer import ChatReader, Piece, read_answer, read_error_body
from serai.ingress.dialects import error_body, request_id_headers
from serai.ingress.endpoints import BY_PATH, Dialect, Endpoint
from serai.ingress.http_server import ClientRequest, ClientStream
from serai.ingress.openai_format import ApiError, parsed_object, read_fields
from serai.ingress.request_ids import REQUEST_ID
from serai.ingress.responses_api import request as responses_request
from serai.ingress.responses_api.answer import ResponseAnswer

CHAT = BY_PATH["/v1/chat/completions"]
_EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
_JSON = {"content-type": "application/json"}


class Answer(Protocol):
    """One answer in another dialect."""

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]: ...

    def events(self, pieces: Sequence[Piece]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Translation:
    """How one endpoint's requests and answers are translated."""

    chat_request: Callable[[dict[str, Any]], dict[str, Any]]
    answer: Callable[[dict[str, Any]], Answer]
    """Of one request. Both raise orjson.JSONEncodeError for what is too deep to be written."""
    through: Endpoint = CHAT
    read: Callable[[bytes, str], list[Piece]] = read_answer
    engines: frozenset[str] | None = None
    """Those whose `through` can be asked this; None: all."""


_TRANSLATED = {
    "/v1/messages": Translation(messages_request.chat_request, MessageAnswer),
    "/v1/responses": Translation(responses_request.chat_request, ResponseAnswer),
    "/v1/messages/count_tokens": Translation(
        token_counts.tokenize_request,
        token_counts.CountAnswer,
        through=BY_PATH["/tokenize"],
        read=token_counts.read_count,
        engines=frozenset({"vllm", "emulated"}),
    ),
}
_BETTER_TRANSLATED = frozenset({("llamacpp", "/v1/responses"), ("llamacpp", "/v1/messages")})
"""Engines whose own endpoint no client can rely on. llama.cpp's Responses tell an answer that was cut as complete, drop
what they do not know (tools, files), and their events lack `output_index`, without which OpenAI's client fails; its
Messages drop documents without a word, and cannot go on at another session."""


def as_served(
    request: ClientRequest, endpoint: Endpoint, serving: Callable[[str], Sequence[SessionRecord]]
) -> tuple[ClientRequest, Endpoint]:
    """`request` as it is, where all sessions of its model are known to have the endpoint themselves; otherwise, where
    that can be, as one for another endpoint. `serving` tells a model's sessions."""
    translation = _TRANSLATED.get(endpoint.path)
    if translation is None:
        return request, endpoint
    try:
        fields = parsed_object(request.body)
        records = serving(read_fields(fields).model)
    except ApiError:
        return request, endpoint  # Whoever answers finds the same, and accounts for it.
    if records and all(_has(record, endpoint) for record in records):
        return request, endpoint
    if translation.engines is not None and not all(record.metadata.engine in translation.engines for record in records):
        return request, endpoint
    return TranslatedRequest(request, endpoint.dialect, translation, fields), translation.through


def _has(record: SessionRecord, endpoint: Endpoint) -> bool:
    metadata = record.metadata
    return endpoint.path in metadata.endpoints and (metadata.engine, endpoint.path) not in _BETTER_TRANSLATED


class TranslatedRequest:
    """A client's request, in another endpoint's words; its answer, as its client asked for it."""

    __slots__ = ("_answer", "_body", "_client", "_dialect", "_fields", "_told", "_translation")

    def __init__(
        self, client: ClientRequest, dialect: Dialect, translation: Translation, fields: dict[str, Any]
    ) -> None:
        self._client = client
        self._dialect = dialect
        self._translation = translation
        self._fields = fields
        self._body = b""
        self._told = b""

    @property
    def body(self) -> bytes:
        """Raises ApiError (400) naming what is wrong or cannot be translated."""
        if not self._body:
            try:
                self._body = orjson.dumps(self._translation.chat_request(self._fields))
                self._answer = self._translation.answer(self._fields)
            except orjson.JSONEncodeError as error:  # Deeper than can be written, though it could be read.
                raise ApiError(400, f"The request cannot be passed on: {error}.", code="invalid_json") from None
        return self._body

    @property
    def headers(self) -> Mapping[str, str]:
        return self._client.headers

    def check(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Raises ApiError (502) when it cannot be told."""
        request_id = headers.get(REQUEST_ID, "")
        if status >= 400:
            error = read_error_body(body, status)
            error.request_id = request_id
            self._told = error_body(self._dialect, error)
        else:
            self._told = _written(self._answer.whole(self._translation.read(body, request_id)))

    def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """A whole answer, or an engine's error. Raises ApiError (502) when it cannot be told."""
        if not self._told:
            self.check(status, headers, body)
        told, self._told = self._told, b""
        request_id = headers.get(REQUEST_ID, "")
        self._client.respond(status, {**headers} | self._names(request_id) | _JSON, told)

    def start(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> ClientStream:
        """Events, of an answer or of an error."""
        request_id = headers.get(REQUEST_ID, "")
        reader = ChatReader(request_id)
        events = self._answer.events(reader.feed(data))
        out = self._client.start(status, {**headers} | self._names(request_id) | _EVENTS, events)
        return TranslatedStream(out, reader, self._answer)

    def abort(self) -> None:
        self._client.abort()

    def _names(self, request_id: str) -> dict[str, str]:
        return request_id_headers(self._dialect, request_id)


def _written(answer: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(answer)
    except orjson.JSONEncodeError as error:  # A model wrote deeply nested arguments.
        text = f"The engine's answer cannot be passed on: {error}."
        raise ApiError(502, text, kind="server_error", code="engine_protocol") from None


class TranslatedStream:
    """Chat completion events go in, the client's come out, in the same call."""

    __slots__ = ("_answer", "_out", "_reader")

    def __init__(self, out: ClientStream, reader: ChatReader, answer: Answer) -> None:
        self._out = out
        self._reader = reader
        self._answer = answer

    def send(self, data: bytes) -> bool:
        return self._out.send(self._answer.events(self._reader.feed(data)))

    async def room(self) -> None:
        await self._out.room()

    def end(self, data: bytes = b"") -> None:
        """The end is told as that of a whole answer only if `data`, or what came before, says so."""
        pieces = [*self._reader.feed(data), *self._reader.end()]
        self._out.end(self._answer.events(pieces))
