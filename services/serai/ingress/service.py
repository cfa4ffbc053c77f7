"""The ingress's shell: starts, listens, routes HTTP paths to what answers them, and stops in order."""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import parse_qs

import orjson
import prometheus_client
import structlog

from serai.contracts.session_record import SessionRecord
from serai.ingress import metrics
from serai.ingress.access import Access
from serai.ingress.accounting import Accounting
from serai.ingress.admission import Admission
from serai.ingress.caller import Caller
from serai.ingress.calls import Calls
from serai.ingress.choosing import Chooser
from serai.ingress.cold_models import ColdModels
from serai.ingress.configuration import Configuration
from serai.ingress.configuration_file import Configured
from serai.ingress.cors import Cors
from serai.ingress.dialects import error_body, request_id_headers
from serai.ingress.door import Door, Told
from serai.ingress.endpoints import BY_PATH, Dialect
from serai.ingress.http_routes import Handler, Route, Routes
from serai.ingress.http_server import FLUSH_S, ClientGone, HttpRequest, HttpServer
from serai.ingress.inference_client import WATCH_EVERY_S, InferenceClient
from serai.ingress.leased_pick import LeasedPick
from serai.ingress.limits import Limiter
from serai.ingress.macro_scheduled import AdmissionClient
from serai.ingress.model_listing import ModelListing
from serai.ingress.openai_format import ApiError, unknown_model
from serai.ingress.openapi import openapi_document
from serai.ingress.reloading import Reloading
from serai.ingress.routing import PolicyChoice, PolicyNeeds, SessionSpeeds
from serai.ingress.settings import IngressSettings
from serai.ingress.shared_limits import Accounts, SharedLimits
from serai.ingress.translated import as_served
from serai.ingress.usage_sender import UsageSender
from serai.ingress.wishes import Wishes
from serai.ingress.worker_place import WorkerPlace
from serai.runtime.bus import Bus
from serai.runtime.registry_copy import RegistryCopy
from serai.runtime.telemetry import Tracing
from serai.runtime.version import VERSION

log = structlog.get_logger()

TIDY_EVERY_S = 30.0
USAGE_FLUSH_S = 3.0
"""For what has no folder to wait in; the rest is sent by whoever comes next."""
_JSON = {"content-type": "application/json"}


