"""TCP between hosts of the simulation: transports that asyncio protocols cannot tell from real ones.

What it keeps of TCP: bytes in order; a window, so that a reader that pauses stops the writer (`pause_writing`); half
close; a reset when data meets a closed end, or is closed upon unread; refused connections; hosts that vanish. What it
leaves out: packet loss and bandwidth, and every limit on the number of connections.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar, copy_context
from typing import Any, cast

from serai.simulator.whole.virtual_loop import VirtualLoop

HOST: ContextVar[str] = ContextVar("simulated_host", default="outside")
"""Which host the running code is on: tasks and callbacks inherit it from what started them."""

WINDOW_BYTES = 256 * 1024
"""Bytes on their way or unread at the other end, unless the network is made with another window; what is beyond waits
in the writer's transport."""
READ_BYTES_MAX = 256 * 1024
HIGH_WATER_BYTES = 64 * 1024
LOOPBACK_S = 0.00002
_EPHEMERAL_PORTS = 40000

Factory = Callable[[], asyncio.BaseProtocol]
Latency = Callable[[str, str], float]
"""One-way delay in seconds from a host to a host."""

_END = object()
_RESET = object()


def same_delay(delay_s: float) -> Latency:
    """The same delay between any two hosts, and next to none within one."""
    return lambda sender, receiver: LOOPBACK_S if sender == receiver else delay_s


class SimulatedSocket:
    """What protocols ask of a socket: its family, options, and name."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM

    def __init__(self, name: tuple[str, int]) -> None:
        self._name = name
        self.resets_on_close = False

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Keeps only SO_LINGER with 0 seconds, which makes a close a reset."""
        if option == socket.SO_LINGER and isinstance(value, bytes):
            self.resets_on_close = struct.unpack("ii", value) == (1, 0)


class MemoryTransport(asyncio.Transport):
    """One end of a connection. Everything that goes to the other end travels in one lane, in order."""

    def __init__(
        self, network: MemoryNetwork, local: tuple[str, int], remote: tuple[str, int], context: Context
    ) -> None:
        super().__init__()
        self._context = context
        """In which the protocol is called: that of the process this end belongs to."""
        self._network = network
        self._loop = network.loop
        self._local = local
        self._remote = remote
        self._socket = SimulatedSocket(local)
        self._peer: MemoryTransport | None = None
        self._protocol: asyncio.Protocol
        self._backlog: deque[bytes] = deque()
        """Written, but beyond the window."""
        self._backlog_bytes = 0
        self._outstanding_bytes = 0
        """In the window: on their way, or not yet read at the other end."""
        self._last_arrival_s = 0.0
        self._unread: deque[object] = deque()
        """What has arrived and was not yet given to the protocol."""
        self._reading_scheduled = False
        self._reading = True
        self._high_bytes = HIGH_WATER_BYTES
        self._low_bytes = HIGH_WATER_BYTES // 4
        self._writing_paused = False
        self._ending = False
        """An end of stream follows the backlog."""
        self._end_sent = False
        self._closing = False
        self._lost = False

    # -- asyncio.Transport: writing ------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._ending:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._closing:
            return
        self._backlog.append(bytes(data))
        self._backlog_bytes += len(data)
        self._send_backlog()
        if self._backlog_bytes > self._high_bytes and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._ending and not self._closing:
            self._ending = True
            self._send_backlog()

    def get_write_buffer_size(self) -> int:
        return self._backlog_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        self._high_bytes, self._low_bytes = high, high // 4 if low is None else low

    # -- asyncio.Transport: reading and ending -------------------------------------------------------------------

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            self._schedule_reading()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """What was written still leaves; nothing is read any more."""
        if not self._closing:
            self._closing = True
            self._ending = True
            self._send_backlog()

    def abort(self) -> None:
        """What was written and is not on its way does not leave any more."""
        self._drop(None, tell=True)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        known = {"socket": self._socket, "sockname": self._local, "peername": self._remote}
        return known.get(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # -- the lane to the other end -------------------------------------------------------------------------------

    def _send_backlog(self) -> None:
        while self._backlog and self._outstanding_bytes < self._network.window_bytes:
            data = self._backlog.popleft()
            room = self._network.window_bytes - self._outstanding_bytes
            if len(data) > room:
                self._backlog.appendleft(data[room:])
                data = data[:room]
            self._backlog_bytes -= len(data)
            self._outstanding_bytes += len(data)
            self._send(data)
        if self._backlog:
            return
        if self._ending and not self._end_sent:
            self._end_sent = True
            self._send(_RESET if self._closing and self._unread else _END)
        if self._closing and not self._lost:
            self._lose(None)

    def _send(self, item: object) -> None:
        peer = self._peer
        if peer is None or self._network.silent(self._local[0], self._remote[0]):
            return
        delay_s = self._network.latency(self._local[0], self._remote[0])
        self._last_arrival_s = max(self._last_arrival_s, self._loop.time() + delay_s)
        self._loop.post(self._last_arrival_s, peer._context, peer._arrive, item)

    def _confirmed(self, size: int) -> None:
        """The other end has read `size` bytes: the window moves."""
        self._outstanding_bytes -= size
        if self._backlog:
            self._send_backlog()
        if self._writing_paused and self._backlog_bytes <= self._low_bytes and not self._lost:
            self._writing_paused = False
            self._protocol.resume_writing()

    # -- from the other end --------------------------------------------------------------------------------------

    def _arrive(self, item: object) -> None:
        if self._network.silent(self._remote[0], self._local[0]):
            return
        if item is _RESET:
            self._drop(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), tell=False)
        elif self._closing:
            if item is not _END:  # Nobody will read it, and its sender is told so.
                self._send(_RESET)
        else:
            self._unread.append(item)
            self._schedule_reading()

    def _schedule_reading(self) -> None:
        if self._unread and self._reading and not self._reading_scheduled:
            self._reading_scheduled = True
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        """One read as from a socket: all that is there, up to a limit; or the end."""
        self._reading_scheduled = False
        if not self._reading or self._closing or not self._unread:
            return
        data = self._take()
        if data:
            if self._peer is not None:
                self._loop.call_soon(self._peer._confirmed, len(data), context=self._peer._context)
            self._protocol.data_received(data)
        else:
            self._unread.clear()
            if not self._protocol.eof_received():
                self.close()
        self._schedule_reading()

    def _take(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while self._unread and isinstance(self._unread[0], bytes) and size < READ_BYTES_MAX:
            parts.append(cast(bytes, self._unread.popleft()))
            size += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # -- ending --------------------------------------------------------------------------------------------------

    def _drop(self, error: Exception | None, *, tell: bool) -> None:
        if self._lost:
            return
        self._closing = True
        self._backlog.clear()
        self._backlog_bytes = 0
        if tell and not self._end_sent:
            self._end_sent = True
            self._send(_RESET if self._unread or self._socket.resets_on_close else _END)
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        self._lost = True
        self._unread.clear()
        self._network._forget(self)
        self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)


