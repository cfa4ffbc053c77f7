"""Asks macro-schedulers where requests are to go, and hears what they promise: hop 2 of the policy `macro-scheduled`.

Asks of one turn of the event loop leave as one message per model; answers come to one private inbox. A scheduler that
is not well costs a request a few milliseconds at most: who is silent for `patience_s`, or is not there at all (NATS
says so at once), is not asked again for a while, and another policy decides. WAIT is an answer, too: from then on the
request waits for its place as long as its own times allow, and asks again each second, since a scheduler that has died
forgets who waits.

A scheduler that is at ease gives places in advance (`Grant`): a request that fits one goes there at once, and the
scheduler is told a little later.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAnswers,
    AdmissionAsk,
    AdmissionRequest,
    Decision,
    Grant,
    Lease,
    UsedGrant,
)
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.subjects import ADMISSION
from serai.ingress import metrics
from serai.runtime.bus import Bus, BusError, Message, Subscription

log = structlog.get_logger()

ASKS_PER_MESSAGE_MAX = 256
WAITING_MAX = 20_000
"""Asks of one model that are out at once. More is a scheduler that decides nothing: another policy does."""
AGAIN_S = 1.0
"""Who waits says so again this often."""
UNHEARD_S = 0.5
"""Who waits gives up when its scheduler answers nothing for so long after that: longer than the patience, since a
scheduler that stumbles once must not lose all that wait for it."""
ABSENT_S = 0.25
"""Nobody there: for so long it is not even asked. A new leader is found that soon."""
SILENT_FIRST_S, SILENT_MAX_S = 0.1, 2.0
"""A silent one is left alone for so long, doubled each time in a row: else each request would pay the patience."""
SPENT_WITHIN_S = 0.1
"""So soon a scheduler hears of the places that were used; at once when as many are gone as are left."""
GRANTS_MAX = 256
"""Of one message."""
WAITED_SHARE_MAX = 0.1
"""Of its target: who has waited longer asks, for a place that was given in advance is for one that comes now."""
POLL_S = 0.001
"""When the patience is over, what lies in the socket is read before it is judged."""


class Outcome(Enum):
    """Why nobody has decided."""

    ABSENT = "absent"
    SILENT = "silent"
    UNKNOWN = "unknown"
    """None of its instances obeys it yet, or none may have the request: the ingress may know of others."""
    FULL = "full"
    BUS_LOST = "bus lost"
    TIMED_OUT = "timed out"
    """It said WAIT, and nothing after that while the request had time."""
    STOPPED = "stopped"
    """This process ends."""


class Ask(NamedTuple):
    """What is asked, and until when an answer is of use."""

    model: str
    ask: AdmissionAsk
    until_s: float
    """On the clock of `time.monotonic`."""


class _Waiting:
    """One ask that is out."""

    __slots__ = ("ask", "asked_at_s", "future", "sent_at_s")

    def __init__(self, ask: Ask, future: asyncio.Future[AdmissionAnswer | Outcome], sent_at_s: float) -> None:
        self.ask = ask
        self.future = future
        self.asked_at_s = self.sent_at_s = sent_at_s


class _Model:
    """What is out and what is known of one model's scheduler."""

    __slots__ = (
        "absent_until_s",
        "asked",
        "grants",
        "heard_at_s",
        "number",
        "silences",
        "spent",
        "subject",
        "to_send",
        "told_to_wait",
        "withdrawn",
    )

    def __init__(self, model: str, number: int) -> None:
        self.subject = ADMISSION.of_model(model)
        self.number = number
        self.asked: dict[str, _Waiting] = {}
        """Not answered yet, the oldest first."""
        self.told_to_wait: dict[str, _Waiting] = {}
        self.to_send: list[AdmissionAsk] = []
        self.withdrawn: list[str] = []
        self.grants: deque[tuple[Grant, float]] = deque()
        """Places given in advance, and until when each is good."""
        self.spent: list[UsedGrant] = []
        """Of these, and not told yet."""
        self.absent_until_s = 0.0
        self.heard_at_s = 0.0
        self.silences = 0

    def take(self, request_id: str) -> _Waiting | None:
        found = self.asked.pop(request_id, None)
        return found if found is not None else self.told_to_wait.pop(request_id, None)


