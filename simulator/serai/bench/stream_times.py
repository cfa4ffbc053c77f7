"""A client process that opens streams and notes when each token came: one task on standard input, one outcome out.

As light as Python allows, since in a burst of tokens its own time for the earlier ones counts as lateness of the
later ones. It sends to 127.0.0.1 and nowhere else.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import uvloop

_TOKEN_MARK = b'"content":" '
"""A token is an event whose content begins with a space, as all of the emulated engine's do."""
_END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class StreamTask:
    """`streams` streams from the engine at `port`, of `tokens` tokens each, begun evenly over `ramp_s` seconds."""

    port: int
    streams: int
    tokens: int
    ramp_s: float
    timeout_s: float


@dataclass(slots=True)
class StreamOutcome:
    """What came, in seconds on this process's clock."""

    sent_s: list[float]
    """When each stream was asked for."""
    token_s: list[list[float]]
    """When each of its tokens came."""
    client_cpu_share: float = 0.0


class Stream(asyncio.Protocol):
    """One stream: asks when connected, then notes times."""

    def __init__(self, message: bytes, on_end: asyncio.Event) -> None:
        self._message = message
        self._left = b""
        self.on_end = on_end
        self.sent_s = 0.0
        self.token_s: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent_s = time.perf_counter()
        cast(asyncio.Transport, transport).write(self._message)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        data = self._left + data
        # A mark may be cut in two; what is kept is too short to hold a whole one.
        self._left = data[1 - len(_TOKEN_MARK) :]
        self.token_s.extend([now] * data.count(_TOKEN_MARK))
        if _END in data:
            self.on_end.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_end.set()


async def carry_out(task: StreamTask) -> StreamOutcome:
    """Open all streams and wait for their ends."""
    loop = asyncio.get_running_loop()
    streams: list[Stream] = []
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    for number in range(task.streams):
        stream = Stream(_message(task, number), asyncio.Event())
        streams.append(stream)
        await asyncio.sleep(began_s + number * task.ramp_s / task.streams - time.perf_counter())
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", task.port)  # type: ignore[misc]
    async with asyncio.timeout(task.timeout_s):
        for stream in streams:
            await stream.on_end.wait()
    share = (time.process_time() - cpu_began_s) / (time.perf_counter() - began_s)
    return StreamOutcome([stream.sent_s for stream in streams], [stream.token_s for stream in streams], share)


def _message(task: StreamTask, number: int) -> bytes:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": f"Stream {number}"}], "stream": True}
    body = json.dumps({**fields, "max_tokens": task.tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def main() -> None:
    """Carry out the one task."""
    task = StreamTask(**json.loads(sys.stdin.readline()))
    gc.freeze()
    gc.disable()
    outcome = uvloop.run(carry_out(task))
    json.dump({name: getattr(outcome, name) for name in StreamOutcome.__slots__}, sys.stdout)


if __name__ == "__main__":
    main()
