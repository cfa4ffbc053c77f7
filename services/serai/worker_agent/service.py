"""The node agent: one process in one allocation, which hosts sessions, one after the other.

What belongs to the process is here: the connection to NATS, when the allocation ends, the wish to stop. What belongs to
one engine's run is the session's (`session.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from serai.contracts.session_record import GpuDevice, SessionRecord
from serai.runtime.bus import Bus
from serai.runtime.metrics import Counts
from serai.runtime.service import ServiceFailure
from serai.runtime.telemetry import Tracing
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.drain_shell import Notice
from serai.worker_agent.engine.base import Engine
from serai.worker_agent.engine.clearance import Clearance, NothingInTheWay
from serai.worker_agent.engine.process import EngineStarter, start_on_loopback
from serai.worker_agent.engine_run import EngineFailed
from serai.worker_agent.presence import Presence
from serai.worker_agent.session import Session, Surroundings
from serai.worker_agent.settings import AgentSettings
from serai.worker_agent.side_by_side import SideBySide
from serai.worker_agent.supervision import EngineEnd, GiveUp, Supervision, story_of

log = structlog.get_logger()

ENGINE_ENDS = Counts("serai_agent_engine_ends", "Engine runs that ended by themselves", ["kind", "cause"])


class NodeAgent:
    """Collaborators come from outside; `run` returns when the last session has left."""

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
        clearance: Clearance | None = None,
    ) -> None:
        """`connection` is the name under which the NATS server knows `bus`."""
        self._surroundings = Surroundings(
            settings, bus, tracing, connection, gpus, allocation_end, start_engine, clearance or NothingInTheWay()
        )
        self._engine = engine
        self._command = command
        self._supervision = Supervision(settings.engine_restarts)
        self.session = self._new_session()

    @property
    def record(self) -> SessionRecord:
        """The present session's."""
        return self.session.record

    @property
    def presence(self) -> Presence:
        """The present session's."""
        return self.session.presence

    def relabel(self, labels: dict[str, str]) -> None:
        """Other labels from now on, for everybody."""
        self.session.relabel(labels)

    async def run(self, stop: asyncio.Event, warned: asyncio.Event | None = None) -> None:
        """Serves until `stop`, until its time is up, or until the engine ends by itself. Raises ServiceFailure with the
        reason then. `warned`: the batch system says that the end is near."""
        around = self._surroundings
        await SideBySide([self], around.settings, around.bus, around.allocation_end).run(stop, warned)

    async def host_sessions(self, notice: Notice) -> None:
        """One after the other, until `notice` is given: an engine that is started again is a new session. Raises
        ServiceFailure. `run` does this for a process that has one engine; `SideBySide` and a pool agent do it for
        several."""
        pause_s = 0.0
        while True:
            heard = notice.follower()
            try:
                await self.session.run(heard, pause_s)
                return
            except EngineFailed as failure:
                if notice.given.is_set():
                    log.warning("engine.ended", why=failure.end.text, effect="none: we are ending anyway")
                    return
                pause_s = self._pause_after(failure.end)
            finally:
                notice.forget(heard)
            self.session = self._new_session()

    def _pause_after(self, end: EngineEnd) -> float:
        """Before the next start. Raises ServiceFailure when there shall be none."""
        decided = self._supervision.ended(end, time.monotonic())
        ENGINE_ENDS.of(str(decided.kind), str(end.cause)).add()
        if isinstance(decided, GiveUp):
            raise ServiceFailure(story_of(end, decided), decided.exit_code)
        log.warning("engine.starts_again", after_s=decided.after_s, kind=decided.kind, why=end.text)
        return decided.after_s

    def _new_session(self) -> Session:
        return Session(self._surroundings, self._engine, self._command)
