"""One run under faults: a steady load, a schedule of faults drawn from the seed, then peace, and everything whole.

`fault_run(seed)` is the whole of it: the same seed gives the same run, to the last delivery.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from serai.simulator.whole.client import ChatClient, ChatRequest, ChatResult, Outcome
from serai.simulator.whole.faults import FaultInjector, FaultKind, plan
from serai.simulator.whole.invariants import Invariants
from serai.simulator.whole.simulated_bus import SERVER_STALE_S
from serai.simulator.whole.system import Scene, SimulatedSystem, simulate
from serai.simulator.whole.virtual_loop import START_S, Stalled

LOOK_EVERY_S = 0.5
START_WITHIN_S = 30.0
RECOVER_WITHIN_S = 150.0
"""The slowest way back: an agent whose engine hangs at the canary request gives that up after 120 s."""
LIMIT_S = 1200.0
"""Beyond the time under load; a run that takes more does not end."""
LONG_TOKENS = 1300
LARGE_PROMPT_BYTES = 1_300_000
"""More than one BODY frame."""

Prepare = Callable[[SimulatedSystem], None]


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How long and how hard."""

    duration_s: float = 60.0
    requests_per_s: float = 8.0
    fault_every_s: float = 2.5
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    scene: Scene = field(default_factory=Scene)


@dataclass(frozen=True, slots=True)
class FaultRunResult:
    """What came of one seed."""

    seed: int
    requests: int
    outcomes: dict[Outcome, int]
    failed_unary: int
    """Answers in one piece that did not come, in spite of the second try; clients that left not counted."""
    faults: int
    violations: list[str]
    virtual_s: float
    turns: int
    digest: str
    trace: list[str]
    """The last events, up to the first violation."""

    @property
    def line(self) -> str:
        """The run in one line; the same each time."""
        counts = ", ".join(f"{self.outcomes.get(outcome, 0)} {outcome}" for outcome in Outcome)
        verdict = f"{len(self.violations)} VIOLATIONS: {self.violations[0]}" if self.violations else "holds"
        return (
            f"seed {self.seed}: {self.requests} requests ({counts}), {self.faults} faults, "
            f"{self.virtual_s:.1f} s, {self.digest}: {verdict}"
        )


def fault_run(seed: int, faults: FaultPlan | None = None, prepare: Prepare = lambda system: None) -> FaultRunResult:
    """The run of one seed. `prepare` may spoil the system before it starts (tests of the invariants do)."""
    run = _Run(seed, faults or FaultPlan())

    async def main(system: SimulatedSystem) -> None:
        prepare(system)
        await run.main(system)

    try:
        simulate(seed, main, run.faults.scene, limit_s=run.faults.duration_s + LIMIT_S)
    except Stalled as error:
        run.checks.violate(str(error))
    return run.result()


