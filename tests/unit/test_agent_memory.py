"""Cancelled and ended requests are given back by counting references alone: the collector hardly ever runs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from serai.contracts.codec import encode, encode_frames
from serai.contracts.inference import Frame, FrameKind, InferenceRequest
from serai.runtime.bus import Message
from serai.runtime.http1 import HttpConnection, HttpPool, Origin
from serai.runtime.telemetry import Tracing
from serai.worker_agent.desk import Desk, DeskLimits
from serai.worker_agent.exchange import Exchange
from serai.worker_agent.outbox import Outbox
from unit.fakes import FakeBus

EVENT = b'data: {"choices":[{"delta":{"content":" x"}}]}\n\n'


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(kind: type) -> int:
    return sum(type(one) is kind for one in gc.get_objects())


async def _engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Streams until its client leaves; asked for `/whole`, it answers in one piece."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            await reader.readexactly(2)
            if head.startswith(b"POST /whole "):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                await writer.drain()
                await asyncio.sleep(0.005)
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


def request(stream: int, path: str, *, streamed: bool) -> Message:
    asked = InferenceRequest(f"r{stream}", path, 2, 1, 64 * 1024, 600.0, stream=streamed)
    frames = [Frame(FrameKind.REQUEST, stream, 1, 0, encode(asked)), Frame(FrameKind.BODY, stream, 1, 0, b"{}")]
    return Message("inference.s", encode_frames(frames), f"_INBOX_i.stream.{stream}")


def cancel(stream: int) -> Message:
    return Message("cancel.s", encode_frames([Frame(FrameKind.CANCEL, stream, 1, 0)]), f"_INBOX_i.stream.{stream}")


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("how", ["cancelled", "whole"])
def test_nothing_of_a_request_stays_behind(how: str) -> None:
    async def main() -> None:
        server = await asyncio.start_server(_engine, "127.0.0.1", 0)
        bus = FakeBus()
        pool = HttpPool(Origin("127.0.0.1", server.sockets[0].getsockname()[1]))
        desk = Desk(pool, Outbox(bus), DeskLimits(), Tracing("test", None, 0.0), {})
        streams = range(1, 21)
        async with asyncio.timeout(30):
            for stream in streams:
                desk.on_inference(request(stream, "/whole" if how == "whole" else "/stream", streamed=how != "whole"))
            if how == "cancelled":
                while not all(exchange.sent_bytes for exchange in desk.at_the_engine()) or not desk.at_the_engine():
                    await asyncio.sleep(0.01)
                for stream in streams:
                    desk.on_cancel(cancel(stream))
            while desk.in_flight:
                await asyncio.sleep(0.01)
            bus.take_frames()
            await asyncio.sleep(0.05)
        assert alive(Exchange) == 0
        if how == "cancelled":
            assert alive(HttpConnection) == 0
        await pool.aclose()
        server.close()

    asyncio.run(main())
