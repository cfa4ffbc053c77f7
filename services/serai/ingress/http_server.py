"""The HTTP/1.1 server of the ingress, on llhttp (httptools) and asyncio transports. Why not aiohttp's: decision 0005.

What it adds to the parser: the one size limit for bodies, compressed bodies, `Expect: 100-continue`, pipelining,
time limits against idle and slow peers, back-pressure, and cancellation of the handler the moment its client leaves.
"""

from __future__ import annotations

import asyncio
import socket
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol, cast
from urllib.parse import unquote

import httptools
import structlog

from serai.ingress.listening import BACKLOG
from serai.ingress.openai_format import ApiError

log = structlog.get_logger()

HEAD_BYTES_MAX = 64 * 1024
PIPELINED_MAX = 16
IDLE_S = 75.0
READING_S = 60.0
"""How long a request's head or body may make no progress."""
LOOK_EVERY_S = 5.0
FLUSH_S = 1.0
DRAIN_IDLE_S = 1.0
"""How long a kept connection may be idle once the server drains: a client that is about to ask does it within that."""
_DRAIN_LOOK_S = 0.1
_PIECES_MAX = 256
"""Of a body, as separate objects: each takes some 40 bytes more than it holds, which may be two."""

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {status: f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}" for status in range(100, 1000)}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientGone(ConnectionError):
    """The client has closed the connection: nobody reads what would be written."""


class ClientStream(Protocol):
    """An answer that is being written; as `HttpStream` has it."""

    def send(self, data: bytes) -> bool: ...

    async def room(self) -> None: ...

    def end(self, data: bytes = b"") -> None: ...


