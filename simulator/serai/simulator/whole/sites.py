"""Several sites in one simulation: each with its own NATS server, registry, ingresses and agents, joined by links."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from serai.contracts.session_record import Lifecycle
from serai.runtime.bus import Message
from serai.runtime.registry_replica import RegistryReplica
from serai.simulator.whole.simulated_bus import NatsLink, SimulatedNats
from serai.simulator.whole.system import Node, Scene, SimulatedSystem

View = frozenset[tuple[str, Lifecycle, int]]

_CONTROL = ("session.", "status.", "probe.", "registry.")


class SimulatedSite(SimulatedSystem):
    """One of several sites: its own NATS, on the loop, network and trace of all."""

    def __init__(self, world: SimulatedSystem, scene: Scene) -> None:
        # Not super(): what is shared must not be made again.
        self.loop, self.seed, self.scene = world.loop, world.seed, scene
        self.network, self.trace = world.network, world.trace
        self.nats = SimulatedNats(world.loop, world.seed, name=f"nats-{scene.site}")
        self.registry = Node(self, f"{scene.site}-registry", self._registry)
        macro_schedulers = range(scene.macro_schedulers)
        self.macro_schedulers = [Node(self, f"{scene.site}-macro-{n}", self._macro) for n in macro_schedulers]
        self.ingresses = [Node(self, f"{scene.site}-ingress-{n}", self._ingress) for n in range(scene.ingresses)]
        self.agents = [Node(self, f"{scene.site}-agent-{n}", self._agent) for n in range(scene.agents)]


class LinkedSites:
    """Two sites whose servers are joined as leaf nodes are."""

    def __init__(self, world: SimulatedSystem, scene: Scene, names: tuple[str, str] = ("east", "west")) -> None:
        self.loop = world.loop
        self.sites = [SimulatedSite(world, replace(scene, site=name)) for name in names]
        self.link: NatsLink = self.sites[0].nats.link(self.sites[1].nats)
        for lane in self.link._lanes.values():
            # Only what copies of the registry are made of: a live link of TCP loses nothing, and what becomes of
            # requests when it does is the matter of `serai simulate faults`.
            lane.stressed = _is_control

    @property
    def nodes(self) -> list[Node]:
        return [node for site in self.sites for node in site.nodes]

    @property
    def observers(self) -> list[Node]:
        """Those that hold a copy of the registry."""
        return [node for site in self.sites for node in (site.registry, *site.ingresses)]

    def start(self) -> None:
        for site in self.sites:
            site.start()

    async def stop(self) -> None:
        await asyncio.gather(*[site.stop() for site in self.sites])

    def views(self) -> list[View]:
        """What each observer knows of the sessions that have not left."""
        return [view_of(node.replica) for node in self.observers if node.replica is not None]

    def serving(self) -> list[str]:
        """Sessions of agents that run and serve."""
        found = []
        for node in (agent for site in self.sites for agent in site.agents):
            record = getattr(node.service, "record", None)
            if node.running and record is not None and record.lifecycle is Lifecycle.SERVING:
                found.append(record.session)
        return sorted(found)

    def agree(self) -> bool:
        """Whether all views are equal, and every ingress routes to every session that serves, and to no other."""
        if len(set(self.views())) != 1:
            return False
        now, serving = self.loop.time(), self.serving()
        for site in self.sites:
            for node in site.ingresses:
                replica = node.replica
                if replica is None or [r.session for r in replica.routable(site.scene.model, now)] != serving:
                    return False
        return True

    async def until_agreed(self, timeout_s: float) -> float | None:
        """Seconds until they agree; None when they do not within `timeout_s`."""
        began_s = self.loop.time()
        while self.loop.time() - began_s < timeout_s:
            if self.agree():
                return self.loop.time() - began_s
            await asyncio.sleep(0.02)
        return None


def view_of(replica: RegistryReplica) -> View:
    """Sessions that have not left, each with its lifecycle and version."""
    return frozenset(
        (record.session, record.lifecycle, record.version)
        for record in replica.records()
        if record.lifecycle is not Lifecycle.LEFT
    )


def _is_control(message: Message) -> bool:
    return message.subject.startswith(_CONTROL)
