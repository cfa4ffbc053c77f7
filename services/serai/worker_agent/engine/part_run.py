"""One node's part of an engine of several nodes, as it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from serai.runtime.http1 import Origin
from serai.worker_agent.engine.base import Engine, EngineMisconfigured
from serai.worker_agent.engine.listeners import Listener
from serai.worker_agent.engine.multi_node import Address, Place, part_of
from serai.worker_agent.engine.openai import OpenAiEngine
from serai.worker_agent.engine.process import EngineStarter, RunningEngine
from serai.worker_agent.engine.rank_line import cannot_reach
from serai.worker_agent.engine.start_watch import Signs

LISTENS_WITHIN_S = 120.0
"""Ray's head takes seconds; on a shared file system its import alone may take a minute."""
AGAIN_S = 0.5
LAST_LINES = 5


class _AsItIs(OpenAiEngine):
    """A command that needs no more than it says."""

    def __init__(self, engine: Engine, environment: Mapping[str, str]) -> None:
        self.kind, self.shares_port = engine.kind, False
        self._environment = {**engine.environment(), **environment}

    def with_address(self, command: Sequence[str], host: str, port: int) -> list[str]:
        return list(command)

    def environment(self) -> dict[str, str]:
        return self._environment


class _Part(OpenAiEngine):
    """The engine, with what its command needs for one place."""

    def __init__(self, engine: Engine, place: Place, master: Address, environment: Mapping[str, str]) -> None:
        self.kind, self.shares_port = engine.kind, engine.shares_port
        self._engine, self._place, self._master = engine, place, master
        self._environment = {**engine.environment(), **environment}

    def with_address(self, command: Sequence[str], host: str, port: int) -> list[str]:
        # Those that serve no API still open the port, for a sign of life (SGLang).
        return list(
            part_of(self.kind, self._engine.with_address(command, host, port), self._place, self._master).command
        )

    def environment(self) -> dict[str, str]:
        return self._environment


class PartRun:
    """A RunningEngine: the part's command and the one before it, if there is one, as one."""

    def __init__(self, before: RunningEngine | None, main: RunningEngine) -> None:
        self._before, self._main = before, main
        self.exited: asyncio.Future[int] = asyncio.ensure_future(self._first_end())

    @property
    def last_lines(self) -> list[str]:
        lines = self._main.last_lines
        return lines if self._before is None else [*self._before.last_lines[-LAST_LINES:], *lines]

    async def signs(self) -> Signs:
        return await self._main.signs()

    async def listener(self) -> Listener:
        return await self._main.listener()

    async def other_ports(self) -> list[int]:
        return await self._main.other_ports()

    async def stop(self, grace_s: float) -> int:
        code = await self._main.stop(grace_s)
        if self._before is not None:
            await self._before.stop(grace_s)
        return code

    async def _first_end(self) -> int:
        ends = {asyncio.shield(run.exited) for run in (self._main, self._before) if run is not None}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()


async def start_part(
    start: EngineStarter, engine: Engine, command: Sequence[str], place: Place, master: Address, own_host: str
) -> tuple[PartRun, Origin]:
    """Raises OSError when a program cannot be started, EngineMisconfigured when nobody comes to listen at `master`
    where the part needs that."""
    part = part_of(engine.kind, command, place, master)
    # The address that was tried, not the one that this host's name happens to have (H23).
    here = {"VLLM_HOST_IP": own_host, "SGLANG_HOST_IP": own_host, **part.environment}
    before = (await start(_AsItIs(engine, here), part.before))[0] if part.before else None
    try:
        if part.waits:
            await _wait_for(master, before)
        main, origin = await start(_Part(engine, place, master, here), command)
    except BaseException:
        if before is not None:
            await before.stop(0)
        raise
    return PartRun(before, main), origin


async def _wait_for(master: Address, before: RunningEngine | None) -> None:
    try:
        async with asyncio.timeout(LISTENS_WITHIN_S):
            while await cannot_reach(master):
                if before is not None and before.exited.done():
                    lines = before.last_lines[-LAST_LINES:]
                    raise EngineMisconfigured("\n  ".join(["the command before the engine ended", *lines]))
                await asyncio.sleep(AGAIN_S)
    except TimeoutError:
        raise EngineMisconfigured(f"nobody listens at {master} after {LISTENS_WITHIN_S:g} s") from None