class AdmissionClient:
    """One per ingress. `start` before the first ask; `look` is its only timer."""

    def __init__(self, bus: Bus, patience_s: float, clock: Callable[[], float] | None = None) -> None:
        self._bus = bus
        self._patience_s = patience_s
        self._clock = clock or time.monotonic
        self._inbox = f"{bus.inbox_prefix}.admission"
        self._models: dict[str, _Model] = {}
        self._by_number: dict[int, _Model] = {}
        self._flush_scheduled = False
        self._looking = False
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    async def start(self) -> Subscription:
        """Subscribes to the inbox; the caller puts a barrier behind it."""
        self._bus.on_disconnect(self._on_disconnect)
        return await self._bus.subscribe(f"{self._inbox}.*", self.on_answers)

    def unique(self, request_id: str) -> str:
        """`request_id`, which a client has made up, so that no other ask has it."""
        return f"{request_id}~{self._prefix}{next(self._numbers):x}"

    @property
    def waiting(self) -> int:
        """Asks that are out now."""
        return sum([len(model.asked) + len(model.told_to_wait) for model in self._models.values()])

    async def ask(self, ask: Ask) -> AdmissionAnswer | Outcome:
        """The scheduler's final word, or why there is none. Who is cancelled here withdraws."""
        now = self._clock()
        model = self._models.get(ask.model) or self._model(ask.model)
        if now < model.absent_until_s:
            return Outcome.SILENT if model.silences else Outcome.ABSENT
        if len(model.asked) + len(model.told_to_wait) >= WAITING_MAX:
            return Outcome.FULL
        request_id = ask.ask.request_id
        waiting = _Waiting(ask, asyncio.get_running_loop().create_future(), now)
        model.asked[request_id] = waiting
        self._send(model, ask.ask)
        try:
            return await waiting.future
        except asyncio.CancelledError:
            model.take(request_id)
            self._withdraw(model, request_id)
            raise

    def spend(self, model_name: str, ask: AdmissionAsk) -> AdmissionAnswer | None:
        """A place for it that was given in advance; None: it has to ask."""
        model = self._models.get(model_name)
        if model is None or not model.grants:
            return None
        now = self._clock()
        while model.grants and model.grants[0][1] <= now:
            model.grants.popleft()
        if not model.grants or not _suits(model.grants[0][0], ask):
            return None
        grant, _ = model.grants.popleft()
        model.spent.append(UsedGrant(ask, grant.session))
        if len(model.spent) >= len(model.grants):
            self._flush_soon()
        elif len(model.spent) == 1:
            asyncio.get_running_loop().call_later(SPENT_WITHIN_S, self._flush_soon)
        return AdmissionAnswer(ask.request_id, Decision.ADMIT, grant.session, _lease(grant, ask))

    def forget_grants(self, model_name: str, session: str) -> None:
        """That session did not take a request that came by one of them."""
        model = self._models.get(model_name)
        if model is not None:
            model.grants = deque([one for one in model.grants if one[0].session != session])

    def give_back(self, model: str, request_id: str) -> None:
        """The lease that this ask was granted will not be used."""
        self._withdraw(self._models.get(model) or self._model(model), request_id)

    def stop(self) -> None:
        """Who waits is told: this process ends before there is a place."""
        for model in self._models.values():
            for request_id in (*model.asked, *model.told_to_wait):
                self._withdraw(model, request_id)
            self._fail_all(model, Outcome.STOPPED)

    def retain(self, models: Sequence[str] | set[str]) -> None:
        """Forgets all models but these, where nothing is out. To be called now and then."""
        for name in [name for name in self._models if name not in models]:
            model = self._models[name]
            if not model.asked and not model.told_to_wait:
                del self._models[name], self._by_number[model.number]

    # -- out -----------------------------------------------------------------------------------------------------

    def _model(self, name: str) -> _Model:
        """Only of models that exist: who asks has sessions of it."""
        made = _Model(name, next(self._numbers))
        self._models[name] = self._by_number[made.number] = made
        return made

    def _send(self, model: _Model, ask: AdmissionAsk) -> None:
        model.to_send.append(ask)
        self._flush_soon()

    def _withdraw(self, model: _Model, request_id: str) -> None:
        model.withdrawn.append(request_id)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        for model in self._models.values():
            if model.to_send or model.withdrawn or model.spent:
                self._publish(model)
        if not self._looking and any(model.asked or model.told_to_wait for model in self._models.values()):
            self._look_in(self._patience_s)

    def _publish(self, model: _Model) -> None:
        asks, withdrawn, spent = model.to_send, model.withdrawn, model.spent
        model.to_send, model.withdrawn, model.spent = [], [], []
        reply = f"{self._inbox}.{model.number}"
        try:
            for at in range(0, max(len(asks), len(withdrawn), len(spent)), ASKS_PER_MESSAGE_MAX):
                upto = at + ASKS_PER_MESSAGE_MAX
                request = encode(AdmissionRequest(asks[at:upto], withdrawn[at:upto], spent[at:upto]))
                self._bus.publish(model.subject, request, reply, at_once=True)
        except BusError:
            self._fail_all(model, Outcome.BUS_LOST)

    # -- in ------------------------------------------------------------------------------------------------------

    def on_answers(self, message: Message) -> None:
        """Answers of one scheduler; or the server's word that nobody heard the question."""
        number = message.subject.rpartition(".")[2]
        model = self._by_number.get(int(number)) if number.isdigit() else None
        if model is None:
            return
        if message.no_responders:
            model.absent_until_s, model.silences = self._clock() + ABSENT_S, 0
            self._fail_all(model, Outcome.ABSENT)
            return
        try:
            said = decode(AdmissionAnswers, message.data)
        except MalformedMessage as error:
            log.warning("admission.malformed", error=str(error), effect="taken for silence")
            return
        model.absent_until_s, model.silences, model.heard_at_s = 0.0, 0, self._clock()
        for answer in said.answers:
            self._answered(model, answer)
        model.grants.extend([(grant, model.heard_at_s + grant.within_s) for grant in said.grants[:GRANTS_MAX]])

    def _answered(self, model: _Model, answer: AdmissionAnswer) -> None:
        waiting = model.take(answer.request_id)
        if waiting is None or waiting.future.done():
            if answer.lease is not None:  # Too late: another policy has decided.
                self._withdraw(model, answer.request_id)
        elif answer.decision is Decision.WAIT:
            model.told_to_wait[answer.request_id] = waiting
        elif answer.decision is Decision.UNKNOWN:
            waiting.future.set_result(Outcome.UNKNOWN)
        elif answer.decision is not Decision.REFUSE and (answer.lease is None or not answer.session):
            log.warning("admission.malformed", error=f"{answer.decision} without session or lease")
            waiting.future.set_result(Outcome.UNKNOWN)
        else:
            waiting.future.set_result(answer)

    def _on_disconnect(self) -> None:
        for model in self._models.values():
            self._fail_all(model, Outcome.BUS_LOST)

    def _fail_all(self, model: _Model, outcome: Outcome) -> None:
        for out in (model.asked, model.told_to_wait):
            for waiting in out.values():
                if not waiting.future.done():
                    waiting.future.set_result(outcome)
            out.clear()

    # -- time ----------------------------------------------------------------------------------------------------

    def _look_in(self, seconds: float) -> None:
        self._looking = True
        loop = asyncio.get_running_loop()
        # Twice: between the two, answers that came while this process was busy are read.
        loop.call_later(seconds, loop.call_later, POLL_S, self._look)

    def _look(self) -> None:
        self._looking = False
        now = self._clock()
        for model in self._models.values():
            if model.asked:
                self._judge_silence(model, now)
            if model.told_to_wait:
                self._look_after_waiting(model, now)
        if any(model.asked for model in self._models.values()):
            self._look_in(self._patience_s)
        elif any(model.told_to_wait for model in self._models.values()):
            self._look_in(min(AGAIN_S / 10, self._next_end_s(now)))

    def _next_end_s(self, now: float) -> float:
        """Until the first of those that wait has no more time."""
        ends = [w.ask.until_s for model in self._models.values() for w in model.told_to_wait.values()]
        return max(POLL_S, min(ends) - now)

    def _judge_silence(self, model: _Model, now: float) -> None:
        if now - next(iter(model.asked.values())).sent_at_s < self._patience_s:
            return
        model.silences += 1
        model.absent_until_s = now + min(SILENT_MAX_S, SILENT_FIRST_S * 2 ** min(model.silences - 1, 16))
        log.warning("admission.silent", subject=model.subject, patience_s=self._patience_s, asked=len(model.asked))
        self._give_up(model, model.asked, Outcome.SILENT)

    def _look_after_waiting(self, model: _Model, now: float) -> None:
        unheard = now - model.heard_at_s > AGAIN_S + UNHEARD_S
        late = {name: one for name, one in model.told_to_wait.items() if unheard or now >= one.ask.until_s}
        for request_id in late:
            del model.told_to_wait[request_id]
        self._give_up(model, late, Outcome.SILENT if unheard else Outcome.TIMED_OUT)
        for waiting in model.told_to_wait.values():
            if now - waiting.sent_at_s >= AGAIN_S:
                waiting.sent_at_s = now
                self._send(model, _later(waiting.ask.ask, waiting.ask.ask.waited_s + now - waiting.asked_at_s))

    def _give_up(self, model: _Model, asks: dict[str, _Waiting], outcome: Outcome) -> None:
        """It is told so, and may hear that later."""
        for request_id, waiting in asks.items():
            self._withdraw(model, request_id)
            if not waiting.future.done():
                waiting.future.set_result(outcome)
        asks.clear()


