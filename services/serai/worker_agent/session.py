"""A session's life: start the engine, join, serve, drain, leave.

One engine, wrapped once. The order of the steps is the contract: nothing is announced as SERVING before a canary token
has come and the server has seen our subscriptions, and nothing is stopped before it is announced as leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from serai.contracts.inference import FailureCode
from serai.contracts.session_record import (
    Draining,
    GpuDevice,
    Lifecycle,
    SessionMetadata,
    SessionRecord,
)
from serai.contracts.subjects import CANCEL, INFERENCE
from serai.runtime.bus import Bus, BusError, Subscription
from serai.runtime.http1 import HttpPool, Origin
from serai.runtime.service import ServiceFailure
from serai.runtime.telemetry import Tracing
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.desk import WATCH_EVERY_S, Desk, DeskLimits
from serai.worker_agent.drain_shell import Notice, answer_drain_requests, drain
from serai.worker_agent.engine.base import Engine, EngineMisconfigured, ServedModel
from serai.worker_agent.engine.process import EngineStarter, RunningEngine, start_on_loopback
from serai.worker_agent.engine.readiness import fingerprint, wait_until_serving
from serai.worker_agent.first_record import first_record
from serai.worker_agent.outbox import Outbox
from serai.worker_agent.presence import Presence, Work
from serai.worker_agent.readers import Readers
from serai.worker_agent.settings import AgentSettings
from serai.worker_agent.watchdog import Watchdog

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all sessions of one agent share."""

    settings: AgentSettings
    bus: Bus
    tracing: Tracing
    connection: str = ""
    """The name under which the NATS server knows `bus`."""
    gpus: Sequence[GpuDevice] = ()
    allocation_end: AllocationEnd | None = None


