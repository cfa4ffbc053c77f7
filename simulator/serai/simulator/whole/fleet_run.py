"""A large fleet in virtual time: what the control plane carries, and how long readers believe what is no longer true.

One site: a real registry, `replicas` real registry copies (what every ingress has), and `sessions` light agents that
announce themselves and show life. Sessions come and go at `churn_per_min`; half of those that go say so, half are
killed without a word, and then the NATS server tells the registry, as where its disconnect events are granted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from serai.contracts.session_record import SessionRecord
from serai.registry.service import Registry
from serai.registry.settings import RegistrySettings
from serai.runtime.bus import Message
from serai.runtime.disconnects import DisconnectedClient
from serai.runtime.registry_copy import RegistryCopy
from serai.runtime.registry_replica import RegistryReplica
from serai.simulator.whole import virtual_loop
from serai.simulator.whole.fleet import LightAgent
from serai.simulator.whole.simulated_bus import SimulatedBus, SimulatedNats, _Interest
from serai.simulator.whole.substitutes import substituted
from serai.simulator.whole.virtual_loop import VirtualLoop

POLL_S = 0.01
SETTLE_S = 15.0
"""Between the last join and the first measurement: everybody has been heard, all records are acknowledged."""
SERVER_NOTICES_S = 0.005
"""A killed process's socket closes at once; the server's event follows."""
SITE = "local"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """How large, for how long, and how restless."""

    sessions: int = 10_000
    replicas: int = 100
    models: int = 20
    churn_per_min: float = 0.01
    """Share of the sessions that end, and are replaced, per minute."""
    join_over_s: float = 20.0
    measured_s: float = 60.0
    disconnect_events: bool = True


@dataclass(slots=True)
class FleetResult:
    """What was seen. Stale times: from a session's change to each replica's knowing it, in seconds."""

    agent_bytes: int = 0
    """Bytes on all agents' connections in the measured time, both ways, NATS's own framing included."""
    measured_s: float = 0.0
    stale_s: list[float] = field(default_factory=list)
    never: int = 0
    """Changes that a replica had not learned at the end."""
    ended: int = 0
    joined: int = 0
    unequal_replicas: int = 0
    """Copies that differ from the registry's at the end."""
    records: list[SessionRecord] = field(default_factory=list)


class _CountedBus(SimulatedBus):
    """Counts what passes over one agent's connection."""

    bytes_total = 0

    def publish(self, subject: str, payload: bytes, reply: str = "", *, at_once: bool = False) -> None:
        _CountedBus.bytes_total += len(b"PUB   \r\n\r\n") + len(subject) + len(reply) + len(payload) + 3
        super().publish(subject, payload, reply, at_once=at_once)

    def _deliver(self, interest: _Interest, message: Message) -> None:
        _CountedBus.bytes_total += len(b"MSG  1  \r\n\r\n") + len(message.subject) + len(message.data) + 3
        super()._deliver(interest, message)


@dataclass(slots=True)
class _Change:
    """A session has become routable, or has ceased to be; replicas that do not know it yet."""

    session: str
    routable: bool
    at_s: float
    unaware: list[RegistryReplica]


def fleet_run(seed: int, plan: FleetPlan, said: Callable[[str], None] = lambda text: None) -> FleetResult:
    """One run. `said` gets lines of progress."""
    loop = VirtualLoop()
    with substituted(loop, Random(f"{seed}/services")):
        return virtual_loop.run(_Fleet(loop, seed, plan, said).run(), loop)


