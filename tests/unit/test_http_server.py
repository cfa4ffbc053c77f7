"""What clients do to HTTP servers, with raw sockets on loopback."""

from __future__ import annotations

import asyncio
import gc
import gzip
import time
import weakref
import zlib
from collections.abc import Awaitable, Callable

import pytest

from serai.ingress.http_server import HEAD_BYTES_MAX, IDLE_S, ClientGone, HttpRequest, HttpServer
from unit.raw_http import Client, answer, answer_chunk, answer_head, connected, post

LIMIT = 1000
UNREADABLE = b"POST /c HTTP/1.1\r\nHost: h\r\nContent-Encoding: br\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


async def echo(request: HttpRequest) -> None:
    """Answers with what was understood."""
    if request.problem is not None:
        request.respond(request.problem.status, {"x-code": request.problem.code or ""}, request.problem.body())
        return
    text = f"{request.method} {request.path} {request.headers.get('x-a', '')} ".encode()
    request.respond(200, {"content-type": "text/plain"}, text + request.body)


def serve(
    talk: Callable[[Client, HttpServer], Awaitable[None]], handler: Callable[[HttpRequest], Awaitable[None]] = echo
) -> None:
    async def main() -> None:
        server = HttpServer(handler, body_bytes_max=LIMIT)
        await server.start("127.0.0.1", 0)
        client = await connected(server)
        try:
            async with asyncio.timeout(10):
                await talk(client, server)
        finally:
            client[1].close()
            await server.aclose()
            await asyncio.sleep(0)

    asyncio.run(main())


def test_requests_follow_each_other_on_one_connection_and_paths_are_decoded() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        for path, seen in (
            ("/a%20b?q=1", "/a b"),
            ("http://h/abs", "/abs"),
            ("/v1/models/org%2Fm", "/v1/models/org/m"),
        ):
            writer.write(post(b"body", "X-A: 1", "X-A: 2", path=path))
            status, headers, body = await answer(reader)
            assert (status, body) == (200, f"POST {seen} 1, 2 body".encode())
            assert headers["date"].endswith("GMT")
            assert "connection" not in headers

    serve(talk)


