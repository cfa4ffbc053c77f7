"""The placer's shell: hears pools and sessions, asks the ledger, lets plans be made, and carries them out step by step.

One loop looks at the whole picture; what woke it says nothing, so a restart and normal running are one path. Before
each word to a pool the lease is written, with the generation in it: whoever has lost it finds out then. Nothing is ever
told because something is missing: pools that are silent, a ledger that does not answer and a bucket that vanished leave
what runs as it is.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from serai.contracts.admission import ScaleWish
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.placement import (
    ASSIGNMENT_LABEL,
    ActionKind,
    ApplyRequest,
    BadReport,
    KeptPlan,
    Knock,
    ModelWord,
    PlacementRequest,
    PlacementWord,
    PlanRecord,
    PlanState,
    PoolReport,
    RunState,
    StartableModels,
    checked_report,
)
from serai.contracts.subjects import (
    MACRO_WISH,
    PLACEMENT_APPLY,
    PLACEMENT_EXPLAIN,
    PLACEMENT_KNOCK,
    PLACEMENT_STARTABLE,
    POOL,
)
from serai.placer import metrics
from serai.placer.carrying_out import CarryingOut, Failure, Floor, Seen, SeenRun
from serai.placer.deciding import Decision, Situation, decide
from serai.placer.demand_watch import DemandWatch
from serai.placer.explain import model_words, pool_words
from serai.placer.knocks import Knocks, with_knocks
from serai.placer.launchers.base import Launcher
from serai.placer.launching import Launching
from serai.placer.leading import Memory, lease_of
from serai.placer.load_times import LoadTimes
from serai.placer.picture import failed_key
from serai.placer.placement import SolveLimits
from serai.placer.placement_file import Mode, PlacementFile
from serai.placer.pools import Pools, PoolView, judged
from serai.placer.scale_wishes import ScaleWishes
from serai.placer.settings import PlacerSettings
from serai.placer.staleness import content, gone
from serai.placer.told import Overtaken, Told
from serai.runtime.bus import Bus, BusError, Message
from serai.runtime.connection_settings import host_name
from serai.runtime.fields import BadInput
from serai.runtime.kv_lease import StateKeys
from serai.runtime.quarantine_list import quarantined
from serai.runtime.registry_copy import RegistryCopy

log = structlog.get_logger()

LOOK_EVERY_S = 0.5
REPLAN_S = 60.0
"""A plan that has been under way for so long is made anew, with what it has started so far."""
HELD_SAID_MAX = 20
LOAD_S, LEAVING_MARGIN_S = 120.0, 30.0
"""What an engine takes to load, until options say; and what a successor of it is started earlier than need be."""
SAY_EVERY_S = 5.0
"""Which models it would start."""
NEWS_PAUSE_S = 1.0
"""After news a plan is made at once, but not more often than this."""


class Placer:
    """Collaborators come from outside; `run` returns when told to stop."""

    def __init__(
        self,
        settings: PlacerSettings,
        read_file: Callable[[], PlacementFile],
        bus: Bus,
        placement_keys: StateKeys,
        pool_keys: StateKeys,
        launchers: Mapping[str, Launcher] | None = None,
    ) -> None:
        self._settings = settings
        self._read_file = read_file
        self._file = read_file()
        self._file_problem = ""
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
        self.knocks = Knocks()
        self.demand = DemandWatch(bus, settings.site, settings.demand_every_s)
        self.loads = LoadTimes()
        self.wished = ScaleWishes()
        self._launching = Launching(launchers or {})
        self._carrying: CarryingOut | None = None
        self._decision: Decision | None = None
        self._words: list[ModelWord] = []
        self._planned_at_s = -math.inf
        self._news = True
        self._problem = ""
        self._anew: list[Message] = []
        self._wake = asyncio.Event()
        bus.on_reconnect(self._on_reconnect)

    async def run(self, stop: asyncio.Event) -> None:
        site = self._settings.site
        subscriptions = [
            *await self.copy.start(),
            await self._bus.subscribe(POOL.every, self.on_pool),
            await self._bus.subscribe(PLACEMENT_EXPLAIN.of_site(site), self.on_explain),
            await self._bus.subscribe(PLACEMENT_APPLY.of_site(site), self.on_apply),
            await self._bus.subscribe(MACRO_WISH.of_site(site), self.on_wish),
            await self._bus.subscribe(PLACEMENT_KNOCK.of_site(site), self.on_knock),
        ]
        await self._bus.barrier()
        log.info("placer.ready", site=site, models=sorted(self._file.models), mode=str(self._file.mode))
        async with asyncio.TaskGroup() as tasks:
            work = (
                self.copy.run(),
                self._beating(),
                self._asking(),
                self._looking(),
                self._saying(),
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

    def on_wish(self, message: Message) -> None:
        """How many instances a model's macro-scheduler wants."""
        try:
            wish = decode(ScaleWish, message.data)
        except MalformedMessage as error:
            log.warning("placer.bad_wish", error=str(error), effect="ignored")
            return
        now = time.monotonic()
        before = self.wished.wanted(now).get(wish.model)
        if why := self.wished.hear(wish, self._file.models, now):
            log.debug("placer.wish_ignored", model=wish.model, why=why)
        elif before != wish.instances:
            log.info("placer.wish", model=wish.model, instances=wish.instances, why=wish.why)
            self._news = True
            self._wake.set()

    def on_knock(self, message: Message) -> None:
        """Somebody asks an ingress for a model that nothing serves."""
        try:
            knock = decode(Knock, message.data)
        except MalformedMessage as error:
            log.warning("placer.bad_knock", error=str(error), effect="ignored")
            return
        if self.knocks.hear(knock, self._file.models, time.monotonic()):
            log.info("placer.knock", model=knock.model, waiting=knock.waiting)
            self._news = True
            self._wake.set()

    async def _saying(self) -> None:
        """Tells ingresses which models it starts when they are asked for."""
        while True:
            if self._file.mode is Mode.AUTOMATIC and not self._blind():
                try:
                    said = StartableModels(self._settings.site, 3 * SAY_EVERY_S, self._starts_s())
                    self._bus.publish(PLACEMENT_STARTABLE.of_site(self._settings.site), encode(said))
                except BusError as error:
                    log.debug("placer.not_said", error=str(error))
            await asyncio.sleep(SAY_EVERY_S)

    async def _warming_up(self) -> None:
        """Reads OR-tools, which takes a second or two, before the first plan waits for it."""
        if self._settings.solve_s > 0 and importlib.util.find_spec("ortools") is not None:
            await asyncio.to_thread(importlib.import_module, "ortools.sat.python.cp_model")

    async def _beating(self) -> None:
        while True:
            await self.lease.beat()
            metrics.ACTING.set(self.lease.held and not self._blind())
            await asyncio.sleep(self._settings.lease_s / 6)

    async def _asking(self) -> None:
        """The ledger: what was asked of each model."""
        while True:
            if self.lease.held and self._bus.connected:
                await self.demand.ask(self._file, self._loads_s)
            await asyncio.sleep(self._settings.demand_every_s)

    @property
    def _loads_s(self) -> dict[str, float]:
        """What an engine of each model takes to serve, at least."""
        options = self._decision.options.feasible if self._decision is not None else ()
        loads: dict[str, float] = {}
        for option in options:
            loads[option.model] = min(loads.get(option.model, math.inf), option.load_s)
        return loads

    def _starts_s(self) -> dict[str, float]:
        """How long who asks for a model that nothing serves has to wait: longer where all GPUs are in use."""
        starts_s = self._loads_s
        for one in self._decision.placement.missing if self._decision is not None else ():
            if one.model in starts_s and self._decision.placement.served_share.get(one.model, 1.0) <= 0:
                starts_s[one.model] += self._file.rules.cool_down_s
        return starts_s

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
        loads_s = max(self._loads_s.values(), default=LOAD_S)
        leaving_s = loads_s + self._file.rules.drain_s + LEAVING_MARGIN_S
        return judged(self.pools.views(now), {one.host: one.reason for one in bad}, leaving_s)

    # -- the loop ------------------------------------------------------------------------------------------------

    async def _looking(self) -> None:
        while True:
            await self._wake_or(LOOK_EVERY_S)
            self._read_again()
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
        self._carry(views, now)
        await self._deliver(reports)
        if self._plan_is_due(now):
            await self._plan(views)
            self._carry(views, time.monotonic())
            await self._deliver(reports)
            if self._decision is not None and self._file.launchables and self._file.mode is Mode.AUTOMATIC:
                await self._launching.ask(self._file, views, self._decision, time.monotonic(), self.lease.beat)

    async def _wake_or(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):  # Not wait_for: it may swallow that we are cancelled.
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _read_again(self) -> None:
        """The placement file, when it has changed. One that cannot be used changes nothing."""
        try:
            fresh = self._read_file()
        except BadInput as error:
            if str(error) != self._file_problem:
                log.error("placer.file_refused", error=str(error), effect="the one before goes on to count")
            self._file_problem = str(error)
            return
        self._file_problem = ""
        if fresh is not self._file:
            log.info("placer.file_read", models=sorted(fresh.models), mode=str(fresh.mode))
            self._file, self._news = fresh, True

    def _note_runs(self, views: Sequence[PoolView], now: float) -> None:
        """Engines that have failed are not wanted any more; those that serve are known to work."""
        for model, took_s in self.loads.note(views, now):
            metrics.LOADS.of(model).observe(took_s)
        self._launching.note(views, now)
        for view in views:
            wanted = dict(self.told.run_of(view.name))
            failed = []
            for run in view.report.runs:
                id, model = run.assignment.id, run.assignment.model
                if run.state is RunState.SERVING:
                    self.memory.worked(failed_key(model, view.name))
                elif run.state is RunState.FAILED and id in wanted:
                    failed.append(id)
                    self._note_failure(Failure(model, view.name, run.problem), now)
            if failed:
                left = [one for id, one in wanted.items() if id not in failed]
                self.told.want(view.name, left, dict.fromkeys(failed, "its engine has failed"))

    def _note_failure(self, failure: Failure, now: float) -> None:
        waits_s = self.memory.failed(failed_key(failure.model, failure.pool), self._settings.failed_wait_s, now)
        metrics.FAILURES.of(failure.model).add()
        log.error("placer.engine_failed", model=failure.model, pool=failure.pool, why=failure.why, waits_s=waits_s)
        self._news = True

    # -- carrying out --------------------------------------------------------------------------------------------

    def _carry(self, views: Sequence[PoolView], now: float) -> None:
        carrying, plan = self._carrying, self.memory.plan
        if carrying is None or plan is None:
            return
        step = carrying.look(self._seen(views, now), now)
        for pool, run in step.told.items():
            self.told.want(pool, run, step.stops)
        if step.moves:
            self.memory.moved(step.moves, now)
        done = carrying.done
        actions = [replace(one, done=one.done or one.assignment.id in done) for one in plan.actions]
        self.memory.plan = replace(plan, actions=actions)
        if carrying.over:
            self._finish(carrying, now)

    def _finish(self, carrying: CarryingOut, now: float) -> None:
        plan = self.memory.plan
        assert plan is not None
        for id, why in carrying.skipped.items():
            log.warning("placer.step_skipped", id=id, why=why)
        for failure in carrying.failed.values():
            if failed_key(failure.model, failure.pool) not in self.memory.failed_for_s(now):
                self._note_failure(failure, now)
        fate = PlanState.REPLACED if carrying.failed or carrying.skipped else PlanState.DONE
        metrics.PLANS.of(str(fate)).add()
        log.info("placer.plan_over", generation=plan.generation, done=len(carrying.done), failed=len(carrying.failed))
        self.memory.plan = replace(plan, state=fate)
        self._carrying, self._news = None, True

    def _seen(self, views: Sequence[PoolView], now: float) -> Seen:
        runs = {
            run.assignment.id: SeenRun(view.name, run.state, run.problem) for view in views for run in view.report.runs
        }
        replica = self.copy.replica
        return Seen(
            pools={view.name: view.gpus for view in views},
            runs=runs,
            told={view.name: self.told.run_of(view.name) for view in views},
            settled=frozenset([view.name for view in views if self.told.settled(view.report)]),
            serving={model: len(replica.routable(model, now)) for model in self._file.models},
        )

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
        if self._anew and since_s > NEWS_PAUSE_S:
            return True
        if self._carrying is not None:
            return self._file.mode is Mode.AUTOMATIC and since_s > max(REPLAN_S, self._settings.plan_every_s)
        return since_s > self._settings.plan_every_s or (self._news and since_s > NEWS_PAUSE_S)

    def _situation(self, views: Sequence[PoolView], now: float) -> Situation:
        replica = self.copy.replica
        ours = {run.session for view in views for run in view.report.runs}
        others = {
            model: sum(
                record.session not in ours and ASSIGNMENT_LABEL not in record.metadata.labels
                for record in replica.routable(model, now)
            )
            for model in self._file.models
        }
        self.knocks.answered([model for model in self.knocks.waiting(now) if replica.routable(model, now)])
        statuses = {session: replica.status(session) for session in ours if session}
        return Situation(
            self._file,
            views,
            with_knocks(self.demand.usage, self.knocks.waiting(now)),
            self.demand.known,
            {model: count for model, count in others.items() if count},
            {session: status.in_flight for session, status in statuses.items() if status is not None},
            self.memory.moves_last_hour(now),
            self.memory.failed_for_s(now),
            self.memory.warm,
            self.demand.prewarm(self._loads_s),
            self.loads.ages_s(now),
            self.loads.seen_s,
            self.memory.turns(now),
            self.wished.wanted(now),
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
            self._answer_anew()
            return
        self._problem, self._decision = "", decision
        metrics.SOLVE_S.observe(decision.placement.solve_s)
        self._words = model_words(decision, situation)
        metrics.show(self._words, views)
        self._take(decision, automatic=automatic)
        self._answer_anew()

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
        self._carrying = None
        if plan.held and (before is None or list(plan.held) != before.held):
            log.info("placer.held", held=list(plan.held)[:HELD_SAID_MAX])
        if plan.changes:
            changes = [f"{one.kind} {one.assignment.model} on {one.pool}" for one in plan.changes]
            log.info("placer.plan", generation=plan.generation, state=str(state), changes=changes, note=decision.note)
            if automatic:
                self._begin(self.memory.plan)

    def _begin(self, plan: KeptPlan) -> None:
        decision = self._decision
        assert decision is not None
        floors = {}
        for model, facts in decision.facts.items():
            demand = facts.demand
            gets = any(one.assignment.model == model and one.kind is not ActionKind.STOP for one in plan.actions)
            floors[model] = Floor(demand.min_replicas, gets and demand.planned_requests_s > 0)
        self.memory.begins(plan.actions, time.monotonic())
        for model in decision.plan.let_go:
            self.memory.warm[model] = sorted({one.pool for one in plan.actions if one.assignment.model == model})
        for one in plan.actions:
            if one.kind is not ActionKind.KEEP:
                metrics.MOVES.of(str(one.kind)).add()
        self._carrying = CarryingOut(plan.actions, floors, start_timeout_s=self._settings.start_timeout_s)
        self._wake.set()

    def _restore(self, record: PlanRecord) -> None:
        self.memory.restore(record, time.monotonic())
        self._start_over()

    def _start_over(self) -> None:
        self.told.forget_all()
        self._carrying, self._news = None, True
        self._listening_since_s = time.monotonic()

    def _on_reconnect(self) -> None:
        self._listening_since_s = time.monotonic()

    # -- what it is asked ----------------------------------------------------------------------------------------

    def on_explain(self, message: Message) -> None:
        """The last plan, or a new one."""
        try:
            request = decode(PlacementRequest, message.data)
        except MalformedMessage as error:
            self._answer(message, replace(self.word(), problem=str(error)))
            return
        if request.anew and not self._blind():
            self._anew.append(message)
            self._wake.set()
        else:
            self._answer(message, self._word_on(request))

    def _answer_anew(self) -> None:
        asked, self._anew = self._anew, []
        for message in asked:
            self._answer(message, self._word_on(decode(PlacementRequest, message.data)))

    def _word_on(self, request: PlacementRequest) -> PlacementWord:
        word = self.word()
        if not request.model:
            return word
        models = [one for one in word.models if one.model == request.model]
        known = ", ".join(sorted(self._file.models))
        problem = (
            "" if request.model in self._file.models else f"there is no model {request.model!r} in the placement file"
        )
        return replace(word, models=models, problem=problem and f"{problem} (there is {known})")

    def on_apply(self, message: Message) -> None:
        """A person says yes to a plan."""
        try:
            request = decode(ApplyRequest, message.data)
            problem = self._apply(request)
        except MalformedMessage as error:
            problem = str(error)
        self._answer(message, replace(self.word(), problem=problem))

    def _apply(self, request: ApplyRequest) -> str:
        """Why not; empty = it is under way."""
        plan = self.memory.plan
        if why := self._blind():
            return why
        if plan is None or plan.state is not PlanState.PROPOSED:
            state = "there is none" if plan is None else f"{plan.generation} is {plan.state}"
            return f"no plan waits for a yes: {state}; see `serai place plan`"
        if request.generation != plan.generation:
            return f"plan {request.generation} is stale: the last one is {plan.generation}; see `serai place diff`"
        if self._decision is None:
            return "it has just taken over; the plan is made anew within seconds"
        if why := gone(plan.actions, self.pools.views(time.monotonic())):
            self._news = True
            self.memory.plan = replace(plan, state=PlanState.REPLACED)
            return f"plan {plan.generation} is stale: {why}; it is made anew"
        log.info("placer.applied", generation=plan.generation)
        self.memory.plan = replace(plan, state=PlanState.APPLYING)
        self._begin(self.memory.plan)
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
            self._file_problem or self._problem,
        )

    def _answer(self, message: Message, word: PlacementWord) -> None:
        """Only the one that acts answers, when there are several."""
        if not message.reply or (not self.lease.held and self.lease.why_not.startswith("another")):
            return
        try:
            self._bus.publish(message.reply, encode(word))
        except BusError as error:
            log.warning("placer.not_answered", error=str(error))
