"""The test stand: each gateway to be compared, up at the same time, each before an emulated engine of its own.

Only one is under load at a time, so that what disturbs the machine disturbs each alike; and with an engine of its
own, a gateway that is slow to drop its requests leaves them to itself. Everything listens on 127.0.0.1.
"""

from __future__ import annotations

import http.client
import json
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

from serai.bench.load import LoadOutcome, LoadTask
from serai.bench.peers import HOST, Peer, find_peers
from serai.bench.processes import BenchFailed, Processes, cpu_s, last_lines, rss_mb
from serai.bench.report import say
from serai.worker_agent.engine.process import free_port

MODEL = "emulated"
CHAT_PATH = "/v1/chat/completions"
ENGINE_TPOT_MS = 20.0
# No time to first token: an answer of one token comes at once, a stream runs at 50 tokens a second.
ENGINE_FLAGS = ("--ttft-ms", "0", "--tpot-ms", f"{ENGINE_TPOT_MS:g}", "--max-concurrency", "8192")
_PROMPT = "A serai is the inn where caravans rest: the caravans come and go, the inn stays. Tell me more of it."
_START_TIMEOUT_S = 60.0
_STUCK_AFTER_S = 15.0
_KEEP_AWAKE = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers `/v1/chat/completions`."""

    name: str
    port: int
    engine_port: int
    headers: Mapping[str, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    """The gateway's processes; what they have started belongs to it, but for engines."""
    engine_pids: tuple[int, ...] = ()

    @property
    def rss_mb(self) -> float:
        """Resident memory of the gateway now."""
        return rss_mb(self.pids, self.engine_pids)

    @property
    def cpu_s(self) -> float:
        """Processor time of the gateway so far, in seconds."""
        return cpu_s(self.pids, self.engine_pids)


def chat_body(*, tokens: int, stream: bool = False) -> dict[str, Any]:
    """The request that every benchmark sends."""
    messages = [{"role": "user", "content": _PROMPT}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream, "temperature": 0}


class LoadGenerator:
    """The load generator's process."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._child = processes.start("load", [sys.executable, "-m", "serai.bench.load"], pipes=True)

    def carry_out(self, task: LoadTask) -> LoadOutcome:
        """Carry out one task. Raises BenchFailed when the load generator is gone or stuck."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        limit_s = task.warmup_s + task.duration_s + task.timeout_s + _STUCK_AFTER_S
        try:
            self._child.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
            self._child.stdin.flush()
            if not select.select([self._child.stdout], [], [], limit_s)[0]:
                raise BenchFailed(self._stuck(limit_s))
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise BenchFailed(f"the load generator ended with status {self._child.wait()}")
        return LoadOutcome(**json.loads(line))

    def _stuck(self, limit_s: float) -> str:
        """Where it is stuck: it writes its stack when asked to."""
        self._child.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return f"the load generator gave no answer in {limit_s:g} s\n{last_lines([self._processes.log_of('load')])}"


