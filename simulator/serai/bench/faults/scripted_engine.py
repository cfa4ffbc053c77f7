"""An engine that does to each request what a case's script says. It lives in the benchmark's own process, so what
reached it, and when a gateway let go of it, is known at first hand.

A script applies to requests whose body holds `MARK`; all others, such as health checks, get a good answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serai.bench.peers import HOST
from serai.bench.stand import MODEL

MARK = "fault-case"
STEADY = "steady-stream"
"""In the prompt of the stream that runs beside each case: one word each `STEADY_EVERY_S`, until it is told to end."""
STEADY_EVERY_S = 0.05
STEADY_WORDS_MAX = 4000
WORDS = 8
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "x", "max_model_len": 1_000_000}]}
_READ_BYTES = 1 << 18


@dataclass(eq=False)
class Call:
    """One request that reached an engine."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    came_at_s: float = field(default_factory=time.monotonic)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """The gateway has closed the connection before the answer was whole."""
    gone_at_s: float = 0.0
    cut_off: bool = False

    @property
    def json(self) -> Any:
        """The body; None when it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def streamed(self) -> bool:
        body = self.json
        return isinstance(body, dict) and body.get("stream") is True

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A whole answer."""
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body))} | dict(headers or {})
        await self.send(_head(status, fields) + body)

    async def begin(self, headers: Mapping[str, str] | None = None) -> None:
        """The head of a stream."""
        fields = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"} | dict(headers or {})
        await self.send(_head(200, fields))

    async def piece(self, data: bytes) -> None:
        """One piece of a stream's body, in a write of its own."""
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, content: object) -> None:
        """One event, with `content` as JSON."""
        await self.piece(b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n")

    async def end(self) -> None:
        """The end of a stream's body."""
        await self.send(b"0\r\n\r\n")

    def cut(self, *, reset: bool = False) -> None:
        """The connection ends here, whatever was announced."""
        self.cut_off = True
        if reset:
            self.writer.transport.abort()
        else:
            self.writer.close()


Script = Callable[[Call], Awaitable[None]]


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode()


# -- good answers ------------------------------------------------------------------------------------------------------


def words(count: int = WORDS) -> list[str]:
    """What the engine says: always the same, so that a lost or doubled word shows."""
    return [f" w{number}" for number in range(count)]


def chunk(delta: Mapping[str, object], finish: str | None = None, **more: object) -> dict[str, object]:
    """One event of a chat stream."""
    choice = {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return {**head, "choices": [choice], **more}


def completion(message: Mapping[str, object] | None = None, **more: object) -> dict[str, object]:
    """A whole chat answer."""
    said = {"role": "assistant", "content": "".join(words())} | dict(message or {})
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "message": said, "logprobs": None, "finish_reason": "stop"}], "usage": usage(), **more,
    }  # fmt: skip


def usage() -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": WORDS, "total_tokens": WORDS + 3}


async def good(call: Call) -> None:
    """What an engine in good health answers."""
    if not call.streamed:
        await call.answer(200, json.dumps(completion()).encode())
        return
    await call.begin()
    await say(call, words()[_said_already(call) :])
    await finish(call)


async def say(call: Call, some: list[str]) -> None:
    """Words of a stream, each an event."""
    for number, word in enumerate(some):
        await call.event(chunk({"role": "assistant", "content": word} if number == 0 else {"content": word}))
        await asyncio.sleep(0.005)


async def finish(call: Call) -> None:
    """The last events of a stream, with usage if that was asked for."""
    await call.event(chunk({}, "stop"))
    body = call.json
    options = body.get("stream_options") if isinstance(body, dict) else None
    if isinstance(options, dict) and options.get("include_usage"):
        await call.event({**chunk({}), "choices": [], "usage": usage()})
    await call.piece(b"data: [DONE]\n\n")
    await call.end()


def _said_already(call: Call) -> int:
    """How many words a message that is to be continued holds already."""
    body = call.json
    if not isinstance(body, dict) or not body.get("continue_final_message"):
        return 0
    return str(body["messages"][-1]["content"]).count("w")


async def never(call: Call) -> None:
    """Takes the request and says nothing."""
    await asyncio.sleep(3600)


# -- the engine --------------------------------------------------------------------------------------------------------


class ScriptedEngine:
    """Listens on one port, which it keeps when it is killed and comes back."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.script: Script = good
        self.hung = False
        """Every completion that comes now is taken and never answered; health checks are, as by real engines."""
        self.calls: list[Call] = []
        """Those with `MARK`, in the order they came."""
        self.asked = 0
        """Completions that came at all."""
        self.steady_may_end = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, HOST, self.port, limit=1 << 20, backlog=512)

    async def kill(self) -> None:
        """As a process that dies: connections break, new ones are refused."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                call = await _read_call(reader, writer)
                if call is None or not await self._carry_out(call, reader):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _carry_out(self, call: Call, reader: asyncio.StreamReader) -> bool:
        """Whether the connection may be used again."""
        task = asyncio.ensure_future(self._script_of(call)(call))
        gone = asyncio.ensure_future(reader.read(_READ_BYTES))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                call.gone_at_s = time.monotonic()
                call.gone.set()
                return False
            task.result()
            return not call.cut_off and not gone.done() and not call.writer.is_closing()
        finally:
            for one in (task, gone):
                one.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await gone
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await task

    def _script_of(self, call: Call) -> Script:
        if call.method != "POST" or not call.path.startswith("/v1/"):
            return _answer_other
        self.asked += 1
        if self.hung:
            return never
        if STEADY.encode() in call.body:
            return self._steady
        if MARK.encode() not in call.body:
            return good
        self.calls.append(call)
        return self.script

    async def _steady(self, call: Call) -> None:
        await call.begin()
        number = _said_already(call)
        while number < STEADY_WORDS_MAX and not self.steady_may_end.is_set():
            await call.event(chunk({"content": f" w{number}"}))
            number += 1
            await asyncio.sleep(STEADY_EVERY_S)
        await finish(call)


async def _answer_other(call: Call) -> None:
    """What gateways ask engines for besides completions."""
    if call.path.startswith("/v1/models"):
        await call.answer(200, json.dumps(_MODELS).encode())
    elif call.path in ("/health", "/ping", "/version"):
        await call.answer(200, b'{"version":"1"}')
    else:
        await call.answer(404, b'{"detail":"Not Found"}')


async def _read_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, path, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if "100-continue" in headers.get("expect", "").lower():
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in headers.get("transfer-encoding", ""):
        body = await _read_chunked(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Call(method, path.partition("?")[0], headers, body, writer)


async def _read_chunked(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readline()).partition(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(parts)
