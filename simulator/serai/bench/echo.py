"""A process that answers each message on one subject with the same bytes: what a NATS round trip costs by itself."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from serai.runtime.bus import Message
from serai.runtime.nats_bus import NatsAddress, NatsBus

ECHO = "bench.echo"


async def _answer(nats_url: str) -> None:
    bus = await NatsBus.connect(NatsAddress(nats_url), "echo")

    def on_message(message: Message) -> None:
        bus.publish(message.reply, bytes(message.data), at_once=True)

    await bus.subscribe(ECHO, on_message)
    await bus.barrier()
    sys.stderr.write("echo.ready\n")
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_answer(sys.argv[1]))
