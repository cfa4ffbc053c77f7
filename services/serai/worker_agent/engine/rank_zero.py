"""Rank 0 of an engine of several nodes: it waits for the others, has the network tried, starts and ends all parts.

Each other rank keeps one connection for as long as it lives. Its loss ends the engine: one that has lost a part only
hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from serai.runtime.http1 import Origin
from serai.worker_agent.engine.base import Engine, EngineMisconfigured
from serai.worker_agent.engine.listeners import Listener
from serai.worker_agent.engine.multi_node import Address, Place, part_of
from serai.worker_agent.engine.part_run import PartRun, start_part
from serai.worker_agent.engine.ports import free_port
from serai.worker_agent.engine.process import EngineStarter, RunningEngine
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
from serai.worker_agent.engine.start_watch import Signs

log = structlog.get_logger()


class _Other:
    """Another rank, as rank 0 knows it."""

    def __init__(self, name: str, hello: Hello, line: Line) -> None:
        self.name, self.hello, self.line = name, hello, line
        self.lost = False
        self.tried: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done with the story when its part has ended by itself, or the connection has."""
        self.stopped = asyncio.Event()

    def expect(self) -> None:
        """Another round begins."""
        loop = asyncio.get_running_loop()
        self.tried, self.ended, self.stopped = loop.create_future(), loop.create_future(), asyncio.Event()

    async def follow(self) -> None:
        """Until the connection ends."""
        try:
            while True:
                match await self.line.hear():
                    case Tried(problem):
                        _settle(self.tried, problem)
                    case Ended(story):
                        _settle(self.ended, f"{self.name}: {story}")
                    case Stopped():
                        self.stopped.set()
                    case _:
                        raise ConnectionError("it said what is not its to say")
        except ConnectionError as error:
            self.lost = True
            _settle(self.tried, str(error))
            _settle(self.ended, f"{self.name}: {error}")
            self.stopped.set()


def _settle(future: asyncio.Future[str], text: str) -> None:
    if not future.done():
        future.set_result(text)


