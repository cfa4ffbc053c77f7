"""One run of an engine, from before its start until it is stopped; however it ends, that is an `EngineEnd`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import structlog

from serai.runtime.http1 import HttpPool, Origin
from serai.worker_agent.engine.base import Engine, EngineMisconfigured, ServedModel, SleepCalls, StrangerListens
from serai.worker_agent.engine.clearance import Clearance, NodeBusy
from serai.worker_agent.engine.listeners import Listener
from serai.worker_agent.engine.model_files import model_bytes, model_config, model_path, model_word
from serai.worker_agent.engine.process import EngineStarter, RunningEngine
from serai.worker_agent.engine.readiness import Candidate, wait_until_serving
from serai.worker_agent.engine.start_watch import Phase, Progress, StartWatch
from serai.worker_agent.engine.traits import Traits, traits_by_config
from serai.worker_agent.settings import AgentSettings
from serai.worker_agent.supervision import Cause, EngineEnd

log = structlog.get_logger()

LISTENER_EVERY_S = 10.0
"""How often it is made sure that the engine, and nobody else, listens on its port: milliseconds in a thread, more on
hosts with thousands of connections."""


class EngineFailed(Exception):
    """The engine's run is over, and nobody wanted that."""

    def __init__(self, end: EngineEnd) -> None:
        super().__init__(end.text)
        self.end = end


class EngineRun:
    """Make it, `start` it, wait for its `end`, `stop` it; once each."""

    def __init__(
        self,
        settings: AgentSettings,
        engine: Engine,
        command: Sequence[str],
        start_engine: EngineStarter,
        clearance: Clearance,
        on_progress: Callable[[Progress], None],
    ) -> None:
        """`on_progress` hears each look at its start."""
        self.engine = engine
        self._settings = settings
        self._command = command
        self._start_engine = start_engine
        self._clearance = clearance
        self._on_progress = on_progress
        key = settings.engine_api_key
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        """Of each request to it."""
        self._process: RunningEngine | None = None
        self._pool: HttpPool | None = None
        self._phase = Phase.IMPORT
        self._serves_since_s = 0.0

    @property
    def pool(self) -> HttpPool:
        """Once it has started."""
        assert self._pool is not None
        return self._pool

    @property
    def tells_steps(self) -> bool:
        """Whether it was started so that it dials us."""
        return not self._settings.engine_url and self.engine.tells_steps(self._command)

    @property
    def sleep_calls(self) -> SleepCalls | None:
        """None: it cannot sleep."""
        return self.engine.sleep_calls(self._command)

    async def start(self) -> ServedModel:
        """Returns when it serves. Raises EngineFailed."""
        try:
            origin = await self._begin()
            self._pool = HttpPool(origin)
            served = await self._until_serving()
        except NodeBusy as error:
            self._fail(Cause.NODE_BUSY, str(error))
        except EngineMisconfigured as error:
            self._fail(Cause.MISCONFIGURED, str(error))
        except StrangerListens as error:
            self._fail(Cause.PORT_TAKEN, f"{error}; nothing was sent there")
        except TimeoutError as error:
            self._fail(Cause.TOO_SLOW, str(error))
        self._serves_since_s = time.monotonic()
        return served

    async def end(self) -> NoReturn:
        """Raises EngineFailed when it ends by itself, or when somebody else answers in its place."""
        assert self._pool is not None
        process = self._process
        while True:
            if process is None:
                await asyncio.Event().wait()
            else:
                try:
                    async with asyncio.timeout(LISTENER_EVERY_S):
                        await self._fail_with_exit(process, await asyncio.shield(process.exited))
                except TimeoutError:
                    pass
                if await process.listener() is Listener.STRANGER:
                    port = self._pool.origin.port
                    self._fail(Cause.PORT_TAKEN, f"another process listens on {port}, beside or instead of our engine")

    def hung(self, stalled_s: float) -> NoReturn:
        """Raises EngineFailed: it has made no progress for so long, and answers no canary."""
        self._fail(Cause.HUNG, f"the engine has made no progress for {stalled_s:.0f} s and does not answer a canary")

    async def stop(self, grace_s: float) -> None:
        """Closes what leads to it and ends it, if it was started by us."""
        if self._pool is not None:
            await self._pool.aclose()
        if self._process is not None:
            await self._process.stop(grace_s)

    # -- inside --------------------------------------------------------------------------------------------------

    async def _begin(self) -> Origin:
        if self._settings.engine_url:
            return Origin.parse(self._settings.engine_url)
        await self._clearance.clear(lambda: self._tell(Progress(Phase.QUEUED)))
        try:
            self._process, origin = await self._start_engine(self.engine, self._command)
        except OSError as error:
            self._fail(Cause.CANNOT_START, f"cannot start {self._command[0]!r}: {error.strerror or error}")
        return origin

    async def _until_serving(self) -> ServedModel:
        process = self._process
        path = await asyncio.to_thread(model_path, self._command) if model_word(self._command) else None
        watch = StartWatch(await model_bytes(path), self._settings.start_timeout_s, time.monotonic())
        wanted = self._settings.engine_model or self._settings.model
        candidate = Candidate(self.engine, self.pool, wanted, self.headers, process)
        serving = asyncio.ensure_future(wait_until_serving(candidate, watch, self._tell))
        ends: set[asyncio.Future[object]] = {serving}  # type: ignore[arg-type]
        if process is not None:
            ends.add(process.exited)  # type: ignore[arg-type]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if process is not None and process.exited.done():
                await self._fail_with_exit(process, process.exited.result())
            served = serving.result()
        finally:
            serving.cancel()
        by_files = traits_by_config(model_config(path)) if path is not None else Traits()
        traits = served.traits.completed_by(self.engine.traits_of(self._command)).completed_by(by_files)
        return ServedModel(served.engine_model, served.context_tokens_max, served.details, served.endpoints, traits)

    def _tell(self, progress: Progress) -> None:
        self._phase = progress.phase
        self._on_progress(progress)

    async def _fail_with_exit(self, process: RunningEngine, code: int) -> NoReturn:
        """Looks for causes outside of the engine first."""
        when = "while it served" if self._serves_since_s else "before it served"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        story = f"the engine {how} {when}"
        if not self._serves_since_s and await process.listener() is Listener.STRANGER:
            self._fail(Cause.PORT_TAKEN, f"{story}: another process has taken port {self.pool.origin.port}", code)
        if fault := await self._clearance.fault():
            cause = Cause.NODE_BUSY if fault.busy else Cause.DEVICE_LOST
            self._fail(cause, f"{story}; {fault.story}", code)
        self._fail(Cause.EXITED, story, code)

    def _fail(self, cause: Cause, text: str, exit_code: int | None = None) -> NoReturn:
        served_s = time.monotonic() - self._serves_since_s if self._serves_since_s else 0.0
        lines = self._process.last_lines if self._process is not None else []
        phase = "" if self._serves_since_s else str(self._phase)
        raise EngineFailed(EngineEnd(cause, text, phase, exit_code, served_s, lines))
