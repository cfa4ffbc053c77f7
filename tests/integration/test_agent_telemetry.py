"""What an agent tells of its engine, its streams and its GPUs, on the status plane, in its record and to Prometheus."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from integration import leaky_engine
from integration.system import Process, System, children_of, wait_for
from serai.contracts.codec import decode
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.status import Phase, SessionStatus
from serai.contracts.subjects import SESSION, STATUS
from serai.runtime.bus import Message
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.worker_agent.engine.process import free_port

STREAM = {
    "model": "m",
    "stream": True,
    "max_tokens": 100_000,
    "messages": [{"role": "user", "content": "Tell me of caravans."}],
}


@contextmanager
def asked(system: System, body: Mapping[str, object], **headers: str) -> Iterator[http.client.HTTPConnection]:
    """A request, given up after the block."""
    address = urlsplit(system.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    given = {"Authorization": f"Bearer {system.key}", "Content-Type": "application/json"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), given | named)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def stream_open(system: System, **headers: str) -> Iterator[None]:
    """A stream of which some tokens have come; given up after the block."""
    with asked(system, STREAM, **headers) as connection, connection.getresponse() as answer:
        assert answer.status == 200
        for _ in range(6):
            answer.readline()
        yield
        connection.close()


class Hearing:
    """What is said on the status plane and of records."""

    def __init__(self, system: System) -> None:
        self._system = system

    def until(self, wanted: Callable[[SessionStatus], bool], timeout_s: float = 30.0) -> SessionStatus:
        """The first status that is wanted."""
        return asyncio.run(self._until(STATUS.every, SessionStatus, wanted, timeout_s))

    def record(self, wanted: Callable[[SessionRecord], bool], timeout_s: float = 30.0) -> SessionRecord:
        """The first record that is wanted."""
        return asyncio.run(self._until(SESSION.every, SessionRecord, wanted, timeout_s))

    async def _until(self, subject, kind, wanted, timeout_s):  # type: ignore[no-untyped-def]
        key = self._system.nats.key_file("registry")
        bus = await NatsBus.connect(NatsAddress(f"nats://127.0.0.1:{self._system.nats_port}", key), "registry")
        found = asyncio.get_running_loop().create_future()
        last = None

        def hear(message: Message) -> None:
            nonlocal last
            last = decode(kind, message.data)
            if wanted(last) and not found.done():
                found.set_result(last)

        try:
            await bus.subscribe(subject, hear)
            async with asyncio.timeout(timeout_s):
                return await found
        except TimeoutError:
            raise AssertionError(f"not heard; last was {last}") from None
        finally:
            await bus.aclose()


def metrics_of(port: int) -> dict[str, float]:
    text = httpx2.get(f"http://127.0.0.1:{port}/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def engine_of(agent: Process) -> int:
    """The process of the agent's engine."""
    return next(pid for pid, line in children_of(agent.popen.pid).items() if b"--port" in line)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engine_s_work_is_told_while_it_runs_and_when_it_has_ended(small_system: System, engine: str) -> None:
    port = free_port()
    small_system.start_agent("--engine", engine, "--tpot-ms", "20", agent_flags=("--metrics-port", str(port)))
    small_system.wait_for_sessions(1)
    hearing = Hearing(small_system)
    with ExitStack() as streams:
        streams.enter_context(stream_open(small_system, x_slo_tpot_ms="200"))
        streams.enter_context(stream_open(small_system, x_slo_tpot_ms="200"))
        streams.enter_context(stream_open(small_system))
        busy = hearing.until(
            # 150 by the clock, as soon as all three ran for all of the time between two looks; the machine may be busy.
            lambda said: said.running == 3 and 30 < (said.decode_tokens_per_s or 0) < 200 and said.phase is Phase.DECODE
        )
        assert busy.in_flight == 3
        assert busy.slack is not None
        assert busy.slack.streams == 2
        assert busy.slack.mean_s > 0  # They come ten times as fast as they have to.
        if engine == "sglang":
            assert busy.kv_tokens_used
            assert busy.kv_tokens_free
        shown = metrics_of(port)
        assert shown["serai_agent_engine_requests_running"] == 3
        assert shown["serai_agent_engine_decode_tokens_per_second"] > 0
        if engine == "sglang":
            record = hearing.record(lambda record: record.lifecycle is Lifecycle.SERVING)
            assert record.metadata.kv_tokens_max == 1_048_576
    idle = hearing.until(lambda said: said.running == 0 and said.in_flight == 0)
    assert (idle.phase, idle.slack) == (Phase.IDLE, None)
    wait_for(lambda: metrics_of(port)['serai_agent_requests_total{outcome="cancelled"}'] == 3, "cancellations")
    assert metrics_of(port).get("serai_agent_leaked_requests_total", 0) == 0


