"""The ingress's shell: HTTP in, frames out, frames in, HTTP out. `docs/request-path.md` walks through it."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import orjson
import prometheus_client
import structlog
from aiohttp import web
from opentelemetry.trace import Span, SpanKind

from serai.contracts.inference import FailureCode, InferenceFailure, InferenceRequest, ResponseHead
from serai.contracts.session_record import SessionRecord
from serai.ingress import metrics, retry
from serai.ingress.access import Access, BadKeysFile
from serai.ingress.http_body import read_body
from serai.ingress.inference_client import WATCH_EVERY_S, InferenceClient, InferenceStream, StreamFailed
from serai.ingress.openai_format import (
    DONE,
    ApiError,
    SseRelay,
    failure_error,
    model_entry,
    models_body,
    read_request_body,
    read_usage,
    unknown_model,
    with_model,
)
from serai.ingress.registry_copy import RegistryCopy
from serai.ingress.routing import POLICIES, Candidate, Policy, untried
from serai.ingress.settings import IngressSettings
from serai.runtime.bus import Bus
from serai.runtime.service import ServiceFailure
from serai.runtime.telemetry import Tracing, context_of
from serai.runtime.version import VERSION

log = structlog.get_logger()

KEYS_LOOK_EVERY_S = 2.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_TO_ENGINE = ("content-type", "accept")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Call:
    """One client's request on its way through this ingress."""

    request_id: str
    path: str
    model: str
    stream: bool
    body: bytes
    headers: dict[str, str]
    started_s: float
    started_ns: int
    traceparent: str = ""
    span: Span | None = None
    tried: list[SessionRecord] = field(default_factory=list)
    first_byte_s: float = 0.0

    def time_left_s(self, timeout_s: float) -> float:
        return max(0.0, self.started_s + timeout_s - time.monotonic())


