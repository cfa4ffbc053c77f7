"""A whole Serai in one process: nodes that run the real services, and can be stopped, killed and started again."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from serai.contracts.subjects import GROUPS_BUCKET, OWNERS_BUCKET
from serai.engine_emulator.settings import EmulatorSettings
from serai.ingress.access import Access
from serai.ingress.service import Ingress
from serai.ingress.settings import IngressSettings
from serai.macro_scheduler.service import MacroScheduler
from serai.macro_scheduler.settings import MacroSchedulerSettings
from serai.registry.service import Registry
from serai.registry.settings import RegistrySettings
from serai.runtime.bus import BusError
from serai.runtime.registry_replica import RegistryReplica
from serai.runtime.service import ServiceFailure
from serai.runtime.telemetry import Tracing
from serai.simulator.whole.client import ChatClient
from serai.simulator.whole.engines import EngineHost
from serai.simulator.whole.memory_network import HOST, MemoryNetwork
from serai.simulator.whole.simulated_bus import SimulatedBus, SimulatedNats
from serai.simulator.whole.substitutes import substituted
from serai.simulator.whole.trace import Trace
from serai.simulator.whole.virtual_loop import VirtualLoop, run
from serai.worker_agent.engine.kinds import ENGINES
from serai.worker_agent.service import NodeAgent
from serai.worker_agent.settings import AgentSettings

T = TypeVar("T")

INGRESS_PORT = 8000
RESTART_AFTER_S = 1.0
"""How soon a supervisor starts a service again that ended by itself."""
ENGINE_SEED = 0

_NODE: ContextVar[str] = ContextVar("simulated_node", default="")


def _untraced(service: str) -> Tracing:
    return Tracing(service, None, 0.0)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is there at the start. Times are short where waiting for them would teach nothing."""

    agents: int = 4
    ingresses: int = 2
    model: str = "m"
    site: str = "local"
    engine: EmulatorSettings = field(
        default_factory=lambda: EmulatorSettings(
            model="m", seed=ENGINE_SEED, tpot_ms=10.0, start_delay_s=0.5, max_concurrency=32
        )
    )
    request_timeout_s: float = 40.0
    client_stall_s: float = 10.0
    drain_s: float = 10.0
    engine_silence_s: float = 8.0
    silence_grace_s: float = 20.0
    """Shorter than the longest partitions, so that sessions are closed that are still there."""
    status_interval_s: float = 1.0
    tcp_window_bytes: int = 16 * 1024
    window_bytes: int = 64 * 1024
    """Both small, so that a client that does not read holds up its engine within a few hundred tokens."""
    macro_schedulers: int = 0
    """With any, ingresses ask them where requests go."""
    macro: MacroSchedulerSettings = field(default_factory=lambda: MacroSchedulerSettings(slo_ttft_s=2.0, beat_s=0.5))

    @property
    def request_limit_s(self) -> float:
        """After so long every request must have ended: its deadline, two silences, a look, and the way."""
        return self.request_timeout_s + 2 * 5.0 + 2.0


