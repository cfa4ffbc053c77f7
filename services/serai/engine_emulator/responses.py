"""What the emulated engine writes: HTTP heads, OpenAI objects, SSE events. Bytes only, no sockets."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol

import orjson

from serai.engine_emulator.completion import Completion, RequestRefused

JSON = "application/json"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
MALFORMED_JSON = b'{"id":"cmpl-broken","choices":[{"index":0,'
MALFORMED_EVENT = b"data: " + MALFORMED_JSON + b"\n\n"
DONE_EVENT = b"data: [DONE]\n\n"
HTML_PAGE = b"<!DOCTYPE html><html><body><h1>Sign in to continue</h1></body></html>"

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n"
)
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ids = itertools.count(1)
_id_prefix = os.urandom(4).hex()


def http_response(
    status: int, body: bytes, *, content_type: str = JSON, keep_alive: bool = True, headers: Mapping[str, str] = {}
) -> bytes:
    """A whole response."""
    extra = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return (
        f"HTTP/1.1 {status} {_phrase(status)}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"{extra}{_connection(keep_alive)}\r\n"
    ).encode("latin-1") + body


def stream_head(keep_alive: bool) -> bytes:
    """Head of a streamed answer, whose body comes in chunks."""
    return _STREAM_HEAD + _connection(keep_alive).encode() + b"\r\n"


def chunk(data: bytes) -> bytes:
    """`data` as one chunk of an HTTP body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(fields: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def error_object(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An OpenAI error object."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: RequestRefused, *, keep_alive: bool = True, headers: Mapping[str, str] = {}) -> bytes:
    """A refusal as a whole response."""
    fields = error_object(error.status, error.message, code=error.code, param=error.param)
    return http_response(error.status, orjson.dumps(fields), keep_alive=keep_alive, headers=headers)


def named_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """One server-sent event with a name, which is its `type`, too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def new_id(prefix: str) -> str:
    """An id that no other answer of this or another engine has."""
    return f"{prefix}{_id_prefix}{next(_ids):08x}"


class AnswerForm(Protocol):
    """The bytes of one answer, in the words of its endpoint."""

    content_type: str
    """Of the answer in one piece."""

    def whole(self) -> bytes:
        """The answer in one piece."""

    def opening(self) -> bytes:
        """The events before the first token."""

    def token_events(self, first: int, tokens: int) -> list[bytes]:
        """Tokens `first` … `first + tokens - 1`, each as its events."""

    def closing(self) -> bytes:
        """The events after the last token."""

    def failure(self, status: int, message: str) -> bytes:
        """The events that end a stream that fails."""


class CompletionFormat:
    """The objects of one completion: one id, one time, and per token only what changes."""

    __slots__ = ("_common", "_completion", "_object", "_token_head", "_token_tail")

    def __init__(self, completion: Completion, model: str) -> None:
        prefix, self._object = ("chatcmpl", "chat.completion") if completion.chat else ("cmpl", "text_completion")
        self._completion = completion
        self._common = {"id": new_id(f"{prefix}-"), "created": int(time.time()), "model": model}
        if completion.stream:
            self._prepare_tokens()

    content_type = JSON
    """Of the answer in one piece."""

    def whole(self) -> bytes:
        """The answer in one piece."""
        text = self._completion.answer.text(self._completion.tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._completion.finish_reason, "logprobs": None}
        if self._completion.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return orjson.dumps(self._fields([choice], usage=self._usage(), streamed=False))

    def opening(self) -> bytes:
        """The event that opens a chat stream; nothing for plain completions."""
        if not self._completion.chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return event(self._fields([choice], usage=self._usage(0) if self._completion.continuous_usage else None))

    def token_events(self, first: int, tokens: int) -> list[bytes]:
        """Tokens `first` … `first + tokens - 1`."""
        token, one = self._completion.answer.token, self._token_event
        if tokens == 1:
            return [one(token(first), first + 1)]
        return [one(token(place), place + 1) for place in range(first, first + tokens)]

    def _token_event(self, text: str, count: int) -> bytes:
        """The token that makes it `count`. `text` is plain ASCII that needs no escapes in JSON."""
        if self._completion.continuous_usage:
            usage = orjson.dumps(self._usage(count))
            return b'%b%b%b,"usage":%b}\n\n' % (self._token_head, text.encode(), self._token_tail, usage)
        return self._token_head + text.encode() + self._token_tail

    def closing(self) -> bytes:
        """What follows the last token: finish reason, usage when asked for, `[DONE]`."""
        last: dict[str, Any] = {"delta": {}} if self._completion.chat else {"text": ""}
        choice = {"index": 0, "logprobs": None, "finish_reason": self._completion.finish_reason, **last}
        usage = event(self._fields([], usage=self._usage())) if self._completion.include_usage else b""
        running = self._usage() if self._completion.continuous_usage else None
        return event(self._fields([choice], usage=running)) + usage + DONE_EVENT

    def failure(self, status: int, message: str) -> bytes:
        """The end of a stream that fails."""
        return event(error_object(status, message, code="engine_error")) + DONE_EVENT

    def _prepare_tokens(self) -> None:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
        choice |= {"delta": {"content": "\x00"}} if self._completion.chat else {"text": "\x00"}
        self._token_head, self._token_tail = event(self._fields([choice])).split(b"\\u0000")
        if self._completion.continuous_usage:
            self._token_tail = self._token_tail.removesuffix(b"}\n\n")

    def _fields(
        self, choices: list[dict[str, Any]], *, usage: dict[str, int] | None = None, streamed: bool = True
    ) -> dict[str, Any]:
        kind = f"{self._object}.chunk" if streamed and self._completion.chat else self._object
        fields = {**self._common, "object": kind, "choices": choices}
        return fields if usage is None else {**fields, "usage": usage}

    def _usage(self, said: int | None = None) -> dict[str, int]:
        prompt, output = self._completion.answer.prompt_tokens, self._completion.tokens if said is None else said
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _connection(keep_alive: bool) -> str:
    return "" if keep_alive else "Connection: close\r\n"