class Ingress:
    """Collaborators come from outside; `run` returns when told to stop and the requests have ended."""

    def __init__(
        self,
        settings: IngressSettings,
        bus: Bus,
        access: Access,
        tracing: Tracing,
        place: WorkerPlace | None = None,
        usage: UsageSender | None = None,
        configured: Configured | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._access = access
        self._copy = RegistryCopy(bus, settings.site)
        self.replica = self._copy.replica
        self._cold = ColdModels(bus, time.monotonic)
        self._listing = ModelListing(self.replica, self._cold.names)
        self._client = InferenceClient(
            bus,
            accept_timeout_s=settings.accept_timeout_s,
            silence_timeout_s=settings.silence_timeout_s,
            on_unreachable=self.replica.unreachable,
        )
        self._copy.on_connection_closed = self._client.ask_after
        speeds = SessionSpeeds()
        policies = PolicyChoice(settings.policy, needs=PolicyNeeds(random.Random(), speeds))
        self._chooser = Chooser(self.replica, self._client.in_flight, policies, speeds, self._cold)
        self._copy.on_report = self._chooser.reported
        self._wishes = Wishes(self._chooser)
        self._usage = usage
        self._accounting = Accounting(self.replica, usage)
        limiter = Limiter()
        self._limits = SharedLimits(bus, limiter, accounts)
        self._admission = Admission(bus, self._copy, self._chooser, limiter, self._limits, self._cold)
        self._asking = AdmissionClient(bus, settings.admission_patience_s)
        leased = LeasedPick(self._chooser, self._asking, tracing, lambda: self._admission.turns.settings.wait_max_s)
        self._calls = Calls(
            settings,
            bus,
            self._copy,
            self._client,
            self._chooser,
            self._wishes,
            tracing,
            self._admission,
            self._accounting,
            leased,
        )
        self._server = HttpServer(self.on_http, body_bytes_max=settings.body_bytes_max)
        self._door = Door(settings, self._server, place)
        self._stopping = False
        self.apply(configured.configuration if configured else Configuration(policy=settings.policy))
        self._reloading = Reloading(access, configured, self.apply) if configured else None
        self._cors = Cors(settings.cors_origin)
        fixed: dict[Route, Handler] = {
            **{("POST", path): self.on_inference for path in BY_PATH},
            ("GET", "/v1/models"): self.on_models,
            ("GET", "/health"): self.on_ready,
            ("GET", "/health/live"): self.on_live,
            ("GET", "/health/ready"): self.on_ready,
            ("GET", "/metrics"): self.on_metrics,
            ("GET", "/version"): self.on_version,
            ("GET", "/openapi.json"): self.on_openapi,
        }
        patterns: dict[Route, Handler] = {
            ("GET", r"/v1/models/.+"): self.on_model,
            ("GET", r"/v1/responses/[^/]+(/input_items)?"): self.on_kept_response,
            ("DELETE", r"/v1/responses/[^/]+"): self.on_kept_response,
            ("POST", r"/v1/responses/[^/]+/cancel"): self.on_kept_response,
        }
        self._routes = Routes(fixed, patterns, self.on_options)

    # -- life ----------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Subscribes, fills its copy of the registry, listens; at the end finishes what runs."""
        inboxes = [await self._client.start(), await self._asking.start()]
        subscriptions = [*inboxes, *await self._copy.start(), await self._limits.start(), await self._cold.start()]
        await self._bus.barrier()
        await self._copy.snapshot()  # Bounded; with it the first request is routed as well as any later one.
        self._listing.body(time.monotonic())  # The first takes longest.
        async with asyncio.TaskGroup() as tasks:
            working = [self._copy.run(), self._watching(), self._tidying(), self._door.watching(), self._limits.run()]
            if self._usage is not None:
                working.append(self._usage.run())
            if self._reloading is not None:
                working.append(self._reloading.run())
            running = [tasks.create_task(work) for work in working]
            try:
                async with self._door.open():
                    log.info("ingress.ready", url=f"http://{self._settings.host}:{self._settings.port}")
                    await self._finish(await self._door.told(stop))
            finally:
                for task in running:
                    task.cancel()
        await self._limits.aclose()
        if self._usage is not None:
            await self._usage.flush(USAGE_FLUSH_S)
        for subscription in subscriptions:
            await subscription.unsubscribe()

    def apply(self, configuration: Configuration) -> None:
        """Takes effect with the next request; those that run keep what they began with."""
        self._access.apply(configuration)
        self.configuration = configuration = replace(configuration, keys=self._access.limits())
        self._chooser.apply(configuration)
        self._wishes.apply(configuration)
        self._admission.apply(configuration, time.monotonic())
        for key in self._access.strays():
            log.warning("keys.unknown_project", key=key.name, project=key.project, effect="its holder is refused")

    def reload(self) -> None:
        """Looks at the files of keys and configuration now, not within seconds."""
        if self._reloading is not None:
            self._reloading.now()

    async def _finish(self, told: Told) -> None:
        """Those that run get `shutdown_s`; what is left then is told so, where it can be told."""
        self._stopping = told is Told.STOP
        if not await self._door.close(told):
            log.warning("ingress.cut_short", streams=self._client.open_streams)
            self._admission.turns.stop()
            self._asking.stop()
            self._client.fail_all()
            await self._server.drain(FLUSH_S)

    async def _tidying(self) -> None:
        """What was learned of sessions and models that are gone is forgotten."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            records = self.replica.records()
            models = {record.metadata.model for record in records}
            sessions = {record.session for record in records}
            self._chooser.retain(sessions, models, time.monotonic())
            self._accounting.retain(sessions, models)
            self._admission.turns.retain(models)
            self._cold.tidy(time.monotonic())
            self._asking.retain(models)

    async def _watching(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(WATCH_EVERY_S)
            metrics.EVENT_LOOP_LAG.set(max(0.0, time.monotonic() - before_s - WATCH_EVERY_S))
            metrics.IN_FLIGHT.set(self._client.open_streams)
            self._client.watch()
            self._calls.abort_stalled()
            self._accounting.look(time.monotonic())
            self._calls.keep_alive()
            self._admission.wake_for_those_who_wait(time.monotonic())

    # -- HTTP ----------------------------------------------------------------------------------------------------

    async def on_http(self, request: HttpRequest) -> None:
        """Every request comes through here; whatever goes wrong is answered with an error object."""
        try:
            request.more_headers = self._cors.headers(request.headers.get("origin"))
            if request.problem is not None:
                raise request.problem
            await self._routes.find(request.method, request.path)(request)
        except ApiError as error:
            self._respond_error(request, error)
        except ClientGone:
            raise
        except Exception:
            log.exception("http.failed", path=request.path)
            text = "The gateway failed; the error is in its log."
            self._respond_error(request, ApiError(500, text, kind="server_error", code="internal"))

    def _respond_error(self, request: HttpRequest, error: ApiError) -> None:
        endpoint = BY_PATH.get(request.path.rstrip("/"))
        dialect = Dialect.OPENAI if endpoint is None else endpoint.dialect
        if error.request_id is None:
            error.request_id = self._calls.request_ids.of(request.headers)
        headers = _JSON | error.headers | request_id_headers(dialect, error.request_id)
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        request.respond(error.status, headers, error_body(dialect, error))

    async def on_inference(self, request: HttpRequest) -> None:
        """Hop 1 begins here: docs/request-path.md."""
        caller = await self._caller(request)
        own = BY_PATH[request.path.rstrip("/")]
        asked, endpoint = as_served(request, own, self._serving)
        await self._calls.answer(asked, endpoint, caller, own.path)

    def _serving(self, name: str) -> list[SessionRecord]:
        """The sessions of all models that a client may mean by `name`."""
        now = time.monotonic()
        return [record for model in self.configuration.targets(name) for record in self.replica.routable(model, now)]

    async def on_kept_response(self, request: HttpRequest) -> None:
        """Responses are not kept: their sessions end, and what is kept there with them."""
        await self._caller(request)
        text = "This gateway keeps no responses: keep the answer, and send the whole conversation as `input`."
        raise ApiError(404, text, kind="not_found_error", code="responses_not_kept")

    async def on_options(self, request: HttpRequest) -> None:
        """What may be done with a path; and whether a browser may do it for a page of another origin."""
        methods = self._routes.methods(request.path)
        told = {"allow": ", ".join(methods)} | self._cors.preflight(request.headers, methods)
        request.respond(HTTPStatus.NO_CONTENT, told, b"")

    async def on_openapi(self, request: HttpRequest) -> None:
        request.respond(200, _JSON, openapi_document())

    async def on_live(self, request: HttpRequest) -> None:
        """The process runs; says nothing of agents."""
        _respond_json(request, 200, {"status": "live"})

    async def on_ready(self, request: HttpRequest) -> None:
        """Requests can be served: connected, not stopping, at least one model routable."""
        now = time.monotonic()
        models = self.replica.models(now)
        checks = (
            ("stopping", not self._stopping),
            ("not connected to NATS", self._bus.connected),
            ("no model is being served", bool(models)),
        )
        missing = [text for text, there in checks if not there]
        age_s = self._copy.knowledge_age_s(now)
        registry = {"synced": self._copy.synced, "age_s": None if age_s is None else round(age_s, 1)}
        status = {"status": ", ".join(missing) or "ready", "models": models, "registry": registry}
        if self._reloading is not None and self._reloading.wrong:
            status["wrong_files"] = self._reloading.wrong  # What was read before holds; the log says what is wrong.
        _respond_json(request, 503 if missing else 200, status)

    async def on_version(self, request: HttpRequest) -> None:
        _respond_json(request, 200, {"version": VERSION})

    async def on_metrics(self, request: HttpRequest) -> None:
        headers = {"content-type": prometheus_client.CONTENT_TYPE_LATEST}
        request.respond(200, headers, await self._door.metrics())

    async def on_models(self, request: HttpRequest) -> None:
        """From the local copy of the registry, never by asking around."""
        caller = await self._caller(request)
        now = time.monotonic()
        body = self._listing.body(
            now,
            everything=_asks_for_all(request),
            judged_at_s=self._copy.judged_at_s(now),
            caller=caller,
            aliases=self._wishes.aliases(caller, now),
        )
        request.respond(200, _JSON, body)

    async def on_model(self, request: HttpRequest) -> None:
        """One model; its name may hold slashes."""
        caller = await self._caller(request)
        now = time.monotonic()
        judged_at_s = self._copy.judged_at_s(now)
        name = request.path.removeprefix("/v1/models/").rstrip("/")
        entry = self._listing.entry(
            name,
            now,
            everything=_asks_for_all(request),
            judged_at_s=judged_at_s,
            caller=caller,
            aliases=self._wishes.aliases(caller, now),
        )
        if entry is None:
            raise unknown_model(name, [model for model in self.replica.models(judged_at_s) if caller.may_use(model)])
        _respond_json(request, 200, entry)

    async def _caller(self, request: HttpRequest) -> Caller:
        """Raises ApiError: 401, 403."""
        authorization = request.headers.get("authorization")
        if authorization is None and (key := request.headers.get("x-api-key")):
            authorization = f"Bearer {key}"  # As Anthropic's clients send it.
        try:
            return self._access.known(authorization) or await self._access.caller(authorization)
        except ApiError as error:
            metrics.DENIED.of(str(error.status)).add()
            raise


def _asks_for_all(request: HttpRequest) -> bool:
    """`?all=true`: models whose sessions have all left, too. Raises ApiError."""
    text = parse_qs(request.query, keep_blank_values=True).get("all", ["false"])[-1]
    if text not in ("true", "false"):
        raise ApiError(400, "`all` must be true or false.", param="all", code="invalid_type")
    return text == "true"


def _respond_json(request: HttpRequest, status: int, content: object) -> None:
    request.respond(status, _JSON, orjson.dumps(content))
