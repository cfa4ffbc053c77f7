"""One run of a group of instances under macro-schedulers, with a steady load, while leaders are killed, cut off and
stopped in the middle of windows, instances die or are drained, and KV forgets. `failover_run(seed)` is the whole of it.

What must hold: every request is answered, whole; no token comes twice and none is missing; an instance obeys one owner
per epoch, and epochs only grow; only one macro-scheduler ever gives leases of one epoch, and none twice. After it there
is one leader that all instances obey, and nothing is left of what was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from serai.engine_emulator.batching.settings import BatchMode
from serai.engine_emulator.modelled import ModelFlags, modelled_engine
from serai.engine_emulator.settings import EmulatorSettings
from serai.macro_scheduler.settings import MacroSchedulerSettings
from serai.simulator.whole.client import ChatClient, ChatRequest, ChatResult, Outcome
from serai.simulator.whole.failover_faults import FailoverFault, PlannedFailover, do, drawn, leader_of
from serai.simulator.whole.failover_watch import OwnerWatch
from serai.simulator.whole.invariants import Invariants
from serai.simulator.whole.simulated_bus import SERVER_STALE_S
from serai.simulator.whole.system import ENGINE_SEED, Scene, SimulatedSystem, simulate
from serai.simulator.whole.virtual_loop import START_S, Stalled

LOOK_EVERY_S = 0.5
START_WITHIN_S = 30.0
RECOVER_WITHIN_S = 60.0
LIMIT_S = 900.0
WORDS = 500
"""Pairs of words in a prompt, on the mean."""

Prepare = Callable[[SimulatedSystem], None]


@cache
def _engine() -> EmulatorSettings:
    """A 34B model on two GPUs, whole prompts before decoding: a window is worth something there."""
    flags = ModelFlags(
        "codellama/CodeLlama-34b-hf", "a100-sxm-80", tp=2, mode=BatchMode.PREFILL_FIRST, kv_tokens=40_000
    )
    return EmulatorSettings(model="m", seed=ENGINE_SEED, start_delay_s=0.5, modelled=modelled_engine(flags))


def scene_of(seed: int) -> Scene:
    """All the same, but for the policy and the target: under a tight one many wait for a place."""
    turn = seed // len(FailoverFault)
    policy, slo_ttft_s = (("serai", 2.0), ("serai", 0.4), ("paper", 2.0), ("author_code", 1.0))[turn % 4]
    macro = MacroSchedulerSettings(admission=policy, slo_ttft_s=slo_ttft_s, slo_tpot_s=0.1, lease_s=1.0, beat_s=0.3)
    return Scene(
        agents=4,
        ingresses=2,
        macro_schedulers=3,
        engine=_engine(),
        macro=macro,
        drain_s=6.0,
        engine_silence_s=30.0,  # An answer in one piece is silent until its end.
    )


@dataclass(frozen=True, slots=True)
class FailoverPlan:
    """How long and how hard."""

    duration_s: float = 14.0
    requests_per_s: float = 10.0
    burst: int = 16
    """Requests that come at once, shortly before each fault: some wait at the scheduler or at a gate when it comes."""
    faults: tuple[FailoverFault, ...] = tuple(FailoverFault)
    scene: Scene | None = None
    """None: by seed."""


@dataclass(slots=True)
class FailoverResult:
    """What came of one seed."""

    seed: int
    faults: list[FailoverFault] = field(default_factory=list)
    requests: int = 0
    lost_requests: int = 0
    """Not answered whole."""
    repeated_tokens: int = 0
    """Words that came twice, or out of their place; missing ones make a request lost."""
    double_owner: int = 0
    """An epoch of an instance that two owners had, or of which two schedulers gave leases; or an epoch gone back."""
    leases: int = 0
    """Given, over all."""
    waits: int = 0
    """Asks that were told to wait for a place."""
    refused: int = 0
    """Leases that instances refused: each cost a way round."""
    takeover_s: float | None = None
    """From the leader's death to the first lease of the next one; None when none died, or nobody asked."""
    problems: list[str] = field(default_factory=list)
    digest: str = ""
    trace: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not (self.lost_requests or self.repeated_tokens or self.double_owner or self.problems)

    @property
    def line(self) -> str:
        """The run in one line; the same each time."""
        verdict = "holds" if self.holds else f"DOES NOT HOLD: {'; '.join(self.problems[:3])}"
        takeover = "" if self.takeover_s is None else f", next leader after {self.takeover_s:.2f} s"
        return (
            f"seed {self.seed}: {', '.join(self.faults)}: {self.requests} requests, {self.lost_requests} lost, "
            f"{self.repeated_tokens} tokens repeated, {self.double_owner} double owners, {self.leases} leases, "
            f"{self.waits} waits, {self.refused} refused{takeover}, {self.digest}: {verdict}"
        )


