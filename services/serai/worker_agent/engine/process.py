"""The engine as a child process: in a process group of its own, dying with its parent, its last lines kept."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import structlog

from serai.runtime.http1 import Origin
from serai.runtime.parent_death import die_with_parent
from serai.worker_agent.engine import process_table
from serai.worker_agent.engine.base import Engine
from serai.worker_agent.engine.environment import engine_environment
from serai.worker_agent.engine.gpu_memory import gpu_bytes_of
from serai.worker_agent.engine.listeners import Listener, inodes_of, listener_on, listening_on, ports_of
from serai.worker_agent.engine.phase_socket import VARIABLE, socket_name
from serai.worker_agent.engine.ports import HeldPort, free_port
from serai.worker_agent.engine.process_table import ProcessIdentity
from serai.worker_agent.engine.start_watch import Signs

__all__ = ["EngineProcess", "EngineStarter", "LoopbackStarter", "RunningEngine", "free_port", "start_on_loopback"]

log = structlog.get_logger()

LAST_LINES = 20
GPU_EVERY_S = 10.0
REST_OF_OUTPUT_S = 1.0
"""How long what a process has written may still come after its end."""
_LINE_BYTES_MAX = 64 * 1024
_CONTAINER_RUNTIMES = {
    "apptainer",
    "singularity",
    "podman",
    "podman-hpc",
    "docker",
    "enroot",
    "shifter",
    "srun",
    "udocker",
}

_SHIELDED = "SLURM_JOB_ID" in os.environ
"""Slurm may send SIGTERM to all processes of a job at once (proctrack/linuxproc, SignalChildrenProcesses of
cgroup.conf), and engines obey at once: streams would be cut before the agent can drain (H39). A signal that is blocked
stays so whatever handlers the engine installs, so we end it by SIGINT, which engines take alike.
Not for all: Python's resource_tracker, which vLLM starts, unblocks it again (docs/engines.md)."""
_WITHOUT_SIGTERM = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); "
    "os.execv(sys.argv[1], sys.argv[2:])"
)


class RunningEngine(Protocol):
    """An engine that the agent has started, and ends."""

    @property
    def exited(self) -> asyncio.Future[int]:
        """Done with the exit code when the engine has ended."""

    @property
    def last_lines(self) -> list[str]:
        """The end of what the engine wrote, oldest first."""

    async def signs(self) -> Signs:
        """What can be seen of its processes now."""

    async def listener(self) -> Listener:
        """Who listens where it should. Before it is known for ours nothing may be sent there."""

    async def other_ports(self) -> list[int]:
        """Where else it listens."""

    async def stop(self, grace_s: float) -> int:
        """Asks it to end, then makes it; the exit code."""


EngineStarter = Callable[[Engine, Sequence[str]], Awaitable[tuple[RunningEngine, Origin]]]
"""Starts an engine's command and says where it will listen. Raises EngineMisconfigured or OSError."""


class _Output(NamedTuple):
    """What an engine writes, and the pipe it comes through."""

    reader: asyncio.StreamReader
    pipe: asyncio.ReadTransport


