"""The phase gate's shell: feeds it with what happens here, and does what it says.

Until somebody takes the instance (`take.<session>`) there is no gate, and requests go straight to the engine. From then
on the gate hears of each request, of first tokens, and of progress as often as reports are made: never once a token.
What the engine says of its steps comes by `engine/phase_socket.py`, where it can.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import assert_never

import structlog
from prometheus_client import Gauge

from serai.contracts.admission import GateMode, TakeInstance
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.inference import FailureCode
from serai.contracts.subjects import INSTANCE, TAKE
from serai.runtime.bus import Bus, BusDisconnected, Message, Subscription
from serai.runtime.metrics import Counts
from serai.worker_agent.desk import Desk
from serai.worker_agent.engine.phase_socket import MIXED, EngineStep, PhaseSocket
from serai.worker_agent.engine_reports import EngineReports
from serai.worker_agent.exchange import Exchange
from serai.worker_agent.phase_gate import (
    Ended,
    EngineSays,
    FirstToken,
    GateEffect,
    GateEvent,
    GateSettings,
    Offered,
    PhaseGate,
    RefuseLease,
    Release,
    Said,
    Stepped,
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
BEATS_MISSED = 2
"""An instance that heard nothing of its owner for so many beats is its own."""
BEAT_S_MAX = 60.0
ON_ITS_WAY_S = 0.02
"""A request that was posted so short a time ago may not be among what the engine tells of."""
DIALLED_WITHIN_S = 3.0
STEP_LOST_S = 1.0
"""An engine that tells its steps has told none for so long: it is at rest, or its word was lost."""

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
    first_at_s: float | None = None
    said: int = 0
    events: int = 0


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
    ) -> None:
        """`load_every_s`: how often `/v1/loads` may be asked, None = never. `phases`: where the engine tells of its
        steps, if it does. `prefill_s_per_token`: what is taken for true until the engine has shown."""
        self._bus = bus
        self._session = session
        self._desk = desk
        self._reports = reports
        self._load_every_s = load_every_s
        self._rate = PrefillRate(prefill_s_per_token)
        self._kv_tokens_total = kv_tokens_total
        self._socket = phases
        self._gate: PhaseGate | None = None
        self._tells_steps = False
        self._requests: dict[str, _Request] = {}
        self._owner, self._epoch, self._beat_s = "", 0, BEAT_S_MAX
        self._heard_at_s = float("-inf")
        self._taken = asyncio.Event()
        self._changed = asyncio.Event()
        self._wake: asyncio.TimerHandle | None = None
        self._reported_at_s = float("-inf")
        self._told_load: tuple[int, int] | None = None
        self._load_at_s = float("-inf")
        self._step: EngineStep | None = None
        self._step_at_s = 0.0
        self._s_per_output_token = 0.0
        self._drains = False

    async def start(self) -> list[Subscription]:
        """Listens to whoever takes the instance, and to the engine's schedulers."""
        if self._socket is not None:
            self._socket.open(self._stepped)
            await self._until_dialled(self._socket)
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
                self._look()
                await self._pause()

    def close(self) -> None:
        """The engine serves by itself from now on."""
        self._detach()
        if self._socket is not None:
            self._socket.close()

    # -- who owns us ---------------------------------------------------------------------------------------------

    def on_take(self, message: Message) -> None:
        """`TakeInstance`: a new owner, or the present one's heartbeat; answered with all that is known here."""
        try:
            take = decode(TakeInstance, message.data)
        except MalformedMessage as error:
            log.warning("take.malformed", error=str(error))
            return
        if self._drains:
            return  # Whoever asks sees in our record that we drain.
        if nonsense := _nonsense(take):
            log.warning("take.refused", owner=take.owner, why=nonsense)
            return
        gate = self._attached()
        accepted = take.epoch > self._epoch or (take.epoch == self._epoch and take.owner == self._owner)
        if accepted:
            self._accept(take)
        if message.reply:
            self._publish(message.reply, encode(gate.state(time.monotonic(), accepted)))

    def _accept(self, take: TakeInstance) -> None:
        if (take.owner, take.epoch) != (self._owner, self._epoch):
            log.info("take.accepted", owner=take.owner, epoch=take.epoch, mode=str(take.mode))
        self._owner, self._epoch, self._beat_s = take.owner, take.epoch, take.beat_s
        self._heard_at_s = time.monotonic()
        TAKEN.set(1)
        self._taken.set()
        self._feed(Taken(take.owner, take.epoch, take.mode, take.low_share, take.beat_s))

    def _attached(self) -> PhaseGate:
        """The gate; made when it is first wanted, and told what is here already."""
        if self._gate is not None:
            return self._gate
        self._tells_steps = self._socket is not None and self._socket.peers == 1
        settings = GateSettings(
            session=self._session,
            kv_tokens_total=self._kv_tokens_total,
            waiting_max=self._desk.concurrency_max,
            tells_steps=self._tells_steps,
            ordinary_tokens_max=None,
        )
        gate = self._gate = PhaseGate(settings, self._rate.predict_s)
        self._desk.gate = self
        for exchange in self._desk.whole():
            self._adopt(exchange)
        return gate

    def _adopt(self, exchange: Exchange) -> None:
        """One that the engine had before there was a gate."""
        key, request = self._enter(exchange)
        request.released_at_s = exchange.posted_at_s or time.monotonic()
        self._feed(Offered(key, request.tokens, None))
        if exchange.first_data_at_s and exchange.request.stream:
            request.first_at_s = exchange.first_data_at_s
            self._feed(FirstToken(key))

    def _lost(self) -> None:
        """The owner has gone: continuous batching, by our own lights."""
        log.warning("take.owner_silent", owner=self._owner, beats=BEATS_MISSED, effect="admits by itself")
        self._feed(Tick())
        if self._gate is not None and self._gate.report(time.monotonic()).mode is GateMode.PADG:
            self._feed(Taken(self._owner, self._epoch, GateMode.ORDINARY, 0.1, BEAT_S_MAX))
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
        if request.released_at_s is not None and request.first_at_s is None:
            self._rate.gone()
        self._feed(Ended(exchange.gate_key))

    def holds(self, exchange: Exchange) -> bool:
        """Whether the engine has not been given it yet."""
        request = self._requests.get(exchange.gate_key)
        return request is not None and request.released_at_s is None

    @property
    def held(self) -> int:
        """How many it holds back."""
        return sum(request.released_at_s is None for request in self._requests.values())

    def drains(self) -> None:
        """Who waits here goes elsewhere: nothing of theirs is lost. Who came without a lease may have nowhere else to
        go, and is let through."""
        self._drains = True
        waiting = [request for request in self._requests.values() if request.released_at_s is None]
        self._detach()
        for request in waiting:
            if request.exchange.request.lease is None:
                self._desk.post(request.exchange)
            else:
                request.exchange.fail(FailureCode.DRAINING, "this session is draining", retry_safe=True)

    def _detach(self) -> None:
        self._desk.gate = None
        self._gate = None
        self._requests.clear()
        self._taken.clear()
        TAKEN.set(0)
        HELD.set(0)
        if self._wake is not None:
            self._wake.cancel()
        if self._socket is not None:
            self._socket.say(MIXED)

    def _enter(self, exchange: Exchange) -> tuple[str, _Request]:
        key = exchange.request.request_id
        if not key or key in self._requests:
            key = f"{key}#{exchange.reply}/{exchange.attempt}"
        lease = exchange.request.lease
        tokens = lease.prompt_tokens if lease is not None else 0
        request = _Request(exchange, tokens if tokens > 0 else max(1, exchange.body_bytes // BYTES_PER_TOKEN))
        exchange.gate_key = key
        exchange.on_first = self._said_first
        self._requests[key] = request
        return key, request

    def _said_first(self, exchange: Exchange) -> None:
        request = self._requests.get(exchange.gate_key)
        # An answer in one piece comes at its end, and says nothing of when its prefill was done.
        if request is not None and exchange.status < 400 and exchange.request.stream:
            self._first(exchange.gate_key, request, time.monotonic())

    def _first(self, key: str, request: _Request, now: float) -> None:
        if request.first_at_s is not None:
            return
        request.first_at_s = now
        if not self._tells_steps:
            self._rate.first_token(request.tokens, now)
        self._feed(FirstToken(key))

    # -- what the gate says --------------------------------------------------------------------------------------

    def _feed(self, event: GateEvent) -> None:
        if self._gate is None:
            return
        for effect in self._gate.handle(event, time.monotonic()):
            self._obey(effect)
        self._changed.set()

    def _obey(self, effect: GateEffect) -> None:
        match effect:
            case Release(key):
                self._release(key)
            case RefuseLease(key, why):
                if (request := self._requests.pop(key, None)) is not None:
                    REFUSED.of().add()
                    request.exchange.fail(FailureCode.LEASE_REFUSED, why, retry_safe=True)
            case Turn(position, prompt_tokens_max):
                if self._socket is not None:
                    self._socket.say(str(position), prompt_tokens_max)
            case WakeAt(at_s):
                if self._wake is not None:
                    self._wake.cancel()
                delay_s = max(0.0, at_s - time.monotonic())
                self._wake = asyncio.get_running_loop().call_later(delay_s, self._feed, Tick())
            case _:
                assert_never(effect)

    def _release(self, key: str) -> None:
        request = self._requests.get(key)
        if request is None or request.released_at_s is not None:
            return
        now = time.monotonic()
        request.released_at_s = now
        before_s = [one.first_due_s for one in self._requests.values() if one.first_at_s is None]
        request.first_due_s = max(now, max(before_s, default=now)) + self._rate.predict_s(request.tokens)
        if not self._tells_steps:
            self._rate.released(now)
        self._desk.post(request.exchange)

    # -- looking, reporting --------------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Until there is something to look at, but no shorter than reports may be apart."""
        await asyncio.sleep(REPORT_EVERY_S)
        if not self._requests:
            self._changed.clear()
            try:
                async with asyncio.timeout(min(REPORT_AT_LEAST_EVERY_S, self._beat_s)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._heard_at_s > BEATS_MISSED * self._beat_s:
            self._lost()
            return
        self._tell_load()
        self._tell_progress(now)
        if self._tells_steps:
            self._tell_rest(now)
        else:
            self._feed(Tick())
        HELD.set(self.held)
        if self._changed.is_set() or now - self._reported_at_s >= REPORT_AT_LEAST_EVERY_S:
            self._changed.clear()
            self._report()

    def _report(self) -> None:
        if self._gate is not None:
            self._reported_at_s = time.monotonic()
            self._publish(INSTANCE.of(self._session), encode(self._gate.report(self._reported_at_s)))

    def _publish(self, subject: str, data: bytes) -> None:
        try:
            self._bus.publish(subject, data)
        except BusDisconnected:
            pass  # Reports may be lost, and a silent instance is asked again.

    def _tell_progress(self, now: float) -> None:
        """Of streams, what they have said; of answers in one piece, what they should have."""
        more, streams = 0, 0
        for key, request in tuple(self._requests.items()):
            exchange = request.exchange
            if request.first_at_s is None:
                if not exchange.request.stream and request.released_at_s is not None and now >= request.first_due_s:
                    self._first(key, request, now)
                continue
            if self._tells_steps:
                continue
            if not exchange.request.stream:
                said = 1 + int((now - request.first_at_s) / (self._s_per_output_token or 1.0))
            elif exchange.events == request.events:
                continue
            else:
                request.events = exchange.events
                said = tokens_said(exchange.events, exchange.last_data)
                more, streams = more + said - request.said, streams + 1
            if said > request.said:
                request.said = said
                self._feed(Said(key, said))
        if more > 0:
            each_s = (now - self._reported_at_s) * streams / more
            share = 0.05 if self._s_per_output_token else 1.0
            self._s_per_output_token += share * (each_s - self._s_per_output_token)

    def _tell_load(self) -> None:
        """What the engine said last of its KV cache. Steps say it better."""
        load = self._reports.load
        if self._tells_steps or load.kv_tokens_free is None or self._load_at_s > self._reports.at_s:
            return
        self._says(load.kv_tokens_free, load.kv_tokens_max or 0)

    def _says(self, kv_tokens_free: int, kv_tokens_total: int) -> None:
        if self._told_load != (kv_tokens_free, kv_tokens_total):
            self._told_load = (kv_tokens_free, kv_tokens_total)
            self._feed(EngineSays(kv_tokens_free, kv_tokens_total))

    async def _asking_load(self, every_s: float) -> None:
        while True:
            await self._taken.wait()
            if self._requests and (load := await self._reports.ask_load()) is not None:
                self._load_at_s = time.monotonic()
                if load.kv_tokens_free is not None:
                    self._says(load.kv_tokens_free, load.kv_tokens_max or 0)
            await asyncio.sleep(every_s)

    # -- engines that tell their steps ---------------------------------------------------------------------------

    def _stepped(self, step: EngineStep) -> None:
        now = time.monotonic()
        self._step, self._step_at_s = step, now
        if step.prefill_tokens and not step.decodes:
            self._rate.measured(step.prefill_tokens, step.step_s)
        if self._gate is None or not self._tells_steps:
            return
        if self._told_load is None or self._told_load[1] != step.kv_tokens_total:
            self._says(step.kv_tokens_free, step.kv_tokens_total)
        self._feed_step(step, now)

    def _feed_step(self, step: EngineStep, now: float) -> None:
        on_their_way = [
            request.tokens
            for request in self._requests.values()
            if request.first_at_s is None and request.released_at_s and now - request.released_at_s < ON_ITS_WAY_S
        ]
        self._feed(
            Stepped(
                step.step_s,
                step.decodes > 0,
                prompt_tokens=step.prefill_tokens,
                backlog_tokens=step.backlog_tokens + sum(on_their_way),
                kv_tokens_free=step.kv_tokens_free,
                context_tokens=step.context_tokens,
            )
        )

    def _tell_rest(self, now: float) -> None:
        """A gate that waits for a step's end would wait for ever if that word was lost."""
        if self._step is not None and now - self._step_at_s > STEP_LOST_S and self.held:
            self._step_at_s = now
            self._feed_step(self._step._replace(step_s=0.0, prefill_tokens=0, decodes=0), now)


def _nonsense(take: TakeInstance) -> str:
    """What is wrong with it; empty: nothing."""
    if take.epoch < 1:
        return f"epoch {take.epoch}: must be at least 1"
    if not 0 < take.beat_s <= BEAT_S_MAX:
        return f"beat_s {take.beat_s:g}: must be above 0, at most {BEAT_S_MAX:g}"
    if not 0 <= take.low_share < 1:
        return f"low_share {take.low_share:g}: must be from 0 to below 1"
    return ""
