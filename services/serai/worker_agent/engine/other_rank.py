"""A rank other than 0 of an engine of several nodes: it runs its part for rank 0, for as long as that is there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from serai.worker_agent.engine.base import Engine, EngineMisconfigured
from serai.worker_agent.engine.multi_node import Address, Place
from serai.worker_agent.engine.part_run import LAST_LINES, PartRun, start_part
from serai.worker_agent.engine.process import EngineStarter
from serai.worker_agent.engine.rank_line import (
    CONNECT_TIMEOUT_S,
    LINE_BYTES_MAX,
    Ended,
    Hello,
    Line,
    Start,
    Stop,
    Stopped,
    Tried,
    Try,
    unreachable,
)

log = structlog.get_logger()

AGAIN_S = 1.0


class OtherRank:
    """Make it, `run` it, once."""

    def __init__(
        self,
        place: Place,
        meeting: Address,
        address: str,
        start: EngineStarter,
        *,
        deadline_s: float,
        stop_s: float,
        leave_s: float,
    ) -> None:
        """Looks for rank 0 at `meeting` for `deadline_s`. `address`: ours in the network to be used, empty = the one by
        which rank 0 is reached. Its part may take `stop_s` to end. Told to stop, it waits `leave_s` for rank 0."""
        self._place, self._meeting, self._address, self._start = place, meeting, address, start
        self._deadline_s, self._stop_s, self._leave_s = deadline_s, stop_s, leave_s
        self._part: PartRun | None = None

    async def run(self, engine: Engine, command: Sequence[str], stop: asyncio.Event) -> None:
        """Until rank 0 has gone. Raises EngineMisconfigured when it never comes, ConnectionError when it is lost while
        the part runs."""
        line = await self._meet(stop)
        if line is None:
            return
        host = self._address or line.own_host
        listener = await asyncio.start_server(lambda _, writer: writer.close(), host, 0)
        leaving = asyncio.ensure_future(self._leave(stop, line))
        try:
            port = listener.sockets[0].getsockname()[1]
            line.say(Hello(self._place.allocation, self._place.rank, host, port))
            await self._obey(line, engine, command, host)
        finally:
            leaving.cancel()
            listener.close()
            await self._end_part()
            line.close()

    async def _meet(self, stop: asyncio.Event) -> Line | None:
        """None when told to stop meanwhile."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + self._deadline_s
        while not stop.is_set():
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    there = await asyncio.open_connection(self._meeting.host, self._meeting.port, limit=LINE_BYTES_MAX)
                log.info("ranks.met", rank=self._place.rank, at=str(self._meeting))
                return Line(*there)
            except (OSError, TimeoutError) as error:
                if loop.time() > give_up_at_s:
                    raise EngineMisconfigured(
                        f"{self._place.name} cannot reach rank 0 at {self._meeting} "
                        f"({error or f'no answer within {CONNECT_TIMEOUT_S:g} s'}); "
                        f"where its name leads elsewhere, say where it is with --nodes-address"
                    ) from error
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await stop.wait()
        return None

    async def _obey(self, line: Line, engine: Engine, command: Sequence[str], host: str) -> None:
        while True:
            try:
                message = await line.hear()
            except ConnectionError:
                if self._part is None:
                    return  # Rank 0 has ended its engine and left.
                raise
            match message:
                case Try(ranks):
                    line.say(Tried(await unreachable(ranks)))
                case Start(master_host, port):
                    await self._begin_part(line, engine, command, Address(master_host, port), host)
                case Stop():
                    await self._end_part()
                    line.say(Stopped())
                case _:
                    raise ConnectionError("rank 0 said what is not its to say")

    async def _begin_part(self, line: Line, engine: Engine, command: Sequence[str], master: Address, host: str) -> None:
        try:
            part, _ = await start_part(self._start, engine, command, self._place, master, host)
        except (OSError, EngineMisconfigured) as error:
            line.say(Ended(f"cannot start {command[0]!r}: {error}"))
            return
        self._part = part

        def tell(exited: asyncio.Future[int]) -> None:
            if part is self._part and not exited.cancelled():
                told = [f"its part ended with exit code {exited.result()}", *part.last_lines[-LAST_LINES:]]
                line.say(Ended("\n  ".join(told)))

        part.exited.add_done_callback(tell)

    async def _end_part(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            await part.stop(self._stop_s)

    async def _leave(self, stop: asyncio.Event, line: Line) -> None:
        """Batch systems tell all nodes to stop at once, but rank 0 still drains, and needs the others for that."""
        await stop.wait()
        await asyncio.sleep(self._leave_s)
        log.warning("ranks.rank_zero_stays", after_s=self._leave_s)
        line.close()