class Stand:
    """What is up, ready to be measured."""

    def __init__(self, processes: Processes, work: Path, free_timeout_s: float, serai_workers: Sequence[int]) -> None:
        self._processes = processes
        self._serai_workers = serai_workers
        self.work = work
        self._free_timeout_s = free_timeout_s
        self.notes: list[str] = []
        self.targets: list[Target] = []
        self.load = LoadGenerator(processes)

    def add(self, names: Sequence[str]) -> None:
        """Start the targets of these names, all side by side."""
        starting = [self._start_peer(peer) for peer in find_peers() if peer.name in names]
        if "direct" in names:
            port = self._start_engine("direct")
            self.targets.append(Target("direct", port, port))
        if "serai" in names:
            for workers in self._serai_workers:
                self.targets.append(self.start_serai(serai_name(workers), workers=workers))
        for begun in starting:
            self._await_peer(*begun)
        there = {target.name for target in self.targets} | {"serai"}
        missing = [name for name in names if name not in there]
        if missing:
            self.notes.append(f"did not take part: {', '.join(missing)}")

    def keep_awake(self, cores: int) -> None:
        """Keep idle cores from sleeping, by loops that give way to everything else."""
        for core in range(cores):
            self._processes.start(f"awake-{core}", [sys.executable, "-c", _KEEP_AWAKE])

    def start_serai(
        self,
        name: str,
        environment: Mapping[str, str] | None = None,
        *,
        workers: int = 1,
        flags: Sequence[str] = (),
    ) -> Target:
        """Start a whole Serai with one agent and one emulated engine, its ingress in so many processes; `flags` are
        further ones of `serai up`. Raises BenchFailed."""
        port, ready_file = free_port(), self.work / f"{name}.json"
        command = [
            sys.executable, "-m", "serai.cli.main", "up", "--emulated", "--agents", "1", "--model", MODEL,
            "--port", str(port), "--state", str(self.work / f"{name}-state"), "--ready-file", str(ready_file),
            f"--engine-args={' '.join(ENGINE_FLAGS)}", *flags,
        ]  # fmt: skip
        environment = {**(environment or {}), "SERAI_WORKERS": str(workers)}
        child = self._processes.start(name, command, environment=environment, stop_s=30)
        self._processes.wait_until(name, child, ready_file.exists, _START_TIMEOUT_S)
        log = self.work / f"{name}-state" / "logs" / "ingress.log"
        are_ready = lambda: log.read_text().count("ingress.ready") >= workers  # noqa: E731
        self._processes.wait_until(name, child, are_ready, _START_TIMEOUT_S)
        ready = json.loads(ready_file.read_text())
        pids: dict[str, int] = ready["pids"]
        self._processes.also_end(pids.values())
        gateway = tuple(pid for role, pid in pids.items() if not role.startswith("engine"))
        engine_port = _port_in_command_line(pids["engine-0"])
        headers = {"Authorization": f"Bearer {ready['key']}"}
        return Target(name, port, engine_port, headers, gateway, (pids["engine-0"],))

    def stop(self, name: str) -> None:
        """Stop one process before the end."""
        self._processes.end(name)

    def measure(self, target: Target, task: LoadTask) -> LoadOutcome:
        """Carry out `task` and wait until the engine behind `target` is free again."""
        outcome = self.load.carry_out(task)
        if not self._is_free_in_time(target):
            self.notes.append(f"{target.name}: engine still busy {self._free_timeout_s:g} s after all clients left")
        return outcome

    def _is_free_in_time(self, target: Target) -> bool:
        give_up_at_s = time.monotonic() + self._free_timeout_s
        while time.monotonic() < give_up_at_s:
            try:
                state = json.loads(get(target.engine_port, "/emulator/state"))
            except OSError as error:
                logs = last_lines([*sorted(self.work.glob("*-state/logs/*.log")), *sorted(self.work.glob("*.log"))])
                raise BenchFailed(f"{target.name}: its engine is gone: {error}\n{logs}") from error
            if state["running"] == 0 and state["waiting"] == 0:
                return True
            time.sleep(0.05)
        return False

    def _start_engine(self, before: str) -> int:
        """Start the engine of one target; its port."""
        port, name = free_port(), f"engine-{before}"
        command = [sys.executable, "-m", "serai.engine_emulator", "--model", MODEL, "--port", str(port), *ENGINE_FLAGS]
        child = self._processes.start(name, command)
        self._processes.wait_until(name, child, lambda: answers(port, {}), _START_TIMEOUT_S)
        return port

    def _start_peer(self, peer: Peer) -> tuple[Target, Popen[bytes]]:
        port, engine_port = free_port(), self._start_engine(peer.name)
        how = peer.command(port=port, metrics_port=free_port(), engine_port=engine_port, model=MODEL, work=self.work)
        child = self._processes.start(peer.name, how.command, environment=how.environment)
        return Target(peer.name, port, engine_port, how.headers, (child.pid,)), child

    def _await_peer(self, target: Target, child: Popen[bytes]) -> None:
        """A peer that does not start is left out and a note says so: the others are measured all the same."""
        try:
            self._processes.wait_until(
                target.name, child, lambda: answers(target.port, target.headers), _START_TIMEOUT_S
            )
        except BenchFailed as failure:
            say(str(failure))
            self.notes.append(str(failure).partition("\n")[0])
        else:
            self.targets.append(target)


@contextmanager
def stand(
    names: Iterable[str],
    *,
    keep_awake_cores: int = 0,
    free_timeout_s: float = 10.0,
    serai_workers: Sequence[int] = (1,),
) -> Iterator[Stand]:
    """A stand with the targets of these names. Raises BenchFailed when the engine or Serai does not start."""
    with TemporaryDirectory(prefix="serai-bench-") as work, Processes(Path(work)) as processes:
        made = Stand(processes, Path(work), free_timeout_s, serai_workers)
        made.keep_awake(keep_awake_cores)
        made.add(list(names))
        say(f"ready: {', '.join(target.name for target in made.targets)}")
        yield made


def serai_name(workers: int) -> str:
    """The name of a Serai whose ingress has so many processes, as in figures."""
    return "serai" if workers == 1 else f"serai_w{workers}"


def get(port: int, path: str) -> bytes:
    """The body of GET `path`. Raises OSError when nothing answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def answers(port: int, headers: Mapping[str, str]) -> bool:
    """True when a completion comes back: a gateway that listens may not have found its engine yet."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        body = json.dumps(chat_body(tokens=1))
        connection.request("POST", CHAT_PATH, body, {"Content-Type": "application/json", **headers})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _port_in_command_line(pid: int) -> int:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return int(words[words.index("--port") + 1])
