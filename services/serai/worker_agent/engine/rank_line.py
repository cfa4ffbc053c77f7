"""What the ranks of an engine say to each other: lines of JSON over one connection between each of them and rank 0."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import msgspec

from serai.worker_agent.engine.multi_node import Address

CONNECT_TIMEOUT_S = 5.0
LINE_BYTES_MAX = 64 * 1024


class Hello(msgspec.Struct, tag=True, frozen=True):
    """To rank 0: who this is, and where the others can try to reach it."""

    allocation: str
    rank: int
    host: str
    port: int


class Try(msgspec.Struct, tag=True, frozen=True):
    """From rank 0: connect to each of these (rank, host, port)."""

    ranks: list[tuple[int, str, int]]


class Tried(msgspec.Struct, tag=True, frozen=True):
    """To rank 0: which of them cannot be reached and why; empty = all can."""

    problem: str


class Start(msgspec.Struct, tag=True, frozen=True):
    """From rank 0: run your part; the engine's processes meet at this address."""

    host: str
    port: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """To rank 0: the part has ended by itself, or could not be started."""

    story: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    """From rank 0: end your part."""


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """To rank 0: it has ended, if it ran."""


Message = Hello | Try | Tried | Start | Ended | Stop | Stopped
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Line:
    """One such connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.own_host = str(writer.get_extra_info("sockname")[0])
        """By which of our addresses we are connected."""
        _notice_loss(writer.get_extra_info("socket"))

    def say(self, message: Message) -> None:
        if not self._writer.is_closing():  # `hear` tells that it is.
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def hear(self) -> Message:
        """Raises ConnectionError when the other side is gone, or is none of us."""
        try:
            line = await self._reader.readline()
        except (ValueError, OSError) as error:
            raise ConnectionError(str(error)) from error
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        try:
            return _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConnectionError("what came is no message of ours") from error

    def close(self) -> None:
        self._writer.close()


def _notice_loss(sock: socket.socket) -> None:
    """A node without power says nothing: ask for a sign of life after 10 s of silence, give up after 25."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def cannot_reach(address: Address) -> str:
    """Why no connection comes about; empty when one does."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""


async def unreachable(ranks: Sequence[tuple[int, str, int]]) -> str:
    """Which of these cannot be reached, and why; empty when all can."""
    problems = await asyncio.gather(*(cannot_reach(Address(host, port)) for _, host, port in ranks))
    told = zip(ranks, problems, strict=True)
    return "; ".join(f"rank {rank} at {Address(host, port)}: {why}" for (rank, host, port), why in told if why)