class RankZero:
    """An EngineStarter. `open` it, and `aclose` it in the end."""

    def __init__(self, place: Place, port: int, address: str, deadline_s: float, start: EngineStarter) -> None:
        """Waits for the others on `port` for at most `deadline_s`. `address`: of the network to be used, empty = the
        one on which the others come. `start`: starts this node's part."""
        self._place, self._port, self._address = place, port, address
        self._deadline_s, self._start = deadline_s, start
        self._others: dict[int, _Other] = {}
        self._changed = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Raises EngineMisconfigured when the port is taken."""
        try:
            self._server = await asyncio.start_server(self._on_connection, port=self._port, limit=LINE_BYTES_MAX)
        except OSError as error:
            raise EngineMisconfigured(
                f"--nodes auto: cannot wait for the other ranks on port {self._port} ({error.strerror}); "
                f"choose another with --nodes-port, the same on all nodes"
            ) from error

    async def aclose(self) -> None:
        """The other ranks end with it."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        line = Line(reader, writer)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                hello = await line.hear()
            if isinstance(hello, Hello) and self._is_awaited(hello):
                await self._follow(hello, line)
        except (ConnectionError, TimeoutError):
            pass  # One that only tried whether we can be reached.
        finally:
            line.close()
            self._connections.discard(task)

    async def _follow(self, hello: Hello, line: Line) -> None:
        log.info("ranks.came", rank=hello.rank, host=hello.host)
        other = self._others[hello.rank] = _Other(f"rank {hello.rank} ({self._place.hosts[hello.rank]})", hello, line)
        self._changed.set()
        await other.follow()
        log.warning("ranks.lost", rank=hello.rank)

    def _is_awaited(self, hello: Hello) -> bool:
        known = self._others.get(hello.rank)
        fits = hello.allocation == self._place.allocation and 0 < hello.rank < len(self._place.hosts)
        awaited = fits and (known is None or known.lost)
        if not awaited:
            log.warning("ranks.stranger", rank=hello.rank, allocation=hello.allocation[:60])
        return awaited

    async def __call__(self, engine: Engine, command: Sequence[str]) -> tuple[RunningEngine, Origin]:
        """Raises EngineMisconfigured when a rank does not come or cannot be reached; OSError as processes do."""
        part_of(engine.kind, command, self._place, Address("", 0))  # What is wrong with the command is said at once.
        others = await self._all_here()
        host = self._address or others[0].line.own_host
        for other in others:
            other.expect()
        await self._try_network(others, host)
        master = Address(host, free_port())
        log.info("ranks.starting", ranks=len(self._place.hosts), master=str(master))
        for other in others:
            other.line.say(Start(master.host, master.port))
        try:
            run, origin = await start_part(self._start, engine, command, self._place, master, host)
        except BaseException:
            for other in others:
                other.line.say(Stop())
            raise
        return EngineOnNodes(run, others), origin

    async def _all_here(self) -> list[_Other]:
        ranks = range(1, len(self._place.hosts))
        missing: list[int] = []
        try:
            async with asyncio.timeout(self._deadline_s):
                while missing := [rank for rank in ranks if rank not in self._others or self._others[rank].lost]:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            names = ", ".join(f"rank {rank} ({self._place.hosts[rank]})" for rank in missing[:8])
            raise EngineMisconfigured(
                f"--nodes auto: {names} did not come to port {self._port} within {self._deadline_s:g} s; start one "
                f"agent on each node (srun --ntasks-per-node=1 serai agent …), and see their logs"
            ) from None
        return [self._others[rank] for rank in ranks]

    async def _try_network(self, others: Sequence[_Other], host: str) -> None:
        """Everyone to everyone: the engine's own libraries would hang for minutes, then say something else."""
        addresses = [(0, host, self._port), *((o.hello.rank, o.hello.host, o.hello.port) for o in others)]
        for other in others:
            other.line.say(Try([address for address in addresses if address[0] != other.hello.rank]))
        problems = [f"{other.name}: {problem}" for other in others if (problem := await other.tried)]
        if own := await unreachable(addresses[1:]):
            problems.append(f"{self._place.name}: {own}")
        if problems:
            raise EngineMisconfigured(
                "the nodes do not reach each other; name the right network with --interface: " + "; ".join(problems)
            )


class EngineOnNodes:
    """A RunningEngine of several nodes: ends when any part of it does."""

    def __init__(self, run: PartRun, others: Sequence[_Other]) -> None:
        self._run, self._others = run, others
        self.exited: asyncio.Future[int] = asyncio.ensure_future(self._first_end())

    @property
    def last_lines(self) -> list[str]:
        return [*self._run.last_lines, *(other.ended.result() for other in self._others if other.ended.done())]

    async def signs(self) -> Signs:
        return await self._run.signs()

    async def listener(self) -> Listener:
        return await self._run.listener()

    async def other_ports(self) -> list[int]:
        return await self._run.other_ports()

    async def stop(self, grace_s: float) -> int:
        """This node's part first: the others would take its end for an accident of theirs."""
        code = await self._run.stop(grace_s)
        for other in self._others:
            other.line.say(Stop())
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s + CONNECT_TIMEOUT_S):
                for other in self._others:
                    await other.stopped.wait()
        await self.exited
        return code

    async def _first_end(self) -> int:
        own = asyncio.shield(self._run.exited)
        ends = {own, *(asyncio.ensure_future(_over(other)) for other in self._others)}
        _, rest = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for other in rest - {own}:
            other.cancel()
        return self._run.exited.result() if self._run.exited.done() else await self._run.stop(0)


async def _over(other: _Other) -> int:
    log.error("ranks.part_ended", story=await asyncio.shield(other.ended))
    return 1
