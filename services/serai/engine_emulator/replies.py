"""How an answer leaves: streamed or in one piece, whole or with the fault that was asked for."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import assert_never

import orjson

from serai.engine_emulator import responses
from serai.engine_emulator.completion import Completion
from serai.engine_emulator.faults import Fault, FaultKind

Exit = Callable[[], None]


def exit_now() -> None:
    """End the process as a crashed engine does: at once, with status 1."""
    os._exit(1)


class CompletionReply:
    """Writes one completion to one connection. `done` is called with True when the connection can go on, and
    False when the answer was cut off by a fault."""

    __slots__ = ("_completion", "_done", "_fault", "_form", "_head_sent", "_keep_alive", "_transport", "paused")

    def __init__(
        self,
        completion: Completion,
        *,
        form: responses.AnswerForm,
        transport: asyncio.Transport,
        keep_alive: bool,
        fault: Fault | None,
        done: Callable[[bool], None],
    ) -> None:
        self._completion = completion
        self._form = form
        self._transport = transport
        self._keep_alive = keep_alive
        self._fault = fault
        self._done = done
        self._head_sent = False
        self.paused = False

    def is_writable(self) -> bool:
        """False while the client does not read."""
        return not self.paused

    def say(self, first: int, tokens: int) -> None:
        """Tokens are there: in a stream they go out now."""
        if self._completion.stream:
            self._write_events(*self._form.token_events(first, tokens))

    def finish(self) -> None:
        """The whole end of the answer."""
        if self._completion.stream:
            self._write_events(self._form.closing(), last=True)
        else:
            self._transport.write(self._whole())
        self._done(True)

    def reach_fault(self) -> bool:
        """Do the fault. True when the answer goes on after it."""
        assert self._fault is not None
        match self._fault.kind:
            case FaultKind.MALFORMED:
                return self._say_nonsense()
            case FaultKind.HANG:
                self._begin_whole()
            case FaultKind.CUT:
                self._begin_whole()
                self._transport.close()
                self._done(False)
            case FaultKind.RESET:
                self._begin_whole()
                self._reset()
                self._done(False)
            case FaultKind.NO_DONE:
                self._end_without_done()
            case FaultKind.ERROR_EVENT:
                self._end_with_error()
            case FaultKind.WRONG_CONTENT_TYPE:
                self._answer_html()
            case FaultKind.EXIT:
                self._begin_whole()
                # One turn of the loop, so that what was said leaves first.
                asyncio.get_running_loop().call_soon(exit_now)
            case FaultKind.STATUS | FaultKind.SLOW | FaultKind.REFUSE_START:
                raise AssertionError(f"fault {self._fault.kind} does not act inside an answer")
            case _:
                assert_never(self._fault.kind)
        return False

    def _whole(self) -> bytes:
        form = self._form
        return responses.http_response(200, form.whole(), content_type=form.content_type, keep_alive=self._keep_alive)

    def _write_events(self, *events: bytes, last: bool = False) -> None:
        """Events as one write: one chunk each, as an engine sends them."""
        chunks = [responses.chunk(data) for data in events]
        if not self._head_sent:
            self._head_sent = True
            opening = self._form.opening()
            chunks.insert(0, responses.stream_head(self._keep_alive) + (responses.chunk(opening) if opening else b""))
        if last:
            chunks.append(responses.LAST_CHUNK)
        self._transport.write(b"".join(chunks) if len(chunks) > 1 else chunks[0])

    def _begin_whole(self) -> None:
        """An answer in one piece that breaks off after some tokens has its head and half of its body out."""
        if not self._completion.stream and self._fault is not None and self._fault.tokens > 0:
            body = len(self._form.whole())
            self._transport.write(self._whole()[: -(body + 1) // 2])

    def _say_nonsense(self) -> bool:
        if self._completion.stream:
            self._write_events(responses.MALFORMED_EVENT)
            return True
        return self._answer(200, responses.MALFORMED_JSON)

    def _end_without_done(self) -> None:
        if self._completion.stream:
            self._write_events(last=True)
            self._done(False)
        else:
            self._answer(200, b"")

    def _end_with_error(self) -> None:
        message = "The emulated engine failed while it generated."
        if self._completion.stream:
            self._write_events(self._form.failure(500, message), last=True)
            self._done(False)
        else:
            self._answer(500, orjson.dumps(responses.error_object(500, message, code="engine_error")))

    def _answer_html(self) -> None:
        if self._head_sent:
            self._write_events(responses.HTML_PAGE, last=True)
            self._done(False)
        else:
            self._answer(200, responses.HTML_PAGE, content_type="text/html; charset=utf-8")

    def _answer(self, status: int, body: bytes, content_type: str = responses.JSON) -> bool:
        self._transport.write(
            responses.http_response(status, body, content_type=content_type, keep_alive=self._keep_alive)
        )
        self._done(False)
        return False

    def _reset(self) -> None:
        raw: socket.socket | None = self._transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
