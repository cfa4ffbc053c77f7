"""Thousands of agents that are only known, not used: for what the control plane costs and how fast it converges.

A `LightAgent` is a real `NodeAgent` of which only its presence lives: what announces its record until a registry
acknowledges it, shows life and answers probes. So records, versions, repetition, and status are the real code. It
leaves out: the engine and its start, the desk (it takes no requests), the HTTP client, and draining.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.runtime.telemetry import Tracing
from serai.simulator.whole.simulated_bus import SimulatedBus, SimulatedNats
from serai.worker_agent.engine.kinds import ENGINES
from serai.worker_agent.service import NodeAgent
from serai.worker_agent.settings import AgentSettings


class LightAgent:
    """One session on `nats`. Make it with `join`."""

    def __init__(self, bus: SimulatedBus, agent: NodeAgent) -> None:
        self.bus = bus
        self.agent = agent
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def join(
        cls,
        nats: SimulatedNats,
        number: int,
        *,
        site: str = "local",
        model: str = "m",
        provider: str = "local",
        status_interval_s: float = 1.0,
        bus_type: type[SimulatedBus] = SimulatedBus,
    ) -> LightAgent:
        """Connects, announces itself as serving, and goes on showing life."""
        bus = await bus_type.connect(nats, "agent", name=f"{site}-light-{number}")
        settings = AgentSettings(
            model=model,
            engine="emulated",
            engine_url="http://127.0.0.1:1",
            allocation=f"light-{number}",
            site=site,
            provider=provider,
            status_interval_s=status_interval_s,
        )
        tracing = Tracing("worker-agent", None, 0.0)
        agent = NodeAgent(settings, ENGINES["emulated"], [], bus, tracing, connection=bus.name)
        light = cls(bus, agent)
        presence = agent.presence
        bus.on_disconnect(presence.on_disconnect)
        bus.on_reconnect(presence.on_reconnect)
        await presence.listen()
        presence.say(Lifecycle.SERVING, replace(agent.record.metadata, loading_phase=""))
        loop = asyncio.get_running_loop()
        light._tasks = [loop.create_task(presence.announcing()), loop.create_task(presence.showing_life())]
        return light

    @property
    def declared_gone(self) -> bool:
        """Whether its id is spent: its registry says that it left, or it was away for too long."""
        return self.agent.presence.spent.is_set()

    @property
    def record(self) -> SessionRecord:
        return self.agent.record

    async def leave(self) -> None:
        """Says LEFT, as an agent that was asked to stop, and is gone."""
        self._end_loops()
        with suppress(ValueError):
            self.agent.presence.say(Lifecycle.LEFT)
        await self.agent.presence.announce()
        await self.bus.aclose()

    def kill(self) -> None:
        """Gone without a word."""
        self._end_loops()
        self.bus.kill()

    def _end_loops(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()


async def join_fleet(nats: SimulatedNats, count: int, *, over_s: float = 1.0, first: int = 0) -> list[LightAgent]:
    """`count` light agents, one after the other within `over_s` seconds, so that their signs of life are spread."""
    fleet: list[LightAgent] = []
    for number in range(first, first + count):
        fleet.append(await LightAgent.join(nats, number, site=nats.name))
        await asyncio.sleep(over_s / count)
    return fleet
