"""Clients that leave at every stage, many at once: engines learn of it within a second, and nothing stays counted."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import Any

import pytest

from integration.system import System, soon, wait_for

EACH = 12
FAST = 4
"""Requests that the engine runs at once; the others wait in its queue."""
NOTICED_S = 1.0
COUNTED_S = 3.0
BIG_BYTES = 3 * 1024 * 1024


def request_bytes(system: System, body: dict[str, Any], *, padding: int = 0) -> bytes:
    if padding:
        body = {**body, "user": "x" * padding}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {system.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def asked(tokens: int, *, stream: bool) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": tokens, "stream": stream}


class Leaver:
    """One client that sends `sends`, reads until it has `reads` bytes, and then waits until it leaves; meanwhile it
    takes `takes` bytes at most."""

    def __init__(self, port: int, sends: bytes, *, reads: int = 0, takes: int = 1 << 30) -> None:
        self._port, self._sends, self._reads, self._takes = port, sends, reads, takes
        self._writer: asyncio.StreamWriter | None = None

    async def come(self) -> None:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=self._takes)
        self._writer.write(self._sends)
        await self._writer.drain()
        if self._reads:
            await asyncio.wait_for(reader.readexactly(self._reads), 20)

    def leave(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()


def storm(system: System, leavers: list[Leaver], *, before_leaving: Any) -> float:
    """All come, wait until `before_leaving` is true, and leave; when the last has left, on the monotonic clock."""

    async def main() -> float:
        await asyncio.gather(*(leaver.come() for leaver in leavers))
        await asyncio.to_thread(wait_for, before_leaving, "all are where they should be", 20)
        random.Random(0).shuffle(leavers)
        for leaver in leavers:
            leaver.leave()
            await asyncio.sleep(0)
        return time.monotonic()

    return asyncio.run(main())


def metric(system: System, name: str) -> float:
    with system.client() as client:
        text = client.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_every_stage_at_once(system: System, workers: str) -> None:
    system.start_registry()
    ingress = system.start_ingress("--workers", workers)
    slow = system.start_agent("--max-concurrency", str(FAST))
    streams = system.start_agent("--ttft-ms", "1", "--tpot-ms", "5", model="s")
    wait_for(lambda: ingress.log.count("ingress.ready") == int(workers), "all workers ready")
    system.wait_for_sessions(1)
    system.wait_for_sessions(1, "s")
    port = int(system.url.rpartition(":")[2])
    in_stream = {**asked(100_000, stream=True), "model": "s"}
    half = request_bytes(system, asked(9, stream=False), padding=BIG_BYTES)

    def leavers() -> list[Leaver]:
        return [
            # More than the engine runs at once, so some of them wait in its queue.
            *[Leaver(port, request_bytes(system, asked(9, stream=number % 2 == 0))) for number in range(EACH)],
            *[Leaver(port, half[: len(half) // 2]) for _ in range(EACH)],
            *[Leaver(port, request_bytes(system, asked(9, stream=False), padding=BIG_BYTES)) for _ in range(3)],
            *[Leaver(port, request_bytes(system, in_stream), reads=2000) for _ in range(EACH)],
            *[Leaver(port, request_bytes(system, in_stream), reads=2000, takes=2000) for _ in range(EACH)],
        ]

    with system.engine(slow) as first, system.engine(streams) as second:

        def at_work() -> tuple[int, int]:
            states = [engine.get("/emulator/state").json() for engine in (first, second)]
            return states[0]["running"] + states[0]["waiting"], states[1]["running"]

        first.post("/emulator/faults", json={"kind": "hang"}).raise_for_status()
        before = 0.0

        def noticed_s() -> float:
            nonlocal before
            left_s = storm(system, leavers(), before_leaving=lambda: at_work() == (EACH + 3, 2 * EACH))
            wait_for(lambda: at_work() == (0, 0), "both engines are free", NOTICED_S + 10)
            took_s = time.monotonic() - left_s
            wait_for(lambda: metric(system, "serai_ingress_requests_in_flight") == 0, "none in flight", COUNTED_S)
            cancelled = metric(system, "serai_ingress_cancelled_total")
            assert cancelled - before == EACH + 3 + 2 * EACH  # Half a body is no request.
            before = cancelled
            return took_s

        soon(noticed_s, NOTICED_S)
    # Nobody was blamed: the next ones are answered by the same sessions at once.
    with system.client() as client:
        for _ in range(10):
            answer = client.post("/v1/chat/completions", json={**asked(1, stream=False), "model": "s"})
            assert answer.status_code == 200
    assert "Traceback" not in ingress.log
