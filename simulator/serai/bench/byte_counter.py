"""A TCP relay that counts what passes, per connection and way: the bytes on the wire, protocol and all.

`python -m serai.bench.byte_counter PORT TARGET_PORT`. A line on standard input asks for the counts, which come as one
JSON list of `[to the server, from the server]` of the connections that are open.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop


class _Side(asyncio.Protocol):
    """One end of a relayed connection; `peer` is the other."""

    def __init__(self) -> None:
        self.peer: _Side | None = None
        self.transport: asyncio.Transport | None = None
        self.received_bytes = 0
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        if self.peer is None or self.peer.transport is None:
            self._early.append(data)
        else:
            self.peer.transport.write(data)

    def join(self, peer: _Side) -> None:
        """What came here goes to `peer` from now on."""
        self.peer = peer
        if peer.transport is not None:
            for data in self._early:
                peer.transport.write(data)
        self._early.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.close()


class _Relay:
    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._pairs: list[tuple[_Side, _Side]] = []
        self._joining: set[asyncio.Task[None]] = set()

    def accept(self) -> asyncio.Protocol:
        client = _Side()
        task = asyncio.ensure_future(self._join(client))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)
        return client

    async def _join(self, client: _Side) -> None:
        _, server = await asyncio.get_running_loop().create_connection(_Side, "127.0.0.1", self._target_port)
        client.join(server)
        server.join(client)
        self._pairs.append((client, server))

    def counts(self) -> list[list[int]]:
        return [[client.received_bytes, server.received_bytes] for client, server in self._pairs]


async def _main(port: int, target_port: int) -> None:
    loop = asyncio.get_running_loop()
    relay = _Relay(target_port)
    server = await loop.create_server(relay.accept, "127.0.0.1", port, backlog=1024)
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while await commands.readline():
        sys.stdout.write(json.dumps(relay.counts()) + "\n")
        sys.stdout.flush()
    server.close()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1]), int(sys.argv[2])))
