"""An engine that hangs while its agent lives is not routed to; one that only works for long is."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx2
import pytest

from integration.system import Process, System, children_of, freeze, soon, wait_for

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}]}
STREAM = CHAT | {"stream": True, "max_tokens": 100_000}


@contextmanager
def asked(system: System, body: Mapping[str, object]) -> Iterator[http.client.HTTPConnection]:
    """A request that is given up after the block, whether it was answered or not."""
    address = urlsplit(system.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    headers = {"Authorization": f"Bearer {system.key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def streaming(system: System, body: Mapping[str, object], tokens: int) -> Iterator[list[float]]:
    """A stream, read by a thread of its own, which brings so many tokens before the block and is given up after it.
    When each of them came."""
    came_at_s: list[float] = []

    def read(connection: http.client.HTTPConnection) -> None:
        with suppress(OSError, http.client.HTTPException), connection.getresponse() as answer:
            for line in answer:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    came_at_s.append(time.monotonic())  # noqa: PERF401 (others look while it grows)

    with asked(system, body) as connection:
        sock = connection.sock
        reader = threading.Thread(target=read, args=(connection,))
        reader.start()
        wait_for(lambda: len(came_at_s) >= tokens, f"{tokens} tokens")
        yield came_at_s
        sock.shutdown(socket.SHUT_RDWR)
        reader.join()


def seconds_until_unrouted(system: System, since_s: float) -> float:
    wait_for(lambda: system.sessions() == 0, "not routed to any more", 15)
    return time.monotonic() - since_s


def engine_of(agent: Process) -> int:
    """The process of the agent's engine."""
    return next(pid for pid, line in children_of(agent.popen.pid).items() if b"--port" in line)


def stays_routed(system: System, agent: Process, while_it: threading.Thread) -> None:
    while while_it.is_alive():
        assert system.sessions() == 1, agent.log[-2000:]
        time.sleep(0.05)
    assert "engine.stalled" not in agent.log


def test_a_hung_stream_stops_routing_within_three_seconds_and_progress_brings_it_back(small_system: System) -> None:
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "20", "--fault", "hang:tokens=10,skip=1,count=1")
    small_system.wait_for_sessions(1)

    def hung_s() -> float:
        with streaming(small_system, STREAM, 9) as came_at_s:
            took_s = seconds_until_unrouted(small_system, came_at_s[-1])
            assert small_system.sessions() == 0
            with small_system.client() as client:
                assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
        # The client gives up; the engine has nothing to do then, and shows by a canary that it works.
        small_system.wait_for_sessions(1, timeout_s=15)
        with small_system.engine(agent) as engine:  # For another time.
            engine.post("/emulator/faults", json={"kind": "hang", "tokens": 10, "count": 1}).raise_for_status()
        return took_s

    soon(hung_s, 3.2)
    assert "engine.stalled" in agent.log
    assert agent.popen.poll() is None


def test_a_frozen_engine_process_is_a_hang_and_its_thaw_ends_it(small_system: System) -> None:
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "20")
    small_system.wait_for_sessions(1)
    pid = engine_of(agent)

    def frozen_s() -> float:
        with streaming(small_system, STREAM, 5) as came_at_s:
            freeze(pid)
            try:
                time.sleep(0.1)
                took_s = seconds_until_unrouted(small_system, came_at_s[-1])
            finally:
                os.kill(pid, signal.SIGCONT)
            small_system.wait_for_sessions(1, timeout_s=10)
        return took_s

    soon(frozen_s, 3.2)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_long_prefill_is_no_hang(small_system: System, streamed: bool) -> None:
    # 20,000 tokens at the pace of 100,000 in 40 s; SERAI_PREFILL_S=40 for all of them.
    seconds = int(os.environ.get("SERAI_PREFILL_S", "8"))
    fault = ("--fault", "slow:factor=0.01,count=1")
    agent = small_system.start_agent("--ttft-ms", str(seconds * 1000), "--tpot-ms", "20", *fault)
    small_system.wait_for_sessions(1)
    prompt = "word" * (2500 * seconds)
    long = CHAT | {"stream": streamed, "max_tokens": 2, "messages": [{"role": "user", "content": prompt}]}
    answers: list[httpx2.Response] = []

    def ask() -> None:
        with small_system.client(100) as client:
            answers.append(client.post("/v1/chat/completions", json=long))

    asking = threading.Thread(target=ask)
    asking.start()
    stays_routed(small_system, agent, asking)
    assert answers[0].status_code == 200


@pytest.mark.parametrize("kind", ["openai", "vllm"])
def test_a_long_answer_in_one_piece_is_no_hang(small_system: System, kind: str) -> None:
    """With counters (a modelled engine counts each step) and without (fixed timing counts at the end, and what is not
    known to be vLLM need not count at all)."""
    modelled = ("--gpu", "h100", "--card", "meta-llama/Llama-3.1-8B", "--speed", "0.2")
    port = ("--port", "{port}")
    timing = modelled if kind == "vllm" else ("--ttft-ms", "5", "--tpot-ms", "25")
    agent = small_system.start_agent(*timing, *port, agent_flags=("--engine", kind))
    small_system.wait_for_sessions(1)
    answers: list[httpx2.Response] = []
    tokens = 200 if kind == "vllm" else 320

    def ask() -> None:
        with small_system.client(60) as client:
            answers.append(client.post("/v1/chat/completions", json=CHAT | {"max_tokens": tokens}))

    began_s = time.monotonic()
    asking = threading.Thread(target=ask)
    asking.start()
    stays_routed(small_system, agent, asking)
    assert answers[0].status_code == 200
    assert time.monotonic() - began_s > 5


def test_an_answer_in_one_piece_that_hangs_shows_by_the_engine_s_counters(small_system: System) -> None:
    modelled = ("--gpu", "h100", "--card", "meta-llama/Llama-3.1-8B", "--speed", "0.5")
    fault = ("--fault", "hang:tokens=60,skip=1,count=1")
    agent = small_system.start_agent(*modelled, *fault, "--port", "{port}", agent_flags=("--engine", "vllm"))
    small_system.wait_for_sessions(1)
    with asked(small_system, CHAT | {"max_tokens": 5000}), small_system.engine(agent) as engine:
        wait_for(lambda: _generated(engine) > 20, "tokens are counted", 10)
        last, since_s = 0.0, time.monotonic()
        while (now := _generated(engine)) != last:
            last, since_s = now, time.monotonic()
            time.sleep(0.05)
        assert seconds_until_unrouted(small_system, since_s) <= 3.4


def _generated(engine: httpx2.Client) -> float:
    lines = engine.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("vllm:generation_tokens_total")).split()[-1])
