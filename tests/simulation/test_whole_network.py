"""TCP in memory: what a protocol may rely on."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from serai.simulator.whole.memory_network import HIGH_WATER_BYTES, HOST, WINDOW_BYTES, MemoryNetwork, same_delay
from serai.simulator.whole.virtual_loop import VirtualLoop, run


class End(asyncio.Protocol):
    """Notes all that happens to one end."""

    def __init__(self, *, keep_open: bool = False) -> None:
        self.transport: asyncio.Transport
        self.data = b""
        self.calls: list[str] = []
        self.lost: BaseException | str | None = "not yet"
        self._keep_open = keep_open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return self._keep_open

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = exc


Work = Callable[[MemoryNetwork, End, End], Coroutine[Any, Any, None]]


def connected(work: Work, *, keep_open: bool = False) -> None:
    """Runs `work` with both ends of a connection between the hosts `outside` and `far`."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        network = MemoryNetwork(loop, same_delay(0.01))
        accepted: list[End] = []

        def accept() -> End:
            accepted.append(End(keep_open=keep_open))
            return accepted[-1]

        HOST.set("far")
        server = await loop.create_server(accept, "0.0.0.0", 80)
        HOST.set("outside")
        _, ours = await loop.create_connection(End, "far", 80)
        await work(network, ours, accepted[0])
        server.close()
        assert not loop.problems

    run(main())


def test_bytes_arrive_in_order_after_the_delay() -> None:
    async def work(network: MemoryNetwork, ours: End, theirs: End) -> None:
        ours.transport.write(b"one ")
        ours.transport.writelines([b"two ", b"three"])
        await asyncio.sleep(0.009)
        assert theirs.data == b""
        await asyncio.sleep(0.002)
        assert theirs.data == b"one two three"
        theirs.transport.write(b"back")
        await asyncio.sleep(0.011)
        assert ours.data == b"back"

    connected(work)


def test_a_reader_that_pauses_stops_its_writer_and_lets_it_go_on() -> None:
    async def work(network: MemoryNetwork, ours: End, theirs: End) -> None:
        theirs.transport.pause_reading()
        sent = 0
        while "pause" not in ours.calls:
            ours.transport.write(b"x" * 10_000)
            sent += 10_000
        assert WINDOW_BYTES + HIGH_WATER_BYTES <= sent <= WINDOW_BYTES + HIGH_WATER_BYTES + 20_000
        await asyncio.sleep(60)
        assert (theirs.data, ours.calls) == (b"", ["pause"])
        theirs.transport.resume_reading()
        await asyncio.sleep(1)
        assert len(theirs.data) == sent
        assert ours.calls == ["pause", "resume"]
        assert ours.transport.get_write_buffer_size() == 0

    connected(work)


def test_half_close_leaves_the_other_direction_open() -> None:
    async def work(network: MemoryNetwork, ours: End, theirs: End) -> None:
        ours.transport.write(b"question")
        ours.transport.write_eof()
        await asyncio.sleep(0.02)
        assert (theirs.data, theirs.calls, theirs.lost) == (b"question", ["eof"], "not yet")
        theirs.transport.write(b"answer")
        await asyncio.sleep(0.02)
        assert ours.data == b"answer"
        theirs.transport.close()
        await asyncio.sleep(0.02)
        assert (ours.calls, ours.lost, theirs.lost) == (["eof"], None, None)
        assert network.open_ends == 0

    connected(work, keep_open=True)


def test_close_delivers_what_was_written_however_much_it_is() -> None:
    async def work(network: MemoryNetwork, ours: End, theirs: End) -> None:
        ours.transport.write(b"x" * 3 * WINDOW_BYTES)
        ours.transport.close()
        assert ours.transport.is_closing()
        await asyncio.sleep(1)
        assert (len(theirs.data), theirs.calls, theirs.lost) == (3 * WINDOW_BYTES, ["eof"], None)
        assert network.open_ends == 0

    connected(work)


def test_abort_drops_what_was_not_on_its_way() -> None:
    async def work(network: MemoryNetwork, ours: End, theirs: End) -> None:
        ours.transport.write(b"x" * 3 * WINDOW_BYTES)
        ours.transport.abort()
        await asyncio.sleep(1)
        assert len(theirs.data) == WINDOW_BYTES
        assert (ours.lost, theirs.lost) == (None, None)

    connected(work)


def test_resets_by_linger_by_unread_data_and_by_writing_to_a_closed_end() -> None:
    async def by_linger(network: MemoryNetwork, ours: End, theirs: End) -> None:
        raw = theirs.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.transport.abort()
        await asyncio.sleep(0.02)
        assert isinstance(ours.lost, ConnectionResetError)

    async def by_unread_data(network: MemoryNetwork, ours: End, theirs: End) -> None:
        theirs.transport.pause_reading()
        ours.transport.write(b"never read")
        await asyncio.sleep(0.02)
        theirs.transport.close()
        await asyncio.sleep(0.02)
        assert isinstance(ours.lost, ConnectionResetError)

    async def by_writing(network: MemoryNetwork, ours: End, theirs: End) -> None:
        theirs.transport.close()
        ours.transport.write(b"too late")
        await asyncio.sleep(0.009)
        assert ours.lost == "not yet"
        await asyncio.sleep(0.02)
        assert ours.lost is None  # The end came first, and closed it.

    for work in (by_linger, by_unread_data, by_writing):
        connected(work)


def test_a_host_that_is_killed_resets_its_peers_and_refuses_connections() -> None:
    async def work(network: MemoryNetwork, ours: End, theirs: End) -> None:
        network.kill("far")
        theirs.transport.write(b"from the grave")
        await asyncio.sleep(0.02)
        assert isinstance(ours.lost, ConnectionResetError)
        assert ours.data == b""
        network.revive("far")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.get_running_loop().create_connection(End, "far", 80)
        assert network.open_ends == 0

    connected(work)


def test_a_cut_is_silent_until_it_heals() -> None:
    async def work(network: MemoryNetwork, ours: End, theirs: End) -> None:
        network.cut("far", "outside")
        ours.transport.write(b"into the void")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.get_running_loop().create_connection(End, "far", 80)
        assert (theirs.data, ours.lost) == (b"", "not yet")
        network.heal("far", "outside")
        await asyncio.sleep(0.02)
        assert isinstance(ours.lost, ConnectionResetError)

    connected(work)


def test_one_port_one_server() -> None:
    async def work(network: MemoryNetwork, ours: End, theirs: End) -> None:
        HOST.set("far")
        with pytest.raises(OSError, match="in use"):
            await asyncio.get_running_loop().create_server(End, "127.0.0.1", 80)

    connected(work)
