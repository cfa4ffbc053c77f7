"""The phase gate's shell: feeds it with what happens here, and does what it says.

Until somebody takes the instance (`take.<session>`) there is no gate, and requests go straight to the engine. From then
on the gate hears of each request, of first tokens, and of progress as often as reports are made: never once a token.
What the engine says of its steps comes by `engine/phase_socket.py`, where it can.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import structlog
from prometheus_client import Gauge

from serai.contracts.admission import GateMode, InstanceState, TakeInstance
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.inference import FailureCode
from serai.contracts.subjects import INSTANCE, TAKE
from serai.runtime.bus import Bus, BusDisconnected, Message, Subscription
from serai.runtime.metrics import Counts
from serai.worker_agent.desk import Desk
from serai.worker_agent.engine.phase_socket import MIXED, PhaseSocket
from serai.worker_agent.engine_metrics import EngineLoad
from serai.worker_agent.engine_pulse import EnginePulse, EngineStep
from serai.worker_agent.engine_reports import EngineReports
from serai.worker_agent.exchange import Exchange
from serai.worker_agent.instance_owner import BEAT_S_MAX, BEATS_MISSED, InstanceOwner, nonsense_in
from serai.worker_agent.phase_gate import (
    Ended,
    GateEffect,
    GateEvent,
    GateSettings,
    Offered,
    PhaseGate,
    Position,
    RefuseLease,
    Release,
    Taken,
    Tick,
    Turn,
    WakeAt,
)
from serai.worker_agent.prefill_rate import PrefillRate
from serai.worker_agent.request_text import BYTES_PER_TOKEN
from serai.worker_agent.slack import tokens_said

log = structlog.get_logger()

REPORT_EVERY_S = 0.03
"""While something changes; and so often progress is looked at."""
REPORT_AT_LEAST_EVERY_S = 1.0
ON_ITS_WAY_S = 0.02
"""A request that was posted so short a time ago may not be among what the engine tells of."""
DIALLED_WITHIN_S = 3.0
ORDINARY_TOKENS_MAX = 512
"""Prompt tokens of a step beside decodes, while nothing is held back: so that no stream stands still for long."""

HELD = Gauge("serai_agent_gate_held", "Requests that the phase gate holds back")
TAKEN = Gauge("serai_agent_gate_taken", "1 while a macro-scheduler owns this instance")
REFUSED = Counts("serai_agent_leases_refused", "Requests whose lease this instance refused", [])


@dataclass(slots=True)
class _Request:
    """One that is here whole."""

    exchange: Exchange
    tokens: int
    """Of its prompt, as far as is known."""
    released_at_s: float | None = None
    first_due_s: float = 0.0
    """When its first token is predicted; for answers in one piece, which do not show it."""
    answered: bool = False
    """Its first token is there."""
    events: int = 0
    """Of its stream, as of the last look."""

    @property
    def held(self) -> bool:
        return self.released_at_s is None


class GateShell:
    """One session's. `start`, then let `watching` run; the desk asks it (`Gatekeeper`) from the first take on."""

    def __init__(
        self,
        bus: Bus,
        session: str,
        desk: Desk,
        reports: EngineReports,
        *,
        load_every_s: float | None,
        phases: PhaseSocket | None,
        prefill_s_per_token: float,
        kv_tokens_total: int,
        open_gate: Position = Position.MIXED,
    ) -> None:
        """`load_every_s`: how often `/v1/loads` may be asked, None = never. `phases`: where the engine tells of its
        steps, if it does. `prefill_s_per_token`: what is taken for true until the engine has shown.
        `open_gate`: what an engine that can be told does while nothing is held back."""
        self._bus = bus
        self._session = session
        self._desk = desk
        self._reports = reports
        self._load_every_s = load_every_s
        self._kv_tokens_total = kv_tokens_total
        self._phases = phases
        self._open_gate = open_gate
        self._rate = PrefillRate(prefill_s_per_token)
        self._pulse = EnginePulse(self._rate, told=False)
        self._gate: PhaseGate | None = None
        self._requests: dict[str, _Request] = {}
        self._owner = InstanceOwner()
        self._taken = asyncio.Event()
        self._changed = asyncio.Event()
        self._wake: asyncio.TimerHandle | None = None
        self._reported_at_s = float("-inf")
        self._load_at_s = float("-inf")
        self._drains = False

    async def start(self) -> list[Subscription]:
        """Listens to whoever takes the instance, and to the engine's schedulers."""
        if self._phases is not None:
            self._phases.open(self._stepped)
            await self._until_dialled(self._phases)
        return [await self._bus.subscribe(TAKE.of(self._session), self.on_take)]

    async def _until_dialled(self, phases: PhaseSocket) -> None:
        """The engine's schedulers try twice a second; what nobody does within seconds nobody will."""
        try:
            async with asyncio.timeout(DIALLED_WITHIN_S):
                await phases.dialled.wait()
        except TimeoutError:
            log.warning("engine.phases_untold", effect="the gate alone orders its work")

    async def watching(self) -> None:
        """Until it is cancelled: progress for the gate, reports for its owner."""
        async with asyncio.TaskGroup() as tasks:
            if self._load_every_s is not None:
                tasks.create_task(self._asking_load(self._load_every_s))
            while True:
                await self._taken.wait()
                self.look()
                await self._pause()

    def close(self) -> None:
        """The engine serves by itself from now on."""
        self._detach()
        if self._phases is not None:
            self._phases.close()

    # -- who owns us ---------------------------------------------------------------------------------------------

    @property
    def obeyed(self) -> tuple[str, int]:
        """Its owner and the epoch; empty and 0 for none."""
        return self._owner.name, self._owner.epoch

    def on_take(self, message: Message) -> None:
        """`TakeInstance`: a new owner, or the present one's heartbeat; answered with all that is known here."""
        try:
            take = decode(TakeInstance, message.data)
        except MalformedMessage as error:
            log.warning("take.malformed", error=str(error))
            return
        if self._drains:
            return  # Whoever asks sees in our record that we drain.
        if nonsense := nonsense_in(take):
            log.warning("take.refused", owner=take.owner, why=nonsense)
            return
        gate = self._attached()
        known, now = self._owner.is_known(take), time.monotonic()
        accepted = self._owner.heard(take, now)
        if accepted:
            if not known:
                log.info("take.accepted", owner=take.owner, epoch=take.epoch, mode=str(take.mode))
            TAKEN.set(1)
            self._taken.set()
            self._feed(Taken(take.owner, take.epoch, take.mode, take.low_share, take.beat_s))
        if message.reply:
            # A beat needs no list: 256 requests are 60 KB.
            state = InstanceState(gate.report(now), [], True) if known else gate.state(now, accepted)
            self._publish(message.reply, encode(state))

    def _attached(self) -> PhaseGate:
        """The gate; made when it is first wanted, and told what is here already."""
        if self._gate is not None:
            return self._gate
        told = self._phases is not None and self._phases.peers == 1
        settings = GateSettings(
            session=self._session,
            kv_tokens_total=self._kv_tokens_total,
            waiting_max=self._desk.concurrency_max,
            tells_steps=True,
            cuts_prompts=told,
            ordinary_position=self._open_gate,
            ordinary_tokens_max=ORDINARY_TOKENS_MAX if self._open_gate is Position.MIXED else None,
        )
        self._pulse = EnginePulse(self._rate, told=told)
        gate = self._gate = PhaseGate(settings, self._rate.predict_s)
        self._desk.gate = self
        for exchange in self._desk.whole():
            self._adopt(exchange)
        return gate

    def _adopt(self, exchange: Exchange) -> None:
        """One that the engine had before there was a gate."""
        key, request = self._enter(exchange)
        request.released_at_s = exchange.posted_at_s or time.monotonic()
        self._pulse.released(key, request.tokens, request.released_at_s)
        self._feed(Offered(key, request.tokens, None))
        if exchange.first_data_at_s and exchange.request.stream:
            self._first(key, request, shows=True)

    def _lost(self) -> None:
        """The owner has gone: continuous batching, by our own lights."""
        log.warning("take.owner_silent", owner=self._owner.name, beats=BEATS_MISSED, effect="admits by itself")
        self._feed(Taken(self._owner.name, self._owner.epoch, GateMode.ORDINARY, 0.1, BEAT_S_MAX))
        self._report()
        TAKEN.set(0)
        self._taken.clear()

    # -- what the desk tells -------------------------------------------------------------------------------------

    def offered(self, exchange: Exchange) -> None:
        """Its body is here, whole."""
        key, request = self._enter(exchange)
        self._feed(Offered(key, request.tokens, exchange.request.lease))

    def ended(self, exchange: Exchange) -> None:
        """However that came about."""
        request = self._requests.pop(exchange.gate_key, None)
        if request is None:
            return
        steps: Sequence[GateEvent] = ()
        if not request.held:
            steps = self._pulse.ended(exchange.gate_key, unanswered=not request.answered)
        self._feed(Ended(exchange.gate_key))
        self._feed_all(steps)

    def holds(self, exchange: Exchange) -> bool:
        """Whether the engine has not been given it yet."""
        request = self._requests.get(exchange.gate_key)
        return request is not None and request.held

    @property
    def held(self) -> int:
        """How many it holds back."""
        return sum(request.held for request in self._requests.values())

    def drains(self) -> None:
        """Who waits here goes elsewhere: nothing of theirs is lost. Who came without a lease may have nowhere else to
        go, and is let through."""
        self._drains = True
        waiting = [request for request in self._requests.values() if request.held]
        self._detach()
        for request in waiting:
            if request.exchange.request.lease is None:
                self._desk.post(request.exchange)
            else:
                request.exchange.fail(FailureCode.DRAINING, "this session is draining", retry_safe=True)

    def serves_again(self) -> None:
        """From the next take on there is a gate again."""
        self._drains = False

    def _detach(self) -> None:
        self._desk.gate = None
        self._gate = None
        self._requests.clear()
        self._taken.clear()
        TAKEN.set(0)
        HELD.set(0)
        if self._wake is not None:
            self._wake.cancel()
        if self._phases is not None:
            self._phases.say(MIXED)

    def _enter(self, exchange: Exchange) -> tuple[str, _Request]:
        key = exchange.request.request_id
        if not key or key in self._requests:
            key = f"{key}#{exchange.reply}/{exchange.attempt}"
        lease = exchange.request.lease
        tokens = lease.prompt_tokens if lease is not None else 0
        request = _Request(exchange, tokens if tokens > 0 else max(1, exchange.body_bytes // BYTES_PER_TOKEN))
        exchange.gate_key = key
        exchange.on_first = self._answered
        self._requests[key] = request
        return key, request

    def _answered(self, exchange: Exchange) -> None:
        """The first bytes of its answer have come. One in one piece comes at its end, and says nothing of when its
        prefill was done."""
        request = self._requests.get(exchange.gate_key)
        if request is not None and exchange.status < 400 and exchange.request.stream:
            self._first(exchange.gate_key, request, shows=True)

    def _first(self, key: str, request: _Request, *, shows: bool) -> None:
        if not request.answered:
            request.answered = True
            self._feed_all(self._pulse.first(key, request.tokens, time.monotonic(), shows=shows))

    # -- what the gate says --------------------------------------------------------------------------------------

    def _feed(self, event: GateEvent) -> None:
        if self._gate is None:
            return
        for effect in self._gate.handle(event, time.monotonic()):
            self._obey(effect)
        self._changed.set()

    def _feed_all(self, events: Iterable[GateEvent]) -> None:
        for event in events:
            self._feed(event)

    def _obey(self, effect: GateEffect) -> None:
        match effect:
            case Release(key):
                self._release(key)
            case RefuseLease(key, why):
                if (request := self._requests.pop(key, None)) is not None:
                    REFUSED.of().add()
                    request.exchange.fail(FailureCode.LEASE_REFUSED, why, retry_safe=True)
            case Turn(position, prompt_tokens_max):
                if self._phases is not None:
                    self._phases.say(str(position), prompt_tokens_max)
            case WakeAt(at_s):
                if self._wake is not None:
                    self._wake.cancel()
                delay_s = max(0.0, at_s - time.monotonic())
                self._wake = asyncio.get_running_loop().call_later(delay_s, self._feed, Tick())
            case _:
                assert_never(effect)

    def _release(self, key: str) -> None:
        request = self._requests.get(key)
        if request is None or not request.held:
            return
        now = time.monotonic()
        before_s = [one.first_due_s for one in self._requests.values() if not one.answered]
        request.first_due_s = max(now, max(before_s, default=now)) + self._rate.predict_s(request.tokens)
        request.released_at_s = now
        self._pulse.released(key, request.tokens, now)
        self._desk.post(request.exchange)

    # -- looking, reporting --------------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Until there is something to look at, but no shorter than reports may be apart."""
        await asyncio.sleep(REPORT_EVERY_S)
        if not self._requests and not self._changed.is_set():
            try:
                async with asyncio.timeout(min(REPORT_AT_LEAST_EVERY_S, self._owner.beat_s)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def look(self) -> None:
        """Tells the gate what has changed, and its owner what the gate says then."""
        now = time.monotonic()
        if self._owner.silent(now):
            self._lost()
            return
        self._tell_load()
        self._expect_first_tokens(now)
        if self._pulse.relearnt() and self._gate is not None:
            self._gate.relearn()
        held = self.held
        works = held < len(self._requests)
        self._feed_all(self._pulse.look(self._said(), now, waits=held > 0, works=works))
        HELD.set(self.held)
        if self._changed.is_set() or now - self._reported_at_s >= REPORT_AT_LEAST_EVERY_S:
            self._report()

    def _report(self) -> None:
        if self._gate is not None:
            self._changed.clear()
            self._reported_at_s = time.monotonic()
            self._publish(INSTANCE.of(self._session), encode(self._gate.report(self._reported_at_s)))

    def _publish(self, subject: str, data: bytes) -> None:
        try:
            self._bus.publish(subject, data, at_once=True)  # It must not keep an answer back.
        except BusDisconnected:
            pass  # Reports may be lost, and a silent instance is asked again.

    def _expect_first_tokens(self, now: float) -> None:
        """Of answers in one piece, which do not show them."""
        for key, request in tuple(self._requests.items()):
            due = not request.held and not request.answered and now >= request.first_due_s
            if due and not request.exchange.request.stream:
                self._first(key, request, shows=False)

    def _said(self) -> dict[str, int]:
        """Tokens of the streams that have said something since the last look."""
        said = {}
        for key, request in self._requests.items():
            exchange = request.exchange
            if exchange.events != request.events and request.answered:
                request.events = exchange.events
                said[key] = tokens_said(exchange.events, exchange.last_data)
        return said

    # -- what the engine tells -----------------------------------------------------------------------------------

    def _stepped(self, step: EngineStep) -> None:
        now = time.monotonic()
        unseen = [
            request.tokens
            for request in self._requests.values()
            if request.released_at_s and not request.answered and now - request.released_at_s < ON_ITS_WAY_S
        ]
        self._feed_all(self._pulse.stepped(step, sum(unseen), now))

    def _tell_load(self) -> None:
        if self._reports.at_s > self._load_at_s:
            self._take_load(self._reports.load)

    def _take_load(self, load: EngineLoad) -> None:
        if load.kv_tokens_free is not None:
            self._feed_all(self._pulse.load(load.kv_tokens_free, load.kv_tokens_max or 0, load.sequences_max or 0))

    async def _asking_load(self, every_s: float) -> None:
        while True:
            await self._taken.wait()
            if self._requests and (load := await self._reports.ask_load()) is not None:
                self._load_at_s = time.monotonic()
                self._take_load(load)
            await asyncio.sleep(every_s)