class _Fleet:
    def __init__(self, loop: VirtualLoop, seed: int, plan: FleetPlan, said: Callable[[str], None]) -> None:
        self._loop = loop
        self._plan = plan
        self._said = said
        self._chance = Random(f"{seed}/fleet")
        self._nats = SimulatedNats(loop, seed, name=SITE, one_hop=True)
        self._numbers = itertools.count()
        self._agents: dict[str, LightAgent] = {}
        self._on_gone: Callable[[DisconnectedClient], None] | None = None
        self._changes: list[_Change] = []
        self._replicas: list[RegistryReplica] = []
        self._result = FleetResult()

    async def run(self) -> FleetResult:
        plan, result = self._plan, self._result
        registry, tasks = await self._start_readers()
        self._said(f"{plan.replicas} replicas listen; {plan.sessions} sessions join over {plan.join_over_s:g} s")
        for _ in range(plan.sessions):
            await self._join()
            await asyncio.sleep(plan.join_over_s / plan.sessions)
        await asyncio.sleep(SETTLE_S)
        self._said(f"{len(self._agents)} sessions are there; measuring {plan.measured_s:g} virtual seconds")
        began_s, bytes_before = self._loop.time(), _CountedBus.bytes_total
        await self._churn_for(plan.measured_s)
        result.measured_s = self._loop.time() - began_s
        result.agent_bytes = _CountedBus.bytes_total - bytes_before
        await self._watch_for(10.0)
        result.never = sum(len(change.unaware) for change in self._changes)
        digest = registry.replica.digest(SITE).root
        result.unequal_replicas = sum(replica.digest(SITE).root != digest for replica in self._replicas)
        result.records = registry.replica.records()
        for task in tasks:
            task.cancel()
        return result

    async def _start_readers(self) -> tuple[Registry, list[asyncio.Task[None]]]:
        bus = await SimulatedBus.connect(self._nats, "registry")
        registry = Registry(RegistrySettings(site=SITE), bus, self._watch if self._plan.disconnect_events else None)
        tasks = [self._loop.create_task(registry.run(asyncio.Event()))]
        await asyncio.sleep(0.1)
        for _ in range(self._plan.replicas):
            bus = await SimulatedBus.connect(self._nats, "ingress")
            copy = RegistryCopy(bus, SITE)
            await copy.start()
            await bus.barrier()
            tasks.append(self._loop.create_task(copy.run()))
            self._replicas.append(copy.replica)
        return registry, tasks

    async def _watch(self, on_gone: Callable[[DisconnectedClient], None]) -> None:
        self._on_gone = on_gone
        await asyncio.Event().wait()

    async def _join(self) -> LightAgent:
        number = next(self._numbers)
        model = f"model-{number % self._plan.models}"
        agent = await LightAgent.join(self._nats, number, site=SITE, model=model, bus_type=_CountedBus)
        self._agents[agent.record.session] = agent
        return agent

    async def _churn_for(self, seconds: float) -> None:
        """Ends and replaces sessions at random times, and notes what each replica knows of it."""
        rate = self._plan.sessions * self._plan.churn_per_min / 60
        until_s = self._loop.time() + seconds
        next_s = self._loop.time() + self._chance.expovariate(rate) if rate > 0 else until_s
        while self._loop.time() < until_s:
            while next_s <= self._loop.time():
                await self._replace_one()
                next_s += self._chance.expovariate(rate)
            self._look()
            await asyncio.sleep(POLL_S)

    async def _watch_for(self, seconds: float) -> None:
        until_s = self._loop.time() + seconds
        while self._changes and self._loop.time() < until_s:
            self._look()
            await asyncio.sleep(POLL_S)

    async def _replace_one(self) -> None:
        session = self._chance.choice(list(self._agents))
        agent = self._agents.pop(session)
        self._note(session, routable=False)
        self._result.ended += 1
        if self._chance.random() < 0.5:
            leaving = self._loop.create_task(agent.leave())
            leaving.add_done_callback(lambda task: task.exception())
        else:
            agent.kill()
            self._loop.call_later(SERVER_NOTICES_S, self._server_notices, agent)
        joined = await self._join()
        self._result.joined += 1
        self._note(joined.record.session, routable=True)

    def _server_notices(self, agent: LightAgent) -> None:
        if self._on_gone is not None:
            self._on_gone(DisconnectedClient(agent.record.metadata.connection, "", "Client Closed"))

    def _note(self, session: str, *, routable: bool) -> None:
        self._changes.append(_Change(session, routable, self._loop.time(), list(self._replicas)))

    def _look(self) -> None:
        now = self._loop.time()
        for change in self._changes:
            unaware = [
                replica
                for replica in change.unaware
                if (replica.why_not_routable(change.session, now) is None) is not change.routable
            ]
            self._result.stale_s += [now - change.at_s] * (len(change.unaware) - len(unaware))
            change.unaware = unaware
        self._changes = [change for change in self._changes if change.unaware]
