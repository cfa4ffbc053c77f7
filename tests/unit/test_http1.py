"""The HTTP client of the agent: answers cut anywhere, servers that close, talk nonsense or are not there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.http1 import (
    BadAnswer,
    Cut,
    HttpConnection,
    HttpFailure,
    HttpPool,
    Origin,
    Unreachable,
    fetch,
    request_head,
)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n5\r\nthree\r\n0\r\n\r\n"
COUNTED = OK + b"content-length: 8\r\nX-A: 1\r\nx-a: 2\r\n\r\nonethree"
UNTIL_EOF = OK + b"connection: close\r\n\r\nonethree"


class Answered:
    """A handler that remembers everything, and insists that nothing follows the end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self.failure: HttpFailure | None = None
        self.connection: HttpConnection | None = None
        self.lent_times = 0
        self.begun = asyncio.Event()
        self.over = asyncio.Event()

    def lent(self, connection: HttpConnection) -> None:
        self.connection = connection
        self.lent_times += 1

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        assert not self.over.is_set()
        assert self.status == 0
        self.status, self.headers = status, headers

    def on_data(self, data: bytes) -> None:
        assert not self.over.is_set()
        assert self.status
        self.body += data
        self.begun.set()

    def on_complete(self) -> None:
        assert not self.over.is_set()
        self.complete = True
        self.over.set()

    def on_failure(self, failure: HttpFailure) -> None:
        assert not self.over.is_set()
        self.failure = failure
        self.over.set()


class Wire:
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        self.sent = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: list[bytes]) -> None:
        self.sent += b"".join(parts)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def answered_with(answer: bytes, cuts: list[int], *, eof: bool = False) -> tuple[Answered, list[HttpConnection]]:
    """What a handler hears when `answer` comes in pieces; and whether the connection may be used again."""
    idle: list[HttpConnection] = []
    connection, handler = HttpConnection(idle.append), Answered()
    connection.connection_made(Wire())  # type: ignore[arg-type]
    connection.send((b"GET / HTTP/1.1\r\n\r\n",), handler)
    bounds = [0, *sorted(cuts), len(answer)]
    for start, end in pairwise(bounds):
        if end > start:
            connection.data_received(answer[start:end])
    if eof:
        connection.connection_lost(None)
    return handler, idle


cuts = st.lists(st.integers(0, 90), max_size=8)


@given(st.sampled_from([CHUNKED, COUNTED]), cuts, st.booleans())
def test_an_answer_is_heard_the_same_however_it_is_cut(answer: bytes, cuts: list[int], interim: bool) -> None:
    if interim:
        answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + answer
    handler, idle = answered_with(answer, [at for at in cuts if at <= len(answer)])
    assert (handler.status, handler.body, handler.complete, handler.failure) == (200, b"onethree", True, None)
    assert handler.headers == (
        {"content-length": "8", "x-a": "1, 2"} if COUNTED in answer else {"transfer-encoding": "chunked"}
    )
    assert len(idle) == 1


@given(cuts)
def test_an_answer_without_a_length_ends_with_its_connection(cuts: list[int]) -> None:
    inside = [at for at in cuts if at <= len(UNTIL_EOF)]
    assert not answered_with(UNTIL_EOF, inside)[0].over.is_set()
    handler, idle = answered_with(UNTIL_EOF, inside, eof=True)
    assert (handler.status, handler.body, handler.complete) == (200, b"onethree", True)
    assert idle == []


@given(st.sampled_from([CHUNKED, COUNTED]), st.data())
def test_an_answer_that_is_not_whole_at_the_end_of_its_connection_is_cut(answer: bytes, data: st.DataObject) -> None:
    handler, idle = answered_with(answer[: data.draw(st.integers(0, len(answer) - 1))], data.draw(cuts), eof=True)
    assert isinstance(handler.failure, Cut)
    assert handler.failure.sent
    assert not handler.complete
    assert idle == []
    assert b"onethree".startswith(handler.body)


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_is_whole_with_its_head(status: int) -> None:
    handler, idle = answered_with(b"HTTP/1.1 %d X\r\n\r\n" % status, [])
    assert (handler.status, handler.body, handler.complete, len(idle)) == (status, b"", True, 1)


