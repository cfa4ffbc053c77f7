"""A small HTTP/1.1 client whose bytes go straight from the socket into a callback: no task, no queue per request.

The streaming path passes tens of thousands of small chunks a second; a general client wakes a task for each. Parsing
is httptools (llhttp); what is ours is only who reads when: `pause_reading` stops the socket itself, so TCP pushes
back on the server, and `abort` closes it at once, which is how engines learn that a request is cancelled.
"""

from __future__ import annotations

import asyncio
import re
import ssl as ssl_module
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

SMALL_REQUEST_BYTES = 64 * 1024
_PATH = re.compile(r"[^ \r\n]*")


class HttpFailure(Exception):
    """The answer is not whole. `sent` tells whether the server may have seen the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Unreachable(HttpFailure):
    """No connection could be made: the server has seen nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=False)


class Cut(HttpFailure):
    """The connection ended before the answer did."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=True)


class BadAnswer(HttpFailure):
    """What came back is not HTTP."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=True)


class ResponseHandler(Protocol):
    """Receives one answer. After `on_complete` or `on_failure` nothing more is called."""

    def on_head(self, status: int, headers: dict[str, str]) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_complete(self) -> None: ...

    def on_failure(self, failure: HttpFailure) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    """Path in front of every request's path, without a trailing slash."""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """From `http://host:port[/prefix]`. Raises ValueError that says what is wrong with `url`."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http:// or https:// address: {url!r}")
        if parts.query or parts.fragment or parts.username:
            raise ValueError(f"an engine's address has no query, fragment or user: {url!r}")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Host and port, as in a `Host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


def request_head(origin: Origin, method: str, path: str, headers: Mapping[str, str], body_bytes: int) -> bytes:
    """The head of a request with a body of `body_bytes` bytes. Raises ValueError on text that would split a header."""
    if not _PATH.fullmatch(path):
        raise ValueError(f"a path must not contain a space or a line break: {path!r}")
    text = f"{method} {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n"
    for name, value in headers.items():
        text += f"{name}: {value}\r\n"
    if text.count("\n") != len(headers) + 2 or text.count("\r") != len(headers) + 2:
        raise ValueError("a header or the path contains a line break")
    return f"{text}content-length: {body_bytes}\r\n\r\n".encode("latin-1", "strict")


class HttpConnection(asyncio.Protocol):
    """One connection, one request at a time. Owned by a `HttpPool`, lent to a `ResponseHandler`."""

    __slots__ = (
        "_body_until_eof",
        "_handler",
        "_headers",
        "_idle",
        "_parser",
        "_request",
        "_silent_since_send",
        "_transport",
        "on_lost_unused",
        "reused",
    )

    def __init__(self, idle: Callable[[HttpConnection], None]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._handler: ResponseHandler | None = None
        self._headers: dict[str, str] = {}
        self._body_until_eof = False
        self._silent_since_send = True
        self._request: Iterable[bytes] = ()
        self.reused = False
        self.on_lost_unused: Callable[[Iterable[bytes], ResponseHandler], None] | None = None

    # -- for the pool and the borrower ---------------------------------------------------------------------------

    def send(self, request: Iterable[bytes], handler: ResponseHandler) -> None:
        """Writes a whole request; the answer goes to `handler`."""
        assert self._handler is None, "one request at a time"
        assert self._transport is not None
        self._handler = handler
        self._headers = {}
        self._body_until_eof = False
        self._silent_since_send = True
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        parts = list(request)
        if sum(map(len, parts)) <= SMALL_REQUEST_BYTES:
            self._transport.write(b"".join(parts))  # A vectored write costs more than this copy.
        else:
            self._transport.writelines(parts)

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes at once and tells the handler nothing more."""
        self._handler = None
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        handler = self._handler
        if handler is None:  # Bytes without a request: the peer is confused, the connection is of no more use.
            self.abort()
            return
        self._silent_since_send = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(BadAnswer("the server changes to another protocol, which nobody asked for"))
        except httptools.HttpParserError as error:
            self._fail(BadAnswer(f"not an HTTP answer: {error}"))

    def eof_received(self) -> None:
        return None  # Closes the transport; connection_lost follows.

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        # The parser holds us, and we hold what leads to the request: all of it would wait for the collector.
        self._parser = None
        request, self._request = self._request, ()
        again, self.on_lost_unused = self.on_lost_unused, None
        handler = self._handler
        if handler is None:
            return
        if self._body_until_eof and exc is None:
            self._handler = None
            handler.on_complete()
        elif self._silent_since_send and self.reused and again is not None:
            # A server may close an idle connection just as it is used again; then it has not seen the request.
            self._handler = None
            again(request, handler)
        else:
            self._fail(Cut(f"the connection closed before the answer was whole{f' ({exc})' if exc else ''}"))

    def _fail(self, failure: HttpFailure) -> None:
        handler, self._handler = self._handler, None
        if self._transport is not None:
            self._transport.abort()
        if handler is not None:
            handler.on_failure(failure)

    # -- httptools callbacks -------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        headers = self._headers
        self._body_until_eof = "content-length" not in headers and "transfer-encoding" not in headers
        if self._handler is not None:
            self._handler.on_head(status, headers)

    def on_body(self, body: bytes) -> None:
        if self._handler is not None:
            self._handler.on_data(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._headers = {}
            return
        handler, self._handler = self._handler, None
        if handler is None:
            return
        self._request = ()
        self.on_lost_unused = None
        keep = self._parser.should_keep_alive() and self.usable
        if keep:
            self.reused = True
            self._idle(self)
        handler.on_complete()
        if not keep and self._transport is not None:
            self._transport.close()


class HttpPool:
    """Connections to one server. `start` never waits; failures come to the handler like answers do."""

    def __init__(self, origin: Origin, *, idle_max: int = 256, connect_timeout_s: float = 5.0) -> None:
        self.origin = origin
        self._idle: list[HttpConnection] = []
        self._idle_max = idle_max
        self._connect_timeout_s = connect_timeout_s
        self._tls = ssl_module.create_default_context() if origin.tls else None
        self._connecting: dict[asyncio.Task[None], ResponseHandler] = {}
        self._closed = False

    def start(self, request: Iterable[bytes], handler: ResponseHandler, lent: Callable[[HttpConnection], None]) -> None:
        """Sends `request` on an idle or a new connection; `lent` receives the connection when it is known."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.usable:
                self._lend(connection, request, handler, lent)
                return
        self._connect_and_send(request, handler, lent)

    def _connect_and_send(
        self, request: Iterable[bytes], handler: ResponseHandler, lent: Callable[[HttpConnection], None]
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(request, handler, lent))
        self._connecting[task] = handler
        task.add_done_callback(lambda done: self._connecting.pop(done, None))

    async def _connect(
        self, request: Iterable[bytes], handler: ResponseHandler, lent: Callable[[HttpConnection], None]
    ) -> None:
        origin = self.origin
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: HttpConnection(self._give_back), origin.host, origin.port, ssl=self._tls
                )
        except TimeoutError:
            handler.on_failure(Unreachable(f"{origin} did not accept a connection in {self._connect_timeout_s:g} s"))
            return
        except OSError as error:
            handler.on_failure(Unreachable(f"{origin} refused the connection: {error}"))
            return
        if self._closed:
            connection.abort()
            handler.on_failure(Unreachable("the client is closing"))
            return
        self._lend(connection, request, handler, lent)

    def _lend(
        self,
        connection: HttpConnection,
        request: Iterable[bytes],
        handler: ResponseHandler,
        lent: Callable[[HttpConnection], None],
    ) -> None:
        connection.on_lost_unused = lambda again, whom: self._connect_and_send(again, whom, lent)
        lent(connection)
        if connection.usable:  # Else the borrower was cancelled while the connection was being made.
            connection.send(request, handler)

    def _give_back(self, connection: HttpConnection) -> None:
        if self._closed or len(self._idle) >= self._idle_max:
            connection.abort()
        else:
            connection.resume_reading()  # The last borrower may have finished while it was out of credit.
            self._idle.append(connection)

    async def aclose(self) -> None:
        """Closes idle connections and gives up on those being made. Lent ones are their borrowers' to abort."""
        self._closed = True
        connecting = dict(self._connecting)
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        for task, handler in connecting.items():
            if task.cancelled():
                handler.on_failure(Unreachable("the client is closing"))
        while self._idle:
            self._idle.pop().abort()


@dataclass(slots=True)
class Answer:
    """A whole small answer, for callers that want one."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Collector:
    def __init__(self, done: asyncio.Future[Answer], limit_bytes: int) -> None:
        self._connection: HttpConnection | None = None
        self._given_up = False
        self._done = done
        self._limit_bytes = limit_bytes
        self._answer = Answer(0, {}, b"")
        self._parts: list[bytes] = []
        self._size = 0

    def lent(self, connection: HttpConnection) -> None:
        self._connection = connection
        if self._given_up:
            connection.abort()

    def give_up(self) -> None:
        """Nobody waits any more: what runs is aborted, what is still connecting will not be sent."""
        self._given_up = True
        if self._connection is not None and not self._answer.body:
            self._connection.abort()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self._answer.status, self._answer.headers = status, headers

    def on_data(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit_bytes:
            self.give_up()
            self.on_failure(BadAnswer(f"the answer is larger than {self._limit_bytes} bytes"))
            return
        self._parts.append(data)

    def on_complete(self) -> None:
        self._answer.body = b"".join(self._parts)
        if not self._done.done():
            self._done.set_result(self._answer)

    def on_failure(self, failure: HttpFailure) -> None:
        if not self._done.done():
            self._done.set_exception(failure)


async def fetch(
    pool: HttpPool,
    method: str,
    path: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    limit_bytes: int = 4 * 1024 * 1024,
) -> Answer:
    """One small request, answered whole. Raises HttpFailure, or TimeoutError after `timeout_s`."""
    done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    collector = _Collector(done, limit_bytes)
    head = request_head(pool.origin, method, path, dict(headers or {}), len(body))
    pool.start((head, body), collector, collector.lent)
    try:
        async with asyncio.timeout(timeout_s):
            return await done
    except (TimeoutError, asyncio.CancelledError):
        collector.give_up()
        raise
