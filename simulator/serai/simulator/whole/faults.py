"""Schedules of faults, drawn from a seed, and how each is done to a system and undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from serai.engine_emulator.faults import Fault as EngineFault
from serai.engine_emulator.faults import FaultKind as EngineFaultKind
from serai.simulator.whole.engines import KILLED
from serai.simulator.whole.simulated_bus import KvFaults
from serai.simulator.whole.system import Node, SimulatedSystem


class FaultKind(StrEnum):
    """Closed set."""

    KILL_AGENT = "kill-agent"
    """SIGKILL: agent and engine die at once, NATS notices."""
    LOSE_AGENT = "lose-agent"
    """The node goes dark: nobody is told."""
    STOP_AGENT = "stop-agent"
    """SIGTERM: it drains and leaves; then another is started."""
    KILL_ENGINE = "kill-engine"
    PARTITION_AGENT = "partition-agent"
    CUT_AGENT = "cut-agent"
    """Its connection to NATS breaks and comes back."""
    STALL_AGENT = "stall-agent"
    """It reads nothing from NATS for a while."""
    ENGINE_HANG = "engine-hang"
    ENGINE_CUT = "engine-cut"
    ENGINE_RESET = "engine-reset"
    ENGINE_ERROR = "engine-error"
    """Answers 500 or 503."""
    ENGINE_ERROR_EVENT = "engine-error-event"
    ENGINE_NO_DONE = "engine-no-done"
    ENGINE_SLOW = "engine-slow"
    KILL_INGRESS = "kill-ingress"
    STOP_INGRESS = "stop-ingress"
    PARTITION_INGRESS = "partition-ingress"
    CUT_INGRESS = "cut-ingress"
    STALL_INGRESS = "stall-ingress"
    KILL_REGISTRY = "kill-registry"
    PARTITION_REGISTRY = "partition-registry"
    RESTART_NATS = "restart-nats"
    RESTART_NATS_EMPTY = "restart-nats-empty"
    """It comes back without its KV."""
    KV_LOSES = "kv-loses"
    """Half of the writes are acknowledged and lost."""
    KV_REFUSES = "kv-refuses"
    KV_BLIND = "kv-blind"
    KV_VANISHES = "kv-vanishes"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault: when, to which of the nodes of its kind, and for how long."""

    at_s: float
    kind: FaultKind
    target: int
    lasts_s: float
    detail: int
    """Whatever else the fault needs a number for."""

    def __str__(self) -> str:
        return f"{self.kind} #{self.target} for {self.lasts_s:.2f} s"


def plan(
    chance: Random, *, duration_s: float, every_s: float, kinds: tuple[FaultKind, ...] = tuple(FaultKind)
) -> list[PlannedFault]:
    """Faults at random times, `every_s` seconds apart on the mean. Most are short; one in four lasts long enough to
    be noticed by time-outs."""
    faults: list[PlannedFault] = []
    at_s = chance.expovariate(1 / every_s)
    while at_s < duration_s:
        lasts_s = chance.uniform(20.0, 45.0) if chance.random() < 0.25 else chance.uniform(0.2, 6.0)
        faults.append(PlannedFault(at_s, chance.choice(kinds), chance.randrange(1000), lasts_s, chance.randrange(1000)))
        at_s += chance.expovariate(1 / every_s)
    return faults


class FaultInjector:
    """Does planned faults to a system. After `heal` all nodes run and nothing is cut, lost or stalled any more."""

    def __init__(self, system: SimulatedSystem) -> None:
        self._system = system
        self.done = 0

    async def run(self, faults: list[PlannedFault]) -> None:
        """Each at its time; returns when the last one is undone."""
        started_s = self._system.loop.time()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(max(0.0, started_s + fault.at_s - self._system.loop.time()))
                self._system.trace.note("FAULT", str(fault))
                self.done += 1
                tasks.create_task(self._do(fault))

    async def heal(self) -> None:
        """Everything as it should be."""
        system = self._system
        system.nats.kv_faults = KvFaults()
        system.nats.stress.end()
        if not system.nats.running:
            system.nats.start()
        for node in system.nodes:
            node.start()
        await asyncio.sleep(0.01)
        for node in system.nodes:
            if node.bus is not None:
                node.bus.heal()

    async def _do(self, fault: PlannedFault) -> None:
        await _ACTIONS[fault.kind](self._system, fault)


Action = Callable[[SimulatedSystem, PlannedFault], Coroutine[Any, Any, None]]


def _agent(system: SimulatedSystem, fault: PlannedFault) -> Node:
    return system.agents[fault.target % len(system.agents)]


def _ingress(system: SimulatedSystem, fault: PlannedFault) -> Node:
    return system.ingresses[fault.target % len(system.ingresses)]


def _registry(system: SimulatedSystem, fault: PlannedFault) -> Node:
    return system.registry


Choice = Callable[[SimulatedSystem, PlannedFault], Node]


