"""An emulated engine in this process: its real HTTP server and scheduler on the simulated network, no child process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from serai.engine_emulator.http_protocol import HttpConnection
from serai.engine_emulator.service import emulated_engine
from serai.engine_emulator.settings import EmulatorSettings
from serai.runtime.http1 import Origin
from serai.simulator.whole.memory_network import MemoryServer
from serai.simulator.whole.virtual_loop import VirtualLoop
from serai.worker_agent.engine.base import Engine
from serai.worker_agent.engine.listeners import Listener
from serai.worker_agent.engine.process import RunningEngine
from serai.worker_agent.engine.start_watch import Signs

KILLED = -9


class SimulatedEngine:
    """Stands in for `worker_agent.engine.process.EngineProcess`. Make it with `start`."""

    def __init__(self, loop: VirtualLoop, settings: EmulatorSettings) -> None:
        self._loop = loop
        self.settings = settings
        self.state = emulated_engine(settings, loop)
        self.exited: asyncio.Future[int] = loop.create_future()
        self.last_lines: list[str] = []
        self._server: MemoryServer | None = None
        self._loading: asyncio.TimerHandle | None = None

    @property
    def generations(self) -> int:
        """Those that run or wait in the engine."""
        return self.state.engine.running + self.state.engine.waiting

    def listen_after(self, delay_s: float, port: int) -> None:
        """Until then it loads its model, and its port refuses connections."""
        self._loading = self._loop.call_later(delay_s, self._listen, port)

    def _listen(self, port: int) -> None:
        network = self._loop.network
        assert network is not None
        self._server = network.create_server(lambda: HttpConnection(self.state), "127.0.0.1", port)

    async def signs(self) -> Signs:
        """Nothing of it can be seen: it is no process."""
        return Signs()

    async def listener(self) -> Listener:
        """Ports of the simulated network are never shared."""
        return Listener.OURS if self._server is not None else Listener.NOBODY

    async def other_ports(self) -> list[int]:
        """It has one."""
        return []

    async def stop(self, grace_s: float) -> int:
        """As SIGTERM: it ends at once."""
        self.end(0)
        return await self.exited

    def end(self, code: int) -> None:
        """The process ends with `code`; its connections close."""
        if self.exited.done():
            return
        if self._loading is not None:
            self._loading.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self.state.connections):
            connection.close()
        self.last_lines.append(f"simulated end with code {code}")
        self.exited.set_result(code)


class EngineHost:
    """Starts engines for one agent: its `EngineStarter`."""

    def __init__(self, loop: VirtualLoop, settings: EmulatorSettings) -> None:
        self._loop = loop
        self._settings = settings
        self._port = 20000
        self.engine: SimulatedEngine | None = None
        """The one that was started last."""

    async def start(self, engine: Engine, command: Sequence[str]) -> tuple[RunningEngine, Origin]:
        """The `EngineStarter`; the command says nothing that the settings do not."""
        self._port += 1
        started = self.engine = SimulatedEngine(self._loop, replace(self._settings, port=self._port))
        started.listen_after(self._settings.start_delay_s, self._port)
        return started, Origin("127.0.0.1", self._port)