def failover_run(seed: int, plan: FailoverPlan | None = None, prepare: Prepare = lambda system: None) -> FailoverResult:
    """The run of one seed. `prepare` may spoil the system before it starts (tests do)."""
    run = _Run(seed, plan or FailoverPlan(), prepare)
    try:
        scene = run.plan.scene or scene_of(seed)
        _, system = simulate(seed, run.main, scene, limit_s=run.plan.duration_s + LIMIT_S)
        run.result.digest, run.result.trace = system.trace.digest, run.checks.trace_at_first or system.trace.last()
    except Stalled as error:
        run.result.problems.append(str(error))
    return run.result


class _Run:
    def __init__(self, seed: int, plan: FailoverPlan, prepare: Prepare) -> None:
        self.plan = plan
        self.result = FailoverResult(seed)
        self.checks: Invariants
        self._prepare = prepare
        self._chance = Random(f"{seed}/failover")
        self._system: SimulatedSystem
        self._watch: OwnerWatch
        self._loaded = True
        self._number = 0

    async def main(self, system: SimulatedSystem) -> None:
        self._system = system
        self.checks = Invariants(system)
        self._watch = OwnerWatch(system)
        self._prepare(system)
        system.nats.observers.append(system.trace.deliver)
        system.start()
        looking = asyncio.ensure_future(self._looking())
        try:
            if not await self._until_led(START_WITHIN_S):
                self._problem(f"no leader whom all instances obey within {START_WITHIN_S:g} s")
            await self._story()
        finally:
            looking.cancel()
        await system.stop()
        await asyncio.sleep(SERVER_STALE_S + LOOK_EVERY_S)  # Until NATS has dropped those that were lost silently.
        self.checks.look()
        self.checks.check_stopped()
        self._sum_up()

    async def _story(self) -> None:
        faults = drawn(self._chance, self.plan.faults, self.result.seed, self.plan.duration_s)
        self.result.faults = [fault.kind for fault in faults]
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(self._load())
            for fault in faults:
                tasks.create_task(self._do_later(fault))
                tasks.create_task(self._burst(fault.at_s))
            await asyncio.sleep(self.plan.duration_s)
            self._loaded = False
            await load
        await self._heal()

    async def _do_later(self, fault: PlannedFailover) -> None:
        await asyncio.sleep(fault.at_s)
        self._note(str(fault))
        if fault.kind.hits_leader and leader_of(self._system) is not None:
            self._watch.leader_dies()
        await do(self._system, fault)

    async def _heal(self) -> None:
        """In peace again there is one leader, all obey it, and it decides the place of each request."""
        system = self._system
        for node in system.nodes:
            node.start()
            if node.bus is not None:
                node.bus.heal()
        if not await system.until_serving(RECOVER_WITHIN_S) or not await self._until_led(RECOVER_WITHIN_S):
            self._problem(f"no leader whom all instances obey {RECOVER_WITHIN_S:g} s after the last fault")
        placed_before = self._watch.placed
        client = self._system.client()
        for ingress in system.ingresses:
            for _ in system.agents:
                self._take(await client.ask(self._drawn(5), ingress.host))
        wanted = len(system.ingresses) * len(system.agents)
        await asyncio.sleep(5.0)
        if (placed := self._watch.placed - placed_before) < wanted:
            self._problem(f"after all, {placed} of {wanted} requests got a lease, or had a place granted in advance")
        self.checks.look()
        self.checks.check_idle()

    async def _until_led(self, timeout_s: float) -> bool:
        give_up_at_s = self._system.loop.time() + timeout_s
        while self._system.loop.time() < give_up_at_s:
            if self._system.sessions(self._system.ingresses[0]) == len(self._system.agents) and self._watch.all_obey():
                return True
            await asyncio.sleep(0.1)
        return False

    # -- load ----------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        client = self._system.client()
        chance = Random(f"{self.result.seed}/load")
        async with asyncio.TaskGroup() as tasks:
            while self._loaded:
                await asyncio.sleep(chance.expovariate(self.plan.requests_per_s))
                ingress = self._system.ingresses[chance.randrange(len(self._system.ingresses))]
                tasks.create_task(
                    self._ask(client, self._drawn(1 + int(chance.expovariate(1 / 30)), chance), ingress.host)
                )

    async def _burst(self, fault_at_s: float) -> None:
        """So shortly before the fault that none of it is over then."""
        client, chance = self._system.client(), self._chance
        await asyncio.sleep(max(0.0, fault_at_s - chance.uniform(0.0, 0.3)))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.plan.burst):
                ingress = chance.choice(self._system.ingresses)
                tasks.create_task(self._ask(client, self._drawn(1 + int(chance.expovariate(1 / 30))), ingress.host))

    async def _ask(self, client: ChatClient, request: ChatRequest, ingress: str) -> None:
        self._take(await client.ask(request, ingress))

    def _drawn(self, tokens: int, chance: Random | None = None) -> ChatRequest:
        self._number += 1
        chance = chance or self._chance
        words = " and more" * int(chance.expovariate(1 / WORDS))
        text = f"request {self._number} of seed {self.result.seed}{words}"
        return ChatRequest(self._number, self._system.scene.model, text, tokens, stream=chance.random() < 0.7)

    def _take(self, result: ChatResult) -> None:
        self.result.requests += 1
        expected = result.request.expected_text(ENGINE_SEED)
        self.result.repeated_tokens += misplaced_words(result.text, expected)
        if result.outcome is not Outcome.WHOLE:
            self.result.lost_requests += 1
            at_s, kind = result.started_s - START_S, "stream" if result.request.stream else "one piece"
            text = f"request {result.request.number} ({kind}) of {at_s:.2f} s: {result.outcome} {result.code}"
            self._problem(f"{text} after {len(result.text)} of {len(expected)} characters, at {result.session}")

    # -- watching ------------------------------------------------------------------------------------------------

    async def _looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.checks.look()

    def _sum_up(self) -> None:
        watch, result = self._watch, self.result
        result.double_owner = len(watch.doubles)
        result.leases, result.waits, result.refused = watch.leases, watch.waits, watch.refused
        result.takeover_s = watch.takeover_s
        result.problems += [*watch.doubles, *self.checks.violations]

    def _problem(self, text: str) -> None:
        self.result.problems.append(text)
        self._note(text)
        if not self.checks.trace_at_first:
            self.checks.trace_at_first = self._system.trace.last()

    def _note(self, text: str) -> None:
        self._system.trace.note("FAILOVER", text)


def misplaced_words(text: str, expected: str) -> int:
    """Words of `text` that are not the beginning of `expected`: said twice, skipped to, or never said."""
    if expected.startswith(text):
        return 0
    said, wanted = text.split(" "), expected.split(" ")
    place = 0
    while place < min(len(said), len(wanted)) and said[place] == wanted[place]:
        place += 1
    return len(said) - place