class ClientRequest(Protocol):
    """What answering a request takes; as `HttpRequest` has it. The other one translates (`ingress/translated.py`)."""

    @property
    def body(self) -> bytes: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    def check(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Raises ApiError when `respond` could not tell that: before it is written down as answered."""

    def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None: ...

    def start(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> ClientStream: ...

    def abort(self) -> None: ...


class HttpRequest:
    """One request, read whole; and the way to answer it, once."""

    __slots__ = (
        "_connection",
        "_has_begun",
        "body",
        "headers",
        "http_1_0",
        "keep_alive",
        "method",
        "more_headers",
        "path",
        "problem",
        "query",
    )

    def __init__(self, connection: HttpServerConnection, method: str, path: str, headers: dict[str, str]) -> None:
        self._connection = connection
        self._has_begun = False
        self.method = method
        self.path = path
        """Decoded, without the query."""
        self.query = ""
        """What stands behind the `?`, as it was sent."""
        self.headers = headers
        """Names in lower case; repeated ones joined by a comma."""
        self.body = b""
        self.keep_alive = True
        self.http_1_0 = False
        self.more_headers: Mapping[str, str] = {}
        """Of the answer, whatever it is."""
        self.problem: ApiError | None = None
        """Why the body could not be read; the answer must be this error."""

    def check(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Bytes can always be told."""

    def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """A whole answer, in one write. Behind the beginning of another one it would be taken for a part of that: then
        the connection is closed instead, and the client sees that it is cut."""
        if self._has_begun:
            self.abort()
            return
        head = self._head(status, headers)
        payload = b"" if self.method == "HEAD" else body
        length = b"" if status == HTTPStatus.NO_CONTENT else b"content-length: %d\r\n" % len(body)
        self._connection.write(b"%s%s\r\n%s" % (head, length, payload))

    def start(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> HttpStream:
        """An answer whose length is not known yet; its head leaves at once, with the first of its data."""
        if self.http_1_0:
            self.keep_alive = False
            head = self._head(status, headers) + b"\r\n"
        else:
            head = self._head(status, headers) + b"transfer-encoding: chunked\r\n\r\n"
        self._has_begun = True
        stream = HttpStream(self._connection, chunked=not self.http_1_0)
        self._connection.write(head + stream.framed(data))
        return stream

    def abort(self) -> None:
        """Closes the connection without another byte."""
        self._connection.abort()

    def _head(self, status: int, headers: Mapping[str, str]) -> bytes:
        text = _STATUS_LINES[status]
        if self._connection.server.draining:
            self.keep_alive = False
        if self.more_headers:
            headers = {**headers, **self.more_headers}
        text += "".join([f"\r\n{name}: {value}" for name, value in headers.items()])
        if text.count("\n") != len(headers) or text.count("\r") != len(headers):
            raise ValueError("a header contains a line break")
        if not self.keep_alive:
            text += "\r\nconnection: close"
        return b"%s\r\ndate: %s\r\n" % (text.encode("latin-1", "replace"), self._connection.server.date)


class HttpStream:
    """An answer that is being written. End it with `end`; if it is not, the client sees it cut."""

    __slots__ = ("_chunked", "_connection")

    def __init__(self, connection: HttpServerConnection, *, chunked: bool) -> None:
        self._connection = connection
        self._chunked = chunked

    def send(self, data: bytes) -> bool:
        """Writes `data`; False when the client has so much to read that `room` should be waited for. Raises
        ClientGone."""
        connection = self._connection
        if data:
            connection.write(self.framed(data))
        return not connection.write_paused

    def framed(self, data: bytes) -> bytes:
        """`data` as it goes on the wire."""
        return b"%x\r\n%s\r\n" % (len(data), data) if data and self._chunked else data

    async def room(self) -> None:
        """Waits while the client is slow to read. Raises ClientGone."""
        if self._connection.write_paused:
            await self._connection.drained()

    def end(self, data: bytes = b"") -> None:
        """The last bytes and the end, in one write. Raises ClientGone."""
        self._connection.write(self.framed(data) + b"0\r\n\r\n" if self._chunked else data)


Handler = Callable[[HttpRequest], Awaitable[None]]


class HttpServer:
    """Listens and keeps its connections. `handler` answers each request; it must not raise but ClientGone."""

    def __init__(self, handler: Handler, *, body_bytes_max: int) -> None:
        self.handler = handler
        self.body_bytes_max = body_bytes_max
        self.connections: set[HttpServerConnection] = set()
        self.stopping = False
        self.draining = False
        self.date = b""
        self._servers: list[asyncio.Server] = []

    async def start(self, host: str, port: int) -> None:
        """Raises OSError when it cannot listen."""
        await self._serve(host=host, port=port)

    async def start_on(self, listeners: Iterable[socket.socket]) -> None:
        """Takes connections from sockets that listen already."""
        for listener in listeners:
            await self._serve(sock=listener)

    async def _serve(self, **where: Any) -> None:
        self._look()
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(lambda: HttpServerConnection(self), backlog=BACKLOG, **where))

    async def drain(self, timeout_s: float) -> bool:
        """No new connections; kept ones get `connection: close` with their next answer, or are closed when idle.
        Returns when all are gone, or False after `timeout_s`."""
        self.draining = True
        for server in self._servers:
            server.close()
        give_up_at_s = time.monotonic() + timeout_s
        while self.connections:
            self._look()
            if time.monotonic() >= give_up_at_s:
                return False
            await asyncio.sleep(_DRAIN_LOOK_S)
        return True

    async def aclose(self) -> None:
        """Stops listening and closes every connection: what has been written still leaves, for a second at most;
        handlers that still run are cancelled."""
        self.stopping = True
        for server in self._servers:
            server.close()
        for connection in tuple(self.connections):
            connection.shut()
        for _ in range(round(FLUSH_S / 0.01)):
            if not self.connections:
                return
            await asyncio.sleep(0.01)
        for connection in tuple(self.connections):
            connection.abort()

    async def watching(self) -> None:
        """Keeps the date and closes idle and slow connections, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self._look()

    def _look(self) -> None:
        self.date = formatdate(usegmt=True).encode()
        now = time.monotonic()
        for connection in tuple(self.connections):
            connection.check_time(now)


def _clean_path(target: str) -> str:
    """Path of a request target, decoded: without scheme and host (as sent to proxies), query and fragment."""
    path = target.partition("?")[0].partition("#")[0]
    if "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    return unquote(path)


class HttpServerConnection(asyncio.Protocol):
    """One client. Requests of one connection are answered one after the other, in order."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.write_paused = False
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[HttpRequest] = deque()
        self._drain: asyncio.Future[None] | None = None
        self._moved_at_s = time.monotonic()
        self._in_request = False
        self._discard = False
        self._unheard_bytes = 0
        self._halted: HttpRequest | None = None
        """The parser takes what follows its head for another protocol; it is its body."""
        self._restoring = False
        self._owes_continue = False
        self._waits_for_reader = False
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._head_bytes = 0
        self._headers: dict[str, str] = {}
        self._request: HttpRequest | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_joined = 0
        self._inflate: Any = None
        self._owes_continue = False

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = httptools.HttpRequestParser(self)
        self.server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._discard:
            return
        if not self._in_request or self._request is not None:
            self._moved_at_s = time.monotonic()  # A head has its time as a whole: a byte now and then wins nothing.
        self._in_request = True
        heard_bytes = self._head_bytes + self._body_bytes
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"This is not a valid HTTP/1.1 request: {error}", code="invalid_http"))
        if self._head_bytes + self._body_bytes == heard_bytes:
            self._count_unheard(len(data))
        else:
            self._unheard_bytes = 0

    def _feed(self, data: bytes) -> None:
        """Raises HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as change:
                # We speak HTTP/1.1 only, and a request to change the protocol may be ignored (RFC 9110, 7.8).
                data = data[change.args[0] :]
            self._parser = httptools.HttpRequestParser(self)
            if self._halted is not None:
                self._take_body_of(self._halted)
            if self._discard or not data:
                return

    def _take_body_of(self, halted: HttpRequest) -> None:
        """The parser has skipped it; Java's client sends one with its offer of HTTP/2."""
        self._halted = None
        length = halted.headers.get("content-length")
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        self._restoring = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n\r\n" % framing.encode())
        self._restoring = False

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._parser = None  # It knows us.
        self.server.connections.discard(self)
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        if self._drain is not None and not self._drain.done():
            self._drain.set_exception(ClientGone())

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._restoring:
            self._reset()

    def on_url(self, url: bytes) -> None:
        if self._restoring:
            return
        self._url += url
        self._head_bytes += len(url)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._restoring:
            return
        # With what stands around them: many small ones of one name would be joined again and again.
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()
        if self._request is None:  # Else it stands behind the body: what checked the head has not seen it.
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            headers = self._headers
            headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        if self._discard or self._restoring:
            return
        path = self._url.decode("latin-1")
        query = ""
        if not path.startswith("/") or "?" in path or "#" in path or "%" in path:
            query = path.partition("#")[0].partition("?")[2]
            path = _clean_path(path)
        headers = self._headers
        request = self._request = HttpRequest(self, self._parser.get_method().decode("latin-1"), path, headers)
        request.query = query
        request.http_1_0 = self._parser.get_http_version() == "1.0"
        request.keep_alive = self._parser.should_keep_alive()
        if "content-encoding" in headers:
            self._check_encoding(request)
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self.server.body_bytes_max:
            self._too_large(int(announced))
            return
        if "expect" in headers and headers["expect"].lower() == "100-continue" and request.problem is None:
            self._continue(request)
        if "upgrade" in headers and self._parser.should_upgrade():
            has_body = "transfer-encoding" in headers or announced.strip("0") != ""
            self._halted = request if has_body and request.method != "CONNECT" else None

    def on_body(self, body: bytes) -> None:
        request = self._request
        if request is None:
            return
        if request.problem is not None:
            self._body_bytes += len(body)  # Heard, not kept.
            if self._body_bytes > self.server.body_bytes_max:
                self._too_large(self._body_bytes)
            return
        if self._inflate is not None:
            try:
                body = self._inflate.decompress(body, self.server.body_bytes_max - self._body_bytes + 1)
            except zlib.error as error:
                request.problem = ApiError(400, f"The compressed request body is broken: {error}", code="invalid_body")
                return
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > self.server.body_bytes_max:
            self._too_large(self._body_bytes)
        elif len(self._body) - self._body_joined > _PIECES_MAX:
            self._body[self._body_joined :] = [b"".join(self._body[self._body_joined :])]
            self._body_joined += 1

    def on_message_complete(self) -> None:
        if self._halted is not None:
            return  # Its body comes yet.
        request, self._request = self._request, None
        self._owes_continue = False
        self._in_request = False
        if request is None:
            return
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        if self._inflate is not None and request.problem is None and not self._inflate.eof:
            request.problem = ApiError(400, "The compressed request body is cut short.", code="invalid_body")
        self._dispatch(request)

    # -- inside --------------------------------------------------------------------------------------------------

    def _continue(self, request: HttpRequest) -> None:
        """Lets the body come; not in the midst of the answer before, and to no client that does not know the word."""
        if request.http_1_0:
            return
        if self._task is None:
            self._send(_CONTINUE)
        else:
            self._owes_continue = True

    def _refuse_head(self) -> None:
        if not self._discard:
            text = f"The request's head has more than {HEAD_BYTES_MAX} bytes."
            self._refuse(ApiError(431, text, code="head_too_large"))

    def _count_unheard(self, size: int) -> None:
        """The parser keeps a header to itself until that has ended; one that never does would fill the memory."""
        self._unheard_bytes += size
        if self._unheard_bytes > HEAD_BYTES_MAX and self._in_request and not self._discard:
            self._refuse(ApiError(431, f"A header has more than {HEAD_BYTES_MAX} bytes.", code="head_too_large"))

    def _check_encoding(self, request: HttpRequest) -> None:
        encoding = self._headers.get("content-encoding", "identity").lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(wbits=47 if "gzip" in encoding else 15)
        elif encoding != "identity":
            text = f"Content-Encoding {encoding[:40]!r} is not understood here; send gzip, deflate or none."
            request.problem = ApiError(415, text, code="unsupported_encoding")

    def _too_large(self, size: int) -> None:
        """Answers at once; the rest of the body is not read."""
        limit = self.server.body_bytes_max
        text = f"The request body has {size} bytes or more; this gateway takes at most {limit}."
        self._refuse(ApiError(413, text, code="body_too_large"))

    def _refuse(self, problem: ApiError) -> None:
        """Answers with an error and closes; whatever else the client sends is not looked at."""
        request = self._request or HttpRequest(self, "GET", "", dict(self._headers))
        self._request = None
        request.problem = problem
        request.keep_alive = False
        self._discard = True
        self._in_request = False
        self._body = []
        self._dispatch(request)

    def _dispatch(self, request: HttpRequest) -> None:
        if self._task is not None:
            self._waiting.append(request)
            if len(self._waiting) > PIPELINED_MAX:
                self._discard = True
                self.abort()
            return
        self._task = asyncio.get_running_loop().create_task(self._handle(request))

    async def _handle(self, request: HttpRequest) -> None:
        while True:
            try:
                if self.write_paused:
                    await self._until_read()
                await self.server.handler(request)
            except ClientGone:
                pass
            except asyncio.CancelledError:
                # Not raised again: the task would keep it, and with it the frames of all that the request had, which
                # know this connection, which knows the task. The collector hardly ever looks at what has lived long.
                self.abort()
                self._task = None
                return
            except Exception:
                log.exception("http.handler_failed", path=request.path)
                self.abort()
            self._moved_at_s = time.monotonic()
            if not request.keep_alive or self.server.stopping:
                self._waiting.clear()
                self._close()
            if not self._waiting:
                self._task = None
                if self._owes_continue:
                    self._owes_continue = False
                    self._send(_CONTINUE)
                return
            request = self._waiting.popleft()

    async def _until_read(self) -> None:
        """Whoever sends requests and reads no answers gets no further ones: they would fill the memory."""
        self._waits_for_reader = True
        try:
            await self.drained()
        finally:
            self._waits_for_reader = False

    def write(self, data: bytes) -> None:
        """Raises ClientGone."""
        if self._transport is None or self._transport.is_closing():
            raise ClientGone
        self._transport.write(data)

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def drained(self) -> None:
        """Returns when the client has read enough of what was written. Raises ClientGone."""
        while self.write_paused and self._transport is not None:
            self._drain = asyncio.get_running_loop().create_future()
            await self._drain
        if self._transport is None:
            raise ClientGone

    def abort(self) -> None:
        """Closes at once; the running handler is cancelled."""
        if self._transport is not None:
            self._transport.abort()

    def shut(self) -> None:
        """Closes when what was written has left, or at once while a request is being answered."""
        if self._transport is None:
            return
        if self._task is not None:
            self._transport.abort()
        else:
            self._transport.close()

    def _close(self) -> None:
        if self._transport is None:
            return
        if self._discard and self._transport.can_write_eof():
            # A client that is still sending would lose the answer to the reset that a plain close causes; it gets
            # until the next look to read it.
            self._transport.write_eof()
        else:
            self._transport.close()

    def check_time(self, now: float) -> None:
        """Closes the connection when it is idle, or its request makes no progress, for too long."""
        if self._task is not None and not self._waits_for_reader:
            return
        idle_s = DRAIN_IDLE_S if self.server.draining else IDLE_S
        limit_s = READING_S if self._in_request else idle_s
        if now - self._moved_at_s <= (LOOK_EVERY_S if self._discard else limit_s):
            return
        if self.server.draining and self._transport is not None:
            self._transport.close()  # Not before a slow client has read what was written.
        else:
            self.abort()
