"""Inference calls: each is received, tried on a session, relayed or retried, and accounted for."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace

import structlog
from opentelemetry.trace import SpanKind

from serai.contracts.inference import FailureCode, InferenceFailure, InferenceRequest, ResponseHead
from serai.contracts.session_record import SessionRecord
from serai.ingress import continuation, metrics, retry, stream_usage
from serai.ingress.accounting import Accounting, is_tracked, span_name
from serai.ingress.admission import Admission, Turn
from serai.ingress.answer_check import what_is_wrong
from serai.ingress.call import Call, Outcome
from serai.ingress.caller import Caller
from serai.ingress.chat_answer import read_error_body
from serai.ingress.choosing import Attempt, Chooser, retry_after_s
from serai.ingress.configuration import Interchange
from serai.ingress.continuation import Continuing
from serai.ingress.dialects import broken_end, request_id_headers
from serai.ingress.endpoints import Body, Endpoint
from serai.ingress.event_answer import Broken, EventAnswer
from serai.ingress.http_server import ClientGone, ClientRequest
from serai.ingress.inference_client import InferenceClient, InferenceStream, StreamFailed
from serai.ingress.keep_alive import KeepAlive, Line
from serai.ingress.leased_pick import LeasedPick
from serai.ingress.openai_format import (
    ApiError,
    endpoint_not_supported,
    failure_error,
    unknown_model,
    usage_of,
)
from serai.ingress.request_body import body_with_model, read_body
from serai.ingress.request_ids import REQUEST_ID, RequestIds
from serai.ingress.retry import Verdict
from serai.ingress.sent_events import Transcript, Unsound
from serai.ingress.settings import IngressSettings
from serai.ingress.sse_relay import relay_of
from serai.ingress.targets import TPOT_HEADER, prompt_tokens, read_targets
from serai.ingress.wishes import Wishes
from serai.runtime.bus import Bus
from serai.runtime.registry_copy import RegistryCopy
from serai.runtime.telemetry import Tracing, context_of

log = structlog.get_logger()

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_TO_ENGINE = ("content-type", "accept", "tracestate", TPOT_HEADER)
_HEADER_BYTES_MAX = 1023
"""Of a header that is sent on: the head of a request must fit into one message beside a part of the body."""
FIRST_STATUS_TRIED_AGAIN = 429
"""Answers below are the caller's to see, whatever else is known."""
CLIENT_CLOSED_REQUEST = 499
"""Not sent, only counted: the client had left."""