class EngineProcess:
    """One run of an engine command. Its output goes on to our standard error, and its end is in `exited`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: _Output,
        mark: str,
        port: int,
        held: HeldPort | None,
        *,
        may_be_unseen: bool,
    ) -> None:
        """`mark` is in the environment of all its processes. `may_be_unseen`: it runs in a container."""
        self._process = process
        self._output = output
        self._mark = mark
        self._port = port
        self._held = held
        self._may_be_unseen = may_be_unseen
        self._keeper: asyncio.subprocess.Process | None = None
        self._known_listeners: dict[int, int] = {}
        """Those that were found to be ours."""
        self._gpu_bytes = 0
        self._gpu_due_s = 0.0
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reading = asyncio.ensure_future(self._read())
        self.exited: asyncio.Future[int] = asyncio.ensure_future(self._follow())
        """Done with the exit code when the process has ended and what it wrote is read."""

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        held: HeldPort | None = None,
        mark: str = "",
    ) -> EngineProcess:
        """`environment` is all it gets. Raises OSError when the program cannot be started."""
        # A pipe of our own: asyncio takes a process for running until everybody has closed those that it made, and
        # vLLM's engine core, which has inherited them, waits for ever for its killed server.
        ours, its = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(_shielded(command, environment) if _SHIELDED else command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=its,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGKILL),
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        started = None
        try:
            output = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", 0)
            )
            unseen = any(os.path.basename(word) in _CONTAINER_RUNTIMES for word in command)
            started = cls(process, _Output(output, pipe), mark, port, held, may_be_unseen=unseen)
            started._keeper = await _keeper_of(process.pid)
        except BaseException:  # Told to end meanwhile: nobody knows of it yet, and a pool's agent lives on.
            if started is not None:
                await started.stop(0)
            else:
                _signal_group(process.pid, signal.SIGKILL)
                await process.wait()
            raise
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> list[str]:
        """The end of what the engine wrote, oldest first."""
        return list(self._lines)

    async def signs(self) -> Signs:
        """Sums over its processes."""
        processes = await asyncio.to_thread(self._processes)
        signs = await asyncio.to_thread(process_table.signs_of, processes)
        if (now := time.monotonic()) >= self._gpu_due_s:
            self._gpu_due_s = now + GPU_EVERY_S
            self._gpu_bytes = await gpu_bytes_of({process.pid for process in processes})
        return replace(signs, gpu_bytes=self._gpu_bytes)

    async def listener(self) -> Listener:
        """Who listens on its port; while that does not change, one reading of the kernel's table."""
        listening = await asyncio.to_thread(listening_on, self._port)
        if not listening:
            return Listener.NOBODY
        if listening == self._known_listeners:
            return Listener.OURS
        found = await asyncio.to_thread(self._find_listener)
        if found is Listener.UNSEEN:
            # Processes that we start are seen, but for those of containers.
            found = Listener.OURS if self._may_be_unseen else Listener.STRANGER
        if found is Listener.OURS:
            self._known_listeners = listening
            self._release_port()
        return found

    async def other_ports(self) -> list[int]:
        """Where else its processes listen."""
        ports = await asyncio.to_thread(lambda: ports_of(inodes_of(one.pid for one in self._processes())))
        return [port for port in ports if port != self._port]

    async def stop(self, grace_s: float) -> int:
        """SIGTERM (SIGINT if shielded), then SIGKILL to the whole group after `grace_s`, and to what has left the
        group. Returns the exit code."""
        if not self.exited.done():
            self._signal_group(signal.SIGINT if _SHIELDED else signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await asyncio.shield(self.exited)
            except TimeoutError:
                log.warning("engine.killed", pid=self.pid, after_s=grace_s)
        self._signal_group(signal.SIGKILL)  # Also reaches workers that outlived the process we started.
        for process in await asyncio.to_thread(process_table.marked, self._mark):
            kill(process, signal.SIGKILL)
        if self._keeper is not None and self._keeper.returncode is None:
            self._keeper.kill()
            await self._keeper.wait()
        await asyncio.wait([self._reading], timeout=REST_OF_OUTPUT_S)
        self._output.pipe.close()
        self._release_port()
        return await self.exited

    def _processes(self) -> list[ProcessIdentity]:
        own = process_table.identity_of(self.pid)
        marked = process_table.marked(self._mark)
        return [own, *[one for one in marked if one != own]] if own is not None else marked

    def _find_listener(self) -> Listener:
        return listener_on(self._port, {process.pid for process in self._processes()})

    def _release_port(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    async def _follow(self) -> int:
        code = await self._process.wait()
        await asyncio.wait([self._reading], timeout=REST_OF_OUTPUT_S)
        return code

    async def _read(self) -> None:
        while True:
            try:
                line = await self._output.reader.readline()
            except ValueError:
                continue  # Longer than the buffer: readline has dropped it.
            if not line:
                break
            text = line.decode(errors="replace").rstrip()
            if text:
                self._lines.append(text)
                sys.stderr.write(text + "\n")

    def _signal_group(self, number: signal.Signals) -> None:
        _signal_group(self._process.pid, number)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def _variables(engine: Engine, command: Sequence[str], port: int) -> dict[str, str]:
    """What an engine needs for what it is to do beside serving."""
    sleep = engine.sleep_calls(command)
    told = {VARIABLE: socket_name(port)} if engine.tells_steps(command) else {}
    return {**engine.environment(), **told, **(sleep.variables if sleep is not None else {})}


@dataclass(frozen=True, slots=True)
class LoopbackStarter:
    """The real `EngineStarter`: a child process on a free port of this host. The fields are `engine_environment`'s, but
    for `variables`: what its environment has in place of ours."""

    scratch: str = ""
    interface: str = ""
    address: str = ""
    keep_proxies: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    async def __call__(self, engine: Engine, command: Sequence[str]) -> tuple[RunningEngine, Origin]:
        held = HeldPort()
        port = held.number
        try:
            addressed = engine.with_address(command, "127.0.0.1", port)
            log.info("engine.starting", kind=engine.kind, command=addressed)
            mark = process_table.new_mark(str(port))
            environment = engine_environment(
                os.environ | self.variables,
                _variables(engine, command, port),
                mark=mark,
                scratch=self.scratch,
                interface=self.interface,
                address=self.address,
                keep_proxies=self.keep_proxies,
            )
            if not engine.shares_port:
                held.release()
            return await EngineProcess.start(addressed, environment, port, held, mark), Origin("127.0.0.1", port)
        except BaseException:
            held.release()
            raise


def kill(process: ProcessIdentity, number: signal.Signals) -> None:
    """Signals it, unless another has its number by now."""
    try:
        if process.alive:
            os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


async def _keeper_of(group: int) -> asyncio.subprocess.Process | None:
    """Kills the process group once we are gone, however that came about. A child dies with its parent, but not the
    children that it started: vLLM's engine core outlives its killed server and keeps the GPU."""
    script = "trap '' TERM INT HUP USR1 USR2; read -r _; kill -s KILL -- \"-$1\""
    try:
        return await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", script, "serai-engine-keeper", str(group)),
            stdin=asyncio.subprocess.PIPE,  # Closed when we end: nobody else has its other side.
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
    except OSError as error:
        log.warning("engine.no_keeper", error=error.strerror)
        return None


def _shielded(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command behind one that blocks SIGTERM and makes way for it: uvloop starts its children with all signals
    open. Raises OSError when there is no such program."""
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return [sys.executable, "-I", "-S", "-c", _WITHOUT_SIGTERM, program, *command]


start_on_loopback: EngineStarter = LoopbackStarter()
"""With nothing known of the site."""
