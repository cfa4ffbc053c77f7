"""The placer's shell: hears pools and sessions, asks the ledger, lets plans be made, and carries them out step by step.

One loop looks at the whole picture; what woke it says nothing, so a restart and normal running are one path. Before
each word to a pool the lease is written, with the generation in it: whoever has lost it finds out then. Nothing is ever
told because something is missing: pools that are silent, a ledger that does not answer and a bucket that vanished leave
what runs as it is.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from serai.contracts.codec import MalformedMessage, decode
from serai.contracts.placement import (
    ApplyRequest,
    BadReport,
    KeptPlan,
    ModelWord,
    PlacementWord,
    PlanRecord,
    PlanState,
    PoolReport,
    checked_report,
)
from serai.contracts.subjects import POOL
from serai.placer import metrics
from serai.placer.answers import Answers
from serai.placer.clearing import Clearing, PoolKeys
from serai.placer.deciding import Decision, Situation, decide
from serai.placer.explain import model_words, pool_words
from serai.placer.launchers.base import Launcher
from serai.placer.launching import Launching
from serai.placer.leading import Memory, lease_of
from serai.placer.load_times import LoadTimes
from serai.placer.placement import SolveLimits
from serai.placer.placement_file import Mode, PlacementFile
from serai.placer.pools import Pools, PoolView, judged
from serai.placer.sessions_seen import in_flight, others
from serai.placer.settings import PlacerSettings
from serai.placer.solve import read_solver
from serai.placer.staleness import content, gone
from serai.placer.told import Overtaken, Told
from serai.placer.under_way import UnderWay
from serai.placer.wants import Wants
from serai.placer.watched_file import WatchedFile
from serai.runtime.bus import Bus, BusError, Message
from serai.runtime.connection_settings import host_name
from serai.runtime.fields import BadInput
from serai.runtime.kv_lease import StateKeys
from serai.runtime.quarantine_list import quarantined
from serai.runtime.registry_copy import RegistryCopy
from serai.runtime.waking import woken_or_after

log = structlog.get_logger()

LOOK_EVERY_S = 0.5
REPLAN_S = 60.0
"""A plan that has been under way for so long is made anew, with what it has started so far."""
HELD_SAID_MAX = 20
LOAD_S, LEAVING_MARGIN_S = 120.0, 30.0
"""What an engine takes to load, until options say; and what a successor of it is started earlier than need be."""
NEWS_PAUSE_S = 1.0
"""After news a plan is made at once, but not more often."""


class Placer:
    """Collaborators come from outside; `run` returns when told to stop."""

    def __init__(
        self,
        settings: PlacerSettings,
        read_file: Callable[[], PlacementFile],
        bus: Bus,
        placement_keys: StateKeys,
        pool_keys: PoolKeys,
        launchers: Mapping[str, Launcher] | None = None,
    ) -> None:
        self._settings = settings
        self._files = WatchedFile(read_file)
        self._bus = bus
        self.copy = RegistryCopy(bus, settings.site)
        self.pools = Pools(settings.site)
        self.memory = Memory()
        self._owner = f"{host_name()}-{secrets.token_hex(4)}"
        self.lease = lease_of(
            placement_keys, settings.site, self._owner, settings.lease_s, time.monotonic, self.memory, self._restore
        )
        self.told = Told(bus, pool_keys, time.monotonic)
        self._limits = SolveLimits(settings.solve_s)
        self._listening_since_s = time.monotonic()
        self.wants = Wants(bus, settings.site, settings.demand_every_s, lambda: self._file, self._at_once)
        self.answers = Answers(bus, settings.site, self, self._at_once)
        self._clearing = Clearing(pool_keys, self.copy.replica, lambda: set(self.pools))
        self.loads = LoadTimes()
        self._launching = Launching(launchers or {})
        self._under_way = UnderWay(settings, self.memory, self.told, self.copy.replica, self._at_once)
        self._decision: Decision | None = None
        self._words: list[ModelWord] = []
        self._planned_at_s = -math.inf
        self._news = True
        self._problem = ""
        self._wake = asyncio.Event()
        bus.on_reconnect(self._on_reconnect)

    async def run(self, stop: asyncio.Event) -> None:
        site = self._settings.site
        subscriptions = [
            *await self.copy.start(),
            await self._bus.subscribe(POOL.every, self.on_pool),
            *await self.answers.start(),
            *await self.wants.start(),
        ]
        await self._bus.barrier()
        log.info("placer.ready", site=site, models=sorted(self._file.models), mode=str(self._file.mode))
        async with asyncio.TaskGroup() as tasks:
            work = (
                self.copy.run(),
                self.wants.asking(lambda: self.lease.held, self._loads_s),
                self.wants.saying(self._starts_by_itself, self._starts_s),
                self._clearing.run(lambda: not self._blind()),
                self._beating(),
                self._looking(),
                self._warming_up(),
            )
            working = [tasks.create_task(one) for one in work]
            await stop.wait()
            for task in working:
                task.cancel()
        for subscription in subscriptions:
            await subscription.unsubscribe()
        await self.lease.give_back(self.memory.kept("", self.lease.beats + 1, time.monotonic()))

    # -- what it hears -------------------------------------------------------------------------------------------

    def on_pool(self, message: Message) -> None:
        """A pool agent's report."""
        try:
            report = checked_report(decode(PoolReport, message.data))
        except (MalformedMessage, BadReport) as error:
            log.warning("placer.bad_report", subject=message.subject, error=str(error), effect="ignored")
            return
        if message.subject == POOL.of(report.pool) and self.pools.hear(report, time.monotonic()):
            self._wake.set()

    async def _warming_up(self) -> None:
        if self._settings.solve_s > 0:
            await asyncio.to_thread(read_solver)

    async def _beating(self) -> None:
        while True:
            await self.lease.beat()
            metrics.ACTING.set(self.lease.held and not self._blind())
            await asyncio.sleep(self._settings.lease_s / 6)

    @property
    def _file(self) -> PlacementFile:
        return self._files.now

    def _at_once(self) -> None:
        """A plan is made as soon as may be."""
        self._news = True
        self._wake.set()

    def _starts_by_itself(self) -> bool:
        return self._file.mode is Mode.AUTOMATIC and not self._blind()

    def _loads_s(self) -> dict[str, float]:
        return {} if self._decision is None else self._decision.loads_s

    def _starts_s(self) -> dict[str, float]:
        return {} if self._decision is None else self._decision.starts_s(self._file.rules.cool_down_s)

    def _blind(self) -> str:
        """Why it does not act; empty = it does."""
        if why := self.lease.why_not:
            return why
        if not self._bus.connected:
            return "there is no connection to NATS"
        if not self.copy.synced:
            return "the registry has not answered yet"
        listened_s = time.monotonic() - self._listening_since_s
        if listened_s < self._settings.settle_s:
            return f"it has listened for {listened_s:.0f} s only, of {self._settings.settle_s:g}"
        return ""

    def _views(self, now: float) -> list[PoolView]:
        """Pools as they are, with what the registry and the clock say of them."""
        bad = quarantined(self.copy.replica.records(), self._settings.site, time.time())
        loads_s = max(self._loads_s().values(), default=LOAD_S)
        leaving_s = loads_s + self._file.rules.drain_s + LEAVING_MARGIN_S
        return judged(self.pools.views(now), {one.host: one.reason for one in bad}, leaving_s)

    # -- the loop ------------------------------------------------------------------------------------------------

    async def _looking(self) -> None:
        while True:
            await woken_or_after(self._wake, LOOK_EVERY_S)
            self._news |= self._files.again()
            if self._blind():
                continue
            try:
                await self._look()
            except BusError as error:
                log.warning("placer.not_now", error=str(error), effect="tried again")
            except Overtaken as overtaken:
                log.warning("placer.overtaken", why=str(overtaken), effect="looks at everything anew")
                self._start_over()

    async def _look(self) -> None:
        now = time.monotonic()
        views = self._views(now)
        reports = {view.name: view.report for view in views}
        for report in reports.values():
            await self.told.learn(report)
        self.told.forget([pool for pool in self.told.pools if pool not in reports])
        self._note_runs(views, now)
        self._under_way.go_on(self._file, views, now)
        await self._deliver(reports)
        if self._plan_is_due(now):
            await self._plan(views)
            self._under_way.go_on(self._file, views, time.monotonic())
            await self._deliver(reports)
            if self._decision is not None and self._file.launchables and self._file.mode is Mode.AUTOMATIC:
                await self._launching.ask(self._file, views, self._decision, time.monotonic(), self.lease.beat)

    def _note_runs(self, views: Sequence[PoolView], now: float) -> None:
        """How engines do that were started."""
        for model, took_s in self.loads.note(views, now):
            metrics.LOADS.of(model).observe(took_s)
        self._launching.note(views, now)
        self._under_way.note_runs(views, now)

    async def _deliver(self, reports: dict[str, PoolReport]) -> None:
        """Tells pools what they do not know yet."""
        for pool in self.told.due(reports):
            self.memory.generation = max(self.memory.generation, self.told.newest) + 1
            if not await self.lease.beat():
                return
            answer = await self.told.tell(pool, self.memory.generation, self._file.rules.drain_s)
            if answer is None:
                continue
            self.pools.hear(answer, time.monotonic())
            if answer.refused:
                self._refused(answer)
            else:
                log.info("placer.assigned", pool=pool, generation=answer.generation, runs=len(self.told.run_of(pool)))

    def _refused(self, answer: PoolReport) -> None:
        """Its own word is what counts; what it was to start has come to nothing."""
        log.error("placer.refused", pool=answer.pool, why=answer.refused, effect="its own word counts")
        self.told.newest = max(self.told.newest, answer.generation)
        self.told.reset(answer)
        self._news = True

    # -- plans ---------------------------------------------------------------------------------------------------

    def _plan_is_due(self, now: float) -> bool:
        since_s = now - self._planned_at_s
        if self.answers.waited_for and since_s > NEWS_PAUSE_S:
            return True
        if self._under_way.busy:
            return self._file.mode is Mode.AUTOMATIC and since_s > max(REPLAN_S, self._settings.plan_every_s)
        return since_s > self._settings.plan_every_s or (self._news and since_s > NEWS_PAUSE_S)

    def _situation(self, views: Sequence[PoolView], now: float) -> Situation:
        replica = self.copy.replica
        return Situation(
            self._file,
            views,
            self.wants.usage(replica, now),
            self.wants.demand.known,
            others(replica, views, self._file.models, now),
            in_flight(replica, views),
            self.memory.moves_last_hour(now),
            self.memory.failed_for_s(now),
            self.memory.warm,
            self.wants.demand.prewarm(self._loads_s()),
            self.loads.ages_s(now),
            self.loads.seen_s,
            self.memory.turns(now),
            self.wants.wished(now),
        )

    async def _plan(self, views: Sequence[PoolView]) -> None:
        now = self._planned_at_s = time.monotonic()
        self._news = False
        situation = self._situation(views, now)
        generation = max(self.memory.generation, self.told.newest) + 1
        automatic = self._file.mode is Mode.AUTOMATIC
        try:
            decision = await asyncio.to_thread(
                decide, situation, generation, self._limits, limited=automatic, clock=time.monotonic
            )
        except BadInput as error:
            if str(error) != self._problem:
                log.error("placer.no_plan", error=str(error), effect="what runs goes on")
            self._problem = str(error)
            self.answers.planned()
            return
        self._problem, self._decision = "", decision
        metrics.SOLVE_S.observe(decision.placement.solve_s)
        self._words = model_words(decision, situation)
        metrics.show(self._words, views)
        self._take(decision, automatic=automatic)
        self.answers.planned()

    def _take(self, decision: Decision, *, automatic: bool) -> None:
        """The plan is the last one now: to be done, to be looked at, or nothing at all."""
        before, plan = self.memory.plan, decision.plan
        same = before is not None and content(before.actions) == content(plan.actions)
        if before is not None and same and before.state is PlanState.PROPOSED and not automatic:
            self.memory.plan = replace(before, models=self._words, held=list(plan.held))
            return
        if before is not None and before.state in (PlanState.PROPOSED, PlanState.APPLYING):
            metrics.PLANS.of(str(PlanState.REPLACED)).add()
        state = PlanState.APPLYING if automatic else PlanState.PROPOSED
        if not plan.changes:
            state = PlanState.DONE
        else:
            self.memory.generation = max(self.memory.generation, plan.generation)
        shown = plan.generation if plan.changes else self.memory.generation
        self.memory.plan = KeptPlan(shown, state, list(plan.actions), self._words, list(plan.held), decision.note)
        self._under_way.drop()
        if plan.held and (before is None or list(plan.held) != before.held):
            log.info("placer.held", held=list(plan.held)[:HELD_SAID_MAX])
        if plan.changes:
            changes = [f"{one.kind} {one.assignment.model} on {one.pool}" for one in plan.changes]
            log.info("placer.plan", generation=plan.generation, state=str(state), changes=changes, note=decision.note)
            if automatic:
                self._under_way.begin(self.memory.plan, decision)

    def _restore(self, record: PlanRecord) -> None:
        self.memory.restore(record, time.monotonic())
        self._start_over()

    def _start_over(self) -> None:
        self.told.forget_all()
        self._under_way.drop()
        self._news = True
        self._listening_since_s = time.monotonic()

    def _on_reconnect(self) -> None:
        self._listening_since_s = time.monotonic()

    # -- what it is asked ----------------------------------------------------------------------------------------

    def plans_anew(self) -> bool:
        return not self._blind()

    def speaks(self) -> bool:
        return self.lease.held or not self.lease.why_not.startswith("another")

    def known_models(self) -> list[str]:
        return sorted(self._file.models)

    def apply(self, request: ApplyRequest) -> str:
        """Why not; empty = it is under way."""
        plan = self.memory.plan
        if why := self._blind():
            return why
        if plan is None or plan.state is not PlanState.PROPOSED:
            state = "there is none" if plan is None else f"{plan.generation} is {plan.state}"
            return f"no plan waits for a yes: {state}; see `serai place plan`"
        if request.generation != plan.generation:
            return f"plan {request.generation} is stale: the last one is {plan.generation}; see `serai place diff`"
        decision = self._decision
        if decision is None:
            return "it has just taken over; the plan is made anew within seconds"
        if why := gone(plan.actions, self.pools.views(time.monotonic())):
            self._news = True
            self.memory.plan = replace(plan, state=PlanState.REPLACED)
            return f"plan {plan.generation} is stale: {why}; it is made anew"
        log.info("placer.applied", generation=plan.generation)
        self._wake.set()
        self.memory.plan = replace(plan, state=PlanState.APPLYING)
        self._under_way.begin(self.memory.plan, decision)
        return ""

    def word(self) -> PlacementWord:
        """How things stand."""
        blind = self._blind()
        return PlacementWord(
            self._settings.site,
            self._owner,
            self.lease.held and not blind,
            str(self._file.mode),
            blind,
            self.memory.plan,
            self._words,
            pool_words(self._views(time.monotonic())),
            self._files.problem or self._problem,
        )