class MemoryServer:
    """A listening port: what `loop.create_server` returns."""

    def __init__(self, network: MemoryNetwork, factory: Factory, address: tuple[str, int]) -> None:
        self._network = network
        self.factory = factory
        self.context = copy_context()
        self.address = address
        self.sockets: tuple[SimulatedSocket, ...] = (SimulatedSocket(address),)

    def close(self) -> None:
        self._network._listening.pop(self.address, None)
        self.sockets = ()

    def is_serving(self) -> bool:
        return bool(self.sockets)

    async def wait_closed(self) -> None:
        return None


class MemoryNetwork:
    """All hosts of the simulation. An address means the host it names; 127.0.0.1 means the caller's own."""

    def __init__(self, loop: VirtualLoop, latency: Latency | None = None, window_bytes: int = WINDOW_BYTES) -> None:
        self.loop = loop
        self.window_bytes = window_bytes
        self.latency = latency or same_delay(0.0002)
        self._listening: dict[tuple[str, int], MemoryServer] = {}
        self._ends: dict[MemoryTransport, None] = {}
        self._dead: set[str] = set()
        self._cut: set[frozenset[str]] = set()
        self._next_port = _EPHEMERAL_PORTS
        loop.network = self

    @property
    def open_ends(self) -> int:
        """Ends of connections that are not lost yet."""
        return len(self._ends)

    @property
    def listening(self) -> list[tuple[str, int]]:
        return list(self._listening)

    # -- for the loop --------------------------------------------------------------------------------------------

    def create_server(self, factory: Factory, host: str, port: int) -> MemoryServer:
        address = (self._resolve(host), port or self._free_port())
        if address in self._listening:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        server = self._listening[address] = MemoryServer(self, factory, address)
        return server

    async def create_connection(
        self, factory: Factory, host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Raises ConnectionRefusedError when nobody listens; waits for ever when the host does not answer."""
        here = (HOST.get(), self._free_port())
        there = (self._resolve(host), port)
        await asyncio.sleep(self.latency(here[0], there[0]))
        if self.silent(here[0], there[0]):
            await self.loop.create_future()
        server = self._listening.get(there)
        await asyncio.sleep(self.latency(there[0], here[0]))
        if server is None or not server.is_serving():
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {there}")
        ours = MemoryTransport(self, here, there, copy_context())
        theirs = MemoryTransport(self, there, here, server.context)
        ours._peer, theirs._peer = theirs, ours
        protocol = factory()
        for end, made in ((ours, protocol), (theirs, server.factory())):
            self._ends[end] = None
            end.set_protocol(made)
            made.connection_made(end)
        return ours, protocol

    # -- faults --------------------------------------------------------------------------------------------------

    def silent(self, sender: str, receiver: str) -> bool:
        """Whether what `sender` sends to `receiver` vanishes."""
        if sender in self._dead or receiver in self._dead:
            return True
        return bool(self._cut) and frozenset((sender, receiver)) in self._cut

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between two hosts, and neither is told."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Connections of before have lost what was sent meanwhile, so they are reset."""
        self._cut.discard(frozenset((one, other)))
        for end in tuple(self._ends):
            if {end._local[0], end._remote[0]} == {one, other}:
                end._drop(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), tell=False)

    def kill(self, host: str) -> None:
        """All processes of `host` die: its ports close and its peers see resets. Code that still runs on it, until
        its tasks are cancelled, reaches nobody."""
        self._dead.add(host)
        for address in [address for address in self._listening if address[0] == host]:
            self._listening[address].close()
        for end in tuple(self._ends):
            if end._local[0] == host:
                peer = end._peer
                if peer is not None and peer._local[0] != host:
                    delay_s = self.latency(host, peer._local[0])
                    reset = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
                    self.loop.call_later(delay_s, lambda peer=peer, reset=reset: peer._drop(reset, tell=False))
                end._drop(None, tell=False)

    def revive(self, host: str) -> None:
        """Processes can be started on `host` again."""
        self._dead.discard(host)

    # -- inside --------------------------------------------------------------------------------------------------

    def _resolve(self, host: str) -> str:
        return HOST.get() if host in ("127.0.0.1", "localhost", "0.0.0.0", "") else host

    def _free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def _forget(self, end: MemoryTransport) -> None:
        self._ends.pop(end, None)