def _kill(choose: Choice) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFault) -> None:
        node = choose(system, fault)
        await node.kill()
        await asyncio.sleep(min(fault.lasts_s, 8.0))
        node.start()

    return act


def _stop(choose: Choice) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFault) -> None:
        node = choose(system, fault)
        await node.terminate()
        await asyncio.sleep(min(fault.lasts_s, 8.0))
        node.start()

    return act


def _lose(choose: Choice) -> Action:
    """As a node whose power fails: neither its network nor its connection to NATS says anything."""

    async def act(system: SimulatedSystem, fault: PlannedFault) -> None:
        node = choose(system, fault)
        if node.bus is not None:
            node.bus.partition()
        await node.kill()
        await asyncio.sleep(fault.lasts_s)
        node.start()

    return act


def _partition(choose: Choice) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFault) -> None:
        bus = choose(system, fault).bus
        if bus is not None:
            bus.partition()
            await asyncio.sleep(fault.lasts_s)
            bus.heal()

    return act


def _stall(choose: Choice) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFault) -> None:
        bus = choose(system, fault).bus
        if bus is not None:
            bus.stall()
            await asyncio.sleep(fault.lasts_s)
            bus.resume()

    return act


def _cut(choose: Choice) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFault) -> None:
        bus = choose(system, fault).bus
        if bus is not None:
            bus.cut()

    return act


def _engine(kind: EngineFaultKind) -> Action:
    """The engine's own fault, for one to three requests."""

    async def act(system: SimulatedSystem, fault: PlannedFault) -> None:
        host = _agent(system, fault).engines
        if host is not None and host.engine is not None:
            status = (500, 503)[fault.detail % 2] if kind is EngineFaultKind.STATUS else 0
            factor = 20.0 if kind is EngineFaultKind.SLOW else 1.0
            tokens = fault.detail % 8
            count = 1 + fault.detail % 3
            host.engine.state.faults.add(EngineFault(kind, tokens=tokens, status=status, factor=factor, count=count))

    return act


async def _kill_engine(system: SimulatedSystem, fault: PlannedFault) -> None:
    host = _agent(system, fault).engines
    if host is not None and host.engine is not None:
        host.engine.end(KILLED)


def _restart_nats(*, keep_kv: bool) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFault) -> None:
        system.nats.stop()
        await asyncio.sleep(min(fault.lasts_s, 12.0))
        system.nats.start(keep_kv=keep_kv)

    return act


def _kv(faults: KvFaults) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFault) -> None:
        system.nats.kv_faults = faults
        await asyncio.sleep(fault.lasts_s)
        if system.nats.kv_faults is faults:
            system.nats.kv_faults = KvFaults()

    return act


async def _kv_vanishes(system: SimulatedSystem, fault: PlannedFault) -> None:
    system.nats.kv.clear()


_ACTIONS: dict[FaultKind, Action] = {
    FaultKind.KILL_AGENT: _kill(_agent),
    FaultKind.LOSE_AGENT: _lose(_agent),
    FaultKind.STOP_AGENT: _stop(_agent),
    FaultKind.KILL_ENGINE: _kill_engine,
    FaultKind.PARTITION_AGENT: _partition(_agent),
    FaultKind.CUT_AGENT: _cut(_agent),
    FaultKind.STALL_AGENT: _stall(_agent),
    FaultKind.ENGINE_HANG: _engine(EngineFaultKind.HANG),
    FaultKind.ENGINE_CUT: _engine(EngineFaultKind.CUT),
    FaultKind.ENGINE_RESET: _engine(EngineFaultKind.RESET),
    FaultKind.ENGINE_ERROR: _engine(EngineFaultKind.STATUS),
    FaultKind.ENGINE_ERROR_EVENT: _engine(EngineFaultKind.ERROR_EVENT),
    FaultKind.ENGINE_NO_DONE: _engine(EngineFaultKind.NO_DONE),
    FaultKind.ENGINE_SLOW: _engine(EngineFaultKind.SLOW),
    FaultKind.KILL_INGRESS: _kill(_ingress),
    FaultKind.STOP_INGRESS: _stop(_ingress),
    FaultKind.PARTITION_INGRESS: _partition(_ingress),
    FaultKind.CUT_INGRESS: _cut(_ingress),
    FaultKind.STALL_INGRESS: _stall(_ingress),
    FaultKind.KILL_REGISTRY: _kill(_registry),
    FaultKind.PARTITION_REGISTRY: _partition(_registry),
    FaultKind.RESTART_NATS: _restart_nats(keep_kv=True),
    FaultKind.RESTART_NATS_EMPTY: _restart_nats(keep_kv=False),
    FaultKind.KV_LOSES: _kv(KvFaults(lose_acknowledged=0.5)),
    FaultKind.KV_REFUSES: _kv(KvFaults(refuse=True)),
    FaultKind.KV_BLIND: _kv(KvFaults(blind=True)),
    FaultKind.KV_VANISHES: _kv_vanishes,
}
