"""The pool agent's shell: one process in one allocation, which hosts sessions side by side, as the placer tells it.

What it is to run comes by message, and lies in KV for an agent that starts anew while no placer runs. What it does
about it, `pool_book` decides; each engine then is an ordinary session (`service.NodeAgent`). The placer may come and
go: nothing that runs depends on it.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

import structlog
from prometheus_client import Gauge

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.drain import DrainAnswer, DrainRequest
from serai.contracts.placement import ASSIGNMENT_LABEL, POOL_LABEL, Assignment, Assignments, PoolReport
from serai.contracts.session_record import GpuDevice, Lifecycle
from serai.contracts.subjects import ASSIGN, DRAIN, POOL
from serai.runtime.bus import Bus, BusDisconnected, BusError, Message
from serai.runtime.connection_settings import host_name
from serai.runtime.metrics import Counts
from serai.runtime.service import ServiceFailure
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.drain import LEAVING_S, Ending, Reason
from serai.worker_agent.drain_shell import Endings, Notice
from serai.worker_agent.engine.base import EngineMisconfigured
from serai.worker_agent.pool_book import (
    Closing,
    Effect,
    IsSession,
    Over,
    PoolBook,
    Refused,
    Serves,
    StartEngine,
    StopEngine,
    Told,
)
from serai.worker_agent.pool_settings import PoolSettings
from serai.worker_agent.pool_templates import Template, command_of
from serai.worker_agent.programs import is_there
from serai.worker_agent.service import NodeAgent
from serai.worker_agent.settings import AgentSettings

log = structlog.get_logger()

LOOK_EVERY_S = 0.25
READ_EVERY_S = 10.0
"""How often it looks whether newer assignments lie in KV: a message may be lost."""
HAND_OVER_S_MAX = 900.0
"""So long at most the placer has to start elsewhere what runs here, when this agent is asked to end."""
SAID_UUID = "said-"

STARTS = Counts("serai_pool_starts", "Engines that a pool agent has started for the placer", [])
STOPS = Counts("serai_pool_stops", "Engines that it has been told to drain and stop", [])
REFUSED = Counts("serai_pool_refused", "Assignments that it did not obey", [])
FREE = Gauge("serai_pool_gpus_free", "GPUs of this pool that no assignment has")


class Keys(Protocol):
    """Where assignments lie: `NatsBucket`. Raises BusError."""

    async def get(self, key: str) -> tuple[bytes, int] | None: ...


HostMaker = Callable[[AgentSettings, Template, list[str], Sequence[GpuDevice]], NodeAgent]
"""Settings of the session, how its engine starts, its command, its GPUs."""


@dataclass(slots=True)
class _Hosted:
    """An assignment whose engine runs, or is about to."""

    host: NodeAgent
    notice: Notice


class Pool:
    """Collaborators come from outside; `run` returns when everything has ended."""

    def __init__(
        self,
        settings: PoolSettings,
        bus: Bus,
        keys: Keys,
        templates: Mapping[str, Template],
        gpus: Sequence[GpuDevice],
        make_host: HostMaker,
        allocation_end: AllocationEnd | None = None,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._keys = keys
        self._templates = {name: one for name, one in templates.items() if is_there(one)}
        self._gpus = list(gpus)
        self._make_host = make_host
        self._allocation_end = allocation_end
        self.pool = settings.pool_token
        self.book = PoolBook(self.pool, len(self._gpus), self._templates.keys())
        self._hosted: dict[str, _Hosted] = {}
        self._instance = os.urandom(4).hex()
        self._sequence = 0
        self._said: PoolReport | None = None
        self._said_at_s = 0.0
        self._stopping = False
        self._asked_to_end: DrainRequest | None = None
        self._ending = asyncio.Event()
        self._wake = asyncio.Event()
        self._no_keys = ""

    async def run(self, stop: asyncio.Event, warned: asyncio.Event | None = None) -> None:
        """Until `stop`, or until the allocation's time is up: then all sessions drain, side by side."""
        self._bus.on_disconnect(lambda: self._each(lambda host: host.session.on_disconnect()))
        self._bus.on_reconnect(self._on_reconnect)
        endings = Endings(self._settings, self._allocation_end)
        async with asyncio.TaskGroup() as sessions:
            self._sessions = sessions
            self._notice = endings.notice
            subscriptions = [
                await self._bus.subscribe(ASSIGN.of(self.pool), self.on_assign),
                await self._bus.subscribe(DRAIN.of(self.pool), self.on_drain),
            ]
            await self._bus.barrier()
            await self._read()  # Before its first report: it should say what it is about to run.
            log.info("pool.ready", pool=self.pool, gpus=len(self._gpus), engines=sorted(self._templates))
            async with asyncio.TaskGroup() as tasks:
                work = (
                    self._looking(),
                    self._reading(),
                    self._following_allocation(),
                    self._handing_over(),
                    endings.watching(stop, warned or asyncio.Event()),
                )
                living = [tasks.create_task(one) for one in work]
                await endings.notice.given.wait()
                self._stopping = True
                self.book.handle(Closing(), time.monotonic())
                for subscription in subscriptions:
                    await subscription.unsubscribe()
                await self._all_over()
                self._report(force=True)
                for task in living:
                    task.cancel()

    async def _all_over(self) -> None:
        """Their drains hear of the end from the same notice."""
        while self._hosted:
            await self._wake.wait()
            await asyncio.sleep(0)

    # -- what it is told -----------------------------------------------------------------------------------------

    def on_assign(self, message: Message) -> None:
        """The placer's word, answered with how things are."""
        refused = self._take(message.data)
        if message.reply:
            self._publish(message.reply, replace(self.report(), refused=refused))

    def _take(self, data: bytes) -> str:
        """Why it is not obeyed; empty = it is."""
        if self._stopping:
            return "this agent is about to end"
        try:
            told = decode(Assignments, data)
        except MalformedMessage as error:
            return str(error)
        refused = self._obey(self.book.handle(Told(told), time.monotonic()))
        if refused:
            REFUSED.of().add()
            log.warning("pool.refused", generation=told.generation, why=refused)
        return refused

    def on_drain(self, message: Message) -> None:
        """The launcher's word that this job is not needed any more, or is about to be over."""
        why = ""
        try:
            asked = decode(DrainRequest, message.data)
            if not 0 <= asked.within_s < math.inf:
                why = f"within_s {asked.within_s:g}: must be a number of seconds, not below 0"
        except MalformedMessage as error:
            why = str(error)
        if not why and self._asked_to_end is None:
            self._asked_to_end, self._stopping = asked, True
            log.info("pool.asked_to_end", why=asked.reason, within_s=asked.within_s)
            self._ending.set()
            self._wake.set()
        if message.reply:
            try:
                answer = DrainAnswer(self.pool, not why, len(self._hosted), why)
                self._bus.publish(message.reply, encode(answer))
            except BusDisconnected:
                pass  # Whoever asked will see that we are about to end.

    async def _handing_over(self) -> None:
        """Once asked to end: what runs here goes on while the placer starts it elsewhere, for half of the time at most.
        Then it drains."""
        await self._ending.wait()
        assert self._asked_to_end is not None
        began_s, asked = time.monotonic(), self._asked_to_end
        try:
            async with asyncio.timeout(min(HAND_OVER_S_MAX, asked.within_s / 2)):
                await self._all_over()
        except TimeoutError:
            pass
        left_s = max(0.0, asked.within_s - (time.monotonic() - began_s))
        self._notice.give(Ending(Reason.ASKED, left_s, asked.reason, requests_s=self._settings.drain_s))

    async def _reading(self) -> None:
        """What lies in KV, now and then."""
        while True:
            await asyncio.sleep(READ_EVERY_S)
            await self._read()

    async def _read(self) -> None:
        try:
            found = await self._keys.get(self.pool)
            self._no_keys = ""
        except BusError as error:
            if not self._no_keys:
                log.warning("pool.no_keys", error=str(error), effect="assignments come by message only")
            self._no_keys = str(error)
            return
        if found is not None and not self._stopping and self._is_newer(found[0]):
            self._take(found[0])

    def _is_newer(self, data: bytes) -> bool:
        try:
            return decode(Assignments, data).generation > self.book.generation
        except MalformedMessage as error:
            log.error("pool.assignments_unreadable", error=str(error), effect="what runs goes on")
            return False

    # -- what it does --------------------------------------------------------------------------------------------

    def _obey(self, effects: Sequence[Effect]) -> str:
        """The refusal that is among them, if any."""
        refused = ""
        for effect in effects:
            match effect:
                case StartEngine(assignment, gpus):
                    self._start(assignment, gpus)
                case StopEngine(id, why, drain_s):
                    self._stop(id, why, drain_s)
                case Refused(why):
                    refused = why
                case _:
                    assert_never(effect)
        self._wake.set()
        return refused

    def _start(self, assignment: Assignment, gpus: Sequence[int]) -> None:
        devices = [self._gpus[number] for number in gpus]
        template = self._templates[assignment.engine]
        command = command_of(template, assignment, devices[0].name if devices else "")
        labels = {**self._settings.label_values, POOL_LABEL: self.pool, ASSIGNMENT_LABEL: assignment.id}
        settings = replace(
            self._settings,
            pool=False,
            pool_name="",
            pool_gpus="",
            pool_templates=None,
            pool_failure_domain="",
            model=assignment.model,
            labels=tuple([f"{key}={value}" for key, value in labels.items()]),
        )
        STARTS.of().add()
        log.info("pool.start", id=assignment.id, model=assignment.model, gpus=list(gpus), why=assignment.why)
        self._sessions.create_task(self._host(assignment.id, settings, template, command, devices))

    async def _host(
        self, id: str, settings: AgentSettings, template: Template, command: list[str], devices: Sequence[GpuDevice]
    ) -> None:
        notice = self._notice.follower()
        problem = ""
        try:
            host = self._make_host(settings, template, command, devices)
            self._hosted[id] = _Hosted(host, notice)
            self._tell_session(id, host)
            await host.host_sessions(notice)
            problem = "it was told to end, and not by the placer"
        except (ServiceFailure, EngineMisconfigured, ValueError) as error:
            problem = " ".join(str(error).split())[:500]
            log.error("pool.engine_failed", id=id, model=settings.model, why=problem)
        except Exception as error:  # A mistake of ours in one session must not end the others.
            problem = f"{type(error).__name__}: {error}"[:500]
            log.exception("pool.session_failed", id=id, model=settings.model)
        finally:
            self._hosted.pop(id, None)
            self._notice.forget(notice)
        self._obey(self.book.handle(Over(id, problem), time.monotonic()))

    def _stop(self, id: str, why: str, drain_s: float) -> None:
        STOPS.of().add()
        log.info("pool.stop", id=id, why=why, drain_s=drain_s)
        hosted = self._hosted.get(id)
        if hosted is not None:
            left_s = drain_s + self._settings.engine_stop_s + LEAVING_S
            hosted.notice.give(Ending(Reason.ASKED, left_s, why, requests_s=drain_s))

    async def _following_allocation(self) -> None:
        while (end := self._allocation_end) is not None:
            if await end.ask():
                log.info("allocation.ends", at=end.ends_at())
            self._each(lambda host: self._tell_end(host, end))
            await end.pause()

    @staticmethod
    def _tell_end(host: NodeAgent, end: AllocationEnd) -> None:
        if (at := end.ends_at()) and host.record.metadata.allocation_ends_at != at:
            host.session.allocation_ends(at)

    def _each(self, what: Callable[[NodeAgent], None]) -> None:
        for hosted in list(self._hosted.values()):
            what(hosted.host)

    def _on_reconnect(self) -> None:
        self._each(lambda host: host.session.on_reconnect())
        self._wake.set()

    # -- what it says --------------------------------------------------------------------------------------------

    async def _looking(self) -> None:
        """Reports after each change, and every few seconds."""
        while True:
            for id, hosted in self._hosted.items():
                self._tell_session(id, hosted.host)
            self._report()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    def _tell_session(self, id: str, host: NodeAgent) -> None:
        now, record = time.monotonic(), host.record
        self.book.handle(IsSession(id, record.session), now)
        self.book.handle(Serves(id, record.lifecycle is Lifecycle.SERVING), now)
        if self._allocation_end is not None and record.lifecycle is Lifecycle.SERVING:
            self._tell_end(host, self._allocation_end)

    def report(self) -> PoolReport:
        """How things are now."""
        settings, end = self._settings, self._allocation_end
        remaining_s = end.remaining_s() if end is not None else None
        return PoolReport(
            pool=self.pool,
            instance=self._instance,
            sequence=self._sequence,
            interval_s=settings.pool_report_s,
            site=settings.site,
            provider=settings.provider,
            allocation=settings.allocation_name,
            host=host_name(),
            failure_domain=settings.pool_failure_domain,
            gpu=self._gpus[0].name if self._gpus else "",
            gpus=self._gpus,
            engines=sorted(self._templates),
            generation=self.book.generation,
            runs=self.book.runs(time.monotonic()),
            allocation_remaining_s=None if remaining_s is None else round(remaining_s),
            storage_bytes_s=settings.pool_storage_mb_s * 1e6,
            stopping=self._stopping,
        )

    def _report(self, *, force: bool = False) -> None:
        report, now = self.report(), time.monotonic()
        FREE.set(len(self.book.free))
        due = now - self._said_at_s >= self._settings.pool_report_s
        if not (force or due or self._said is None or _changed(self._said, report)):
            return
        self._said, self._said_at_s = report, now
        self._sequence += 1
        self._publish(POOL.of(self.pool), replace(report, sequence=self._sequence))

    def _publish(self, subject: str, report: PoolReport) -> None:
        try:
            self._bus.publish(subject, encode(report))
        except BusDisconnected:
            pass  # The next report says it.
        except BusError as error:
            log.warning("pool.not_reported", error=str(error))


def _changed(before: PoolReport, now: PoolReport) -> bool:
    return _without_times(before) != _without_times(now)


def _without_times(report: PoolReport) -> PoolReport:
    runs = [replace(run, age_s=0.0) for run in report.runs]
    return replace(report, sequence=0, runs=runs, allocation_remaining_s=None)
