"""The emulated engine's HTTP: one connection, parsed by httptools, answered in order.

Written on asyncio's protocols and not on a framework because it is the stand-in engine of every benchmark: what it
costs is taken from what is measured (docs/decisions/0004).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import cast

import httptools
import orjson

from serai.engine_emulator import native_messages, responses, routes
from serai.engine_emulator.answering import Read
from serai.engine_emulator.batching.engine import TooLong
from serai.engine_emulator.completion import RequestRefused
from serai.engine_emulator.faults import Fault, FaultKind
from serai.engine_emulator.generation import Generation
from serai.engine_emulator.replies import CompletionReply
from serai.engine_emulator.state import EmulatorState, HttpRequest

_LINGER_S = 5.0
_PIPELINED_MAX = 64
_HEADER_BYTES_MAX = 65536
_REMEMBERED_BODY_BYTES_MAX = 1_048_576


class HttpConnection(asyncio.Protocol):
    """One client connection. Requests on it are answered one after the other."""

    def __init__(self, state: EmulatorState) -> None:
        self._state = state
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[HttpRequest] = deque()
        self._generation: Generation | None = None
        self._reply: CompletionReply | None = None
        self._serving = False
        self._closing = False
        self._lingering: asyncio.TimerHandle | None = None
        self._reset_message()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self._state.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._state.connections.discard(self)
        if self._lingering is not None:
            self._lingering.cancel()
        if self._generation is not None:
            self._state.engine.abort(self._generation)
            self._generation = self._reply = None

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(RequestRefused(400, "Upgrades are not supported."))
        except httptools.HttpParserError as error:
            self._refuse(RequestRefused(400, f"The request is not valid HTTP/1.1: {error}."))

    def pause_writing(self) -> None:
        if self._reply is not None:
            self._reply.paused = True

    def resume_writing(self) -> None:
        if self._reply is not None and self._generation is not None and self._reply.paused:
            self._reply.paused = False
            self._state.engine.resume(self._generation)

    def close(self) -> None:
        """Close at once; a running generation is aborted."""
        self._transport.abort()

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._reset_message()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._header_bytes + len(self._url) > _HEADER_BYTES_MAX:
            self._refuse(RequestRefused(431, f"The request head is over {_HEADER_BYTES_MAX} bytes."))
            return
        length = self._headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._state.settings.body_limit_bytes:
            self._refuse_body(int(length))
        elif self._headers.get("expect", "").lower() == "100-continue" and self._generation is None:
            self._transport.write(responses.CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > self._state.settings.body_limit_bytes and not self._closing:
            self._refuse_body(self._body_bytes)

    def on_message_complete(self) -> None:
        if self._closing:
            return
        method = self._parser.get_method().decode("latin-1")
        path = self._url.partition(b"?")[0].decode("latin-1")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._requests.append(HttpRequest(method, path, self._headers, body, self._parser.should_keep_alive()))
        self._body.clear()
        if len(self._requests) > _PIPELINED_MAX:
            self._refuse(RequestRefused(400, f"More than {_PIPELINED_MAX} requests sent ahead on one connection."))
        else:
            self._serve()

    # answering

    def _reset_message(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0

    def _serve(self) -> None:
        """Answer what has come, until an answer takes time. A loop, so that sent-ahead requests do not recurse."""
        if self._serving:
            return
        self._serving = True
        while self._requests and self._generation is None and not self._transport.is_closing():
            self._answer(self._requests.popleft())
        self._serving = False

    def _answer(self, request: HttpRequest) -> None:
        try:
            read = self._state.reads.get(request.path)
            if read is not None and request.method == "POST":
                self._complete(request, read)
            else:
                self._respond(request, *self._answer_other(request))
        except RequestRefused as refused:
            self._transport.write(_error(request, refused))
            self._close_unless(request.keep_alive)

    def _complete(self, request: HttpRequest, read: Read) -> None:
        state = self._state
        if not state.sleep.serves(time.monotonic()):
            raise RequestRefused(503, "The engine sleeps.")
        state.last_request = request if len(request.body) <= _REMEMBERED_BODY_BYTES_MAX else None
        completion, form = read(request.body, request.headers.get("content-type", ""))
        fault = state.faults.take()
        if fault is not None and fault.kind is FaultKind.STATUS:
            self._refuse_by_fault(request, fault)
            return
        self._reply = CompletionReply(
            completion,
            form=form,
            transport=self._transport,
            keep_alive=request.keep_alive,
            fault=fault,
            done=self._on_done if request.keep_alive else self._on_done_and_close,
        )
        self._generation = Generation(completion, self._reply, fault)
        slow_factor = fault.factor if fault is not None and fault.kind is FaultKind.SLOW else 1.0
        try:
            state.engine.submit(self._generation, slow_factor)
        except TooLong as error:
            self._generation = self._reply = None
            raise RequestRefused(400, f"{error}.", code="context_length_exceeded", param="messages") from error

    def _on_done(self, whole: bool) -> None:
        generation, self._generation, self._reply = self._generation, None, None
        if not whole and generation is not None:
            self._state.engine.fail(generation)
        self._serve()

    def _on_done_and_close(self, whole: bool) -> None:
        self._close_unless(False)
        self._on_done(whole)

    def _refuse_by_fault(self, request: HttpRequest, fault: Fault) -> None:
        totals = self._state.engine.totals
        totals.requests += 1
        totals.failed += 1
        headers = {} if fault.retry_after_s is None else {"Retry-After": f"{fault.retry_after_s:g}"}
        refused = RequestRefused(fault.status, f"The emulated engine was told to answer {fault.status}.")
        self._transport.write(_error(request, refused, headers))
        self._close_unless(request.keep_alive)

    def _respond(self, request: HttpRequest, body: bytes, content_type: str = responses.JSON) -> None:
        response = responses.http_response(200, body, content_type=content_type, keep_alive=request.keep_alive)
        self._transport.write(response)
        self._close_unless(request.keep_alive)

    def _close_unless(self, keep_alive: bool) -> None:
        if not keep_alive:
            self._closing = True
            self._transport.close()

    def _refuse_body(self, size: int) -> None:
        limit = self._state.settings.body_limit_bytes
        self._refuse(RequestRefused(413, f"The request body has {size} bytes or more; the limit is {limit}."))

    def _refuse(self, refused: RequestRefused) -> None:
        """Answer and close: where the next request would begin is not known, or not worth reading up to.

        What still comes in is read and dropped for a while: closing on unread bytes would reset the connection, and
        the client might lose the answer.
        """
        if self._closing:
            return
        self._closing = True
        if self._generation is None:
            self._transport.write(responses.error_response(refused, keep_alive=False))
        self._transport.write_eof()
        self._lingering = asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)

    # everything that is not a completion

    def _answer_other(self, request: HttpRequest) -> tuple[bytes] | tuple[bytes, str]:
        if request.path in self._state.reads:
            raise RequestRefused(405, f"{request.method} is not allowed at {request.path}.")
        answer = routes.answer(self._state, request)
        if isinstance(answer, str):
            return answer.encode(), "text/plain; version=0.0.4; charset=utf-8"
        return (answer,)


def _error(request: HttpRequest, refused: RequestRefused, headers: Mapping[str, str] = {}) -> bytes:
    """A refusal in the words of the path that was asked."""
    keep_alive = request.keep_alive
    if not request.path.startswith("/v1/messages"):
        return responses.error_response(refused, keep_alive=keep_alive, headers=headers)
    body = orjson.dumps(native_messages.error_body(refused.status, refused.message))
    return responses.http_response(refused.status, body, keep_alive=keep_alive, headers=headers)
