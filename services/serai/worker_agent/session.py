"""A session's life: start the engine, join, serve, drain, leave.

One engine, wrapped once. The order of the steps is the contract: nothing is announced as SERVING before a canary token
has come and the server has seen our subscriptions, and nothing is stopped before it is announced as leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

import structlog

from serai.contracts.inference import FailureCode
from serai.contracts.session_record import (
    TEXT_CHARACTERS_MAX,
    Draining,
    GpuDevice,
    Lifecycle,
    SessionMetadata,
    SessionRecord,
)
from serai.contracts.subjects import CANCEL, INFERENCE
from serai.runtime.bus import Bus, BusError, Subscription
from serai.runtime.http1 import HttpFailure
from serai.runtime.service import ServiceFailure
from serai.runtime.telemetry import Tracing
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.desk import WATCH_EVERY_S, Desk, DeskLimits
from serai.worker_agent.drain_shell import Notice, answer_drain_requests, drain
from serai.worker_agent.engine.base import Engine, NotServing, ServedModel
from serai.worker_agent.engine.clearance import Clearance, NothingInTheWay
from serai.worker_agent.engine.phase_socket import PhaseSocket, socket_name
from serai.worker_agent.engine.process import EngineStarter, start_on_loopback
from serai.worker_agent.engine.readiness import canary, fingerprint
from serai.worker_agent.engine.start_watch import Phase, Progress
from serai.worker_agent.engine_reports import EngineReports
from serai.worker_agent.engine_run import EngineFailed, EngineRun
from serai.worker_agent.faults import ENGINE_DIED, with_fault
from serai.worker_agent.first_record import first_record
from serai.worker_agent.gpu_watch import GpuWatch
from serai.worker_agent.outbox import Outbox
from serai.worker_agent.phase_gate import Position
from serai.worker_agent.phase_gate_shell import GateShell
from serai.worker_agent.presence import Presence, Vitals, Work
from serai.worker_agent.readers import Readers
from serai.worker_agent.settings import AgentSettings
from serai.worker_agent.sleeping import EngineSleep, Sleeping
from serai.worker_agent.supervision import EngineEnd
from serai.worker_agent.vitals import VitalSigns
from serai.worker_agent.watchdog import Watchdog

log = structlog.get_logger()

SHARE_SAID = 0.1
"""Of a start: a record is stored by every registry, so it is not written for each percent."""
HUNG_CANARY_S = 30.0
PREFILL_S_PER_TOKEN = 0.000_2
"""What the phase gate takes for true until the engine has shown: about a 30B model on two GPUs."""


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
    start_engine: EngineStarter = start_on_loopback
    clearance: Clearance = NothingInTheWay()


class Session:
    """One session of an agent. `run` returns when it has left; it runs once."""

    def __init__(self, surroundings: Surroundings, engine: Engine, command: Sequence[str]) -> None:
        settings = self._settings = surroundings.settings
        self._bus = surroundings.bus
        self._tracing = surroundings.tracing
        self._allocation_end = surroundings.allocation_end
        start, clearance = surroundings.start_engine, surroundings.clearance
        ends_at = self._allocation_end.ends_at() if self._allocation_end else ""
        self._engine = EngineRun(settings, engine, command, start, clearance, self._on_progress)
        self.presence = Presence(
            self._bus,
            first_record(settings, engine.kind, command, surroundings.connection, surroundings.gpus, ends_at),
            self._work,
            status_interval_s=settings.status_interval_s,
            rejoin_after_s=settings.rejoin_after_s,
        )
        self._served = ServedModel("")
        self.desk: Desk | None = None
        self._readers: Readers | None = None
        self._watchdog: Watchdog | None = None
        self._vitals: VitalSigns | None = None
        self._gate: GateShell | None = None
        self._sleeping: Sleeping | None = None

    @property
    def record(self) -> SessionRecord:
        return self.presence.record

    async def run(self, notice: Notice, pause_s: float = 0.0) -> None:
        """Serves until `notice` is given, or until the engine ends by itself: then it raises EngineFailed. Raises
        ServiceFailure when its id is spent. `pause_s`: how long to wait before the engine is started."""
        stop = notice.given
        failure: ServiceFailure | EngineFailed | None = None
        async with asyncio.TaskGroup() as tasks:
            living = [
                tasks.create_task(self.presence.announcing()),
                tasks.create_task(self.presence.showing_life()),
            ]
            try:
                await self.presence.listen()
                if not await self._start(stop, pause_s):
                    return
                subscriptions = await self._open_desk(notice)
                assert self._watchdog is not None
                assert self._vitals is not None
                assert self._gate is not None
                assert self._sleeping is not None
                living += [
                    tasks.create_task(self._sleeping.running()),
                    tasks.create_task(self._watching()),
                    tasks.create_task(self._gate.watching()),
                    tasks.create_task(self._watchdog.watching()),
                    tasks.create_task(self._vitals.watching()),
                ]
                self.presence.say(
                    Lifecycle.SERVING, replace(self.record.metadata, loading_progress=None, loading_phase="")
                )
                log.info("agent.serving", session=self.record.session, model=self._settings.model)
                await self._unless_over(stop, self._engine.end(), self._until_hung())
                assert self.desk is not None
                await drain(self.desk, notice, self._drains, self._settings.engine_stop_s)
                await self._close_desk(subscriptions)
            except (ServiceFailure, EngineFailed) as error:
                failure = error  # Raised outside, so that it does not come wrapped in a group.
                if isinstance(error, EngineFailed):
                    self._say_failed(error.end)
            finally:
                for task in living:
                    task.cancel()
                await self._leave()
                await self.presence.close()
        if failure is not None:
            raise failure

    # -- start ---------------------------------------------------------------------------------------------------

    async def _start(self, stop: asyncio.Event, pause_s: float) -> bool:
        """Starts the engine and waits until it serves. False when told to stop meanwhile."""
        if pause_s > 0:
            self._on_progress(Progress(Phase.QUEUED))
            if await self._unless_over(stop, asyncio.sleep(pause_s)):
                return False
        starting = asyncio.ensure_future(self._engine.start())
        if await self._unless_over(stop, starting):
            return False
        self._serves(starting.result())
        return True

    async def _unless_over(self, stop: asyncio.Event, *work: Awaitable[object]) -> bool:
        """Until one of `work` is done or raises, which this raises; or until told to stop, which is True. Raises
        ServiceFailure when our id is spent."""
        working = [asyncio.ensure_future(one) for one in work]
        over = [asyncio.ensure_future(event.wait()) for event in (stop, self.presence.spent)]
        try:
            await asyncio.wait([*working, *over], return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return True
            self.presence.refuse_spent_id()
            for one in working:
                if one.done():
                    one.result()
            return False
        finally:
            for one in (*working, *over):
                one.cancel()
            await asyncio.gather(*working, *over, return_exceptions=True)

    def _serves(self, served: ServedModel) -> None:
        self._served = served
        metadata = replace(
            self.record.metadata,
            engine_model=served.engine_model,
            fingerprint=fingerprint(self._engine.engine.kind, served),
            context_tokens_max=served.context_tokens_max,
            endpoints=served.endpoints,
            quantization=served.traits.quantization[:TEXT_CHARACTERS_MAX],
            dtype=served.traits.dtype[:TEXT_CHARACTERS_MAX],
            engine_version=served.traits.engine_version[:TEXT_CHARACTERS_MAX],
        )
        self.presence.note(metadata)  # It is said with SERVING.

    def _on_gpu_fault(self, gpu: str, what: str) -> None:
        self._change(with_fault(self.record.metadata, what, gpu))

    def _on_progress(self, progress: Progress) -> None:
        """Says each phase, and within one each tenth."""
        metadata, share = self.record.metadata, progress.share
        said = metadata.loading_progress
        if progress.phase != metadata.loading_phase:
            log.info("engine.phase", phase=progress.phase)
        elif share is None or (said is not None and abs(share - said) < SHARE_SAID):
            return
        rate = round(progress.bytes_per_s / 2**20)
        log.debug("engine.progress", phase=progress.phase, share=share, mib_per_s=rate)
        self._change(replace(metadata, loading_phase=str(progress.phase), loading_progress=share))

    def _say_failed(self, end: EngineEnd) -> None:
        """That it is over, and why: those who look at the record should not need our log."""
        why = f"{end.cause}: {end.text}"[:TEXT_CHARACTERS_MAX]
        metadata = replace(self.record.metadata, failure=why, loading_phase="", loading_progress=None)
        self.presence.say(Lifecycle.DOWN, with_fault(metadata, ENGINE_DIED) if end.served_s else metadata)

    async def _open_desk(self, notice: Notice) -> list[Subscription]:
        pool, settings = self._engine.pool, self._settings
        limits = DeskLimits(
            concurrency_max=settings.concurrency_max,
            body_bytes_max=settings.body_bytes_max,
            engine_silence_s=settings.engine_silence_s,
        )
        outbox = Outbox(self._bus)
        about_engine: dict[str, str | int] = {
            "gen_ai.provider.name": self.record.metadata.engine,
            "gen_ai.request.model": self.record.metadata.engine_model,
            "server.address": pool.origin.host,
            "server.port": pool.origin.port,
        }
        desk = self.desk = Desk(pool, outbox, limits, self._tracing, self._engine.headers, about_engine)
        reports = EngineReports(pool, self._engine.engine, self._engine.headers, lambda: desk.in_flight)
        gpus = GpuWatch(self.record.metadata.gpus, self._on_gpu_fault)
        self._vitals = VitalSigns(desk, reports, gpus, engine_is_ours=not settings.engine_url)
        self._watchdog = Watchdog(
            desk,
            pool,
            self._engine.engine,
            self._served,
            self._engine.headers,
            self.presence.show_life,
            reports,
            prefill_s_per_token=settings.prefill_s_per_token or None,
        )
        self._readers = Readers(self._bus, desk, self.record.session)
        await reports.ask()
        self.presence.note(replace(self.record.metadata, kv_tokens_max=reports.load.kv_tokens_max or 0))
        session = self.record.session
        self._gate = GateShell(
            self._bus,
            session,
            desk,
            reports,
            load_every_s=self._engine.engine.load_every_s,
            phases=PhaseSocket(socket_name(pool.origin.port)) if self._engine.tells_steps else None,
            prefill_s_per_token=settings.prefill_s_per_token or PREFILL_S_PER_TOKEN,
            kv_tokens_total=reports.load.kv_tokens_max or 0,
            open_gate=Position(settings.open_gate),
        )
        self._sleeping = self._made_sleeping(desk, notice)
        subscriptions = [
            *await self._gate.start(),
            await self._sleeping.start(),
            await self._bus.subscribe(INFERENCE.of(session), desk.on_inference),
            await self._bus.subscribe(CANCEL.of(session), desk.on_cancel),
            await self._readers.start(),
            await answer_drain_requests(self._bus, session, notice, lambda: desk.in_flight),
        ]
        await self._bus.barrier()
        return subscriptions

    def _made_sleeping(self, desk: Desk, notice: Notice) -> Sleeping:
        pool, headers, model = self._engine.pool, self._engine.headers, self._served.engine_model
        # An engine that somebody else has started is not ours to put to sleep.
        calls = None if self._settings.engine_url else self._engine.sleep_calls
        return Sleeping(
            self._bus,
            self.record.session,
            desk,
            EngineSleep(pool, headers, calls) if calls is not None else None,
            lambda: canary(pool, model, headers, HUNG_CANARY_S),
            lambda: self.record.metadata,
            self._change,
            notice.given.is_set,
        )

    # -- while it serves -----------------------------------------------------------------------------------------

    async def _until_hung(self) -> None:
        """Raises EngineFailed when the engine gets on with nothing for long, not even with a canary."""
        limit_s = self._settings.engine_hung_s
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            watchdog = self._watchdog
            if limit_s <= 0 or watchdog is None or watchdog.stalled_s <= limit_s:
                continue
            try:
                patience_s = min(HUNG_CANARY_S, limit_s)
                await canary(self._engine.pool, self._served.engine_model, self._engine.headers, patience_s)
            except (NotServing, HttpFailure, TimeoutError):
                if watchdog.stalled_s > limit_s:
                    self._engine.hung(watchdog.stalled_s)

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
        if self._gate is not None:
            self._gate.close()
        await self.presence.leave()
        await self._engine.stop(self._settings.engine_stop_s)

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
            vitals=self._vitals.now if self._vitals else Vitals,
        )