def _later(ask: AdmissionAsk, waited_s: float) -> AdmissionAsk:
    return replace(ask, waited_s=waited_s)


def _suits(grant: Grant, ask: AdmissionAsk) -> bool:
    """Whether the place is one for such a request."""
    ttft_s = grant.slo_ttft_s if ask.slo_ttft_s is None else ask.slo_ttft_s
    return (
        ask.prompt_tokens <= grant.prompt_tokens_max
        and ttft_s >= grant.slo_ttft_s
        and (ask.slo_tpot_s is None or ask.slo_tpot_s >= grant.slo_tpot_s)
        and ask.waited_s <= WAITED_SHARE_MAX * ttft_s
    )


def _lease(grant: Grant, ask: AdmissionAsk) -> Lease:
    left_s = (grant.slo_ttft_s if ask.slo_ttft_s is None else ask.slo_ttft_s) - ask.waited_s
    return Lease(
        epoch=grant.epoch,
        sequence=0,
        prefill_s=grant.prefill_s,
        kv_tokens=grant.prompt_tokens_max,
        start_within_s=left_s - grant.prefill_s,
        slo_ttft_s=left_s,
        slo_tpot_s=grant.slo_tpot_s if ask.slo_tpot_s is None else ask.slo_tpot_s,
        prompt_tokens=ask.prompt_tokens,
        waited_s=ask.waited_s,
    )


def outcome_name(outcome: AdmissionAnswer | Outcome) -> str:
    """For metrics and traces."""
    return str(outcome.decision) if isinstance(outcome, AdmissionAnswer) else outcome.value


def count(model: str, outcome: AdmissionAnswer | Outcome, took_s: float) -> None:
    """What became of an ask."""
    metrics.ADMISSIONS.of(model, outcome_name(outcome)).add()
    metrics.ADMISSION_TIME.of(model).observe(took_s)
