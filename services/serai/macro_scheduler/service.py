"""The macro-scheduler's shell: a candidate per model that the registry knows, reports to whoever leads, and words for
people.

One loop looks at the whole picture; what woke it says nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from fnmatch import fnmatchcase

import structlog

from serai.contracts.admission import InstanceReport, MacroExplainRequest, MacroWord
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.subjects import INSTANCE, MACRO_EXPLAIN, MACRO_PRESENCE, to_token
from serai.macro_scheduler import metrics
from serai.macro_scheduler.leading import PRESENCE, Candidate
from serai.macro_scheduler.messages import report_problem
from serai.macro_scheduler.owner_keys import OwnerKeys
from serai.macro_scheduler.settings import MacroSchedulerSettings
from serai.runtime.bus import Bus, BusError, Message
from serai.runtime.connection_settings import host_name
from serai.runtime.kv_lease import StateKeys
from serai.runtime.registry_copy import RegistryCopy

log = structlog.get_logger()

LOOK_EVERY_S = 0.25
LOOK_APART_S = 0.05
"""However much changes in the registry copy."""
FORGOTTEN_AFTER_S = 60.0
"""A model without sessions for so long is stood for no more."""
MODELS_MAX = 1000
LATE_WORD_S = 0.2
"""Who does not know of a request leaves the first word to whoever does."""


class MacroScheduler:
    """Collaborators come from outside; `run` returns when told to stop."""

    def __init__(self, settings: MacroSchedulerSettings, bus: Bus, groups: StateKeys, owners: StateKeys) -> None:
        self._settings = settings
        self._bus = bus
        self._groups = groups
        self._owners = OwnerKeys(owners)
        self.copy = RegistryCopy(bus, settings.site)
        self._name = f"{host_name()}-{secrets.token_hex(4)}"
        self._unheard = f"{bus.inbox_prefix}.unheard"
        self.candidates: dict[str, Candidate] = {}
        self._numbers: dict[str, Candidate] = {}
        """By the token in the subjects of answers that nobody heard."""
        self._standing: dict[str, asyncio.Task[None]] = {}
        self._seen_at_s: dict[str, float] = {}
        self._raw: dict[str, bytes] = {}
        """Sessions' last reports, as they came: a follower reads them when it becomes leader, not before."""
        self._model_of: dict[str, str] = {}
        self._tidied_at_s = 0.0
        self._wake = asyncio.Event()
        self.copy.on_change = self._wake.set

    async def run(self, stop: asyncio.Event) -> None:
        site = self._settings.site
        subscriptions = [
            *await self.copy.start(),
            await self._bus.subscribe(INSTANCE.every, self.on_instance),
            await self._bus.subscribe(MACRO_EXPLAIN.of_site(site), self.on_explain),
            await self._bus.subscribe(f"{self._unheard}.*.*", self.on_unheard),
            await self._bus.subscribe(MACRO_PRESENCE.of(to_token(self._name)), self.on_presence),
        ]
        await self._bus.barrier()
        await self.copy.snapshot()
        log.info("macro.ready", site=site, policy=self._settings.admission, models=list(self._settings.models))
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(one) for one in (self.copy.run(), self._looking(tasks))]
            await stop.wait()
            for task in (*working, *self._standing.values()):
                task.cancel()
        for subscription in subscriptions:
            await subscription.unsubscribe()

    # -- models --------------------------------------------------------------------------------------------------

    async def _looking(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            now = time.monotonic()
            self._stand(tasks, now)
            for candidate in self.candidates.values():
                candidate.look()
            await asyncio.sleep(LOOK_APART_S)
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    def _stand(self, tasks: asyncio.TaskGroup, now: float) -> None:
        """A candidate for each model that is served, and none for those that have not been for a while."""
        served = [model for model in self.copy.replica.models(now) if self._is_ours(model)]
        for model in served:
            instances = self.instances(model)
            self._model_of.update(dict.fromkeys([record.session for record in instances], model))
            if instances:
                self._seen_at_s[model] = now
            if instances and model not in self.candidates and len(self.candidates) < MODELS_MAX:
                candidate = self.candidates[model] = self._candidate(model)
                self._standing[model] = tasks.create_task(candidate.run())
        if now - self._tidied_at_s > FORGOTTEN_AFTER_S:
            self._tidied_at_s = now
            self._tidy(now)
        for model in [one for one, seen_s in self._seen_at_s.items() if now - seen_s > FORGOTTEN_AFTER_S]:
            self._forget(model)

    def _candidate(self, model: str) -> Candidate:
        number = secrets.token_hex(4)
        made = self._numbers[number] = Candidate(
            model,
            self._settings,
            self._bus,
            self._groups,
            self._owners,
            self._name,
            self.instances,
            self.asleep,
            self._heard_epoch,
            f"{self._unheard}.{number}",
        )
        return made

    def _forget(self, model: str) -> None:
        del self._seen_at_s[model]
        candidate = self.candidates.pop(model, None)
        if candidate is not None:
            self._standing.pop(model).cancel()
            self._numbers = {number: one for number, one in self._numbers.items() if one is not candidate}
        gone = [session for session, of_model in self._model_of.items() if of_model == model]
        for session in gone:
            del self._model_of[session]
            self._raw.pop(session, None)

    def _tidy(self, now: float) -> None:
        """Sessions that serve no more are forgotten, also of models that are served on."""
        there = {one.session for model in self._seen_at_s for one in self.copy.replica.routable(model, now)}
        self._model_of = {session: model for session, model in self._model_of.items() if session in there}
        self._raw = {session: data for session, data in self._raw.items() if session in there}

    def _is_ours(self, model: str) -> bool:
        return any(fnmatchcase(model, pattern) for pattern in self._settings.models)

    def instances(self, model: str) -> list[SessionRecord]:
        """Sessions of this site that serve the model and may have requests now."""
        site, routable = self._settings.site, self.copy.replica.routable(model, time.monotonic())
        return [record for record in routable if record.metadata.site == site]

    def asleep(self, model: str) -> set[str]:
        """Sessions of this site whose engine could be woken."""
        site, replica = self._settings.site, self.copy.replica
        return {
            record.session
            for record in replica.records_of_model(model)
            if record.metadata.asleep and record.metadata.site == site and record.lifecycle is Lifecycle.SERVING
        }

    # -- instances -----------------------------------------------------------------------------------------------

    def on_instance(self, message: Message) -> None:
        """`instance.<session>`: what an instance says of itself."""
        session = message.subject.partition(".")[2]
        model = self._model_of.get(session)
        if model is None:
            metrics.REPORTS.of("unknown instance").add()
            return
        self._raw[session] = message.data
        candidate = self.candidates.get(model)
        if candidate is None or candidate.term is None:
            return
        report = self._report(session, message.data)
        if report is not None:
            metrics.REPORTS.of("taken").add()
            candidate.term.on_report(report)

    def _report(self, session: str, data: bytes) -> InstanceReport | None:
        try:
            report = decode(InstanceReport, data)
        except MalformedMessage as error:
            problem = str(error)
        else:
            problem = report_problem(report)
            if report.session != session:
                problem = f"a report of {report.session} on the subject of another session"
        if not problem:
            return report
        metrics.REPORTS.of("malformed").add()
        log.debug("instance.malformed", session=session, error=problem)
        return None

    def _heard_epoch(self, model: str) -> int:
        """The highest epoch that the model's instances have told."""
        sessions = [session for session, of_model in self._model_of.items() if of_model == model]
        reports = [self._report(session, self._raw[session]) for session in sessions if session in self._raw]
        return max([report.epoch for report in reports if report is not None], default=0)

    # -- asks ----------------------------------------------------------------------------------------------------

    def on_unheard(self, message: Message) -> None:
        """Nobody heard one of our answers, or is where a leader should be."""
        number, _, answer = message.subject.removeprefix(f"{self._unheard}.").partition(".")
        candidate = self._numbers.get(number)
        if not message.no_responders or candidate is None:
            return
        if answer == PRESENCE:
            candidate.holder_is_gone()
        elif candidate.term is not None and answer.isdigit():
            candidate.term.on_unheard(int(answer))

    def on_presence(self, message: Message) -> None:
        """Another macro-scheduler looks after this one. That it is delivered is the answer."""

    # -- words ---------------------------------------------------------------------------------------------------

    def on_explain(self, message: Message) -> None:
        """`macro.explain.<site>`: of a request, or of how the groups stand."""
        if not message.reply:
            return
        try:
            request = decode(MacroExplainRequest, message.data)
        except MalformedMessage as error:
            self._say(message.reply, [str(error)])
            return
        lines = self.word(request)
        if lines:
            self._say(message.reply, lines)
        else:
            nothing = [self._nothing(request)]
            asyncio.get_running_loop().call_later(LATE_WORD_S, self._say, message.reply, nothing)

    def word(self, request: MacroExplainRequest) -> list[str]:
        """Empty where nothing is known here."""
        led = [one.term for one in self.candidates.values() if one.term is not None and one.lease.held]
        asked = [term for term in led if not request.model or term.model == request.model]
        if request.request_id:
            return [line for term in asked for line in term.explain(request.request_id)]
        return [line for term in asked for line in term.picture()]

    def _nothing(self, request: MacroExplainRequest) -> str:
        if request.request_id:
            return f"nothing is known of request {request.request_id!r}"
        what = f"the group of model {request.model!r}" if request.model else "a group"
        whys = [one.lease.why_not for name, one in self.candidates.items() if request.model in ("", name)]
        return f"nobody here leads {what}: " + ("; ".join(whys) or "no instance of it is known")

    def _say(self, reply: str, lines: list[str]) -> None:
        try:
            self._bus.publish(reply, encode(MacroWord(lines)))
        except BusError as error:
            log.warning("macro.not_answered", error=str(error))
