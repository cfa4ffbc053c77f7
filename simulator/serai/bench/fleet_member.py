"""A process with several real agents and several real copies of the registry, told what to do on standard input.

Each agent has a NATS connection of its own. The copies share one, each with subscriptions of its own, unless told
otherwise: real copies are on machines of their own, and what as many sockets cost one machine is nobody's in reality.
Times are of the machine's monotonic clock, which all its processes share. One JSON object a line, in and out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.runtime.registry_copy import RegistryCopy
from serai.runtime.registry_replica import RegistryReplica
from serai.runtime.telemetry import Tracing, set_up_logs
from serai.worker_agent.engine.kinds import ENGINES
from serai.worker_agent.service import NodeAgent
from serai.worker_agent.settings import AgentSettings

MODEL = "emulated"


class NotingReplica(RegistryReplica):
    """Notes when a record that was written for the measurement is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.came_ns: dict[str, int] = {}

    def merge(self, record: SessionRecord, now: float, *, heard: bool = False) -> bool:
        changed = super().merge(record, now, heard=heard)
        write = record.metadata.labels.get("write")
        if write is not None and changed:
            self.came_ns.setdefault(write, time.monotonic_ns())
        return changed


class Members:
    """The agents and copies of this process."""

    def __init__(
        self, nats_url: str, engine_url: str, name: str, status_interval_s: float, *, own_connections: bool
    ) -> None:
        self._nats_url = nats_url
        self._engine_url = engine_url
        self._name = name
        self._status_interval_s = status_interval_s
        self._agents: list[NodeAgent] = []
        self._copies: list[RegistryCopy] = []
        self._copies_bus: NatsBus | None = None
        self._own_connections = own_connections
        self._stop = asyncio.Event()
        self._churning: asyncio.Task[None] | None = None
        self._running: list[asyncio.Task[None]] = []

    async def add_copy(self, tasks: asyncio.TaskGroup) -> None:
        bus = self._copies_bus
        if bus is None or self._own_connections:
            bus = self._copies_bus = await NatsBus.connect(NatsAddress(self._nats_url), "ingress")
        copy = RegistryCopy(bus, "local")
        copy.replica = NotingReplica()
        await copy.start()
        await bus.barrier()
        tasks.create_task(copy.run())
        self._copies.append(copy)

    async def add_agent(self, tasks: asyncio.TaskGroup) -> None:
        number = len(self._agents)
        settings = AgentSettings(
            model=MODEL,
            engine="emulated",
            engine_url=self._engine_url,
            nats_url=self._nats_url,
            allocation=f"{self._name}-{number}",
            status_interval_s=self._status_interval_s,
            drain_s=0.0,
        )
        connection = f"agent-{self._name}-{number}"
        bus = await NatsBus.connect(settings.nats, "agent", name=connection)
        agent = NodeAgent(
            settings, ENGINES["emulated"], [], bus, Tracing("worker-agent", None, 0.0), connection=connection
        )
        self._agents.append(agent)
        self._running.append(tasks.create_task(self._run(agent, bus)))

    async def _run(self, agent: NodeAgent, bus: NatsBus) -> None:
        try:
            await agent.run(self._stop)
        finally:
            await bus.aclose()

    async def serving(self) -> None:
        while any(agent.record.lifecycle is not Lifecycle.SERVING for agent in self._agents):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    # -- what may be asked ---------------------------------------------------------------------------------------

    async def ready(self) -> object:
        return {"agents": len(self._agents), "copies": len(self._copies)}

    async def known(self) -> object:
        """How many sessions each copy would route to."""
        now = time.monotonic()
        return [len(copy.replica.routable(MODEL, now)) for copy in self._copies]

    async def write(self, agent: int, write: str) -> object:
        """One agent says something new; when it did."""
        began_ns = time.monotonic_ns()
        self._agents[agent].relabel({"write": write})
        return began_ns

    async def came(self) -> object:
        """Per copy: when each write was there."""
        return [copy.replica.came_ns for copy in self._copies if isinstance(copy.replica, NotingReplica)]

    async def churn(self, every_s: float) -> object:
        """Every agent registers anew every so many seconds, one after the other."""
        self._churning = asyncio.ensure_future(self._churn(every_s))
        return None

    async def leave(self) -> object:
        """All agents leave, as when they are told to stop."""
        if self._churning is not None:
            self._churning.cancel()
        self._stop.set()
        await asyncio.gather(*self._running)
        return None

    async def _churn(self, every_s: float) -> None:
        count = 0
        while True:
            for agent in self._agents:
                agent.relabel({"registered": str(count)})
                count += 1
                await asyncio.sleep(every_s / len(self._agents))


async def _answer_commands(members: Members) -> None:
    commands: dict[str, Callable[..., Awaitable[object]]] = {
        "ready": members.ready,
        "known": members.known,
        "write": members.write,
        "came": members.came,
        "churn": members.churn,
        "leave": members.leave,
    }
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        asked: dict[str, Any] = json.loads(line)
        answer = await commands[asked.pop("do")](**asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


async def _main(arguments: argparse.Namespace) -> None:
    members = Members(
        arguments.nats_url,
        arguments.engine_url,
        arguments.name,
        arguments.status_interval_s,
        own_connections=arguments.own_connections,
    )
    async with asyncio.TaskGroup() as tasks:
        for _ in range(arguments.copies):
            await members.add_copy(tasks)
        for _ in range(arguments.agents):
            await members.add_agent(tasks)
        await members.serving()
        await _answer_commands(members)
        raise SystemExit(0)  # Whoever asked is gone.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nats-url", required=True)
    parser.add_argument("--engine-url", default="http://127.0.0.1:1")
    parser.add_argument("--name", required=True)
    parser.add_argument("--agents", type=int, default=0)
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--own-connections", action="store_true")
    parser.add_argument("--status-interval-s", type=float, default=1.0)
    arguments = parser.parse_args()
    set_up_logs("member", "warning")
    uvloop.run(_main(arguments))


if __name__ == "__main__":
    main()