class Ingress:
    """Collaborators come from outside; `run` returns when told to stop and the requests have ended."""

    def __init__(self, settings: IngressSettings, bus: Bus, access: Access, tracing: Tracing) -> None:
        self._settings = settings
        self._bus = bus
        self._access = access
        self._tracing = tracing
        self._policy: Policy = POLICIES[settings.policy]()
        self._copy = RegistryCopy(bus)
        self.replica = self._copy.replica
        self._client = InferenceClient(
            bus,
            accept_timeout_s=settings.accept_timeout_s,
            silence_timeout_s=settings.silence_timeout_s,
            on_unreachable=self.replica.unreachable,
        )
        self._transports: dict[int, asyncio.BaseTransport] = {}
        self._stopping = False
        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/chat/completions"): self.on_inference,
            ("POST", "/v1/completions"): self.on_inference,
            ("GET", "/v1/models"): self.on_models,
            ("GET", "/health"): self.on_ready,
            ("GET", "/health/live"): self.on_live,
            ("GET", "/health/ready"): self.on_ready,
            ("GET", "/metrics"): self.on_metrics,
            ("GET", "/version"): self.on_version,
        }

    # -- life ----------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Subscribes, fills its copy of the registry, listens; at the end finishes what runs."""
        subscriptions = [await self._client.start(), *await self._copy.start()]
        await self._bus.barrier()
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._copy.repairing()), tasks.create_task(self._watching())]
            if self._settings.keys_file is not None:
                working.append(tasks.create_task(self._watching_keys()))
            runner = await self._listen()
            log.info("ingress.ready", url=f"http://{self._settings.host}:{self._settings.port}")
            try:
                await stop.wait()
                await self._finish()
            finally:
                await runner.cleanup()
                for task in working:
                    task.cancel()
        for subscription in subscriptions:
            await subscription.unsubscribe()

    async def _listen(self) -> web.ServerRunner:
        settings = self._settings
        server = web.Server(self.on_http, handler_cancellation=True, access_log=None, keepalive_timeout=75)
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, settings.host, settings.port, backlog=1024).start()
        except OSError as error:
            await runner.cleanup()
            raise ServiceFailure(
                f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); "
                f"is another server there? choose another --port",
                exit_code=2,
            ) from error
        return runner

    async def _finish(self) -> None:
        """No new requests; those that run get `shutdown_s`."""
        self._stopping = True
        await self._client.until_idle(self._settings.shutdown_s)
        if self._client.open_streams:
            log.warning("ingress.cut_short", streams=self._client.open_streams)

    async def _watching(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(WATCH_EVERY_S)
            metrics.EVENT_LOOP_LAG.set(max(0.0, time.monotonic() - before_s - WATCH_EVERY_S))
            metrics.IN_FLIGHT.set(self._client.open_streams)
            self._client.watch()
            for stream in self._client.stalled(self._settings.client_stall_s):
                if transport := self._transports.get(stream.id):
                    log.info("ingress.client_stalled", request_id=stream.request.request_id)
                    transport.abort()  # type: ignore[attr-defined]

    async def _watching_keys(self) -> None:
        while True:
            await asyncio.sleep(KEYS_LOOK_EVERY_S)
            try:
                if self._access.refresh():
                    log.info("access.keys_read")
            except BadKeysFile as error:
                log.error("access.keys_unreadable", error=str(error), effect="the keys read before stay valid")

    # -- HTTP ----------------------------------------------------------------------------------------------------

    async def on_http(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request comes through here; whatever goes wrong is answered with an error object."""
        try:
            handler = self._routes.get((request.method, request.path)) or self._route(request)
            return await handler(request)
        except ApiError as error:
            return _error_response(error, request.headers.get("x-request-id"))
        except web.HTTPException:
            raise
        except Exception:
            log.exception("http.failed", path=request.path)
            return _error_response(
                ApiError(500, "The gateway failed; the error is in its log.", kind="server_error", code="internal"),
                request.headers.get("x-request-id"),
            )

    def _route(self, request: web.BaseRequest) -> Handler:
        """Routes that are not one fixed string, or 404 and 405 that say what there is."""
        path = request.path
        if len(path) > 1 and path.endswith("/"):
            path = path.rstrip("/")
            if handler := self._routes.get((request.method, path)):
                return handler
        if request.method == "GET" and path.startswith("/v1/models/"):
            return self.on_model
        methods = sorted(method for method, known in self._routes if known == path)
        if methods:
            raise ApiError(
                405, f"{path} takes {' and '.join(methods)}, not {request.method}.", code="method_not_allowed"
            )
        raise ApiError(404, f"There is no {path} here.", kind="not_found_error", code="unknown_path")

    async def on_live(self, request: web.BaseRequest) -> web.StreamResponse:
        """The process runs; says nothing of agents."""
        return _json_response(200, {"status": "live"})

    async def on_ready(self, request: web.BaseRequest) -> web.StreamResponse:
        """Requests can be served: connected, in step with the registry, at least one model routable."""
        models = self.replica.models(time.monotonic())
        missing = [
            text
            for text, there in (
                ("stopping", not self._stopping),
                ("not connected to NATS", self._bus.connected),
                ("no model is being served", bool(models)),
            )
            if not there
        ]
        return _json_response(503 if missing else 200, {"status": ", ".join(missing) or "ready", "models": models})

    async def on_version(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json_response(200, {"version": VERSION})

    async def on_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(
            body=prometheus_client.generate_latest(),
            headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST},
        )

    async def on_models(self, request: web.BaseRequest) -> web.StreamResponse:
        """From the local copy of the registry, never by asking around."""
        self._holder(request)
        now = time.monotonic()
        served = {model: self.replica.routable(model, now) for model in self.replica.models(now)}
        return web.Response(body=models_body(served), content_type="application/json")

    async def on_model(self, request: web.BaseRequest) -> web.StreamResponse:
        """One model; its name may hold slashes."""
        self._holder(request)
        now = time.monotonic()
        name = request.path.removeprefix("/v1/models/").rstrip("/")
        records = self.replica.routable(name, now)
        if not records:
            raise unknown_model(name, self.replica.models(now))
        return _json_response(200, model_entry(records[0]) | {"sessions": len(records)})

    # -- inference -----------------------------------------------------------------------------------------------

    async def on_inference(self, request: web.BaseRequest) -> web.StreamResponse:
        """Hop 1: a request arrives. It is read whole, checked, and tried."""
        call = await self._receive(request)
        status = 499
        try:
            response = await self._try_until_answered(request, call)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            error.request_id = call.request_id
            raise
        except asyncio.CancelledError:
            metrics.CANCELLED.labels(call.model).inc()
            raise
        finally:
            self._account(call, status)

    async def _receive(self, request: web.BaseRequest) -> Call:
        started_s, started_ns = time.monotonic(), time.time_ns()
        self._holder(request)
        if self._stopping:
            raise ApiError(503, "This gateway is stopping.", kind="server_error", code="stopping", retry_after_s=1)
        headers = request.headers
        body = await read_body(request, self._settings.body_bytes_max)
        asked = read_request_body(body)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        to_engine = {name: headers[name] for name in _TO_ENGINE if name in headers}
        to_engine["x-request-id"] = request_id
        call = Call(
            request_id, request.path.rstrip("/"), asked.model, asked.stream, body, to_engine, started_s, started_ns
        )
        parent, sampled = self._tracing.incoming(headers.get("traceparent"))
        if sampled:
            call.span = self._tracing.start("ingress", parent, SpanKind.SERVER, started_ns)
            call.traceparent = context_of(call.span).traceparent
        elif parent is not None:
            call.traceparent = parent.traceparent
        return call

    async def _try_until_answered(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        while True:
            record = self._pick(call)
            call.tried.append(record)
            tries = len(call.tried)
            body = with_model(call.body, call.model, record.metadata.engine_model)
            stream = self._client.stream(record.session, tries, self._inference_request(call, len(body)), body)
            self._policy.on_request_start(record.session)
            try:
                async with stream:
                    head = await stream.head()
                    verdict = retry.after_status(head.status, tries)
                    if not (verdict.again and self._others(call)):
                        return await self._answer(request, call, stream, head)
            except StreamFailed as failed:
                metrics.FAILURES.labels(call.model, failed.failure.code).inc()
                verdict = retry.after_failure(failed.failure, tries)
                if not (verdict.again and self._others(call)):
                    raise failure_error(failed.failure) from failed
            finally:
                self._policy.on_request_end(record.session, whole=stream.end is not None)
            metrics.RETRIES.labels(call.model).inc()
            log.info("inference.retry", request_id=call.request_id, session=record.session, reason=verdict.reason)

    def _pick(self, call: Call) -> SessionRecord:
        """Hop 2: model → candidates → one session."""
        now = time.monotonic()
        records = self.replica.routable(call.model, now)
        if not records:
            raise self._nobody(call.model, now)
        candidates = [
            Candidate(record, self._client.in_flight(record.session), status.in_flight if status else 0)
            for record in untried(records, call.tried, _allowed)
            for status in (self.replica.status(record.session),)
        ]
        return self._policy.pick(call.model, candidates).record

    def _others(self, call: Call) -> bool:
        return bool(untried(self.replica.routable(call.model, time.monotonic()), call.tried, _allowed))

    def _nobody(self, model: str, now: float) -> ApiError:
        if not self._bus.connected:
            failure = InferenceFailure(FailureCode.BUS_LOST, "the gateway has lost its connection to NATS")
            return failure_error(failure)
        if self.replica.knows_model(model) or not self._copy.synced:
            return ApiError(
                503,
                f"No session serves `{model[:200]}` at this moment.",
                kind="overloaded_error",
                code="no_session",
                retry_after_s=5,
            )
        return unknown_model(model, self.replica.models(now))

    def _inference_request(self, call: Call, body_bytes: int) -> InferenceRequest:
        return InferenceRequest(
            request_id=call.request_id,
            path=call.path,
            body_bytes=body_bytes,
            body_frames=self._client.body_frames(body_bytes),
            window_bytes=self._settings.window_bytes,
            deadline_s=call.time_left_s(self._settings.request_timeout_s),
            headers=call.headers,
            stream=call.stream,
            traceparent=call.traceparent,
        )

    async def _answer(
        self, request: web.BaseRequest, call: Call, stream: InferenceStream, head: ResponseHead
    ) -> web.StreamResponse:
        """Hop 7: the answer goes to the client, as a stream of events or in one piece."""
        headers = {name: value for name, value in head.headers.items() if name != "x-request-id"}
        headers["X-Request-Id"] = call.request_id
        headers["X-Serai-Session"] = stream.session
        if head.status == 200 and headers.get("content-type", "").startswith("text/event-stream"):
            return await self._relay(request, call, stream, headers)
        body = await self._whole(call, stream)
        self._count_tokens(call, read_usage(body[-4096:]))
        return web.Response(status=head.status, headers=headers, body=body)

    async def _whole(self, call: Call, stream: InferenceStream) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while (data := await stream.data()) is not None:
            chunks.append(data)
            size += len(data)
            if size > self._settings.answer_bytes_max:
                raise ApiError(
                    502,
                    f"The answer has more than {self._settings.answer_bytes_max} bytes.",
                    kind="server_error",
                    code="answer_too_large",
                )
        call.first_byte_s = time.monotonic()
        return b"".join(chunks)

    async def _relay(
        self, request: web.BaseRequest, call: Call, stream: InferenceStream, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Events pass as they came. If they break off, the client is told: never a clean end that is not one."""
        response = web.StreamResponse(status=200, headers=headers | _STREAM_HEADERS)
        await response.prepare(request)
        assert request.transport is not None
        self._transports[stream.id] = request.transport
        relay = SseRelay()
        try:
            while (data := await stream.data()) is not None:
                data = relay.feed(data)
                if not data:
                    continue
                if not call.first_byte_s:
                    call.first_byte_s = time.monotonic()
                stream.blocked_since_s = time.monotonic()
                await response.write(data)
                stream.blocked_since_s = None
            problem = None if relay.done else _unfinished()
        except StreamFailed as failed:
            problem = failure_error(failed.failure)
        finally:
            self._transports.pop(stream.id, None)
            self._count_tokens(call, relay.usage())
        if problem is None:
            await response.write_eof(relay.rest())
        else:
            metrics.BROKEN_STREAMS.labels(call.model, problem.code or "").inc()
            log.warning(
                "inference.broken_stream", request_id=call.request_id, session=stream.session, code=problem.code
            )
            await response.write_eof(problem.event() + DONE)
        return response

    # -- small things --------------------------------------------------------------------------------------------

    def _holder(self, request: web.BaseRequest) -> str:
        holder = self._access.holder(request.headers.get("Authorization"))
        if holder is None:
            given = "is not known here" if request.headers.get("Authorization") else "is missing"
            raise ApiError(
                401,
                f"The API key {given}. Send it as `Authorization: Bearer sk-serai-…`.",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return holder

    def _count_tokens(self, call: Call, usage: dict[str, object] | None) -> None:
        for kind in ("prompt", "completion"):
            count = (usage or {}).get(f"{kind}_tokens")
            if isinstance(count, int) and count > 0:
                metrics.TOKENS.labels(call.model, kind).inc(count)

    def _account(self, call: Call, status: int) -> None:
        now = time.monotonic()
        model = call.model if call.tried else "unknown"
        metrics.REQUESTS.labels(model, str(status)).inc()
        metrics.DURATION.labels(model).observe(now - call.started_s)
        if call.first_byte_s:
            metrics.TTFT.labels(model).observe(call.first_byte_s - call.started_s)
        if call.span is not None:
            self._end_span(call, status, now)

    def _end_span(self, call: Call, status: int, now: float) -> None:
        span = call.span
        assert span is not None
        span.set_attributes(
            {
                "gen_ai.operation.name": "chat" if call.path.endswith("/chat/completions") else "text_completion",
                "gen_ai.request.model": call.model,
                "http.response.status_code": status,
                "serai.request_id": call.request_id,
                "serai.tries": len(call.tried),
                "serai.session": call.tried[-1].session if call.tried else "",
            }
        )
        if call.first_byte_s:
            span.add_event("first byte", timestamp=call.started_ns + round((call.first_byte_s - call.started_s) * 1e9))
        span.end(call.started_ns + round((now - call.started_s) * 1e9))


def _allowed(record: SessionRecord) -> bool:
    return True


def _unfinished() -> ApiError:
    return ApiError(
        502,
        "The engine ended the stream without saying that it is done.",
        kind="server_error",
        code="stream_unfinished",
    )


def _json_response(status: int, content: object) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(content), content_type="application/json")


def _error_response(error: ApiError, given_request_id: str | None) -> web.Response:
    response = web.Response(status=error.status, body=error.body(), content_type="application/json")
    request_id = error.request_id or given_request_id
    if request_id and _REQUEST_ID.fullmatch(request_id):
        response.headers["X-Request-Id"] = request_id
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 413:
        response.force_close()  # The rest of the body is not read.
    return response
