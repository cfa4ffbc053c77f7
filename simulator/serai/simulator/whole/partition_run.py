"""One run of two sites whose link is cut and healed, under load and churn, with a link that loses, doubles and
reorders what copies of the registry are made of. `partition_run(seed)` is the whole of it.

What must hold: no request fails for a model that both sites serve; what has left stays so, in every copy, for ever;
nobody is taken to have left who lives; after healing all views are equal within seconds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.subjects import SESSION
from serai.simulator.whole.client import ChatClient, ChatRequest, ChatResult, Outcome
from serai.simulator.whole.simulated_bus import Passage
from serai.simulator.whole.sites import LinkedSites, SimulatedSite
from serai.simulator.whole.system import Node, Scene, SimulatedSystem, simulate
from serai.simulator.whole.virtual_loop import START_S, Stalled

_SESSION_PREFIX = SESSION.of("")
START_WITHIN_S = 40.0
HEAL_WITHIN_S = 90.0
LIMIT_S = 600.0
SERVER_PINGS_S = 30.0
"""Two pings of 15 s that are not answered, as `cli.embedded_nats` configures its servers."""
LOOK_EVERY_S = 0.25
CALM_AFTER_S = 12.0
"""How long a healed system is watched: an agent repeats its record within so long."""


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """How long and how hard."""

    requests_per_s: float = 3.0
    """At each site."""
    cut_s: tuple[float, float] = (3.0, 40.0)
    lost: float = 0.1
    doubled: float = 0.1
    reordered: float = 0.1
    churn_every_s: float = 4.0
    """Mean time between agents that leave and come back, at each site."""
    silent: bool = False
    """Packets vanish, and nobody is told: the servers find out by their pings. Else the link is known to be cut."""
    registry_dies: bool = False
    """One of the registries is killed in the cut, and comes back without its KV."""
    scene: Scene = field(default_factory=lambda: Scene(agents=3, ingresses=1, silence_grace_s=60.0))


@dataclass(slots=True)
class PartitionResult:
    """What came of one seed."""

    seed: int
    heal_s: float | None = None
    """From the healing of the link until all views were equal; None = not within a minute and a half."""
    cut_s: float = 0.0
    requests: int = 0
    failed: int = 0
    streams_cut: int = 0
    """Streams from the other site that were running when the link was cut, and ended with an error event: an engine's
    tokens cannot pass a link that is not there."""
    resurrections: int = 0
    closed_alive: int = 0
    left: int = 0
    problems: list[str] = field(default_factory=list)
    digest: str = ""
    trace: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not (self.failed or self.resurrections or self.closed_alive or self.problems or self.heal_s is None)

    @property
    def line(self) -> str:
        """The run in one line; the same each time."""
        heal = "never" if self.heal_s is None else f"{self.heal_s:.2f} s"
        verdict = "holds" if self.holds else f"DOES NOT HOLD: {'; '.join(self.problems[:3])}"
        return (
            f"seed {self.seed}: cut {self.cut_s:.1f} s, equal views {heal} after healing, {self.requests} requests, "
            f"{self.failed} failed, {self.streams_cut} streams cut with the link, {self.left} left, "
            f"{self.resurrections} resurrections, {self.closed_alive} closed alive, {self.digest}: {verdict}"
        )


def partition_run(seed: int, plan: PartitionPlan | None = None) -> PartitionResult:
    """The run of one seed."""
    run = _Run(seed, plan or PartitionPlan())
    try:
        _, system = simulate(seed, run.main, run.plan.scene, limit_s=LIMIT_S)
        run.result.digest, run.result.trace = system.trace.digest, system.trace.last()
    except Stalled as error:
        run.result.problems.append(str(error))
    return run.result


class _Run:
    def __init__(self, seed: int, plan: PartitionPlan) -> None:
        self.plan = plan
        self.result = PartitionResult(seed)
        self._chance = Random(f"{seed}/partition")
        self._sites: LinkedSites
        self._cut_at_s = float("inf")
        self._churning = True
        self._loaded = True
        self._left: dict[str, None] = {}
        """Sessions that any copy has known to have left."""
        self._risen: dict[str, None] = {}
        self._lifecycles: dict[str, dict[str, Lifecycle]] = {}
        """Per life of an observer: what it knew at the last look."""
        self._number = 0
        self._observer_of: dict[str, Node] = {}

    async def main(self, world: SimulatedSystem) -> None:
        sites = self._sites = LinkedSites(world, self.plan.scene)
        for site in sites.sites:
            site.nats.observers += [world.trace.deliver, self._observe]
        self._observer_of = {node.host: node for node in sites.observers}
        sites.start()
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._looking())
            if not await self._all_serve():
                self.result.problems.append(f"not all served everywhere within {START_WITHIN_S:g} s")
            await self._story(tasks)
            looking.cancel()
        self._look()
        self.result.left, self.result.resurrections = len(self._left), len(self._risen)
        await sites.stop()

    async def _all_serve(self) -> bool:
        sites = self._sites
        count = sum(len(site.agents) for site in sites.sites)
        give_up_at_s = sites.loop.time() + START_WITHIN_S
        while len(sites.serving()) < count and sites.loop.time() < give_up_at_s:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)
        return len(sites.serving()) == count and await sites.until_agreed(START_WITHIN_S) is not None

    async def _story(self, tasks: asyncio.TaskGroup) -> None:
        sites, plan, chance = self._sites, self.plan, self._chance
        link, stress = sites.link, sites.link.stress
        stress.lost, stress.doubled, stress.reordered = plan.lost, plan.doubled, plan.reordered
        loads = [tasks.create_task(self._load(site)) for site in sites.sites]
        churns = [tasks.create_task(self._churn(site)) for site in sites.sites]
        await asyncio.sleep(chance.uniform(2.0, 8.0))
        self.result.cut_s = chance.uniform(*plan.cut_s)
        self._note("the link is cut")
        self._cut_at_s = sites.loop.time()
        if plan.silent:
            link.freeze()
            pings_unanswered_s = SERVER_PINGS_S * chance.uniform(1.0, 1.5)
            noticing = sites.loop.call_later(pings_unanswered_s, link.cut)
        else:
            link.cut()
        await asyncio.sleep(self.result.cut_s / 2)
        if plan.registry_dies:
            await self._kill_registry(sites.sites[chance.randrange(2)])
        await asyncio.sleep(self.result.cut_s / 2)
        self._churning = False
        await asyncio.gather(*churns)
        self._note("the link is healed")
        if plan.silent:
            noticing.cancel()
        link.heal()
        self.result.heal_s = await sites.until_agreed(HEAL_WITHIN_S)
        self._note(f"equal views after {self.result.heal_s}")
        if self.result.heal_s is None:
            self.result.problems.append(f"views not equal {HEAL_WITHIN_S:g} s after healing: {self._differences()}")
        await asyncio.sleep(CALM_AFTER_S)
        self._loaded = False
        await asyncio.gather(*loads)
        if not sites.agree() and await sites.until_agreed(5.0) is None:
            self.result.problems.append(f"views differ again after healing: {self._differences()}")

    async def _kill_registry(self, site: SimulatedSite) -> None:
        await site.registry.kill()
        site.nats.kv.clear()
        await asyncio.sleep(1.0)
        site.registry.start()

    # -- churn ---------------------------------------------------------------------------------------------------

    async def _churn(self, site: SimulatedSite) -> None:
        """Agents of one site leave in order, one at a time, and others come in their place."""
        chance = Random(f"{self.result.seed}/churn/{site.scene.site}")
        while True:
            await asyncio.sleep(chance.expovariate(1 / self.plan.churn_every_s))
            if not self._churning:
                return
            agent = site.agents[chance.randrange(len(site.agents))]
            await agent.terminate()
            await asyncio.sleep(chance.uniform(0.1, 2.0))
            agent.start()
            await self._until_serving(agent)

    async def _until_serving(self, agent: Node) -> None:
        while getattr(getattr(agent.service, "record", None), "lifecycle", None) is not Lifecycle.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    # -- load ----------------------------------------------------------------------------------------------------

    async def _load(self, site: SimulatedSite) -> None:
        chance = Random(f"{self.result.seed}/load/{site.scene.site}")
        client = site.client()
        async with asyncio.TaskGroup() as tasks:
            while self._loaded:
                await asyncio.sleep(chance.expovariate(self.plan.requests_per_s))
                self._number += 1
                tokens = 1 + int(chance.expovariate(1 / 20))
                text = f"request {self._number} of seed {self.result.seed}"
                request = ChatRequest(self._number, site.scene.model, text, tokens, stream=chance.random() < 0.5)
                tasks.create_task(self._ask(client, request, site))

    async def _ask(self, client: ChatClient, request: ChatRequest, site: SimulatedSite) -> None:
        result = await client.ask(request, site.ingresses[0].host)
        self.result.requests += 1
        if result.outcome is Outcome.WHOLE:
            return
        if result.outcome is Outcome.MARKED and self._cut_with_link(result, site):
            self.result.streams_cut += 1
            return
        self.result.failed += 1
        at_s = result.started_s - START_S
        text = f"request {request.number} at {site.scene.site}, {at_s:.2f} s: {result.outcome} {result.code}"
        self.result.problems.append(text)
        self._note(text)

    def _cut_with_link(self, result: ChatResult, site: SimulatedSite) -> bool:
        ended_s = result.ended_s if result.ended_s is not None else 0.0
        own = result.session.startswith(f"{site.scene.site}-")
        return not own and result.started_s <= self._cut_at_s <= ended_s

    # -- watching ------------------------------------------------------------------------------------------------

    async def _looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._look()

    def _look(self) -> None:
        alive = frozenset(self._sites.serving())
        for node in self._sites.observers:
            if node.replica is None:
                continue
            for record in node.replica.records():
                self._check_lifecycle(node, record)
                session = record.session
                if record.lifecycle is not Lifecycle.LEFT:
                    continue
                if session not in self._left:
                    self._left[session] = None
                    if session in alive:
                        self.result.closed_alive += 1
                        self.result.problems.append(f"{session} was closed while it served")
        for node in self._sites.nodes:
            self.result.problems += node.failures
            node.failures.clear()
        for site in self._sites.sites:
            self.result.problems += site.nats.handler_failures
            site.nats.handler_failures.clear()

    def _observe(self, passage: Passage) -> None:
        """At every delivery of a record: what its receiver has made of it."""
        if passage.delivered and passage.subject.startswith(_SESSION_PREFIX):
            node = self._observer_of.get(passage.connection.rpartition(".")[0])
            record = node.replica.get(passage.subject[len(_SESSION_PREFIX) :]) if node and node.replica else None
            if node is not None and record is not None:
                self._check_lifecycle(node, record)

    def _check_lifecycle(self, node: Node, record: SessionRecord) -> None:
        """A copy may not have heard yet that a session left; but none may unlearn it."""
        known = self._lifecycles.setdefault(node.name, {})
        if record.lifecycle < known.get(record.session, Lifecycle.JOIN):
            self._risen[record.session] = None
            self.result.problems.append(f"{node.name}: {record.session} came back as {record.lifecycle.name}")
        known[record.session] = record.lifecycle

    def _differences(self) -> str:
        views = [set(view) for view in self._sites.views()]
        common = set.intersection(*views)
        extra = {
            node.host: sorted(view - common)[:3]
            for node, view in zip(self._sites.observers, views, strict=False)
            if view - common
        }
        return f"{extra}"[:400] if extra else "the same records, but not the same sessions routed to"

    def _note(self, text: str) -> None:
        self._sites.sites[0].trace.note("PARTITION", text)
