"""The ingress's door: its listening sockets, or those of a parent process, and the order in which it closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum, auto

import prometheus_client
import structlog

from serai.ingress.http_server import HttpRequest, HttpServer
from serai.ingress.listening import CannotListen, plain_reason
from serai.ingress.settings import IngressSettings
from serai.ingress.worker_place import WorkerPlace
from serai.runtime.service import ServiceFailure

log = structlog.get_logger()

_METRICS_BODY_BYTES_MAX = 1024


class Told(Enum):
    """Why a door closes."""

    STOP = auto()
    """The ingress stops: load balancers have to notice first."""
    RETIRE = auto()
    """Another process has taken over the same listening sockets; or the parent is gone."""


class Door:
    """Opens `server` to clients. Without a `place` the ingress is this process alone."""

    def __init__(self, settings: IngressSettings, server: HttpServer, place: WorkerPlace | None) -> None:
        self._settings = settings
        self._server = server
        self._place = place
        self._metrics_server = HttpServer(self._on_metrics, body_bytes_max=_METRICS_BODY_BYTES_MAX)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Clients may come during the block; at its end every connection is closed. Raises ServiceFailure."""
        place = self._place
        async with AsyncExitStack() as open_now:
            if place is not None:
                await open_now.enter_async_context(place.metrics.answering())
            open_now.push_async_callback(self._metrics_server.aclose)
            open_now.push_async_callback(self._server.aclose)
            if place is None:
                await self._listen()
            else:
                await self._metrics_server.start_on(place.metrics_listeners)
                await self._server.start_on(place.listeners)
                place.say_ready()
            yield

    async def watching(self) -> None:
        """Closes idle and slow connections, and tells the parent that this process lives, until cancelled."""
        saying = [self._place.saying_alive()] if self._place is not None else []
        await asyncio.gather(self._server.watching(), self._metrics_server.watching(), *saying)

    async def told(self, stop: asyncio.Event) -> Told:
        """Returns when the door has to close."""
        if self._place is None:
            await stop.wait()
            return Told.STOP
        stopping, retired = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._place.retired())
        try:
            await asyncio.wait({stopping, retired}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (stopping, retired):
                waiting.cancel()
        return Told.STOP if stop.is_set() else Told.RETIRE

    async def close(self, told: Told) -> bool:
        """Whether all requests had ended within their time. Until the last moment of `drain_delay_s` requests are
        taken as before; then none but on connections that are there, each of which gets one answer more at most."""
        if told is Told.STOP and self._settings.drain_delay_s:
            log.info("ingress.drain_delay", seconds=self._settings.drain_delay_s)
            await asyncio.sleep(self._settings.drain_delay_s)
        return await self._server.drain(self._settings.shutdown_s)

    async def metrics(self) -> bytes:
        """In Prometheus' text format: of this process, or of all that share the door."""
        return await self._place.metrics.scraped() if self._place is not None else prometheus_client.generate_latest()

    async def _on_metrics(self, request: HttpRequest) -> None:
        request.respond(200, {"content-type": prometheus_client.CONTENT_TYPE_LATEST}, await self.metrics())

    async def _listen(self) -> None:
        settings = self._settings
        await _start(self._server, settings.host, settings.port, "--port")
        if settings.metrics_port:
            await _start(self._metrics_server, settings.metrics_host, settings.metrics_port, "--metrics-port")


async def _start(server: HttpServer, host: str, port: int, flag: str) -> None:
    try:
        await server.start(host, port)
    except OSError as error:
        raise ServiceFailure(str(CannotListen(host, port, plain_reason(error), flag)), exit_code=2) from error
