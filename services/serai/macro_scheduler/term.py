"""One term: the time during which this process leads one model's group. The shell around `group.Group`.

What comes from ingresses and instances becomes events, effects become messages. Whatever is in here dies with the term:
instances know the truth, and the next leader asks them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, assert_never

import structlog

from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAnswers,
    AdmissionAsk,
    AdmissionRequest,
    Decision,
    InstanceReport,
    InstanceState,
    TakeInstance,
    UsedGrant,
)
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.drain import DrainRequest, SleepAnswer, SleepRequest
from serai.contracts.session_record import SessionRecord
from serai.contracts.subjects import ADMISSION, DRAIN, SLEEP, TAKE
from serai.macro_scheduler import metrics
from serai.macro_scheduler.group import (
    Answer,
    Asked,
    Drain,
    Gone,
    Granted,
    Group,
    GroupEffect,
    GroupEvent,
    Joined,
    Own,
    Owned,
    Reported,
    Scale,
    Sleep,
    Slept,
    SpentBy,
    Take,
    Tick,
    TookOver,
    Wake,
    WakeAt,
    Withdrawn,
)
from serai.macro_scheduler.messages import ask_problem
from serai.macro_scheduler.owner_keys import OwnerKeys
from serai.macro_scheduler.ownership import Deposed
from serai.macro_scheduler.predicting import InstanceSteps
from serai.macro_scheduler.windows import Windows
from serai.macro_scheduler.wishing import Wishing
from serai.runtime.bus import Bus, BusError, Message, Subscription

log = structlog.get_logger()

TAKE_TIMEOUT_S = 1.0
CLAIM_AGAIN_S = 0.2
REBUILD_S = 1.0
"""Instances that have not told their state by then join later: those that have must not wait for them."""
SENT_MAX = 4096
"""Answers of which it is remembered whose they were, until the server could have said that nobody heard them."""
NAMES_MAX = 10_000
"""Requests that clients have named, to be found by that name."""
SAID_EVERY_S = 1.0
"""Refusals are told in the log at most so often: under overload there are thousands."""


class Term:
    """Collaborators come from outside. `begin`, feed it, `end`."""

    def __init__(
        self,
        model: str,
        epoch: int,
        group: Group,
        bus: Bus,
        owners: OwnerKeys,
        held: Callable[[], bool],
        deposed: Callable[[str], None],
        unheard_inbox: str,
        wishing: Wishing | None = None,
    ) -> None:
        self.model = model
        self.epoch = epoch
        self.group = group
        self.windows = Windows()
        self._bus = bus
        self._owners = owners
        self._held = held
        self._deposed = deposed
        self._unheard_inbox = unheard_inbox
        self.wishing = wishing
        """None: nobody starts instances for it."""
        self._steps: dict[str, InstanceSteps] = {}
        self._heard_epochs: dict[str, int] = {}
        """By session: the highest epoch that it has told."""
        self._obeying: set[str] = set()
        """Sessions that have accepted."""
        self._all_obey = asyncio.Event()
        self._taking: set[str] = set()
        self._owning: dict[str, str] = {}
        """Sessions that are being claimed, and for whom."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._subscription: Subscription | None = None
        self._to_send: dict[str, AdmissionAnswers] = {}
        self._sent: OrderedDict[int, list[str]] = OrderedDict()
        self._sent_number = 0
        self._waiting: dict[str, str] = {}
        """Asks that were told to wait → where their answer goes."""
        self._names: OrderedDict[str, str] = OrderedDict()
        self._said_at_s = 0.0
        self._ended = False
        scaling = group.settings.scaling
        self._sleeps = scaling is not None and scaling.sleeps
        self._sleepless: set[str] = set()
        """Sessions whose engines cannot sleep: they end instead."""
        self.asleep: set[str] = set()
        """Sessions that sleep, as far as is known."""

    # -- life ----------------------------------------------------------------------------------------------------

    async def begin(self, records: Iterable[SessionRecord]) -> None:
        """Takes the instances, hears what they know, and from then on is asked. Raises BusError."""
        for record in records:
            self.join(record)
        if self.wishing is not None:
            self.group.macros.members.resumed(self.wishing.before, time.monotonic())
        self._note_obedience()
        try:
            async with asyncio.timeout(REBUILD_S):
                await self._all_obey.wait()
        except TimeoutError:
            late = sorted([session for session in self._steps if session not in self._obeying])
            log.warning("macro.rebuilt_in_part", model=self.model, late=late, effect="they join when they answer")
        self._subscription = await self._bus.subscribe(ADMISSION.of_model(self.model), self.on_admission)
        await self._bus.barrier()
        metrics.LEADS.labels(self.model).set(1)
        metrics.TERMS.labels(self.model).inc()
        log.info("macro.leads", model=self.model, epoch=self.epoch, instances=len(self._steps))

    async def end(self) -> None:
        """Is asked no more. Who waits asks again by itself, and finds the next leader."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        metrics.LEADS.labels(self.model).set(0)
        log.info("macro.leads_no_more", model=self.model, epoch=self.epoch)

    # -- instances -----------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> set[str]:
        """Instances of the group."""
        return set(self._steps)

    def join(self, record: SessionRecord) -> None:
        """A session that serves the model."""
        steps = self._steps[record.session] = InstanceSteps(record.metadata)
        self.asleep.discard(record.session)
        self.handle(Joined(record.session, record.metadata.kv_tokens_max, steps.predictor))
        metrics.INSTANCES.labels(self.model).set(len(self._steps))

    def leave(self, session: str) -> None:
        """It serves no more, or drains."""
        self._steps.pop(session, None)
        self.asleep.discard(session)
        self._obeying.discard(session)
        self._heard_epochs.pop(session, None)
        self.windows.forget(session)
        self.handle(Gone(session))
        metrics.INSTANCES.labels(self.model).set(len(self._steps))

    def slept(self, session: str) -> None:
        """Its engine sleeps; known before, or not."""
        self.leave(session)
        self.asleep.add(session)
        self.handle(Slept(session))

    def on_report(self, report: InstanceReport) -> None:
        """`instance.<session>`, of one of our instances."""
        steps = self._steps.get(report.session)
        if steps is None:
            return
        steps.hear(report)
        self._note_epoch(report.session, report.epoch)
        self.windows.note(report, time.monotonic())
        self.handle(Reported(report))

    def _note_epoch(self, session: str, epoch: int) -> None:
        self._heard_epochs[session] = max(epoch, self._heard_epochs.get(session, 0))

    def _note_obedience(self) -> None:
        if all(session in self._obeying for session in self._steps):
            self._all_obey.set()

    def look(self) -> None:
        """Now and then: what has to be said again."""
        if self.wishing is not None and self._subscription is not None:
            self.wishing.look(self._held, time.monotonic())

    # -- asks ----------------------------------------------------------------------------------------------------

    def on_admission(self, message: Message) -> None:
        """`admission.<model>`: asks of one ingress that came together."""
        if not self._held():  # Another may lead by now: it answers, or nobody does, and ingresses know what to do.
            return
        began_s = time.monotonic()
        try:
            request = decode(AdmissionRequest, message.data)
        except MalformedMessage as error:
            log.warning("admission.malformed", model=self.model, error=str(error))
            return
        for request_id in request.withdrawn:
            self._waiting.pop(request_id, None)
            self._obey(self.group.handle(Withdrawn(request_id), began_s))
        if message.reply:
            for spent in request.spent:
                self._on_spent(spent, message.reply, began_s)
            for ask in request.asks:
                self._on_ask(ask, message.reply, began_s)
        self._flush()
        metrics.DECISION.of(self.model).observe(time.monotonic() - began_s)

    def _on_ask(self, ask: AdmissionAsk, reply: str, now_s: float) -> None:
        if problem := ask_problem(ask):
            self._answer(AdmissionAnswer(ask.request_id, Decision.REFUSE, reason=problem), reply, final=True)
            return
        if not self._obeying or (ask.excluded and self._obeying <= set(ask.excluded)):
            self._answer(AdmissionAnswer(ask.request_id, Decision.UNKNOWN), reply, final=True)
            return
        self._note_name(ask.request_id)
        self._obey(self.group.handle(Asked(ask, reply), now_s))

    def _on_spent(self, spent: UsedGrant, reply: str, now_s: float) -> None:
        """A place granted in advance was used."""
        if not ask_problem(spent.ask):
            metrics.ANSWERS.of(self.model, "granted").add()
            self._note_name(spent.ask.request_id)
            self._obey(self.group.handle(SpentBy(spent.ask, spent.session, reply), now_s))

    def _note_name(self, request_id: str) -> None:
        name, tilde, _ = request_id.rpartition("~")
        if tilde and name:
            self._names[name] = request_id
            if len(self._names) > NAMES_MAX:
                self._names.popitem(last=False)

    def on_unheard(self, number: int) -> None:
        """The server's word that nobody heard our answer of that number: its ingress has gone, and all it asked for."""
        request_ids = self._sent.pop(number, None)
        if request_ids is None:
            return
        metrics.UNHEARD.inc()
        gone = {self._waiting[one] for one in request_ids if one in self._waiting}
        request_ids += [one for one, reply in self._waiting.items() if reply in gone]
        for request_id in dict.fromkeys(request_ids):
            self._waiting.pop(request_id, None)
            self.handle(Withdrawn(request_id))

    # -- events and effects --------------------------------------------------------------------------------------

    def handle(self, event: GroupEvent) -> None:
        """One event, and all that follows."""
        if not self._ended:
            self._obey(self.group.handle(event, time.monotonic()))
            self._flush()

    def _obey(self, effects: Iterable[GroupEffect]) -> None:
        for effect in effects:
            match effect:
                case Answer(answer, to, final):
                    self._answer(answer, str(to), final=final)
                case Granted(grants, to):
                    self._to(str(to)).grants.extend(grants)
                case Own(session, owner):
                    self._spawn(self._own(session, owner))
                case Take(session, take):
                    if session not in self._taking:
                        self._spawn(self._take(session, take))
                case WakeAt(at_s):
                    self._wake_at(at_s)
                case Scale(change, why):
                    metrics.SCALE.of(self.model, f"{change:+d}").add()
                    log.info("macro.scale", model=self.model, change=change, why=why)
                    if self.wishing is not None:
                        self.wishing.scaled(self.group.macros.members, change, why)
                        self.look()
                case Drain(session, _, deadline_s):
                    if self._sleeps and session not in self._sleepless:
                        self._spawn(self._put_to_sleep(session, deadline_s))
                    else:
                        self._drain(session, deadline_s)
                case Sleep():
                    pass  # It was asked for in place of the drain.
                case Wake(session):
                    self._spawn(self._wake_up(session))
                case _:
                    assert_never(effect)

    def _answer(self, answer: AdmissionAnswer, reply: str, *, final: bool) -> None:
        metrics.ANSWERS.of(self.model, answer.decision).add()
        if final:
            self._waiting.pop(answer.request_id, None)
        else:
            self._waiting[answer.request_id] = reply
        self._to(reply).answers.append(answer)
        if answer.decision in (Decision.REFUSE, Decision.BEST_EFFORT):
            self._say(answer)

    def _to(self, reply: str) -> AdmissionAnswers:
        """What an ingress will be told."""
        return self._to_send.setdefault(reply, AdmissionAnswers([], []))

    def _say(self, answer: AdmissionAnswer) -> None:
        now = time.monotonic()
        if now - self._said_at_s >= SAID_EVERY_S:
            self._said_at_s = now
            facts = {"request_id": answer.request_id, "decision": str(answer.decision), "reason": answer.reason}
            log.info("admission.decided", model=self.model, session=answer.session, **facts)

    def _flush(self) -> None:
        """What was decided in one go leaves as one message an ingress."""
        if not self._to_send:
            return
        to_send, self._to_send = self._to_send, {}
        metrics.WAITING.labels(self.model).set(len(self._waiting))
        for reply, answers in to_send.items():
            self._sent_number += 1
            self._sent[self._sent_number] = [answer.request_id for answer in answers.answers]
            if len(self._sent) > SENT_MAX:
                self._sent.popitem(last=False)
            unheard = f"{self._unheard_inbox}.{self._sent_number}"
            try:
                self._bus.publish(reply, encode(answers), unheard, at_once=True)
            except BusError as error:
                log.warning("admission.not_answered", model=self.model, error=str(error))

    def _drain(self, session: str, deadline_s: float) -> None:
        """It ends what it has by then, and hands over what it has not; its record says so, and that it has left."""
        log.info("macro.drain", model=self.model, session=session, within_s=deadline_s)
        try:
            self._bus.publish(
                DRAIN.of(session), encode(DrainRequest("its macro-scheduler needs it no more", deadline_s))
            )
        except BusError as error:
            log.warning("macro.not_drained", model=self.model, session=session, error=str(error))

    def _wake_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = max(0.0, at_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._held():
            self.handle(Tick())
        else:
            self._wake_at(time.monotonic() + 0.1)

    # -- what takes time -----------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _own(self, session: str, owner: str) -> None:
        """Until it is ours, has left, is wanted for another owner, or is a later leader's."""
        if self._owning.get(session) == owner:
            return
        self._owning[session] = owner
        try:
            while session in self._steps and self._owning.get(session) == owner:
                heard = self._heard_epochs.get(session, 0)
                event = await self._owners.claim(session, owner, self.epoch, heard) if self._held() else None
                if isinstance(event, Owned):
                    self.handle(event)
                    return
                await asyncio.sleep(CLAIM_AGAIN_S)
        except Deposed as error:
            self._deposed(str(error))
        finally:
            if self._owning.get(session) == owner:
                del self._owning[session]

    async def _take(self, session: str, take: TakeInstance) -> None:
        """First, and as the beat."""
        if not self._held():
            return
        self._taking.add(session)
        try:
            message = await self._bus.request(TAKE.of(session), encode(take), TAKE_TIMEOUT_S)
            state = decode(InstanceState, message.data)
        except (BusError, MalformedMessage) as error:
            metrics.TAKES.of(self.model, "no answer").add()
            log.debug("take.no_answer", session=session, error=str(error))
            return
        finally:
            self._taking.discard(session)
        metrics.TAKES.of(self.model, "accepted" if state.accepted else "refused").add()
        self._note_epoch(session, state.report.epoch)
        if session in self._steps:
            self._steps[session].hear(state.report)
            self.handle(TookOver(state))
            if state.accepted:
                self._obeying.add(session)
                self._note_obedience()
            else:  # It obeys a higher epoch than KV knew of.
                self._obeying.discard(session)
                self._spawn(self._own(session, take.owner))

    async def _put_to_sleep(self, session: str, within_s: float) -> None:
        """Or to its end, where that cannot be."""
        if why := await self._sleep_word(session, SleepRequest(True, within_s, "its macro-scheduler needs it no more")):
            log.info("macro.sleepless", model=self.model, session=session, why=why, effect="it ends instead")
            self._sleepless.add(session)
            self._drain(session, within_s)
        else:
            log.info("macro.put_to_sleep", model=self.model, session=session, within_s=within_s)

    async def _wake_up(self, session: str) -> None:
        why = await self._sleep_word(session, SleepRequest(False, reason="its macro-scheduler needs it again"))
        log.info("macro.woken", model=self.model, session=session, problem=why)

    async def _sleep_word(self, session: str, request: SleepRequest) -> str:
        """Why it does not; empty: it does."""
        try:
            message = await self._bus.request(SLEEP.of(session), encode(request), TAKE_TIMEOUT_S)
            answer = decode(SleepAnswer, message.data)
        except (BusError, MalformedMessage) as error:
            return str(error)
        return "" if answer.accepted else answer.why or "it says no"

    # -- words ---------------------------------------------------------------------------------------------------

    def explain(self, request_id: str) -> list[str]:
        """What was decided on a request, and why; empty = it is not known here."""
        return self.group.explain(request_id) or self.group.explain(self._names.get(request_id, request_id))

    def picture(self) -> list[str]:
        """How the group stands, and its windows."""
        obey = f"{len(self._obeying)} of {len(self._steps)} instances obey"
        head = f"{self.model}: {obey}, epoch {self.epoch}, {len(self._waiting)} wait"
        if self.asleep:
            head += f", {len(self.asleep)} sleep"
        if self.wishing is not None:
            head += f", wants {self.wishing.wanted}"
        names = {session: session[-12:] for session in sorted(self._steps)}
        return [head, *self.group.explain(""), *self.windows.picture(time.monotonic(), names)]
