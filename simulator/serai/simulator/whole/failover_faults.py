"""What befalls a group of instances under macro-schedulers, drawn from a seed, and how it is done and undone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from serai.contracts.codec import encode
from serai.contracts.drain import DrainRequest
from serai.contracts.session_record import Lifecycle
from serai.contracts.subjects import DRAIN, GROUPS_BUCKET, OWNERS_BUCKET
from serai.macro_scheduler.service import MacroScheduler
from serai.simulator.whole.engines import KILLED
from serai.simulator.whole.simulated_bus import SimulatedBus
from serai.simulator.whole.system import Node, SimulatedSystem
from serai.worker_agent.service import NodeAgent


class FailoverFault(StrEnum):
    """Closed set."""

    LEADER_KILLED = "leader-killed"
    LEADER_LOST = "leader-lost"
    """Its host goes dark: not even NATS is told."""
    LEADER_STOPPED = "leader-stopped"
    """SIGTERM: it gives its lease back."""
    LEADER_PARTITIONED = "leader-partitioned"
    """From NATS, and so from instances, ingresses and KV; when that ends, all it has sent and missed arrives."""
    LEADER_STALLED = "leader-stalled"
    """It reads nothing for a while, and does not know."""
    LEADER_CUT = "leader-cut"
    LEADERS_KILLED = "leaders-killed"
    """All macro-schedulers, one after the other: for a while there is none."""
    LEADER_AND_INSTANCE_KILLED = "leader-and-instance-killed"
    LEADER_AND_INSTANCE_PARTITIONED = "leader-and-instance-partitioned"
    INSTANCE_KILLED = "instance-killed"
    INSTANCE_LOST = "instance-lost"
    INSTANCE_PARTITIONED = "instance-partitioned"
    ENGINE_KILLED = "engine-killed"
    SCALED_IN = "scaled-in"
    """An instance is asked to end within seconds."""
    SCALED_IN_AT_ONCE = "scaled-in-at-once"
    SCALED_IN_AND_LEADER_KILLED = "scaled-in-and-leader-killed"
    KV_FORGETS = "kv-forgets"
    """Who leads and who owns what is gone from KV."""
    KV_FORGETS_AND_LEADER_PARTITIONED = "kv-forgets-and-leader-partitioned"

    @property
    def hits_leader(self) -> bool:
        """Whether another must lead after it."""
        return self in (FailoverFault.LEADER_KILLED, FailoverFault.LEADER_LOST, FailoverFault.LEADER_STOPPED)


@dataclass(frozen=True, slots=True)
class PlannedFailover:
    """One fault: when, to whom, for how long."""

    at_s: float
    kind: FailoverFault
    target: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.kind} #{self.target} for {self.lasts_s:.2f} s"


def drawn(chance: Random, kinds: tuple[FailoverFault, ...], seed: int, duration_s: float) -> list[PlannedFailover]:
    """One to three: the first goes round by seed, so that each kind gets its share; the others are drawn. None where
    there are no kinds."""
    if not kinds:
        return []
    first = kinds[seed % len(kinds)]
    count = chance.choice((0, 0, 1, 2))
    found = [
        _planned(chance, first, duration_s),
        *[_planned(chance, chance.choice(kinds), duration_s) for _ in range(count)],
    ]
    return sorted(found, key=lambda fault: fault.at_s)


def _planned(chance: Random, kind: FailoverFault, duration_s: float) -> PlannedFailover:
    lasts_s = chance.uniform(8.0, 25.0) if chance.random() < 0.2 else chance.uniform(0.05, 5.0)
    return PlannedFailover(chance.uniform(1.0, duration_s - 2.0), kind, chance.randrange(1000), lasts_s)


def leader_of(system: SimulatedSystem) -> Node | None:
    """Who leads now, as far as that one knows; the latest, if an older one does not know yet."""
    found, epoch = None, 0
    for node in system.macro_schedulers:
        if node.running and isinstance(node.service, MacroScheduler):
            for candidate in node.service.candidates.values():
                if candidate.term is not None and candidate.term.epoch > epoch:
                    found, epoch = node, candidate.term.epoch
    return found


async def do(system: SimulatedSystem, fault: PlannedFailover) -> None:
    """To its end, with what follows."""
    await _ACTIONS[fault.kind](system, fault)


Action = Callable[[SimulatedSystem, PlannedFailover], Awaitable[None]]
Choice = Callable[[SimulatedSystem, PlannedFailover], Node | None]


def _leader(system: SimulatedSystem, fault: PlannedFailover) -> Node | None:
    return leader_of(system)


def _instance(system: SimulatedSystem, fault: PlannedFailover) -> Node | None:
    """One of those that serve, as long as another does: with none left nobody could answer."""
    serving = [node for node in system.agents if _serves(node)]
    return serving[fault.target % len(serving)] if len(serving) > 2 else None


def _serves(node: Node) -> bool:
    if not node.running or not isinstance(node.service, NodeAgent):
        return False
    record = node.service.record
    return record.lifecycle is Lifecycle.SERVING and record.metadata.draining is None


def _kill(choose: Choice, *, dark: bool = False) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFailover) -> None:
        node = choose(system, fault)
        if node is None:
            return
        if dark and node.bus is not None:
            node.bus.partition()
        await node.kill()
        await asyncio.sleep(min(fault.lasts_s, 8.0))
        node.start()

    return act


def _stop(choose: Choice) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFailover) -> None:
        if (node := choose(system, fault)) is not None:
            await node.terminate()
            await asyncio.sleep(min(fault.lasts_s, 8.0))
            node.start()

    return act


def _away(choose: Choice, begin: Callable[[SimulatedBus], None], end: Callable[[SimulatedBus], None]) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFailover) -> None:
        node = choose(system, fault)
        bus = node.bus if node is not None else None
        if bus is not None:
            begin(bus)
            await asyncio.sleep(fault.lasts_s)
            end(bus)

    return act


async def _cut(system: SimulatedSystem, fault: PlannedFailover) -> None:
    node = leader_of(system)
    if node is not None and node.bus is not None:
        node.bus.cut()


async def _kill_all_leaders(system: SimulatedSystem, fault: PlannedFailover) -> None:
    for node in system.macro_schedulers:
        await node.kill()
    await asyncio.sleep(min(fault.lasts_s, 5.0))
    for node in system.macro_schedulers:
        node.start()


async def _kill_engine(system: SimulatedSystem, fault: PlannedFailover) -> None:
    node = _instance(system, fault)
    if node is not None and node.engines is not None and node.engines.engine is not None:
        node.engines.engine.end(KILLED)


def _drain(within_s: float) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFailover) -> None:
        node = _instance(system, fault)
        if node is None or not isinstance(node.service, NodeAgent):
            return
        subject = DRAIN.of(node.service.record.session)
        bus = await SimulatedBus.connect(system.nats, "tools", name=f"drain-{fault.target}")
        bus.publish(subject, encode(DrainRequest("not needed any more", within_s * (1 + fault.target % 5))))
        await bus.aclose()

    return act


async def _kv_forgets(system: SimulatedSystem, fault: PlannedFailover) -> None:
    for bucket in (GROUPS_BUCKET, OWNERS_BUCKET):
        system.nats.kv.pop(bucket, None)


def _both(*actions: Action) -> Action:
    async def act(system: SimulatedSystem, fault: PlannedFailover) -> None:
        await asyncio.gather(*[action(system, fault) for action in actions])

    return act


_partition_leader = _away(_leader, SimulatedBus.partition, SimulatedBus.heal)
_partition_instance = _away(_instance, SimulatedBus.partition, SimulatedBus.heal)

_ACTIONS: dict[FailoverFault, Action] = {
    FailoverFault.LEADER_KILLED: _kill(_leader),
    FailoverFault.LEADER_LOST: _kill(_leader, dark=True),
    FailoverFault.LEADER_STOPPED: _stop(_leader),
    FailoverFault.LEADER_PARTITIONED: _partition_leader,
    FailoverFault.LEADER_STALLED: _away(_leader, SimulatedBus.stall, SimulatedBus.resume),
    FailoverFault.LEADER_CUT: _cut,
    FailoverFault.LEADERS_KILLED: _kill_all_leaders,
    FailoverFault.LEADER_AND_INSTANCE_KILLED: _both(_kill(_leader), _kill(_instance)),
    FailoverFault.LEADER_AND_INSTANCE_PARTITIONED: _both(_partition_leader, _partition_instance),
    FailoverFault.INSTANCE_KILLED: _kill(_instance),
    FailoverFault.INSTANCE_LOST: _kill(_instance, dark=True),
    FailoverFault.INSTANCE_PARTITIONED: _partition_instance,
    FailoverFault.ENGINE_KILLED: _kill_engine,
    FailoverFault.SCALED_IN: _drain(2.0),
    FailoverFault.SCALED_IN_AT_ONCE: _drain(0.0),
    FailoverFault.SCALED_IN_AND_LEADER_KILLED: _both(_drain(1.0), _kill(_leader)),
    FailoverFault.KV_FORGETS: _kv_forgets,
    FailoverFault.KV_FORGETS_AND_LEADER_PARTITIONED: _both(_kv_forgets, _partition_leader),
}
