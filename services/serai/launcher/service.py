"""The launcher's shell: answers and sessions go into the book, the plan is carried out, step by step.

One loop looks at the whole picture each second; what woke it says nothing. Before each action the lease is written,
with the intention in it: whoever has lost it finds out then, and whoever comes after knows what was begun.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.drain import DrainAnswer, DrainRequest
from serai.contracts.launcher import LauncherState, LauncherWord, SlotWord
from serai.contracts.placement import PoolReport
from serai.contracts.registry import AllocationEnded
from serai.contracts.subjects import (
    DRAIN,
    ENDED,
    POOL,
)
from serai.launcher import metrics
from serai.launcher.answers import Answers
from serai.launcher.answers_missing import too_little_known
from serai.launcher.deployments import Deployment, picture_of
from serai.launcher.estimates import Estimates
from serai.launcher.job_book import JobBook
from serai.launcher.jobs import JobId, Refused, Slurm, Unknown
from serai.launcher.lease import lease_of
from serai.launcher.maintenance import Calendar, fitted
from serai.launcher.picture import Cancel, Drain, Picture, Plan, Sleep, Submit
from serai.launcher.pools import PoolSessions, seen_sessions
from serai.launcher.runs import Ended, Event, Requeued, Run, SeenSession, Served, Started
from serai.launcher.scaled import Scaled
from serai.launcher.settings import LauncherSettings
from serai.launcher.slots import Slot, SlotNames, slot_name
from serai.launcher.succession import plan
from serai.runtime.bus import Bus, BusError, Message
from serai.runtime.connection_settings import host_name
from serai.runtime.kv_lease import StateKeys
from serai.runtime.quarantine_list import quarantined
from serai.runtime.registry_copy import RegistryCopy
from serai.runtime.slurm_time import duration_text
from serai.runtime.waking import woken_or_after

log = structlog.get_logger()

LOOK_EVERY_S = 1.0
DRAIN_TIMEOUT_S = 3.0
DRAIN_AGAIN_S = 10.0
ENDED_TIMEOUT_S = 3.0
OTHERS_SAID_MAX = 20


class Launcher:
    """Collaborators come from outside; `run` returns when told to stop."""

    def __init__(
        self,
        settings: LauncherSettings,
        deployments: Sequence[Deployment],
        bus: Bus,
        slurm: Slurm,
        keys: StateKeys,
        query_every_s: float,
        calendar: Calendar | None = None,
    ) -> None:
        self._settings = settings
        self.scaled = Scaled(deployments)
        self._pools = PoolSessions(settings.site)
        self._bus = bus
        self._slurm = slurm
        self._calendar = calendar
        self._query_every_s = query_every_s
        self.copy = RegistryCopy(bus, settings.site)
        self.book = JobBook(
            settings.book_rules,
            SlotNames(settings.site, list(self.scaled.now)),
            {one.name: one.specification for one in deployments},
        )
        self._owner = f"{host_name()}-{secrets.token_hex(4)}"
        self.lease = lease_of(
            keys,
            settings.site,
            self._owner,
            settings.lease_s,
            time.monotonic,
            state=lambda beat: self._kept(self._owner, beat),
            taken=self._restore,
        )
        self.last = Plan(blind="it has just started")
        self._listening_since_s = time.monotonic()
        self._succeeded_at_s: dict[str, float] = {}
        self._estimates = Estimates(slurm)
        self._drained_at_s: dict[str, float] = {}
        self._said: dict[str, tuple[str, bool]] = {}
        self._wake = asyncio.Event()
        self.answers = Answers(bus, settings.site, self, self.scaled, self.book, self._wake.set)
        bus.on_reconnect(self._on_reconnect)

    async def run(self, stop: asyncio.Event) -> None:
        site = self._settings.site
        subscriptions = [
            *await self.copy.start(),
            *await self.answers.start(),
            await self._bus.subscribe(POOL.every, self.on_pool),
        ]
        await self._bus.barrier()
        log.info("launcher.ready", site=site, deployments=sorted(self.scaled.now))
        async with asyncio.TaskGroup() as tasks:
            seeing = (self.copy.run(), self._asking(), self._estimates.run(self._wanted))
            work = (*seeing, self._beating(), self._looking())
            working = [tasks.create_task(one) for one in work]
            await stop.wait()
            for task in working:
                task.cancel()
        for subscription in subscriptions:
            await subscription.unsubscribe()
        await self.lease.give_back(self._kept("", self.lease.beats + 1))

    async def rehearse(self, patience_s: float) -> LauncherWord:
        """`--dry-run`: listens until it sees the whole picture, and says what it would do. Raises BusError."""
        self._restore(await self.lease.read())
        await self.copy.start()
        await self._bus.barrier()
        give_up_at_s = time.monotonic() + patience_s
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(one) for one in (self.copy.run(), self._asking())]
            while (why := self._blind(acting=False)) and time.monotonic() < give_up_at_s:
                await woken_or_after(self._wake, LOOK_EVERY_S)
            for task in working:
                task.cancel()
        self._hear_sessions(time.monotonic())
        self.last = plan(self._picture(why), self._settings.rules)
        return self.word("")

    # -- what it sees --------------------------------------------------------------------------------------------

    async def _beating(self) -> None:
        while True:
            await self.lease.beat()
            await asyncio.sleep(self._settings.lease_s / 6)

    async def _asking(self) -> None:
        """The batch system; the protocol's other side sees to it that it is not asked too often."""
        while True:
            answer = await self._slurm.jobs()
            now = time.monotonic()
            if isinstance(answer, Unknown):
                metrics.UNKNOWN.inc()
                log.warning("launcher.unknown", reason=answer.reason, effect="nothing is done")
            foreign = self.book.foreign
            await self._note(self.book.hear_jobs(answer, now))
            if self.book.foreign != foreign:
                effect = "of no deployment of the site file: left alone"
                log.info("launcher.other_jobs", names=list(self.book.foreign)[:OTHERS_SAID_MAX], effect=effect)
            self._wake.set()
            await asyncio.sleep(self._query_every_s)

    def _hear_sessions(self, now: float) -> list[Event]:
        wanted = {run.allocation for run in self.book.runs if run.allocation}
        return self.book.hear_sessions(self._seen(wanted, now), now)

    def _seen(self, allocations: set[str], now: float) -> Iterable[SeenSession]:
        return seen_sessions(self.copy.replica, self._pools, self._settings.site, allocations, now)

    def _wanted(self) -> list[Deployment]:
        """Those that jobs are submitted for."""
        deployments = self.scaled.now.values() if self.lease.held else ()
        return [one for one in deployments if one.count and one.name not in self.book.asleep]

    def _blind(self, *, acting: bool = True) -> str:
        """Why the picture is not whole; empty = it is."""
        now = time.monotonic()
        if acting and (why := self.lease.why_not):
            return why
        if not self._bus.connected:
            return "there is no connection to NATS"
        if not self.copy.synced:
            return "the registry has not answered yet"
        listened_s = now - self._listening_since_s
        if acting and listened_s < self._settings.settle_s:
            return f"it has listened for {listened_s:.0f} s only, of {self._settings.settle_s:g}"
        return too_little_known(self.book, now, self._query_every_s)

    def _picture(self, blind: str) -> Picture:
        return picture_of(
            self.book,
            list(self.scaled.now.values()),
            time.monotonic(),
            blind=blind,
            estimates_s=self._estimates.wait_s,
            succeeded_at_s=self._succeeded_at_s,
        )

    # -- what it does --------------------------------------------------------------------------------------------

    async def _looking(self) -> None:
        while True:
            await woken_or_after(self._wake, LOOK_EVERY_S)
            await self._note(self._hear_sessions(time.monotonic()))
            self.last = plan(self._picture(self._blind()), self._settings.rules)
            self._say()
            metrics.show(self.book, self.last)
            await self._act(self.last)

    async def _act(self, made: Plan) -> None:
        for drain in made.drain:
            await self._drain(drain)
        for cancel in made.cancel:
            await self._cancel(cancel)
        for submit in made.submit:
            await self._submit(submit)
        for sleep in made.sleep:
            self._sleep(sleep)

    async def _drain(self, drain: Drain) -> None:
        now = time.monotonic()
        if now - self._drained_at_s.get(drain.session, -DRAIN_AGAIN_S) < DRAIN_AGAIN_S or not await self.lease.beat():
            return
        self._drained_at_s = {name: at_s for name, at_s in self._drained_at_s.items() if now - at_s < DRAIN_AGAIN_S}
        self._drained_at_s[drain.session] = now
        try:
            message = await self._bus.request(
                DRAIN.of(drain.session), encode(DrainRequest(drain.why, drain.within_s)), DRAIN_TIMEOUT_S
            )
            answer = decode(DrainAnswer, message.data)
        except (BusError, MalformedMessage) as error:
            log.warning("launcher.drain_failed", session=drain.session, error=str(error), effect="asked again")
            return
        metrics.DRAINS.inc()
        log.info(
            "launcher.drain",
            slot=str(drain.slot),
            session=drain.session,
            within_s=drain.within_s,
            why=drain.why,
            accepted=answer.accepted,
            in_flight=answer.in_flight,
        )

    async def _cancel(self, cancel: Cancel) -> None:
        if not await self.lease.beat():
            return
        self.book.cancelling(cancel.run, time.monotonic(), dismissed=cancel.dismissed)
        answer = await self._slurm.cancel(cancel.job)
        metrics.CANCELS.inc()
        told = answer.text if isinstance(answer, Refused) else answer.reason if isinstance(answer, Unknown) else "taken"
        log.info("launcher.cancel", slot=str(cancel.slot), job=str(cancel.job), why=cancel.why, answer=told)

    async def _submit(self, submit: Submit) -> None:
        deployment = self.scaled.now[submit.slot.deployment]
        time_limit_s = await self._time_limit_s(submit, deployment)
        generation = self.book.next_generation(submit.slot)
        name = slot_name(self._settings.site, submit.slot, generation, deployment.model, secrets.token_hex(4))
        self.book.submitting(name, time_limit_s, time.monotonic())
        if not await self.lease.beat():
            self.book.withdrawn(name)
            return
        options = [
            f"--job-name={name}",
            f"--time={duration_text(time_limit_s)}",
            f"--comment=serai {submit.slot} generation {generation}",
            *await self._away_from_bad_nodes(deployment),
        ]
        answer = await self._slurm.submit(deployment.script, options)
        self.book.submitted(name, answer, time.monotonic())
        if any(word.slot == str(submit.slot) and word.verdict == "successor" for word in self.last.says):
            self._succeeded_at_s[submit.slot.deployment] = time.monotonic()
        self._log_submission(submit, str(name), generation, answer)
        await self.lease.beat()

    async def _away_from_bad_nodes(self, deployment: Deployment) -> list[str]:
        """sbatch's option for the hosts that are in quarantine, where there are any. It replaces the script's own, so
        that one's nodes are in it, too. A host that the batch system knows by another name cannot be told to it."""
        bad = quarantined(self.copy.replica.records(), self._settings.site, time.time())
        nodes = await self._slurm.nodes() if bad else frozenset[str]()
        if isinstance(nodes, Unknown):
            log.warning("launcher.nodes_unknown", reason=nodes.reason, effect="nodes in quarantine may get the job")
            return []
        known = [one.node for one in bad if one.node in nodes]
        if not known:
            return []
        log.info("launcher.excluded", nodes=known)
        return [f"--exclude={','.join(dict.fromkeys((*deployment.excluded, *known)))}"]

    async def _time_limit_s(self, submit: Submit, deployment: Deployment) -> float:
        """Shorter, where a maintenance would keep such a job from starting before it."""
        if self._calendar is None:
            return submit.time_limit_s
        fit = await fitted(self._calendar, lambda _: deployment.script, submit.time_limit_s, time.time())
        if fit.note:
            log.info("launcher.time_limit", slot=str(submit.slot), time_limit_s=fit.time_s, note=fit.note)
        return fit.time_s

    def _log_submission(self, submit: Submit, name: str, generation: int, answer: JobId | Refused | Unknown) -> None:
        facts = {"slot": str(submit.slot), "generation": generation, "name": name, "why": submit.why}
        match answer:
            case JobId():
                metrics.SUBMISSIONS.of("taken").add()
                log.info("launcher.submitted", job=str(answer), **facts)
            case Refused():
                metrics.SUBMISSIONS.of(str(answer.kind)).add()
                log.error("launcher.refused", kind=str(answer.kind), text=answer.text, remedy=answer.remedy, **facts)
            case Unknown():
                metrics.SUBMISSIONS.of("unknown").add()
                log.warning("launcher.submission_unknown", reason=answer.reason, effect="looked for by name", **facts)

    def _sleep(self, sleep: Sleep) -> None:
        self.book.asleep.add(sleep.deployment)
        log.info("launcher.asleep", deployment=sleep.deployment, why=sleep.why)

    # -- what it notes -------------------------------------------------------------------------------------------

    async def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            run = event.run
            facts = {"slot": str(run.slot), "job": str(run.id), "generation": run.generation}
            match event:
                case Started(wait_s=wait_s):
                    if wait_s is not None:
                        metrics.WAITS.of(run.slot.deployment).observe(wait_s)
                    log.info("launcher.started", wait_s=_rounded(wait_s), **facts)
                case Served(load_s=load_s):
                    if load_s is not None:
                        metrics.LOADS.of(run.slot.deployment).observe(load_s)
                    log.info("launcher.serves", load_s=_rounded(load_s), **facts)
                case Requeued():
                    log.warning("launcher.requeued", effect="what comes is another session", **facts)
                case Ended(state=state, failed=failed):
                    metrics.ENDS.of("gone" if state is None else str(state), "failed" if failed else "as meant").add()
                    tell = log.warning if failed else log.info
                    tell("launcher.ended", state="gone" if state is None else str(state), failed=failed, **facts)
                    if state is not None:
                        await self._tell_ended(run, str(state))

    async def _tell_ended(self, run: Run, state: str) -> None:
        """The batch system's word, for the registry, where a session of the job did not say so itself."""
        if not run.sessions:
            return
        ended = AllocationEnded(self._settings.site, run.allocation, f"job {run.id}: {state}")
        try:
            await self._bus.request(ENDED.of_site(self._settings.site), encode(ended), ENDED_TIMEOUT_S)
        except BusError as error:
            log.warning("launcher.ended_not_told", allocation=run.allocation, error=str(error))

    def _say(self) -> None:
        """What is thought of a slot, when it is something new."""
        for word in self.last.says:
            if self._said.get(word.slot) != (word.verdict, word.alert):
                self._said[word.slot] = (word.verdict, word.alert)
                tell = log.error if word.alert else log.info
                tell("launcher.slot", slot=word.slot, verdict=word.verdict, text=word.text, **word.facts)

    def _restore(self, state: LauncherState) -> None:
        self.book.restore(state, time.monotonic())
        self.scaled.restore(state.scaled)
        self._listening_since_s = time.monotonic()

    def _on_reconnect(self) -> None:
        self._listening_since_s = time.monotonic()

    # -- what it is asked ----------------------------------------------------------------------------------------

    def on_pool(self, message: Message) -> None:
        """A pool agent's word: it is to its job what a session is to others."""
        try:
            self._pools.hear(decode(PoolReport, message.data), time.monotonic())
        except MalformedMessage as error:
            log.warning("launcher.bad_report", subject=message.subject, error=str(error))

    def acts(self) -> bool:
        return self.lease.held

    def speaks(self) -> bool:
        return self.lease.held or not self.lease.why_not.startswith("another")

    def _kept(self, holder: str, beat: int) -> LauncherState:
        return replace(self.book.kept(holder, beat, time.monotonic()), scaled=dict(sorted(self.scaled.asked.items())))

    def word(self, asked: str) -> LauncherWord:
        """The last plan, of the slots asked for."""
        slots = [one for one in self.last.says if _is_asked(one, asked)]
        problem = "" if slots or not asked else f"there is no slot {asked!r}"
        acting = self.lease.held and not self.last.blind
        return LauncherWord(self._settings.site, self._owner, acting, self.last.blind, slots, problem)


def _is_asked(word: SlotWord, asked: str) -> bool:
    slot = Slot.of(word.slot)
    return not asked or word.slot == asked or (slot is not None and slot.deployment == asked)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
