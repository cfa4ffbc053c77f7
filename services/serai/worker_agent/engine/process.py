"""The engine as a child process: in a process group of its own, dying with its parent, its last lines kept."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import structlog

from serai.runtime.http1 import Origin
from serai.worker_agent.engine.base import Engine

log = structlog.get_logger()

LAST_LINES = 20
_LINE_BYTES_MAX = 64 * 1024
_PR_SET_PDEATHSIG = 1
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")

_libc = ctypes.CDLL(None, use_errno=True)


class RunningEngine(Protocol):
    """An engine that the agent has started, and ends."""

    @property
    def exited(self) -> asyncio.Future[int]:
        """Done with the exit code when the engine has ended."""

    @property
    def last_lines(self) -> list[str]:
        """The end of what the engine wrote, oldest first."""

    async def stop(self, grace_s: float) -> int:
        """Asks it to end, then makes it; the exit code."""


EngineStarter = Callable[[Engine, Sequence[str]], Awaitable[tuple[RunningEngine, Origin]]]
"""Starts an engine's command and says where it will listen. Raises EngineMisconfigured or OSError."""


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now, below the range the kernel hands out to clients."""
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free TCP port between 20000 and 32000 on 127.0.0.1")


class EngineProcess:
    """One run of an engine command. Its output goes on to our standard error, and its end is in `exited`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self.exited: asyncio.Future[int] = asyncio.ensure_future(self._follow())
        """Done with the exit code when the process has ended and all its output is read."""

    @classmethod
    async def start(cls, command: Sequence[str], extra_environment: Mapping[str, str]) -> EngineProcess:
        """Raises OSError when the program cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES_MAX,
            env=_environment(extra_environment),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> list[str]:
        """The end of what the engine wrote, oldest first."""
        return list(self._lines)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then SIGKILL to the whole group after `grace_s`. Returns the exit code."""
        if not self.exited.done():
            self._signal_group(signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await asyncio.shield(self.exited)
            except TimeoutError:
                log.warning("engine.killed", pid=self.pid, after_s=grace_s)
        self._signal_group(signal.SIGKILL)  # Also reaches workers that outlived the process we started.
        return await self.exited

    async def _follow(self) -> int:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                continue  # Longer than the buffer: readline has dropped it.
            if not line:
                break
            text = line.decode(errors="replace").rstrip()
            if text:
                self._lines.append(text)
                sys.stderr.write(text + "\n")
        return await self._process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass


async def start_on_loopback(engine: Engine, command: Sequence[str]) -> tuple[RunningEngine, Origin]:
    """The real `EngineStarter`: a child process on a free port of this host."""
    port = free_port()
    addressed = engine.with_address(command, "127.0.0.1", port)
    log.info("engine.starting", kind=engine.kind, command=addressed)
    return await EngineProcess.start(addressed, engine.environment()), Origin("127.0.0.1", port)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours, without proxies (they would swallow loopback traffic) and without Serai's own secrets."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.lower() not in _PROXY_VARIABLES and not name.startswith("SERAI_NATS_")
    }
    return kept | {"NO_PROXY": "127.0.0.1,localhost", "PYTHONUNBUFFERED": "1"} | dict(extra)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
