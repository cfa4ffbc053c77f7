"""A client that reads nothing costs one stream: neither its neighbours' time nor anybody's memory."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import httpx2

from integration.system import System, wait_for
from integration.test_continuation import listen
from serai.worker_agent.engine.process import free_port

CHAT = "/v1/chat/completions"
ENGINE = Path(__file__).with_name("torrent_engine.py")
HELD_BYTES_MAX = 8 * 1024 * 1024
"""What one stream may add to a process: its window, and what the allocator rounds it up to."""


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def ask_and_read_nothing(system: System) -> socket.socket:
    """A client whose answer would be endless, with a receive buffer of a few KB."""
    body = {"model": "m", "stream": True, "max_tokens": 5_000_000, "messages": [{"role": "user", "content": "x"}]}
    data = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(system.url.rpartition(":")[2])))
    client.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {system.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return client


def test_a_client_that_reads_nothing_costs_one_stream(system: System) -> None:
    system.start_registry()
    ingress = system.start_ingress("--client-stall-s", "8")
    port = free_port()
    system.start("engine", [sys.executable, str(ENGINE), str(port)])
    engine_url = f"http://127.0.0.1:{port}"

    def written_bytes() -> int:
        return int(httpx2.get(f"{engine_url}/written", timeout=10).json()["bytes"])

    agent = system.service("agent", "--model", "m", "--engine-url", engine_url)
    system.wait_for_sessions(1)
    assert listen(system, CHAT, {"max_tokens": 20}).finish_reasons == ["stop"]
    before = {process.name: resident_bytes(process.popen.pid) for process in (agent, ingress)}
    stuck = ask_and_read_nothing(system)
    try:

        def stands() -> bool:
            """Nobody reads the engine any more."""
            first = written_bytes()
            time.sleep(0.3)
            return first == written_bytes() > 0

        wait_for(stands, "back-pressure reaches the engine", 6)
        for process in (agent, ingress):
            assert resident_bytes(process.popen.pid) - before[process.name] < HELD_BYTES_MAX, process.name
        asked_s = time.monotonic()
        assert [listen(system, CHAT, {"max_tokens": 20}).finish_reasons for _ in range(5)] == [["stop"]] * 5
        assert time.monotonic() - asked_s < 5
        wait_for(lambda: "ingress.client_stalled" in ingress.log, "its client is given up", 20)
    finally:
        stuck.close()