class _Run:
    def __init__(self, seed: int, faults: FaultPlan) -> None:
        self.seed = seed
        self.faults = faults
        self.results: list[ChatResult] = []
        self.system: SimulatedSystem
        self.checks: Invariants
        self._injector: FaultInjector

    async def main(self, system: SimulatedSystem) -> None:
        self.system = system
        self.checks = Invariants(system)
        self._injector = FaultInjector(system)
        system.nats.observers.append(system.trace.deliver)
        system.start()
        looking = asyncio.ensure_future(self._looking())
        try:
            if not await system.until_serving(START_WITHIN_S):
                self.checks.violate(f"not all agents served within {START_WITHIN_S:g} s")
            chance, faults = Random(f"{self.seed}/faults"), self.faults
            schedule = plan(chance, duration_s=faults.duration_s, every_s=faults.fault_every_s, kinds=faults.kinds)
            await asyncio.gather(self._load(), self._injector.run(schedule))
            await self._recover()
        finally:
            looking.cancel()
        await system.stop()
        await asyncio.sleep(SERVER_STALE_S + LOOK_EVERY_S)  # Until NATS has dropped those that were lost silently.
        self.checks.look()
        self.checks.check_stopped()

    async def _recover(self) -> None:
        """In peace again: everything comes back by itself, serves, and holds nothing of what was."""
        system, checks = self.system, self.checks
        await self._injector.heal()
        if not await system.until_serving(RECOVER_WITHIN_S):
            seen = [system.sessions(node) for node in system.ingresses]
            checks.violate(f"{RECOVER_WITHIN_S:g} s after the last fault the ingresses route to {seen} sessions")
        for agent in system.agents:
            if agent.engines is not None and agent.engines.engine is not None:
                agent.engines.engine.state.faults.clear()
        await self._ask_all()
        await asyncio.sleep(2.0)
        checks.look()
        checks.check_idle()

    async def _ask_all(self) -> None:
        """As many requests to each ingress as there are agents: each agent should get one."""
        client, model = self.system.client(), self.system.scene.model
        for at, ingress in enumerate(self.system.ingresses):
            for _ in self.system.agents:
                number = len(self.results)
                request = ChatRequest(number, model, f"after all, {number}", 5, stream=at % 2 == 0)
                result = await client.ask(request, ingress.host)
                self._take(result)
                if result.outcome is not Outcome.WHOLE:
                    why = f"{result.outcome} ({result.code})"
                    self.checks.violate(f"after the last fault {ingress.host} answers {why}")

    # -- load ----------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Requests at random times, whatever becomes of those before."""
        chance = Random(f"{self.seed}/load")
        client = self.system.client()
        loop = self.system.loop
        end_at_s = loop.time() + self.faults.duration_s
        number = 0
        async with asyncio.TaskGroup() as tasks:
            while loop.time() < end_at_s:
                await asyncio.sleep(chance.expovariate(self.faults.requests_per_s))
                ingress = self.system.ingresses[chance.randrange(len(self.system.ingresses))].host
                tasks.create_task(self._ask(client, self._draw(chance, number), ingress))
                number += 1

    def _draw(self, chance: Random, number: int) -> ChatRequest:
        prompt = f"request {number} of seed {self.seed}"
        if chance.random() < 0.02:
            prompt += " and more" * (LARGE_PROMPT_BYTES // 9)
        leaves = chance.uniform(0.0, 1.5) if chance.random() < 0.1 else None
        pauses = chance.uniform(0.0, 1.0) if chance.random() < 0.05 else None
        tokens = 1 + int(chance.expovariate(1 / 40))
        stream = chance.random() < 0.6
        if stream and chance.random() < 0.05:  # Long enough for a client that pauses to hold up its engine.
            tokens, pauses = LONG_TOKENS, chance.uniform(0.0, 2.0)
        return ChatRequest(
            number,
            self.system.scene.model,
            prompt,
            tokens=tokens,
            stream=stream,
            leaves_after_s=leaves,
            pauses_after_s=pauses,
            pauses_for_s=chance.uniform(0.5, 16.0),
        )

    async def _ask(self, client: ChatClient, request: ChatRequest, ingress: str) -> None:
        self._take(await client.ask(request, ingress))

    def _take(self, result: ChatResult) -> None:
        self.results.append(result)
        self.system.trace.note(
            result.ingress, f"request {result.request.number} {result.outcome} {result.code} {result.session}"
        )
        self.checks.check_result(result)

    async def _looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.checks.look()

    def result(self) -> FaultRunResult:
        system = self.system
        outcomes = Counter(result.outcome for result in self.results if result.outcome is not None)
        lost = (Outcome.REFUSED, Outcome.CUT, Outcome.LATE)
        return FaultRunResult(
            seed=self.seed,
            requests=len(self.results),
            outcomes=dict(outcomes),
            failed_unary=sum(not one.request.stream and one.outcome in lost for one in self.results),
            faults=self._injector.done,
            violations=self.checks.violations,
            virtual_s=system.loop.time() - START_S,
            turns=system.loop.turns,
            digest=system.trace.digest,
            trace=self.checks.trace_at_first or system.trace.last(),
        )