class Node:
    """One process on one host. `make` is called anew for each life."""

    def __init__(self, system: SimulatedSystem, host: str, make: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
        self.system = system
        self.host = host
        self.lives = 0
        self.stop = asyncio.Event()
        self.bus: SimulatedBus | None = None
        self.service: Ingress | Registry | NodeAgent | MacroScheduler | None = None
        self.engines: EngineHost | None = None
        self.failures: list[str] = []
        self._make = make
        self._task: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._kept_down = False

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def name(self) -> str:
        """Of this life's connection to NATS."""
        return f"{self.host}.{self.lives}"

    @property
    def replica(self) -> RegistryReplica | None:
        """This node's copy of the registry, if it has one."""
        if isinstance(self.service, MacroScheduler):
            return self.service.copy.replica
        return getattr(self.service, "replica", None)

    def start(self) -> None:
        """A new life, unless it lives."""
        if self.running:
            return
        self._kept_down = False
        self.lives += 1
        self.stop = asyncio.Event()
        self.system.network.revive(self.host)
        context = copy_context()
        context.run(HOST.set, self.host)
        context.run(_NODE.set, self.host)
        self._task = self.system.loop.create_task(self._live(), name=self.name, context=context)

    async def terminate(self) -> None:
        """SIGTERM; returns when it has ended in its own way."""
        self._kept_down = True
        self.stop.set()
        await self._ended()

    async def kill(self) -> None:
        """SIGKILL: not another byte leaves it, then its tasks are cancelled, which nobody sees any more."""
        self._kept_down = True
        if self._again is not None:
            self._again.cancel()
        self.system.network.kill(self.host)
        if self.bus is not None:
            self.bus.kill()
        if self._task is not None:
            self._task.cancel()
        await self._ended()

    async def _ended(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _live(self) -> None:
        note = self.system.trace.note
        note(self.host, f"starts, life {self.lives}")
        try:
            await self._make(self)
            note(self.host, "ends as asked")
        except asyncio.CancelledError:
            note(self.host, "killed")
        except BaseExceptionGroup as group:
            expected, others = group.split((ServiceFailure, BusError, asyncio.CancelledError))
            if others is not None:
                self.failures.append(f"{self.host}: {others!r}")
            note(self.host, f"fails: {(expected or others)!r}"[:300])
        except (ServiceFailure, BusError) as error:
            note(self.host, f"fails: {error}"[:300])
        except Exception as error:
            self.failures.append(f"{self.host}: {error!r}")
            note(self.host, f"fails: {error!r}")
        finally:
            if self.bus is not None:
                self.bus.kill()
            self.system.network.kill(self.host)
            self.system.network.revive(self.host)
            if not self._kept_down:
                self._again = self.system.loop.call_later(RESTART_AFTER_S, self.start)


class SimulatedSystem:
    """All nodes of one site, on one simulated NATS."""

    def __init__(self, loop: VirtualLoop, seed: int, scene: Scene | None = None) -> None:
        self.loop = loop
        self.seed = seed
        self.scene = scene or Scene()
        self.network = MemoryNetwork(loop, window_bytes=self.scene.tcp_window_bytes)
        self.nats = SimulatedNats(loop, seed)
        self.trace = Trace(loop)
        self.registry = Node(self, "registry", self._registry)
        self.ingresses = [Node(self, f"ingress-{n}", self._ingress) for n in range(self.scene.ingresses)]
        self.agents = [Node(self, f"agent-{n}", self._agent) for n in range(self.scene.agents)]
        self.macro_schedulers = [Node(self, f"macro-{n}", self._macro) for n in range(self.scene.macro_schedulers)]

    @property
    def nodes(self) -> list[Node]:
        return [self.registry, *self.macro_schedulers, *self.ingresses, *self.agents]

    def client(self) -> ChatClient:
        """One of its ingresses, who knows what its engines should say."""
        return ChatClient(port=INGRESS_PORT, engine_seed=ENGINE_SEED, limit_s=self.scene.request_limit_s)

    def start(self) -> None:
        """All nodes, in this order and at once."""
        for node in self.nodes:
            node.start()

    async def stop(self) -> None:
        """All nodes, as an operator would: agents drain first."""
        await asyncio.gather(*[node.terminate() for node in self.agents])
        await asyncio.gather(*[node.terminate() for node in self.ingresses])
        await asyncio.gather(*[node.terminate() for node in self.macro_schedulers])
        await self.registry.terminate()

    def sessions(self, ingress: Node) -> int:
        """How many sessions `ingress` would route to now."""
        replica = ingress.replica
        return len(replica.routable(self.scene.model, self.loop.time())) if replica is not None else 0

    async def until_serving(self, timeout_s: float) -> bool:
        """Whether every ingress comes to route to every agent within `timeout_s`."""
        give_up_at_s = self.loop.time() + timeout_s
        while self.loop.time() < give_up_at_s:
            if all(node.running and self.sessions(node) == len(self.agents) for node in self.ingresses):
                return True
            await asyncio.sleep(0.1)
        return False

    def on_log(self, event: str, fields: dict[str, Any]) -> None:
        """Our services' log events become part of the trace."""
        shown = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("exc_info", "command"))
        self.trace.note(_NODE.get() or "simulation", f"{event} {shown}"[:240])

    # -- lives ---------------------------------------------------------------------------------------------------

    async def _registry(self, node: Node) -> None:
        node.bus = await SimulatedBus.connect(self.nats, "registry", name=node.name)
        settings = RegistrySettings(
            site=self.scene.site, silence_grace_s=self.scene.silence_grace_s, retention_s=86400.0
        )
        node.service = Registry(settings, node.bus)
        await node.service.run(node.stop)

    async def _ingress(self, node: Node) -> None:
        node.bus = await SimulatedBus.connect(self.nats, "ingress", name=node.name)
        settings = IngressSettings(
            site=self.scene.site,
            host="0.0.0.0",
            port=INGRESS_PORT,
            anonymous=True,
            policy="macro-scheduled" if self.scene.macro_schedulers else "least-loaded",
            request_timeout_s=self.scene.request_timeout_s,
            client_stall_s=self.scene.client_stall_s,
            window_bytes=self.scene.window_bytes,
            shutdown_s=10.0,
        )
        node.service = Ingress(settings, node.bus, Access(None, anonymous=True), _untraced("ingress"))
        await node.service.run(node.stop)

    async def _macro(self, node: Node) -> None:
        bus = node.bus = await SimulatedBus.connect(self.nats, "macro-scheduler", name=node.name)
        settings = replace(self.scene.macro, site=self.scene.site)
        timeout_s = settings.lease_s / 2
        groups, owners = (bus.bucket(name, timeout_s=timeout_s) for name in (GROUPS_BUCKET, OWNERS_BUCKET))
        node.service = MacroScheduler(settings, bus, groups, owners)
        await node.service.run(node.stop)

    async def _agent(self, node: Node) -> None:
        node.bus = await SimulatedBus.connect(self.nats, "agent", name=node.name)
        scene = self.scene
        settings = AgentSettings(
            site=scene.site,
            model=scene.model,
            engine="emulated",
            allocation=node.host,
            drain_s=scene.drain_s,
            engine_silence_s=scene.engine_silence_s,
            status_interval_s=scene.status_interval_s,
            start_timeout_s=60.0,
        )
        node.engines = EngineHost(self.loop, replace(scene.engine, model=scene.model))
        agent = NodeAgent(
            settings, ENGINES["emulated"], ["emulated"], node.bus, _untraced("worker-agent"), node.engines.start
        )
        node.service = agent
        await agent.run(node.stop)


def simulate(
    seed: int,
    main: Callable[[SimulatedSystem], Coroutine[Any, Any, T]],
    scene: Scene | None = None,
    limit_s: float = 24 * 3600.0,
) -> tuple[T, SimulatedSystem]:
    """Runs `main` with a system that is made but not started, in virtual time, to its end.
    Raises Stalled when that is more than `limit_s` virtual seconds away."""
    loop = VirtualLoop(limit_s)
    made: list[SimulatedSystem] = []

    def on_log(event: str, fields: dict[str, Any]) -> None:
        if made:
            made[0].on_log(event, fields)

    world: AbstractContextManager[None] = substituted(loop, Random(f"{seed}/services"), on_log)

    async def whole() -> T:
        made.append(SimulatedSystem(loop, seed, scene))
        return await main(made[0])

    collector_before = gc.get_threshold()
    # Nothing of a run is garbage for long, and walking thousands of agents again and again takes a quarter of it.
    gc.set_threshold(100_000, 50, 1000)
    try:
        with world:
            result = run(whole(), loop)
    finally:
        gc.set_threshold(*collector_before)
    return result, made[0]
