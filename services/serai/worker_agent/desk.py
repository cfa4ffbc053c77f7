"""Where requests arrive: joins their frames, gives them to the engine, and watches over those that run.

Every request that is here is in `_exchanges` and nowhere else: the in-flight count is its length, so it cannot leak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog
from prometheus_client import Gauge

from serai.contracts.codec import MalformedMessage, decode, decode_frames
from serai.contracts.inference import WINDOW_BYTES_MAX, FailureCode, Frame, FrameKind, InferenceRequest
from serai.runtime.bus import Message
from serai.runtime.http1 import HttpPool, request_head
from serai.runtime.metrics import Counts, Histograms
from serai.runtime.telemetry import Tracing
from serai.worker_agent.drain import Running
from serai.worker_agent.exchange import Exchange
from serai.worker_agent.outbox import Outbox
from serai.worker_agent.request_text import answer_shape
from serai.worker_agent.spans import RequestSpans

log = structlog.get_logger()

ALIVE_EVERY_S = 0.45
"""A request from which nothing was sent for so long gets an ALIVE frame at the next look (`watch`)."""
WATCH_EVERY_S = 0.5
CREDIT_STARVED_S = 60.0
_REQUEST, _BODY, _CREDIT = int(FrameKind.REQUEST), int(FrameKind.BODY), int(FrameKind.CREDIT)
BODY_FRAMES_AHEAD = 8
"""How many BODY frames may be on their way beyond those received."""

REQUESTS = Counts("serai_agent_requests", "Requests that ended, by outcome", ["outcome"])
IN_FLIGHT = Gauge("serai_agent_requests_in_flight", "Requests held now")
FIRST_BYTE = Histograms(
    "serai_agent_engine_first_byte_seconds",
    "Request posted to the engine until the first byte of its answer",
    [],
    (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120),
)


@dataclass(frozen=True, slots=True)
class DeskLimits:
    """What the agent takes at once; more is refused at once, with the reason."""

    concurrency_max: int = 1024
    body_bytes_max: int = 32 * 1024 * 1024
    body_bytes_total_max: int = 512 * 1024 * 1024
    engine_silence_s: float = 600.0


class Gatekeeper(Protocol):
    """Decides when requests go to the engine."""

    def offered(self, exchange: Exchange) -> None:
        """Its body is here: to be posted (`Desk.post`) or ended, sooner or later."""

    def ended(self, exchange: Exchange) -> None:
        """It is not here any more."""

    def holds(self, exchange: Exchange) -> bool:
        """Whether the engine has not been given it."""

    @property
    def held(self) -> int:
        """How many it holds back."""

    def drains(self) -> None:
        """No new requests come; it holds nothing back from now on."""

    def serves_again(self) -> None:
        """They do come after all."""


class Desk:
    """Handlers for `inference` and `cancel`; bus callbacks, so nothing here waits."""

    def __init__(
        self,
        pool: HttpPool,
        outbox: Outbox,
        limits: DeskLimits,
        tracing: Tracing,
        engine_headers: dict[str, str],
        about_engine: Mapping[str, str | int] | None = None,
    ) -> None:
        """`about_engine`: attributes of the spans of what it does."""
        self._pool = pool
        self._about_engine = about_engine or {}
        self._outbox = outbox
        self._limits = limits
        self._tracing = tracing
        self._engine_headers = engine_headers
        self._exchanges: dict[tuple[str, int], Exchange] = {}
        self.gate: Gatekeeper | None = None
        """None: requests go to the engine at once."""
        self._drained: Gatekeeper | None = None
        """Who was told that no new requests come."""
        self.closed_because: tuple[FailureCode, str] | None = None
        """Set while no new request may start; the reason goes back with each refusal."""
        self.requests_total = 0
        self.output_bytes_total = 0
        self._progress_at_s = float("-inf")
        """When the last byte came of the answers that have ended."""
        self.on_empty: Callable[[], None] = lambda: None
        self.on_cancelled: Callable[[Exchange], None] = lambda _: None
        """The engine should stop working on this one."""

    @property
    def in_flight(self) -> int:
        return len(self._exchanges)

    @property
    def held(self) -> int:
        """Requests that have not been given to the engine."""
        return self.gate.held if self.gate is not None else 0

    @property
    def concurrency_max(self) -> int:
        return self._limits.concurrency_max

    def whole(self) -> list[Exchange]:
        """Requests whose body is here."""
        return [exchange for exchange in self._exchanges.values() if exchange.whole]

    def running(self) -> list[Running]:
        """What is here now, with what can be said of how long it will take."""
        return [_running(exchange) for exchange in self._exchanges.values()]

    def at_the_engine(self) -> list[Exchange]:
        """Requests that the engine has, and whose answers are read now: not those that wait for their reader."""
        return [e for e in self._exchanges.values() if e.posted_at_s and e.paused_at_s is None]

    def progress_at_s(self) -> float:
        """When the engine last said something of an answer. A head proves nothing, nor does an error: HTTP servers
        send them while the engine behind them hangs."""
        last = self._progress_at_s
        for exchange in self._exchanges.values():
            if exchange.sent_bytes and exchange.last_engine_byte_at_s > last and exchange.status < 400:
                last = exchange.last_engine_byte_at_s
        return last

    # -- bus handlers --------------------------------------------------------------------------------------------

    def on_inference(self, message: Message) -> None:
        """Frames of requests: REQUEST opens one, BODY completes it, CREDIT lets its answer go on."""
        try:
            frames = decode_frames(message.data)
        except MalformedMessage as error:
            log.warning("inference.malformed", error=str(error), reply=message.reply)
            return
        for frame in frames:
            if frame.kind == _REQUEST:
                self._open(message.reply, frame)
                continue
            exchange = self._exchanges.get((message.reply, frame.attempt))
            if exchange is None:
                continue  # It ended here already; the frame crossed that news on the way.
            if frame.kind == _BODY:
                self._add_body(exchange, frame)
            elif frame.kind == _CREDIT:
                exchange.confirm(frame.sequence)

    def on_cancel(self, message: Message) -> None:
        """The ingress gives up on requests: their engine connections close at once."""
        try:
            frames = decode_frames(message.data)
        except MalformedMessage as error:
            log.warning("cancel.malformed", error=str(error), reply=message.reply)
            return
        for frame in frames:
            if exchange := self._exchanges.get((message.reply, frame.attempt)):
                exchange.cancel()

    # -- watching ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """To be called every WATCH_EVERY_S seconds: signs of life, deadlines, silence, starvation."""
        now = time.monotonic()
        IN_FLIGHT.set(len(self._exchanges))
        for exchange in tuple(self._exchanges.values()):
            if now > exchange.deadline_at_s:
                exchange.fail(FailureCode.DEADLINE, f"not finished within {exchange.request.deadline_s:g} s")
            elif exchange.paused_at_s is not None:
                if now - exchange.paused_at_s > CREDIT_STARVED_S:
                    exchange.fail(FailureCode.CREDIT_STARVED, f"the reader took nothing for {CREDIT_STARVED_S:g} s")
                    continue
            elif now - exchange.last_engine_byte_at_s > self._limits.engine_silence_s and not self._holds(exchange):
                exchange.fail(
                    FailureCode.ENGINE_SILENT, f"the engine sent nothing for {self._limits.engine_silence_s:g} s"
                )
            if not exchange.done and now - exchange.last_frame_at_s > ALIVE_EVERY_S:
                exchange.control(FrameKind.ALIVE)

    def readers(self) -> dict[str, Exchange]:
        """One running request of each ingress that has any here, by the ingress's inbox."""
        return {exchange.reply.rpartition(".")[0]: exchange for exchange in self._exchanges.values()}

    def cancel_all_of(self, inbox: str) -> int:
        """That ingress is gone: nobody reads what it asked for. How much that was."""
        theirs = [one for one in self._exchanges.values() if one.reply.rpartition(".")[0] == inbox]
        for exchange in theirs:
            exchange.cancel()
        return len(theirs)

    def refuse_new(self) -> None:
        """From now on: the session drains."""
        self.closed_because = (FailureCode.DRAINING, "this session is draining")
        if self.gate is not None:
            self._drained = self.gate
            self.gate.drains()

    def take_again(self) -> None:
        """The session serves on after all."""
        self.closed_because = None
        if self._drained is not None:
            self._drained.serves_again()

    def hand_over_all(self) -> None:
        """Everything that is here."""
        self.hand_over([one.key for one in self.running()])

    def hand_over(self, keys: Collection[int]) -> None:
        """Ends these requests (`Running.key`) in a way that their ingresses survive: what has begun goes on elsewhere
        where that is sound, what has not is tried elsewhere."""
        for exchange in tuple(self._exchanges.values()):
            if id(exchange) in keys:
                message = "the session ends before the answer would"
                exchange.fail(FailureCode.AGENT_LEFT, message, retry_safe=exchange.status == 0)

    def fail_all(self, code: FailureCode, message: str, *, retry_safe: bool = False) -> None:
        """Ends every request that is here."""
        for exchange in tuple(self._exchanges.values()):
            exchange.fail(code, message, retry_safe=retry_safe and exchange.status == 0)

    # -- inside --------------------------------------------------------------------------------------------------

    def _open(self, reply: str, frame: Frame) -> None:
        key = (reply, frame.attempt)
        if not reply or key in self._exchanges:
            log.warning("inference.duplicate", reply=reply, attempt=frame.attempt)
            return
        try:
            request = decode(InferenceRequest, frame.payload)
        except MalformedMessage as error:
            placeholder = InferenceRequest("", "", 0, 0, 0, 0.0)
            exchange = Exchange(reply, frame.stream, frame.attempt, placeholder, self._outbox, self._on_done)
            exchange.fail(FailureCode.BAD_REQUEST_FRAME, str(error))
            return
        exchange = Exchange(reply, frame.stream, frame.attempt, request, self._outbox, self._on_done)
        if refusal := self._refusal(request):
            code, text = refusal
            exchange.fail(
                code,
                text,
                retry_safe=code in (FailureCode.BUSY, FailureCode.DRAINING),
                retry_after_s=1.0 if code is FailureCode.BUSY else None,
            )
            return
        self._exchanges[key] = exchange
        if request.body_frames == 0:
            self._go_on(exchange)
        elif request.body_frames > 1:
            exchange.control(FrameKind.BODY_CREDIT, 1 + BODY_FRAMES_AHEAD)

    def _refusal(self, request: InferenceRequest) -> tuple[FailureCode, str] | None:
        limits = self._limits
        if self.closed_because is not None:
            return self.closed_because
        if len(self._exchanges) >= limits.concurrency_max:
            return FailureCode.BUSY, f"{limits.concurrency_max} requests are running here already"
        if (request.body_bytes > 0) != (request.body_frames > 0):
            return (
                FailureCode.BAD_REQUEST_FRAME,
                f"{request.body_bytes} bytes of body in {request.body_frames} frames",
            )
        if not 0 < request.window_bytes <= WINDOW_BYTES_MAX:
            return (
                FailureCode.BAD_REQUEST_FRAME,
                f"window of {request.window_bytes} bytes; at least 1, at most {WINDOW_BYTES_MAX}",
            )
        if request.body_bytes > limits.body_bytes_max:
            return FailureCode.BODY_TOO_LARGE, f"body of {request.body_bytes} bytes; at most {limits.body_bytes_max}"
        if request.body_frames > 1:
            held = sum(exchange.request.body_bytes for exchange in self._exchanges.values())
            if held + request.body_bytes > limits.body_bytes_total_max:
                return FailureCode.BUSY, f"bodies of {held} bytes are here or on their way already"
        return None

    def _add_body(self, exchange: Exchange, frame: Frame) -> None:
        request = exchange.request
        if frame.sequence < len(exchange.body):
            return  # It came twice.
        if frame.sequence != len(exchange.body) or frame.sequence >= request.body_frames:
            told = f"body frame {frame.sequence} instead of {len(exchange.body)}"
            exchange.fail(FailureCode.FRAME_GAP, told, retry_safe=True)
            return
        exchange.body.append(frame.payload)
        exchange.body_bytes += len(frame.payload)
        received = len(exchange.body)
        if received < request.body_frames and exchange.body_bytes <= request.body_bytes:
            if received % (BODY_FRAMES_AHEAD // 2) == 0:
                exchange.control(FrameKind.BODY_CREDIT, received + BODY_FRAMES_AHEAD)
        elif exchange.body_bytes != request.body_bytes:
            exchange.fail(
                FailureCode.BAD_REQUEST_FRAME, f"{exchange.body_bytes} body bytes instead of {request.body_bytes}"
            )
        else:
            self._go_on(exchange)

    def _go_on(self, exchange: Exchange) -> None:
        """Its body is here, whole."""
        if self.gate is None:
            self.post(exchange)
        else:
            self.gate.offered(exchange)

    def _holds(self, exchange: Exchange) -> bool:
        return self.gate is not None and self.gate.holds(exchange)

    def post(self, exchange: Exchange) -> None:
        """Gives it to the engine."""
        request = exchange.request
        headers = request.headers | self._engine_headers if self._engine_headers else request.headers
        if request.traceparent:
            exchange.spans = RequestSpans.begin(self._tracing, request, exchange.received_ns)
            traceparent = request.traceparent
            if exchange.spans is not None:
                traceparent = exchange.spans.post(self._about_engine, time.time_ns())
            headers["traceparent"] = traceparent
        try:
            head = request_head(self._pool.origin, request.method, request.path, headers, exchange.body_bytes)
        except ValueError as error:
            exchange.fail(FailureCode.BAD_REQUEST_FRAME, str(error))
            return
        self._pool.start((head, *exchange.body), exchange, exchange.lent)

    def _on_done(self, exchange: Exchange, code: FailureCode | None) -> None:
        self._exchanges.pop((exchange.reply, exchange.attempt), None)
        self.requests_total += 1
        if exchange.sent_bytes:
            self.output_bytes_total += exchange.sent_bytes
            if exchange.status < 400:
                self._progress_at_s = max(self._progress_at_s, exchange.last_engine_byte_at_s)
        REQUESTS.of(code or "ok").add()
        if self.gate is not None:
            self.gate.ended(exchange)
        if code is FailureCode.CANCELLED:
            self.on_cancelled(exchange)
        if exchange.first_byte_at_s:
            FIRST_BYTE.of().observe(exchange.first_byte_at_s - exchange.posted_at_s)
        if exchange.spans is not None:
            offset_ns = exchange.received_ns - round(exchange.received_at_s * 1e9)
            first_byte_ns = offset_ns + round(exchange.first_byte_at_s * 1e9) if exchange.first_byte_at_s else 0
            exchange.spans.end(exchange.status, code or "", first_byte_ns, offset_ns + time.monotonic_ns())
        if not self._exchanges:
            self.on_empty()


def _running(exchange: Exchange) -> Running:
    if exchange.tokens_max is None:
        exchange.tokens_max = answer_shape(exchange.body).output_tokens_max
    steps = exchange.events - 1
    return Running(
        key=id(exchange),
        since_s=exchange.received_at_s,
        tokens_said=exchange.events,
        tokens_max=exchange.tokens_max,
        s_per_token=(exchange.last_engine_byte_at_s - exchange.first_byte_at_s) / steps if steps > 0 else 0.0,
    )
