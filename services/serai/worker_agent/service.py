"""The worker-agent's life: start the engine, join, serve, drain, leave.

One engine per process. The order of the steps is the contract: nothing is announced as SERVING before a canary token
has come and the server has seen our subscriptions, and nothing is stopped before it is announced as leaving.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.inference import FailureCode
from serai.contracts.session_record import (
    Draining,
    GpuDevice,
    Lifecycle,
    SessionMetadata,
    SessionRecord,
)
from serai.contracts.status import ProbeAnswer, SessionStatus
from serai.contracts.subjects import CANCEL, INFERENCE, PROBE, SESSION, STATUS
from serai.runtime.bus import Bus, BusDisconnected, BusError, Message, Subscription
from serai.runtime.http1 import HttpPool, Origin
from serai.runtime.service import ServiceFailure
from serai.runtime.telemetry import Tracing
from serai.worker_agent.absence import Absence
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.desk import WATCH_EVERY_S, Desk, DeskLimits
from serai.worker_agent.engine.base import Engine, EngineMisconfigured, ServedModel
from serai.worker_agent.engine.process import EngineStarter, RunningEngine, start_on_loopback
from serai.worker_agent.engine.readiness import fingerprint, wait_until_serving
from serai.worker_agent.first_record import first_record
from serai.worker_agent.outbox import Outbox
from serai.worker_agent.probe_answers import ProbeAnswers
from serai.worker_agent.readers import Readers
from serai.worker_agent.settings import AgentSettings
from serai.worker_agent.watchdog import Watchdog

log = structlog.get_logger()

ANNOUNCE_TIMEOUT_S = 2.0
ACKNOWLEDGED_WITHIN_S = 1.0
REANNOUNCE_EVERY_S = 10.0
RETURN_SPREAD_S = 1.0
"""Agents that are back at the same moment announce themselves over so many seconds."""
WITHDRAWAL_S = 0.25
"""After the word that we drain: how long a request that was already on its way is still taken."""


class WorkerAgent:
    """Collaborators come from outside; `run` returns when the session has left."""

    def __init__(
        self,
        settings: AgentSettings,
        engine: Engine,
        command: Sequence[str],
        bus: Bus,
        tracing: Tracing,
        start_engine: EngineStarter = start_on_loopback,
        *,
        connection: str = "",
        gpus: Sequence[GpuDevice] = (),
        allocation_end: AllocationEnd | None = None,
    ) -> None:
        """`connection` is the name under which the NATS server knows `bus`."""
        self._settings = settings
        self._engine = engine
        self._command = command
        self._bus = bus
        self._start_engine = start_engine
        self._process: RunningEngine | None = None
        self._origin = Origin.parse(settings.engine_url) if settings.engine_url else None
        key = settings.engine_api_key
        self._engine_headers = {"authorization": f"Bearer {key}"} if key else {}
        self._tracing = tracing
        self._status_sequence = 0
        self._acknowledged_version = -1
        self._acknowledgements = ""
        """Where registries acknowledge what `_say` says, version by version; empty until we listen there."""
        self._acknowledged = asyncio.Event()
        self._changed = asyncio.Event()
        self._spent = asyncio.Event()
        self._spent_because = ""
        """Why our id can be used no more."""
        self._absence = Absence(settings.rejoin_after_s)
        self._registry_answers = True
        self._allocation_end = allocation_end
        self.record = first_record(settings, engine.kind, command, connection, gpus)
        self._probes = ProbeAnswers(bus, self.record.session, self._probe_answer)
        self._pool: HttpPool | None = None
        self._served = ServedModel("")
        self._desk: Desk | None = None
        self._readers: Readers | None = None
        self._watchdog: Watchdog | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, or until the engine ends by itself. Raises ServiceFailure with the reason then."""
        async with asyncio.TaskGroup() as tasks:
            living = [
                tasks.create_task(self._announcing()),
                tasks.create_task(self._showing_life()),
                tasks.create_task(self._following_allocation()),
            ]
            try:
                await self._listen()
                if not await self._start(stop):
                    return
                subscriptions = await self._open_desk()
                assert self._watchdog is not None
                living += [tasks.create_task(self._watching()), tasks.create_task(self._watchdog.watching())]
                self._say(Lifecycle.SERVING, replace(self.record.metadata, loading_progress=None, loading_phase=""))
                log.info("agent.serving", session=self.record.session, model=self._settings.model)
                await self._until_over(stop)
                await self._drain()
                await self._close_desk(subscriptions)
            finally:
                for task in living:
                    task.cancel()
                self._probes.close()
                await self._leave()

    # -- start ---------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """To what concerns us before the engine serves: whether we are there, and what the registry says of us."""
        self._bus.on_disconnect(self._on_disconnect)
        self._bus.on_reconnect(self._on_reconnect)
        session = self.record.session
        acknowledgements = f"{self._bus.inbox_prefix}.announced"
        await self._bus.subscribe(f"{acknowledgements}.*", self._on_acknowledged)
        self._acknowledgements = acknowledgements
        await self._bus.subscribe(PROBE.of(session), self._probes.on_probe)

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
        spent = asyncio.ensure_future(self._spent.wait())
        ends: set[asyncio.Future[object]] = {serving, stopping, spent}  # type: ignore[arg-type]
        if self._process is not None:
            ends.add(self._process.exited)  # type: ignore[arg-type]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return False
            if self._process is not None and self._process.exited.done():
                raise ServiceFailure(self._exit_story("before it served"))
            self._refuse_spent_id()
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
        )
        self.record = self.record.advanced(self.record.lifecycle, metadata)

    def _on_phase(self, phase: str) -> None:
        metadata = self.record.metadata
        if phase != metadata.loading_phase:
            log.info("engine.phase", phase=phase)
            self._say(self.record.lifecycle, replace(metadata, loading_phase=phase))

    async def _open_desk(self) -> list[Subscription]:
        assert self._pool is not None
        settings = self._settings
        limits = DeskLimits(
            concurrency_max=settings.concurrency_max,
            body_bytes_max=settings.body_bytes_max,
            engine_silence_s=settings.engine_silence_s,
        )
        outbox = Outbox(self._bus)
        desk = self._desk = Desk(self._pool, outbox, limits, self._tracing, self._engine_headers)
        self._watchdog = Watchdog(
            desk,
            self._pool,
            self._engine,
            self._served,
            self._engine_headers,
            self._show_life,
            prefill_s_per_token=settings.prefill_s_per_token or None,
        )
        self._readers = Readers(self._bus, desk)
        session = self.record.session
        subscriptions = [
            await self._bus.subscribe(INFERENCE.of(session), desk.on_inference),
            await self._bus.subscribe(CANCEL.of(session), desk.on_cancel),
            await self._readers.start(),
        ]
        await self._bus.barrier()
        return subscriptions

    # -- while it serves -----------------------------------------------------------------------------------------

    async def _until_over(self, stop: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(stop.wait())
        spent = asyncio.ensure_future(self._spent.wait())
        ends: set[asyncio.Future[object]] = {stopping, spent}  # type: ignore[arg-type]
        if self._process is not None:
            ends.add(self._process.exited)  # type: ignore[arg-type]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            spent.cancel()
        self._refuse_spent_id()
        if self._process is not None and self._process.exited.done():
            self._say(Lifecycle.DOWN)
            raise ServiceFailure(self._exit_story("while it served"))

    def _heed(self, data: bytes) -> None:
        """The registry's answer: what it knows of us. When that is LEFT (after a long silence of ours), so it is: our
        id is spent, and only a new session can serve. Nobody else's word counts, and so nobody else is listened to."""
        try:
            record = decode(SessionRecord, data) if data else self.record
        except MalformedMessage:
            return
        if record.session == self.record.session and record.lifecycle > self.record.lifecycle:
            log.error("agent.declared_gone", lifecycle=record.lifecycle.name)
            self._spend("the registry says that this session has left")

    def _spend(self, because: str) -> None:
        self._spent_because = because
        self._spent.set()

    def _refuse_spent_id(self) -> None:
        # A new id means a new session from the start; ending and being started again is the one path to it.
        if self._spent.is_set():
            raise ServiceFailure(f"{self._spent_because}; start again as a new session")

    def _on_disconnect(self) -> None:
        self._absence.lost(time.monotonic())
        if self._desk is not None:
            # Frames may be lost with the connection, so no stream can go on after it: free the engine at once.
            self._desk.fail_all(FailureCode.BUS_LOST, "the agent lost NATS")

    def _on_reconnect(self) -> None:
        now = time.monotonic()
        away_s = self._absence.lasted_s(now)
        if not self._absence.over(now):
            log.error("agent.away_too_long", away_s=round(away_s))
            self._spend(f"NATS was out of reach for {away_s:.0f} s, and others may have closed this session meanwhile")
            return
        asyncio.get_running_loop().call_later(random.uniform(0, RETURN_SPREAD_S), self._return)

    def _return(self) -> None:
        self._changed.set()
        self._show_life()

    @property
    def _silenced(self) -> bool:
        """Whether the only word that is still ours to say is that we leave."""
        return self.record.lifecycle is not Lifecycle.LEFT and self._absence.too_long(time.monotonic())

    async def _following_allocation(self) -> None:
        """Keeps in the record when our allocation ends."""
        while (end := self._allocation_end) is not None:
            if await end.ask():
                log.info("allocation.ends", at=end.ends_at())
                metadata = replace(self.record.metadata, allocation_ends_at=end.ends_at())
                self._say(self.record.lifecycle, metadata)
            await end.pause()

    async def _watching(self) -> None:
        assert self._desk is not None
        assert self._readers is not None
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            self._desk.watch()
            self._readers.ask()

    # -- end -----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """No new requests; those that run may finish for `drain_s`; the rest get an honest error."""
        assert self._desk is not None
        desk = self._desk
        left_s = self._settings.drain_s
        self._say(self.record.lifecycle, replace(self.record.metadata, draining=Draining("stopping", left_s)))
        log.info("agent.draining", in_flight=desk.in_flight, at_most_s=left_s)
        await asyncio.sleep(WITHDRAWAL_S)
        desk.closed_because = (FailureCode.DRAINING, "this session is draining")
        empty = asyncio.Event()
        desk.on_empty = empty.set
        if desk.in_flight:
            try:
                async with asyncio.timeout(left_s):
                    await empty.wait()
            except TimeoutError:
                log.warning("agent.drain_incomplete", in_flight=desk.in_flight)
                desk.fail_all(FailureCode.AGENT_LEFT, "the session ended before the answer did", retry_safe=True)

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
        if self._desk is not None:
            self._desk.fail_all(FailureCode.AGENT_LEFT, "the session ended before the answer did", retry_safe=True)
            await asyncio.sleep(0)  # Lets the outbox send.
        if self.record.lifecycle is not Lifecycle.LEFT:
            self.record = self.record.advanced(Lifecycle.LEFT)
            await self._announce()
            log.info("agent.left", session=self.record.session)
        if self._pool is not None:
            await self._pool.aclose()
        if self._process is not None:
            await self._process.stop(self._settings.engine_stop_s)

    # -- what the others know of us ------------------------------------------------------------------------------

    def relabel(self, labels: dict[str, str]) -> None:
        """Other labels from now on, for everybody."""
        self._say(self.record.lifecycle, replace(self.record.metadata, labels=labels))

    def _say(self, lifecycle: Lifecycle, metadata: SessionMetadata | None = None) -> None:
        """Changes our record, says so at once, and wakes the announcer, who sees to it that a registry has heard."""
        self.record = self.record.advanced(lifecycle, metadata)
        self._changed.set()
        if self._silenced:
            return
        version = self.record.version
        reply = f"{self._acknowledgements}.{version}" if self._acknowledgements else ""
        try:
            self._bus.publish(SESSION.of(self.record.session), encode(self.record), reply)
        except BusDisconnected:
            pass  # The announcer repeats it after the reconnect.

    def _on_acknowledged(self, message: Message) -> None:
        version = message.subject.rpartition(".")[2]
        if version.isdigit() and not message.no_responders:
            self._acknowledged_version = max(self._acknowledged_version, int(version))
            self._acknowledged.set()
            self._heed(message.data)

    async def _announcing(self) -> None:
        """Repeats our record until the registry has acknowledged this version of it, then now and then: what the
        registry stores may be lost, and whoever starts later should hear of us."""
        said_already = False
        while True:
            self._changed.clear()
            if not (said_already and await self._is_acknowledged()):
                await self._announce()
            acknowledged = self._acknowledged_version == self.record.version
            pause_s = REANNOUNCE_EVERY_S * random.uniform(0.8, 1.2) if acknowledged else 1.0
            said_version = self.record.version
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            # Woken without a new version means: we are back after an absence, and nobody has heard us meanwhile.
            said_already = self.record.version != said_version

    async def _is_acknowledged(self) -> bool:
        """Whether the registry acknowledges within a moment what has just been said."""
        if not self._acknowledgements:
            return False
        try:
            async with asyncio.timeout(ACKNOWLEDGED_WITHIN_S):
                while self._acknowledged_version != self.record.version:
                    self._acknowledged.clear()
                    await self._acknowledged.wait()
        except TimeoutError:
            return False
        return True

    async def _announce(self) -> None:
        record = self.record
        if self._silenced:
            return
        try:
            answer = await self._bus.request(SESSION.of(record.session), encode(record), ANNOUNCE_TIMEOUT_S)
            self._heed(answer.data)
            self._acknowledged_version = max(self._acknowledged_version, record.version)
            self._registry_answers = True
        except BusError as error:
            if self._registry_answers:
                log.warning("agent.not_acknowledged", error=str(error), effect="repeated until a registry answers")
            self._registry_answers = False

    async def _showing_life(self) -> None:
        while True:
            self._show_life()
            await asyncio.sleep(self._settings.status_interval_s * random.uniform(0.9, 1.1))

    def _show_life(self) -> None:
        if self._silenced:
            return
        self._status_sequence += 1
        desk = self._desk
        status = SessionStatus(
            session=self.record.session,
            sequence=self._status_sequence,
            lifecycle=self.record.lifecycle,
            version=self.record.version,
            interval_s=self._settings.status_interval_s,
            in_flight=desk.in_flight if desk else 0,
            requests_total=desk.requests_total if desk else 0,
            output_bytes_total=desk.output_bytes_total if desk else 0,
            stalled_s=self._stalled_s,
            allocation_remaining_s=self._allocation_remaining_s,
        )
        try:
            self._bus.publish(STATUS.of(status.session), encode(status))
        except BusDisconnected:
            pass  # Silence is what a disconnected agent should be.

    def _probe_answer(self) -> ProbeAnswer:
        record = self.record
        return ProbeAnswer(
            record.session, lifecycle=record.lifecycle, version=record.version, stalled_s=self._stalled_s
        )

    @property
    def _stalled_s(self) -> float:
        # Tenths are enough for anybody, and every digit is sent every second.
        return round(self._watchdog.stalled_s, 1) if self._watchdog else 0.0

    @property
    def _allocation_remaining_s(self) -> float | None:
        remaining_s = self._allocation_end.remaining_s() if self._allocation_end else None
        return None if remaining_s is None else round(remaining_s)

    # -- words for people ----------------------------------------------------------------------------------------

    def _exit_story(self, when: str) -> str:
        assert self._process is not None
        code = self._process.exited.result()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the engine {how} {when}{self._tail()}"

    def _tail(self) -> str:
        lines = self._process.last_lines if self._process else []
        return ("; its last lines:\n  " + "\n  ".join(lines)) if lines else ""