class Calls:
    """Answers inference requests. What it waits for is frames from agents and room at the client."""

    def __init__(
        self,
        settings: IngressSettings,
        bus: Bus,
        copy: RegistryCopy,
        client: InferenceClient,
        chooser: Chooser,
        wishes: Wishes,
        tracing: Tracing,
        admission: Admission,
        accounting: Accounting,
        leased: LeasedPick,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._copy = copy
        self._replica = copy.replica
        self._client = client
        self._chooser = chooser
        self._wishes = wishes
        self._tracing = tracing
        self._admission = admission
        self._accounting = accounting
        self._leased = leased
        self.request_ids = RequestIds()
        self._continuing = Continuing(settings.continuing)
        self._keep_alive = KeepAlive(settings.keep_alive_s)
        self._relayed: dict[int, ClientRequest] = {}

    async def answer(self, request: ClientRequest, endpoint: Endpoint, caller: Caller, asked_path: str = "") -> None:
        """Hops 1 to 8 of docs/request-path.md. `asked_path` is the client's own, where that is not the endpoint's.
        Raises ApiError when there is no answer but an error."""
        asked_path = asked_path or endpoint.path
        try:
            call = self._receive(request, endpoint, caller)
        except ApiError as error:
            self._accounting.unreadable(request.headers, asked_path, caller, error, time.time_ns())
            raise
        call.asked_path = asked_path
        line = Line(request, endpoint.dialect, lambda: _early_headers(call), call.started_s)
        status = CLIENT_CLOSED_REQUEST
        try:
            status = await self._admit_and_try(line, call)
        except ApiError as error:
            status = error.status
            error.request_id = call.request_id
            error.headers |= call.answer_headers
            call.outcome = Outcome.FAILED if call.tried else Outcome.REFUSED
            call.error_code = error.code or ""
            if line.out is None:
                raise
            self._accounting.answering(call, status, time.monotonic())
            line.out.end(broken_end(endpoint.dialect, error, b""))
        except (asyncio.CancelledError, ClientGone):
            call.outcome = Outcome.CANCELLED
            metrics.CANCELLED.labels(call.model if call.tried else "unknown").inc()
            raise
        finally:
            self._accounting.ended(call, status, time.monotonic())

    async def _admit_and_try(self, line: Line, call: Call) -> int:
        """The status of the answer. Once its client waits for events, an error can only be told by one of them: then
        it is the caller's to end `line.out`."""
        if not call.stream or not call.endpoint.streams:
            async with self._admission.admitted(call) as turn:
                return await self._try_until_answered(line, call, turn)
        with ExitStack() as watching:
            watching.enter_context(self._keep_alive.watched(line))
            async with self._admission.admitted(call) as turn:
                try:
                    return await self._try_until_answered(line, call, turn)
                finally:
                    watching.close()

    def keep_alive(self) -> None:
        """Says something to clients that have long heard nothing."""
        self._keep_alive.look(time.monotonic())

    def abort_stalled(self) -> None:
        """Closes the connections of clients that have read nothing for too long."""
        for stream in self._client.stalled(self._settings.client_stall_s):
            if request := self._relayed.get(stream.id):
                log.info("ingress.client_stalled", request_id=stream.request.request_id)
                request.abort()

    # -- receive and pick ----------------------------------------------------------------------------------------

    def _receive(self, request: ClientRequest, endpoint: Endpoint, caller: Caller) -> Call:
        """Hop 1. Raises ApiError naming the field that is wrong."""
        started_s, started_ns = time.monotonic(), time.time_ns()
        headers = request.headers
        asked = read_body(endpoint, headers.get("content-type", ""), request.body)
        request_id = self.request_ids.of(headers)
        to_engine = {REQUEST_ID: request_id}
        for name in _TO_ENGINE:
            if name in headers and 0 < len(value := headers[name]) <= _HEADER_BYTES_MAX:
                to_engine[name] = value
        targets = read_targets(headers, self._settings.request_timeout_s, caller.priority)
        output_tokens_max = asked.output_tokens_max
        wish = self._wishes.of(asked.model, endpoint, request, request_id, caller, started_s, output_tokens_max)
        if targets.ttft_s is not None or targets.tpot_s is not None:
            wish = replace(wish, ask=replace(wish.ask, slo_ttft_s=targets.ttft_s, slo_tpot_s=targets.tpot_s))
        call = Call(
            request_id=request_id,
            endpoint=endpoint,
            caller=caller,
            model=wish.ask.model,
            stream=asked.stream,
            body=request.body,
            headers=to_engine,
            started_s=started_s,
            started_ns=started_ns,
            wish=wish,
            asked_model=asked.model,
            deadline_s=started_s + targets.timeout_s,
            priority=targets.priority,
            prompt_tokens=prompt_tokens(request.body) if endpoint.body is Body.JSON else 0,  # A file is no text.
            output_tokens_max=output_tokens_max,
            outputs=asked.outputs,
            hides_usage=stream_usage.is_hidden(endpoint, asked.stream, request.body),
            tracked=is_tracked(headers, caller),
            best_effort=targets.best_effort,
            named_by_client=REQUEST_ID in headers,
        )
        parent, sampled = self._tracing.incoming(headers.get("traceparent"))
        if sampled:
            call.span = self._tracing.start(span_name(call), parent, SpanKind.SERVER, started_ns)
            call.traceparent = context_of(call.span).traceparent
        elif parent is not None:
            call.traceparent = parent.traceparent
        return call

    def _pick(self, call: Call) -> SessionRecord:
        """Hop 2: model → candidates → one session."""
        now = time.monotonic()
        record = self._chooser.choose(call.wish, self._chooser.fitting(call.wish, now), call.tried_in_vain, now)
        if record is None:
            raise self._nobody(call, now)
        if not call.tried:
            self._chooser.first_try(call.model, now)
        return record

    def _nobody(self, call: Call, now: float) -> ApiError:
        model = call.model
        if not self._bus.connected:
            failure = InferenceFailure(FailureCode.BUS_LOST, "the gateway has lost its connection to NATS")
            return failure_error(failure)
        if instead := self._chooser.endpoints_instead(call.wish, now):
            return endpoint_not_supported(model, call.path, instead)
        if in_the_way := self._chooser.in_the_way(call.wish, now):
            text = f"No session that serves `{model[:200]}` now meets what the request demands: {in_the_way}."
            return ApiError(503, text, kind="overloaded_error", code="requirements_not_met", retry_after_s=5)
        if self._chooser.lacks_time(call.wish, now):
            short = f"The sessions that serve `{model[:200]}` end before {call.output_tokens_max} tokens are said."
            text = f"{short} Ask for fewer, or again when another session has started."
            return ApiError(503, text, kind="overloaded_error", code="allocation_ends", retry_after_s=30)
        if self._chooser.expects(model) or not self._copy.synced:
            text = f"No session serves `{model[:200]}` at this moment."
            return ApiError(503, text, kind="overloaded_error", code="no_session", retry_after_s=5)
        return unknown_model(model, [name for name in self._replica.models(now) if call.caller.may_use(name)])

    # -- try -----------------------------------------------------------------------------------------------------

    async def _try_until_answered(self, line: Line, call: Call, turn: Turn) -> int:
        """Hops 3 to 7, once or twice; the status of the answer."""
        while True:
            granted = await self._leased.pick(call) if self._chooser.grants(call.model) else None
            record = granted or self._pick(call)
            call.tried.append(record)
            stream = self._send(call, record, call.body)
            full: StreamFailed | None = None
            with (
                self._accounting.attempt(call, record, time.monotonic),
                self._chooser.attempt(call.model, record, time.monotonic) as attempt,
            ):
                try:
                    with stream:
                        head = await stream.head()
                        attempt.began()
                        verdict = self._again(call, head)
                        if verdict is None:
                            broken = await self._relay(line, call, stream, head, attempt)
                            break
                        attempt.answered(head.status, retry_after_s(head.headers))
                except StreamFailed as failed:
                    failure = failed.failure
                    attempt.failed(failure)
                    metrics.FAILURES.labels(call.model, failure.code).inc()
                    if failure.code is FailureCode.LEASE_REFUSED and call.lease is not None:
                        self._leased.refused_by(call, record.session)
                    now = time.monotonic()
                    verdict = self._chooser.again_after_failure(call.wish, call.tried_in_vain, failure, now)
                    full = None if verdict.again else failed
                    if full is not None and failure.code is not FailureCode.BUSY:
                        raise failure_error(failure) from failed
            if full is not None and not await turn.again():
                raise failure_error(full.failure) from full
            metrics.RETRIES.labels(call.model).inc()
            log.info("inference.retry", request_id=call.request_id, session=record.session, reason=verdict.reason)
        if broken is not None:
            await self._go_on(call, broken)
        return head.status

    def _again(self, call: Call, head: ResponseHead) -> Verdict | None:
        """Why another session is tried, after an engine's whole answer; None when the answer is the client's."""
        if head.status < FIRST_STATUS_TRIED_AGAIN:
            return None
        marked = retry.mark(head.headers)
        verdict = self._chooser.again_after_status(call.wish, call.tried_in_vain, head.status, marked, time.monotonic())
        return verdict if verdict.again else None

    def _send(self, call: Call, record: SessionRecord, body: bytes) -> InferenceStream:
        """Hop 3: what goes to the agent; it goes when the stream's `with` is entered."""
        content_type = call.headers.get("content-type", "")
        body = body_with_model(call.endpoint, content_type, body, call.asked_model, record.metadata.engine_model)
        if call.hides_usage:
            body = stream_usage.with_usage(body)
        inference = InferenceRequest(
            request_id=call.request_id,
            path=call.endpoint.path_at(record.metadata.endpoints) or call.path,
            body_bytes=len(body),
            body_frames=self._client.body_frames(len(body)),
            window_bytes=self._settings.window_bytes,
            deadline_s=max(0.0, call.deadline_s - time.monotonic()),
            headers=call.headers,
            stream=call.stream,
            traceparent=call.traceparent,
            operation=call.endpoint.operation if call.traceparent else "",
            lease=call.lease,
        )
        return self._client.stream(record.session, len(call.tried), inference, body)

    # -- relay ---------------------------------------------------------------------------------------------------

    async def _relay(
        self, line: Line, call: Call, stream: InferenceStream, head: ResponseHead, attempt: Attempt
    ) -> Broken | None:
        """Hop 7: the answer goes to the client, as a stream of events or in one piece. What broke off, if it did."""
        headers = head.headers
        headers |= request_id_headers(call.endpoint.dialect, call.request_id)
        metadata = attempt.record.metadata
        headers["x-serai-session"] = stream.session
        headers["x-serai-provider"] = metadata.provider
        headers["x-serai-fingerprint"] = metadata.fingerprint
        headers["x-serai-attempts"] = str(len(call.tried))
        headers |= call.answer_headers
        call.status = head.status
        if head.status == 200 and headers.get("content-type", "").startswith("text/event-stream"):
            return await self._relay_events(line, call, stream, headers | _STREAM_HEADERS, attempt)
        body = await self._whole(stream)
        if head.status == 200:
            wanted = call.stream and call.endpoint.streams and call.endpoint.body is Body.JSON
            if wrong := what_is_wrong(headers.get("content-type", ""), body, stream_wanted=wanted):
                raise StreamFailed(InferenceFailure(FailureCode.ENGINE_PROTOCOL, wrong))
        call.first_byte_s = time.monotonic()
        call.usage = usage_of(body)
        if call.span is not None:
            call.last_answer = body
        call.outcome = Outcome.COMPLETE if head.status < 400 else Outcome.FAILED
        attempt.answered(head.status, retry_after_s(headers))
        if line.out is not None:
            raise _no_events(head.status, body)
        line.request.check(head.status, headers, body)
        self._accounting.answering(call, head.status, time.monotonic())
        line.request.respond(head.status, headers, body)
        return None

    async def _whole(self, stream: InferenceStream) -> bytes:
        """An answer that is no stream is collected: until its end is known, an error can still be told."""
        if stream.end is not None and stream.received_bytes <= self._settings.answer_bytes_max:
            return stream.data_now()  # It has come together with its head, as short ones do.
        chunks: list[bytes] = []
        size = 0
        while (data := await stream.data()) is not None:
            chunks.append(data)
            size += len(data)
            if size > self._settings.answer_bytes_max:
                text = f"The answer has more than {self._settings.answer_bytes_max} bytes."
                raise ApiError(502, text, kind="server_error", code="answer_too_large")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _relay_events(
        self, line: Line, call: Call, stream: InferenceStream, headers: dict[str, str], attempt: Attempt
    ) -> Broken | None:
        """Events pass as they came."""
        relay = relay_of(call.endpoint.dialect)
        first = relay.feed(stream.data_now())
        if call.hides_usage:
            first = stream_usage.without_usage_event(first)
        out = line.begin(headers, first)
        keep = continuation.is_worth_keeping(self._continuing, call.tried[-1], call.path, call.body)
        said = Transcript() if keep else None
        answer = line.answer = EventAnswer(line.request, out, relay, said, hides_usage=call.hides_usage)
        if first:
            call.first_byte_s = time.monotonic()
            answer.sent(first)
        return await self._pass_events(call, stream, answer, attempt)

    async def _pass_events(
        self, call: Call, stream: InferenceStream, answer: EventAnswer, attempt: Attempt
    ) -> Broken | None:
        """All that a session says of an answer, and the answer's end if that is whole; otherwise how it broke off."""
        self._relayed[stream.id] = answer.request
        error, survivable = _unfinished(), True
        attempt.broke_off()  # Unless something else is found to be true below.
        try:
            await self._pump(call, stream, answer)
        except StreamFailed as failed:
            attempt.failed(failed.failure)
            code = failed.failure.code
            error, survivable = failure_error(failed.failure), continuation.is_survivable(code)
        except (asyncio.CancelledError, ClientGone):
            attempt.cancelled()
            call.usage = answer.usage()
            call.events += answer.events_in(stream.received_bytes)
            raise
        finally:
            self._relayed.pop(stream.id, None)
        # What breaks off after the engine has said that it is done has lost nothing.
        rest = answer.rest() if answer.relay.done else b""
        if answer.relay.done and not answer.contradicted:
            attempt.answered(200)
            call.usage = answer.usage()
            call.outcome = Outcome.COMPLETE
            if call.first_byte_s and not call.resumed:
                self._chooser.streamed(call.tried[-1], call.usage, time.monotonic() - call.first_byte_s)
            call.events += 0 if call.usage else answer.events_in(stream.received_bytes)
            if call.span is not None:
                call.last_answer = answer.last + rest
            self._accounting.answering(call, 200, time.monotonic())
            answer.out.end(rest)
            return None
        if answer.contradicted:
            attempt.cancelled()  # By us: it answers, only not with the words of another.
        call.events += answer.events_in(stream.received_bytes)
        metrics.FAILURES.labels(call.model, error.code or "").inc()
        return Broken(answer, error, survivable)

    async def _pump(self, call: Call, stream: InferenceStream, answer: EventAnswer) -> None:
        """Until the session has said all it says. Raises StreamFailed."""
        take, out = answer.take, answer.out

        def pass_on(data: bytes) -> bool:
            """Once per token, in the bus's callback; False: the client is slow, or gone."""
            try:
                return out.send(take(data)) and not answer.contradicted
            except ClientGone:
                return False
            except Exception:
                # Here it would reach the bus: what it has for other streams would be lost, and so would these bytes.
                log.exception("inference.cannot_be_read", request_id=call.request_id, session=stream.session)
                stream.fail(InferenceFailure(FailureCode.ENGINE_PROTOCOL, "the engine sent what cannot be passed on"))
                return False

        while (data := await stream.data(pass_on if call.first_byte_s else None)) is not None:
            passed = take(data)
            out.send(passed)
            if passed and not call.first_byte_s:
                call.first_byte_s = time.monotonic()
            stream.blocked_since_s = time.monotonic()
            await out.room()
            stream.blocked_since_s = None
            if answer.contradicted:
                return

    # -- go on after a break -------------------------------------------------------------------------------------

    async def _go_on(self, call: Call, broken: Broken) -> None:
        """The answer goes on at another session, or its client is told that it does not: never a clean end that is
        not one."""
        outcome = ""
        for _ in range(continuation.CONTINUATIONS_MAX):
            if not broken.survivable or broken.answer.said is None:
                break
            plan = self._plan(call, broken.answer.said)
            record = self._successor(call)
            if plan is None or record is None:
                outcome = outcome or ("unsound" if plan is None else "nobody")
                break
            again = await self._continue(call, broken, record, plan)
            if again is None:
                metrics.CONTINUATIONS.labels(call.model, "resumed").inc()
                return
            outcome = "lost"
            if again.answer.contradicted:
                outcome = "mismatch"
                break
            broken = again
        if outcome:
            metrics.CONTINUATIONS.labels(call.model, outcome).inc()
        self._end_broken(call, broken)

    def _plan(self, call: Call, said: Transcript) -> continuation.Plan | None:
        engine = call.tried[-1].metadata.engine
        try:
            return continuation.plan(self._continuing, engine, call.path, call.body, said)
        except Unsound as reason:
            log.info("inference.not_continued", request_id=call.request_id, reason=str(reason))
            return None

    def _successor(self, call: Call) -> SessionRecord | None:
        """A session not tried yet that would have said the same, while there is time left."""
        now = time.monotonic()
        if now >= call.deadline_s:
            return None
        # Wherever it goes on, it is further than here: for how long that session lasts is no question now.
        rest = replace(call.wish, ask=replace(call.wish.ask, output_tokens_max=0))
        fitting = self._chooser.fitting(rest, now)
        any_like = self._chooser.interchange(call.model) is Interchange.ANY
        likes = [r for r in fitting if continuation.can_replace(r, call.tried[-1], any_fingerprint=any_like)]
        # One whose gate refused it, or that was full before it waited its turn, has said nothing of this answer.
        return self._chooser.choose(call.wish, likes, call.tried_in_vain, now)

    async def _continue(
        self, call: Call, broken: Broken, record: SessionRecord, plan: continuation.Plan
    ) -> Broken | None:
        """One session's part of an answer that others began. None when the answer is whole now."""
        answer = broken.answer
        call.tried.append(record)
        call.lease = None
        call.resumed += 1
        log.info("inference.continued", request_id=call.request_id, session=record.session, after=broken.error.code)
        stream = self._send(call, record, plan.body)
        with (
            self._accounting.attempt(call, record, time.monotonic),
            self._chooser.attempt(call.model, record, time.monotonic) as attempt,
        ):
            try:
                with stream:
                    head = await stream.head()
                    attempt.began()
                    if head.status != 200 or not head.headers.get("content-type", "").startswith("text/event-stream"):
                        attempt.answered(head.status, retry_after_s(head.headers))
                        return Broken(answer, broken.error, survivable=True)
                    answer.out.send(b": serai continued on %s\n\n" % record.session.encode())
                    answer.relay, answer.splice = relay_of(call.endpoint.dialect), plan.splice
                    return await self._pass_events(call, stream, answer, attempt)
            except StreamFailed as failed:
                attempt.failed(failed.failure)
                metrics.FAILURES.labels(call.model, failed.failure.code).inc()
                survivable = failed.failure.retry_safe or continuation.is_survivable(failed.failure.code)
                return Broken(answer, broken.error, survivable)

    def _end_broken(self, call: Call, broken: Broken) -> None:
        """One error event, then the end marker; before it the usage so far, if the engine told it."""
        code, answer = broken.error.code or "", broken.answer
        metrics.BROKEN_STREAMS.labels(call.model, code).inc()
        log.warning("inference.broken_stream", request_id=call.request_id, session=call.tried[-1].session, code=code)
        call.usage = answer.usage()
        metrics.TOKENS_LOST.of(code).add(_output_tokens(call))
        call.outcome, call.error_code = Outcome.TRUNCATED, code
        self._accounting.answering(call, 200, time.monotonic())
        answer.out.end(broken_end(call.endpoint.dialect, broken.error, answer.last))


def _early_headers(call: Call) -> dict[str, str]:
    return _STREAM_HEADERS | request_id_headers(call.endpoint.dialect, call.request_id) | call.answer_headers


def _output_tokens(call: Call) -> int:
    """About as many as its client has been sent."""
    told = (call.usage or {}).get("completion_tokens")
    return told if isinstance(told, int) else call.events


def _unfinished() -> ApiError:
    text = "The engine ended the stream without saying that it is done."
    return ApiError(502, text, kind="server_error", code="stream_unfinished")


def _no_events(status: int, body: bytes) -> ApiError:
    """What a client is told that waits for events, when an engine has answered with something else."""
    if status >= 400:
        return read_error_body(body, status)
    text = "The engine answered in one piece, though a stream was asked for."
    return ApiError(502, text, kind="server_error", code="no_stream")