@pytest.mark.parametrize(
    "answer", [COUNTED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), b"HTTP/1.0" + COUNTED[8:]]
)
def test_a_connection_that_the_server_will_close_is_not_used_again(answer: bytes) -> None:
    handler, idle = answered_with(answer, [])
    assert handler.complete
    assert idle == []
    assert handler.body == b"onethree"


def test_a_change_of_protocol_is_no_answer() -> None:
    handler, idle = answered_with(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", [])
    assert isinstance(handler.failure, BadAnswer)
    assert idle == []


@given(st.binary(min_size=1, max_size=40))
def test_nonsense_is_a_failure_or_nothing_yet_but_never_an_answer(garbage: bytes) -> None:
    handler, idle = answered_with(b"X" + garbage, [])
    assert isinstance(handler.failure, BadAnswer)
    assert (handler.status, idle) == (0, [])


def test_bytes_nobody_asked_for_close_the_connection() -> None:
    connection, wire = HttpConnection(lambda _: None), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    assert not connection.usable
    assert wire.closing


def test_an_aborted_connection_tells_its_handler_nothing_more() -> None:
    connection, wire, handler = HttpConnection(lambda _: None), Wire(), Answered()
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.send((b"x",), handler)
    connection.data_received(COUNTED[:-3])
    connection.abort()
    assert wire.closing
    connection.data_received(COUNTED[-3:])
    connection.connection_lost(None)
    assert not handler.over.is_set()


# -- requests --------------------------------------------------------------------------------------------------------


def test_a_request_head_says_where_it_goes_and_how_long_its_body_is() -> None:
    origin = Origin.parse("http://engine:8000/base/")
    assert request_head(origin, "POST", "/v1/x", {"a": "b"}, 7) == (
        b"POST /base/v1/x HTTP/1.1\r\nhost: engine:8000\r\na: b\r\ncontent-length: 7\r\n\r\n"
    )


def test_a_request_head_names_an_ipv6_host_in_brackets() -> None:
    assert b"host: [::1]:80\r\n" in request_head(Origin.parse("http://[::1]"), "GET", "/", {}, 0)


def test_a_path_that_would_split_the_request_line_is_refused() -> None:
    with pytest.raises(ValueError, match="space"):
        request_head(Origin("h", 1), "GET", "/a HTTP/1.1", {}, 0)


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/a\r\nb: c", {}), ("/a", {"x": "y\r\nz: 1"}), ("/a", {"x\n": "y"}), ("/a", {"x": "\r"}), ("/a", {"x": "駱駝"})],
)
def test_text_that_would_split_a_header_is_refused(path: str, headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"line break|latin-1"):
        request_head(Origin("h", 1), "GET", path, headers, 0)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h", Origin("h", 80)),
        ("https://h/", Origin("h", 443, tls=True)),
        ("http://[::1]:8000", Origin("::1", 8000)),
        ("http://127.0.0.1:8000/v/w/", Origin("127.0.0.1", 8000, prefix="/v/w")),
    ],
)
def test_an_address_is_read(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin
    assert Origin.parse(str(origin)) == origin


@pytest.mark.parametrize("url", ["", "h:80", "ftp://h", "http://", "http://h?x=1", "http://h#x", "http://u:p@h"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="address") as refused:
        Origin.parse(url)
    assert repr(url) in str(refused.value)


# -- with a server ---------------------------------------------------------------------------------------------------

Script = Callable[["Visit"], Awaitable[None]]


class Visit:
    """One connection, as a scripted server sees it."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.gone = asyncio.Event()
        """Its script has come to an end."""

    async def request(self) -> bytes:
        """The next request's head; b"" when the client has closed."""
        try:
            return await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def closed_by_client(self) -> None:
        """Returns when the client has closed the connection."""
        try:
            await self.reader.read()
        except ConnectionError:
            pass


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[HttpPool, list[Visit]]]:
    """A pool to a server that treats each connection by `script`, and the connections it has seen."""
    visits: list[Visit] = []
    scripts: set[asyncio.Task[Any]] = set()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        scripts.add(task)
        visit = Visit(len(visits) + 1, reader, writer)
        visits.append(visit)
        try:
            await script(visit)
        finally:
            visit.gone.set()
            writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    pool = HttpPool(Origin("127.0.0.1", server.sockets[0].getsockname()[1]))
    try:
        async with asyncio.timeout(10):
            yield pool, visits
            await pool.aclose()
            await asyncio.gather(*scripts)
    finally:
        server.close()
        await server.wait_closed()


def ask(pool: HttpPool, body: bytes = b"") -> Answered:
    handler = Answered()
    pool.start((request_head(pool.origin, "POST", "/", {}, len(body)), body), handler, handler.lent)
    return handler


async def always(visit: Visit, answer: bytes = COUNTED) -> None:
    while await visit.request():
        await visit.say(answer)


def test_one_connection_serves_one_request_after_the_other() -> None:
    async def test() -> None:
        async with serving(always) as (pool, visits):
            for _ in range(5):
                assert (await fetch(pool, "GET", "/")).body == b"onethree"
            assert len(visits) == 1

    asyncio.run(test())


def test_requests_at_once_have_connections_of_their_own() -> None:
    async def test() -> None:
        async with serving(always) as (pool, visits):
            answers = await asyncio.gather(*(fetch(pool, "GET", "/") for _ in range(4)))
            assert [answer.status for answer in answers] == [200] * 4
            assert len(visits) == 4

    asyncio.run(test())


def test_a_request_on_a_connection_that_the_server_closed_meanwhile_is_sent_again_once() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(COUNTED)
        if visit.number == 1:
            await visit.request()  # Read, and closed without a byte.
        else:
            await visit.closed_by_client()

    async def test() -> None:
        async with serving(script) as (pool, visits):
            await fetch(pool, "GET", "/")
            handler = ask(pool)
            await handler.over.wait()
            assert (handler.complete, handler.lent_times, len(visits)) == (True, 2, 2)

    asyncio.run(test())


def test_a_new_connection_that_closes_without_an_answer_is_not_tried_again() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()

    async def test() -> None:
        async with serving(script) as (pool, visits):
            handler = ask(pool)
            await handler.over.wait()
            assert isinstance(handler.failure, Cut)
            assert (handler.lent_times, len(visits)) == (1, 1)

    asyncio.run(test())


def test_an_answer_that_has_begun_is_never_asked_for_again() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(COUNTED)
        await visit.request()
        await visit.say(COUNTED[:-3])

    async def test() -> None:
        async with serving(script) as (pool, visits):
            await fetch(pool, "GET", "/")
            handler = ask(pool)
            await handler.over.wait()
            assert isinstance(handler.failure, Cut)
            assert (handler.body, len(visits)) == (b"oneth", 1)

    asyncio.run(test())


def test_an_idle_connection_that_the_server_has_closed_is_replaced() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(COUNTED)
        if visit.number == 2:
            await visit.closed_by_client()

    async def test() -> None:
        async with serving(script) as (pool, visits):
            first = ask(pool)
            await first.over.wait()
            assert first.connection is not None
            while first.connection.usable:
                await asyncio.sleep(0)
            second = ask(pool)
            await second.over.wait()
            assert (second.complete, len(visits)) == (True, 2)

    asyncio.run(test())


def test_an_aborted_request_closes_its_connection_at_the_server() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(COUNTED[:-3])
        await visit.closed_by_client()

    async def test() -> None:
        async with serving(script) as (pool, visits):
            handler = ask(pool)
            await handler.begun.wait()
            assert handler.connection is not None
            handler.connection.abort()
            await visits[0].gone.wait()
            assert not handler.over.is_set()

    asyncio.run(test())


def test_a_fetch_that_takes_too_long_closes_its_connection() -> None:
    async def script(visit: Visit) -> None:
        await visit.closed_by_client()

    async def test() -> None:
        async with serving(script) as (pool, visits):
            with pytest.raises(TimeoutError):
                await fetch(pool, "GET", "/", timeout_s=0.05)
            await visits[0].gone.wait()

    asyncio.run(test())


def test_a_cancelled_fetch_closes_its_connection() -> None:
    asked = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        asked.set()
        await visit.closed_by_client()

    async def test() -> None:
        async with serving(script) as (pool, visits):
            fetching = asyncio.ensure_future(fetch(pool, "GET", "/"))
            await asked.wait()
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await visits[0].gone.wait()

    asyncio.run(test())


def test_a_fetch_cancelled_while_it_connects_sends_nothing() -> None:
    visited = asyncio.Event()

    async def script(visit: Visit) -> None:
        visited.set()
        assert await visit.request() == b""

    async def test() -> None:
        async with serving(script) as (pool, visits):
            fetching = asyncio.ensure_future(fetch(pool, "GET", "/"))
            await asyncio.sleep(0)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await visited.wait()
            await visits[0].gone.wait()

    asyncio.run(test())


def pausing(handler: Answered) -> None:
    """Makes `handler` stop the reading with each piece of data."""
    data_came = handler.on_data

    def pause(data: bytes) -> None:
        data_came(data)
        assert handler.connection is not None
        handler.connection.pause_reading()

    handler.on_data = pause  # type: ignore[method-assign]


def test_a_paused_connection_is_read_again_when_it_is_resumed() -> None:
    async def test() -> None:
        more, sent = asyncio.Event(), asyncio.Event()

        async def script(visit: Visit) -> None:
            if visit.number == 2:
                await always(visit)
                return
            await visit.request()
            await visit.say(COUNTED[:-3])
            await more.wait()
            await visit.say(COUNTED[-3:])
            sent.set()
            await visit.closed_by_client()

        async with serving(script) as (pool, _):
            handler = ask(pool)
            pausing(handler)
            await handler.begun.wait()
            more.set()
            await sent.wait()
            await fetch(pool, "GET", "/")  # What was sent before this answer has arrived too.
            assert not handler.over.is_set()
            assert handler.connection is not None
            handler.connection.resume_reading()
            await handler.over.wait()
            assert handler.body == b"onethree"

    asyncio.run(test())


def test_a_connection_that_was_paused_at_the_end_of_its_answer_can_be_used_again() -> None:
    async def test() -> None:
        async with serving(always) as (pool, visits):
            handler = ask(pool)
            pausing(handler)
            await handler.over.wait()
            assert (await fetch(pool, "GET", "/")).body == b"onethree"
            assert len(visits) == 1

    asyncio.run(test())


def test_a_refused_connection_is_unreachable_and_nothing_was_sent() -> None:
    async def test() -> None:
        with socket.socket() as taken:  # Bound, but nobody listens.
            taken.bind(("127.0.0.1", 0))
            pool = HttpPool(Origin("127.0.0.1", taken.getsockname()[1]))
            handler = ask(pool)
            await handler.over.wait()
            assert isinstance(handler.failure, Unreachable)
            assert not handler.failure.sent
            assert handler.lent_times == 0
            await pool.aclose()

    asyncio.run(test())


def test_a_server_that_does_not_accept_in_time_is_unreachable() -> None:
    async def test() -> None:
        pool = HttpPool(Origin("127.0.0.1", 9), connect_timeout_s=0)
        handler = ask(pool)
        await handler.over.wait()
        assert isinstance(handler.failure, Unreachable)
        assert "did not accept" in str(handler.failure)
        await pool.aclose()

    asyncio.run(test())


def test_an_answer_larger_than_the_limit_is_not_collected() -> None:
    async def test() -> None:
        async with serving(always) as (pool, visits):
            with pytest.raises(BadAnswer, match="larger than 7 bytes"):
                await fetch(pool, "GET", "/", limit_bytes=7)
            await visits[0].gone.wait()

    asyncio.run(test())


def test_closing_the_pool_closes_its_idle_connections() -> None:
    async def test() -> None:
        async with serving(always) as (pool, visits):
            await fetch(pool, "GET", "/")
            await pool.aclose()
            await visits[0].gone.wait()

    asyncio.run(test())


def test_closing_the_pool_fails_those_who_wait_for_a_connection() -> None:
    async def test() -> None:
        pool = HttpPool(Origin("127.0.0.1", 9))
        handler = ask(pool)
        await pool.aclose()
        assert isinstance(handler.failure, Unreachable)
        assert handler.lent_times == 0

    asyncio.run(test())


def test_a_connection_that_comes_back_to_a_full_or_closed_pool_is_closed() -> None:
    async def test() -> None:
        async with serving(always) as (pool, visits):
            small = HttpPool(pool.origin, idle_max=1)
            await asyncio.gather(*(fetch(small, "GET", "/") for _ in range(3)))
            await fetch(small, "GET", "/")
            assert len(visits) == 3
            running = ask(small)
            await small.aclose()
            await running.over.wait()
            assert running.connection is not None
            assert not running.connection.usable

    asyncio.run(test())