def test_any_cutting_of_a_request_is_the_same_request() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        for byte in post(b"in pieces"):
            writer.write(bytes((byte,)))
            await asyncio.sleep(0)
        assert (await answer(reader))[2] == b"POST /x  in pieces"
        writer.write(CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert (await answer(reader))[2] == b"POST /c  abcde"

    serve(talk)


def test_pipelined_requests_are_answered_in_order() -> None:
    gate = asyncio.Event()

    async def slow_first(request: HttpRequest) -> None:
        if request.body == b"0":
            await gate.wait()
        await echo(request)

    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(b"".join(post(str(n).encode()) for n in range(5)))
        await writer.drain()
        asyncio.get_running_loop().call_later(0.05, gate.set)
        assert [(await answer(reader))[2][-1:] for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]

    serve(talk, slow_first)


@pytest.mark.parametrize(
    ("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_compressed_bodies_are_read(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        client[1].write(post(encode(b"squeezed"), f"Content-Encoding: {encoding}"))
        assert (await answer(client[0]))[2] == b"POST /x  squeezed"

    serve(talk)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (post(b"x" * (LIMIT + 1)), 413, "body_too_large"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999\r\n\r\n", 413, "body_too_large"),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000,
            413,
            "body_too_large",
        ),
        (post(gzip.compress(b"x" * 100_000, mtime=0), "Content-Encoding: gzip"), 413, "body_too_large"),
        (post(b"not gzip", "Content-Encoding: gzip"), 400, "invalid_body"),
        (post(gzip.compress(b"x" * 50, mtime=0)[:-10], "Content-Encoding: gzip"), 400, "invalid_body"),
        (post(b"x", "Content-Encoding: br"), 415, "unsupported_encoding"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * (HEAD_BYTES_MAX + 10) + b"\r\n\r\n", 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 1_000_000, 431, "head_too_large"),
        (CHUNKED + b"1\r\na\r\n0\r\nX: " + b"y" * 1_000_000, 431, "head_too_large"),
        (UNREADABLE + b"0\r\nX: " + b"y" * 1_000_000, 431, "head_too_large"),
        (UNREADABLE + b"7d0\r\n" + b"x" * 2000, 413, "body_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * (HEAD_BYTES_MAX // 5), 431, "head_too_large"),
        (b"complete nonsense\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: many\r\n\r\n", 400, "invalid_http"),
    ],
)
def test_what_cannot_be_read_is_told(request_bytes: bytes, status: int, code: str) -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(request_bytes)
        got, headers, body = await answer(reader)
        assert (got, headers["x-code"]) == (status, code), body

    serve(talk)


def test_a_refused_body_is_not_read_and_the_connection_ends() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5000\r\nExpect: 100-continue\r\n\r\n")
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (413, "close")
        assert await reader.read() == b"", "no 100 Continue, and nothing after the answer"

    serve(talk)


def test_expect_is_answered_before_the_body_comes() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(b"POST /e HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert (await answer(reader))[2] == b"POST /e  hi"

    serve(talk)


def test_http_1_0_head_and_close_are_honoured() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(b"HEAD /h HTTP/1.1\r\nHost: h\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 9\r\n" in head
        writer.write(b"GET /z HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""

    serve(talk)


def test_a_request_to_change_the_protocol_is_served_as_http_1_1() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(b"GET /u HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(post(b"still here"))
        assert (await answer(reader))[2] == b"POST /x  still here"

    serve(talk)


def test_the_handler_is_cancelled_when_its_client_leaves() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(request: HttpRequest) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def talk(client: Client, server: HttpServer) -> None:
        client[1].write(post(b""))
        await started.wait()
        client[1].close()
        await cancelled.wait()
        assert not server.connections

    serve(talk, wait_for_ever)


def test_a_slow_reader_holds_the_writer_and_a_gone_one_ends_it() -> None:
    held, ended = asyncio.Event(), asyncio.Event()

    async def stream(request: HttpRequest) -> None:
        answer = request.start(200, {"content-type": "text/event-stream"})
        try:
            while True:
                if not answer.send(b"x" * 65536):
                    held.set()
                    await answer.room()
        except (ClientGone, asyncio.CancelledError):
            ended.set()
            raise

    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(post(b""))
        await reader.readuntil(b"\r\n\r\n")
        await held.wait()
        writer.transport.abort()
        await ended.wait()

    serve(talk, stream)


def test_a_stream_that_is_not_ended_is_cut_for_the_client() -> None:
    async def broken(request: HttpRequest) -> None:
        answer = request.start(200, {})
        answer.send(b"half")
        raise RuntimeError("a bug in the handler")

    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(post(b""))
        await reader.readuntil(b"\r\n\r\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readuntil(b"0\r\n\r\n")

    serve(talk, broken)


def test_headers_cannot_be_split() -> None:
    async def evil(request: HttpRequest) -> None:
        with pytest.raises(ValueError, match="line break"):
            request.respond(200, {"x": "a\r\nset-cookie: b"}, b"")
        request.respond(200, {"x": "fine"}, b"ok")

    async def talk(client: Client, server: HttpServer) -> None:
        client[1].write(post(b""))
        assert (await answer(client[0]))[1]["x"] == "fine"

    serve(talk, evil)


def test_a_head_that_drips_has_no_more_time_than_one_that_stops() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(b"POST / HTTP/1.1\r\nX: ")
        await asyncio.sleep(0.02)
        (connection,) = server.connections
        began_s = connection._moved_at_s
        for _ in range(3):
            writer.write(b"y")
            await asyncio.sleep(0.02)
        connection.check_time(began_s + 61)
        assert await reader.read() == b""

    serve(talk)


def test_headers_that_belong_to_every_answer_are_sent_with_it_and_no_content_has_no_length() -> None:
    async def empty(request: HttpRequest) -> None:
        request.more_headers = {"x-more": "1"}
        request.respond(204 if request.body else 404, {"x": "2"}, b"")

    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(post(b"x"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 204 No Content\r\nx: 2\r\nx-more: 1\r\n")
        assert b"content-length" not in head
        writer.write(post(b""))
        status, headers, _ = await answer(reader)
        assert (status, headers["x-more"], headers["content-length"]) == (404, "1", "0")

    serve(talk, empty)


def test_idle_and_stuck_connections_are_closed() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(b"POST / HTTP/1.1\r\nContent-Le")
        await asyncio.sleep(0.02)
        (connection,) = server.connections
        connection.check_time(connection._moved_at_s + 59)
        assert server.connections
        connection.check_time(connection._moved_at_s + 61)
        await reader.read()  # The end, as far as the client sees.
        assert not server.connections

    serve(talk)


def test_draining_lets_each_connection_have_the_answer_it_waits_for_and_closes_the_idle_ones() -> None:
    gate = asyncio.Event()

    async def slow(request: HttpRequest) -> None:
        if request.body == b"slow":
            stream = request.start(200, {}, b"begun")
            await gate.wait()
            stream.end(b" ended")
        else:
            await echo(request)

    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        kept, idle = await connected(server), await connected(server)
        for one in (kept, idle):
            one[1].write(post(b"1"))
            assert "connection" not in (await answer(one[0]))[1]
        writer.write(post(b"slow"))
        await reader.readuntil(b"begun")
        port = server._servers[0].sockets[0].getsockname()[1]
        draining = asyncio.ensure_future(server.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        kept[1].write(post(b"2"))  # One more answer, which says that it is the last.
        status, headers, body = await answer(kept[0])
        assert (status, headers["connection"], body) == (200, "close", b"POST /x  2")
        assert await kept[0].read() == b""
        assert await idle[0].read() == b""
        assert not draining.done()
        gate.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b" ended\r\n0\r\n\r\n")
        # It was not told that the connection ends: it may ask once more before that is noticed to be idle.
        writer.write(post(b"3"))
        assert (await answer(reader))[1]["connection"] == "close"
        assert await draining is True
        for one in (kept, idle):
            one[1].close()

    serve(talk, slow)


def test_draining_ends_in_time_though_a_request_does_not() -> None:
    async def never(request: HttpRequest) -> None:
        await asyncio.Event().wait()

    async def talk(client: Client, server: HttpServer) -> None:
        client[1].write(post(b""))
        await asyncio.sleep(0.02)
        assert await server.drain(0.1) is False

    serve(talk, never)


class Held:
    """Something big that a handler has."""


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_client_that_left_leaves_nothing_to_the_collector(is_answered: bool) -> None:
    kept: list[weakref.ref[object]] = []

    async def hold(request: HttpRequest) -> None:
        held = Held()
        kept.append(weakref.ref(held))
        if is_answered:
            await echo(request)
        else:
            await asyncio.Event().wait()
        assert held

    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(post(b""))
        if is_answered:
            await answer(reader)
        while not kept:
            await asyncio.sleep(0.01)
        kept.extend(weakref.ref(connection) for connection in server.connections)
        writer.transport.abort()
        while server.connections:
            await asyncio.sleep(0.01)
        for _ in range(5):
            await asyncio.sleep(0)

    gc.collect()
    gc.disable()
    try:
        serve(talk, hold)
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


def test_what_stands_behind_a_body_is_no_header() -> None:
    """A proxy that takes headers out, or sets them, does not look there."""

    async def talk(client: Client, server: HttpServer) -> None:
        head = CHUNKED.replace(b"Host: h", b"Host: h\r\nX-A: 1")
        client[1].write(head + b"1\r\nz\r\n0\r\nX-A: 2\r\nX-B: 3\r\n\r\n")
        assert (await answer(client[0]))[2] == b"POST /c 1 z"

    serve(talk)


def test_a_pipelined_expectation_is_answered_behind_the_answer_before_it() -> None:
    gate = asyncio.Event()

    async def streaming(request: HttpRequest) -> None:
        if request.method == "POST":
            await echo(request)
            return
        stream = request.start(200, {})
        stream.send(b"before")
        await gate.wait()
        stream.end(b"after")

    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.write(b"GET /s HTTP/1.1\r\nHost: h\r\n\r\n")
        await answer_head(reader)
        assert await answer_chunk(reader) == b"before"
        writer.write(b"POST /b HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        await asyncio.sleep(0.05)
        gate.set()
        assert [await answer_chunk(reader), await answer_chunk(reader)] == [b"after", b""]
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await answer(reader))[2] == b"POST /b  ok"

    serve(talk, streaming)


def test_a_client_of_http_1_0_is_not_told_to_continue() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        client[1].write(b"POST /o HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx")
        assert (await answer(client[0]))[2] == b"POST /o  x"

    serve(talk)


@pytest.mark.parametrize("cut", [None, 1, 40, 100, 118, 130])
@pytest.mark.parametrize(
    "body", [b"Content-Length: 4\r\n\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n"]
)
def test_an_offer_of_another_protocol_takes_neither_the_body_nor_what_follows(body: bytes, cut: int | None) -> None:
    """Java's client offers HTTP/2 in each request that it sends without TLS."""

    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        head = b"POST /u HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nX-A: 1\r\n"
        sent = head + body + post(b"next")
        writer.write(sent[:cut])
        await asyncio.sleep(0.02)
        writer.write(sent[cut or len(sent) :])
        assert [(await answer(reader))[2] for _ in range(2)] == [b"POST /u 1 body", b"POST /x  next"]

    serve(talk)


def test_a_client_that_reads_no_answers_gets_no_further_ones() -> None:
    answered = 0

    async def large(request: HttpRequest) -> None:
        nonlocal answered
        answered += 1
        request.respond(200, {}, b"x" * 10_000_000)

    async def talk(client: Client, server: HttpServer) -> None:
        reader, writer = client
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(10):
            writer.write(post(b""))
            await asyncio.sleep(0.01)
        assert answered == 1
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(10):
            assert len((await answer(reader))[2]) == 10_000_000
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(b"") + post(b""))
        await asyncio.sleep(0.05)
        (connection,) = server.connections
        connection.check_time(time.monotonic() + IDLE_S + 1)
        await asyncio.sleep(0.05)
        assert not server.connections, "whoever never reads is not waited for"

    serve(talk, large)


def test_a_body_in_crumbs_takes_little_more_than_its_size() -> None:
    async def talk(client: Client, server: HttpServer) -> None:
        client[1].write(CHUNKED + b"1\r\na\r\n" * 900)
        await asyncio.sleep(0.1)
        (connection,) = server.connections
        assert len(connection._body) < 300
        client[1].write(b"0\r\n\r\n")
        assert (await answer(client[0]))[2] == b"POST /c  " + b"a" * 900

    serve(talk)


def test_no_second_answer_is_written_into_a_stream() -> None:
    async def broken(request: HttpRequest) -> None:
        request.start(200, {}, b"some")
        request.respond(500, {}, b"sorry")  # As for whatever goes wrong and is not foreseen.

    async def talk(client: Client, server: HttpServer) -> None:
        client[1].write(post(b""))
        await answer_head(client[0])
        assert await answer_chunk(client[0]) == b"some"
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client[0].readexactly(1)

    serve(talk, broken)