class Session:
    """One session of an agent. `run` returns when it has left; it runs once."""

    def __init__(
        self,
        surroundings: Surroundings,
        engine: Engine,
        command: Sequence[str],
        start_engine: EngineStarter = start_on_loopback,
    ) -> None:
        settings = self._settings = surroundings.settings
        self._bus = surroundings.bus
        self._tracing = surroundings.tracing
        self._allocation_end = surroundings.allocation_end
        self._engine = engine
        self._command = command
        self._start_engine = start_engine
        self._process: RunningEngine | None = None
        self._origin = Origin.parse(settings.engine_url) if settings.engine_url else None
        key = settings.engine_api_key
        self._engine_headers = {"authorization": f"Bearer {key}"} if key else {}
        self.presence = Presence(
            self._bus,
            first_record(settings, engine.kind, command, surroundings.connection, surroundings.gpus),
            self._work,
            status_interval_s=settings.status_interval_s,
            rejoin_after_s=settings.rejoin_after_s,
        )
        self._pool: HttpPool | None = None
        self._served = ServedModel("")
        self.desk: Desk | None = None
        self._readers: Readers | None = None
        self._watchdog: Watchdog | None = None

    @property
    def record(self) -> SessionRecord:
        return self.presence.record

    async def run(self, notice: Notice) -> None:
        """Serves until `notice` is given, or until the engine ends by itself. Raises ServiceFailure with the reason
        then."""
        stop = notice.given
        failure: ServiceFailure | None = None
        async with asyncio.TaskGroup() as tasks:
            living = [
                tasks.create_task(self.presence.announcing()),
                tasks.create_task(self.presence.showing_life()),
            ]
            try:
                await self.presence.listen()
                if not await self._start(stop):
                    return
                subscriptions = await self._open_desk(notice)
                assert self._watchdog is not None
                living += [tasks.create_task(self._watching()), tasks.create_task(self._watchdog.watching())]
                self.presence.say(
                    Lifecycle.SERVING, replace(self.record.metadata, loading_progress=None, loading_phase="")
                )
                log.info("agent.serving", session=self.record.session, model=self._settings.model)
                await self._until_over(stop)
                assert self.desk is not None
                await drain(self.desk, notice, self._drains, self._settings.engine_stop_s)
                await self._close_desk(subscriptions)
            except ServiceFailure as error:
                failure = error  # Raised outside, so that it does not come wrapped in a group.
            finally:
                for task in living:
                    task.cancel()
                await self._leave()
                await self.presence.close()
        if failure is not None:
            raise failure

    # -- start ---------------------------------------------------------------------------------------------------

    async def _start(self, stop: asyncio.Event) -> bool:
        """Starts the engine and waits until it serves. False when told to stop meanwhile."""
        if self._origin is None:
            self._origin = await self._start_process()
        self._pool = HttpPool(self._origin)
        serving = asyncio.ensure_future(
            wait_until_serving(
                self._engine,
                self._pool,
                self._settings.engine_model or self._settings.model,
                self._engine_headers,
                self._on_phase,
                deadline_s=self._settings.start_timeout_s,
            )
        )
        stopping = asyncio.ensure_future(stop.wait())
        spent = asyncio.ensure_future(self.presence.spent.wait())
        ends: set[asyncio.Future[object]] = {serving, stopping, spent}  # type: ignore[arg-type]
        if self._process is not None:
            ends.add(self._process.exited)  # type: ignore[arg-type]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return False
            if self._process is not None and self._process.exited.done():
                raise ServiceFailure(self._exit_story("before it served"))
            self.presence.refuse_spent_id()
            self._serves(serving.result())
            return True
        except (EngineMisconfigured, TimeoutError) as error:
            raise ServiceFailure(f"{error}{self._tail()}") from error
        finally:
            serving.cancel()
            stopping.cancel()
            spent.cancel()

    async def _start_process(self) -> Origin:
        try:
            self._process, origin = await self._start_engine(self._engine, self._command)
        except EngineMisconfigured as error:
            raise ServiceFailure(str(error), exit_code=2) from error
        except OSError as error:
            raise ServiceFailure(f"cannot start {self._command[0]!r}: {error.strerror}", exit_code=2) from error
        return origin

    def _serves(self, served: ServedModel) -> None:
        self._served = served
        metadata = replace(
            self.record.metadata,
            engine_model=served.engine_model,
            fingerprint=fingerprint(self._engine.kind, served),
            context_tokens_max=served.context_tokens_max,
            endpoints=served.endpoints,
        )
        self.presence.note(metadata)  # It is said with SERVING.

    def _on_phase(self, phase: str) -> None:
        metadata = self.record.metadata
        if phase != metadata.loading_phase:
            log.info("engine.phase", phase=phase)
            self._change(replace(metadata, loading_phase=phase))

    async def _open_desk(self, notice: Notice) -> list[Subscription]:
        assert self._pool is not None
        settings = self._settings
        limits = DeskLimits(
            concurrency_max=settings.concurrency_max,
            body_bytes_max=settings.body_bytes_max,
            engine_silence_s=settings.engine_silence_s,
        )
        outbox = Outbox(self._bus)
        about_engine: dict[str, str | int] = {
            "gen_ai.provider.name": self.record.metadata.engine,
            "gen_ai.request.model": self.record.metadata.engine_model,
            "server.address": self._pool.origin.host,
            "server.port": self._pool.origin.port,
        }
        desk = self.desk = Desk(self._pool, outbox, limits, self._tracing, self._engine_headers, about_engine)
        self._watchdog = Watchdog(
            desk,
            self._pool,
            self._engine,
            self._served,
            self._engine_headers,
            self.presence.show_life,
            prefill_s_per_token=settings.prefill_s_per_token or None,
        )
        self._readers = Readers(self._bus, desk)
        session = self.record.session
        subscriptions = [
            await self._bus.subscribe(INFERENCE.of(session), desk.on_inference),
            await self._bus.subscribe(CANCEL.of(session), desk.on_cancel),
            await self._readers.start(),
            await answer_drain_requests(self._bus, session, notice, lambda: desk.in_flight),
        ]
        await self._bus.barrier()
        return subscriptions

    # -- while it serves -----------------------------------------------------------------------------------------

    async def _until_over(self, stop: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(stop.wait())
        spent = asyncio.ensure_future(self.presence.spent.wait())
        ends: set[asyncio.Future[object]] = {stopping, spent}  # type: ignore[arg-type]
        if self._process is not None:
            ends.add(self._process.exited)  # type: ignore[arg-type]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            spent.cancel()
        self.presence.refuse_spent_id()
        if self._process is not None and self._process.exited.done():
            self.presence.say(Lifecycle.DOWN)
            raise ServiceFailure(self._exit_story("while it served"))

    def on_disconnect(self) -> None:
        """NATS is lost."""
        self.presence.on_disconnect()
        if self.desk is not None:
            # Frames may be lost with the connection, so no stream can go on after it: free the engine at once.
            self.desk.fail_all(FailureCode.BUS_LOST, "the agent lost NATS")

    def on_reconnect(self) -> None:
        """NATS is there again."""
        self.presence.on_reconnect()

    def allocation_ends(self, at: str) -> None:
        """Keeps in the record when our allocation ends (ISO 8601 in UTC)."""
        self._change(replace(self.record.metadata, allocation_ends_at=at))

    async def _watching(self) -> None:
        assert self.desk is not None
        assert self._readers is not None
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            self.desk.watch()
            self._readers.ask()

    # -- end -----------------------------------------------------------------------------------------------------

    async def _close_desk(self, subscriptions: list[Subscription]) -> None:
        """Unsubscribe, barrier, wait for what was on its way: nats-py's own drain loses it."""
        for subscription in subscriptions:
            await subscription.unsubscribe()
        try:
            await self._bus.barrier()
        except BusError as error:
            log.warning("agent.no_barrier", error=str(error))
        await asyncio.sleep(0.05)

    async def _leave(self) -> None:
        if self.desk is not None:
            self.desk.fail_all(FailureCode.AGENT_LEFT, "the session ended before the answer did", retry_safe=True)
            await asyncio.sleep(0)  # Lets the outbox send.
        await self.presence.leave()
        if self._pool is not None:
            await self._pool.aclose()
        if self._process is not None:
            await self._process.stop(self._settings.engine_stop_s)

    # -- what the others know of us ------------------------------------------------------------------------------

    def _drains(self, draining: Draining) -> None:
        self._change(replace(self.record.metadata, draining=draining))

    def relabel(self, labels: dict[str, str]) -> None:
        """Other labels from now on, for everybody."""
        self._change(replace(self.record.metadata, labels=labels))

    def _change(self, metadata: SessionMetadata) -> None:
        self.presence.say(self.record.lifecycle, metadata)

    def _work(self) -> Work:
        desk, watchdog, end = self.desk, self._watchdog, self._allocation_end
        remaining_s = end.remaining_s() if end else None
        return Work(
            in_flight=desk.in_flight if desk else 0,
            requests_total=desk.requests_total if desk else 0,
            output_bytes_total=desk.output_bytes_total if desk else 0,
            # Tenths are enough for anybody, and every digit is sent every second.
            stalled_s=round(watchdog.stalled_s, 1) if watchdog else 0.0,
            allocation_remaining_s=None if remaining_s is None else round(remaining_s),
        )

    # -- words for people ----------------------------------------------------------------------------------------

    def _exit_story(self, when: str) -> str:
        assert self._process is not None
        code = self._process.exited.result()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the engine {how} {when}{self._tail()}"

    def _tail(self) -> str:
        lines = self._process.last_lines if self._process else []
        return ("; its last lines:\n  " + "\n  ".join(lines)) if lines else ""