def test_a_prompt_that_is_worked_on_is_prefill(small_system: System) -> None:
    small_system.start_agent("--ttft-ms", "6000")
    small_system.wait_for_sessions(1)
    with asked(small_system, STREAM | {"stream": False, "max_tokens": 1}):
        Hearing(small_system).until(lambda said: said.phase is Phase.PREFILL, 10)


def test_h41_a_request_that_the_engine_goes_on_with_is_counted_and_logged(small_system: System) -> None:
    port = free_port()
    flags = ["--model", "m", "--allocation", "a", "--engine", "vllm", "--metrics-port", str(port)]
    agent = small_system.service("agent", *flags, "--", sys.executable, str(Path(leaky_engine.__file__)))
    small_system.wait_for_sessions(1)
    with stream_open(small_system), stream_open(small_system):
        pass
    wait_for(lambda: metrics_of(port).get("serai_agent_leaked_requests_total") == 2, "two leaks", 15)
    assert "engine.leaks" in agent.log


def test_h37_an_engine_that_has_no_time_for_questions_is_not_dead(small_system: System) -> None:
    command = [sys.executable, str(Path(leaky_engine.__file__)), "--slow-metrics"]
    agent = small_system.service("agent", "--model", "m", "--allocation", "a", "--engine", "vllm", "--", *command)
    small_system.wait_for_sessions(1)
    hearing = Hearing(small_system)
    with stream_open(small_system):
        # What it said before is not repeated as if it were true; that tokens come is seen without it.
        busy = hearing.until(lambda said: said.running is None and said.phase is Phase.DECODE)
        assert busy.in_flight == 1
        hearing.until(lambda said: said.requests_total == 0 and said.sequence >= busy.sequence + 5)
        assert small_system.sessions() == 1
    assert "engine.stalled" not in agent.log


def test_h29_a_broken_gpu_is_in_the_record_and_its_power_in_the_status(
    small_system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        "*power.draw*) echo 'GPU-11, 301.5, 64, 0x0000000000000040, 3' ;;\n"
        "*memory.total*) echo 'GPU-11, NVIDIA H100 80GB HBM3, 81559 MiB' ;;\n"
        "*) exit 6 ;;\nesac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    small_system.start_agent()
    hearing = Hearing(small_system)
    record = hearing.record(lambda record: bool(record.metadata.faults) and record.lifecycle is Lifecycle.SERVING)
    (fault,) = record.metadata.faults
    assert (fault.gpu, fault.what) == ("GPU-11", "uncorrectable ECC errors")
    status = hearing.until(lambda said: said.gpu_power_w is not None)
    assert (status.gpu_power_w, status.gpu_celsius, status.gpu_throttled) == (302.0, 64.0, True)
    assert status.gpu_energy_j == 0.0


def test_h29_a_host_on_which_engines_died_twice_is_in_quarantine_until_it_is_cleared(small_system: System) -> None:
    def tool(*words: str) -> subprocess.CompletedProcess[str]:
        nats = ["--nats-url", f"nats://127.0.0.1:{small_system.nats_port}"]
        key = ["--nats-nkey-file", str(small_system.nats.key_file("tools"))]
        command = [sys.executable, "-m", "serai.cli.main", "registry", "quarantine", *words, *nats, *key]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert tool("ls").stdout == "no host is in quarantine\n"
    agent = small_system.start_agent()
    for deaths in (1, 2):
        small_system.wait_for_sessions(1, timeout_s=60)
        os.kill(engine_of(agent), signal.SIGKILL)
        wait_for(lambda n=deaths: agent.log.count("agent.left") == n, "the session has left", 60)
    told = tool("ls", "--names")
    assert told.stdout.strip(), (told.stderr, agent.log[-3000:])
    assert "2 engines died here" in tool("ls").stdout
    host = told.stdout.strip()
    assert tool("clear", host).returncode == 0
    assert tool("ls").stdout == "no host is in quarantine\n"
    assert tool("clear", host).returncode == 3


def test_an_agent_does_not_load_what_it_does_not_use() -> None:
    """60 MB are the goal for an agent; these were 13 of them."""
    code = "import sys, serai.worker_agent.__main__; print(*{'rich', 'aiohttp', 'pynvml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
