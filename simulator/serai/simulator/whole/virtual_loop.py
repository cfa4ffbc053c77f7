"""An asyncio event loop whose time is virtual: when nothing is ready, it is at once as late as the next timer.

Timers that are due at one instant run in the order in which they were set. Time stands still while anything is ready,
so a run depends on nothing but its own code and seeds. There are no file descriptors and no threads here: whatever
would wait for the world outside raises.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")

START_S = 1000.0
"""Virtual time at the start. Not 0: services take 0 for "not yet"."""
WALL_CLOCK_START_NS = 1_800_000_000 * 10**9
"""Unix time at the start, in nanoseconds."""
TURNS_PER_INSTANT_MAX = 1_000_000
"""So many turns without time going on are a loop that waits for nothing."""
_COMPACT_FROM = 1000


class Stalled(RuntimeError):
    """Nothing is ready, no timer is set, and the main task has not ended: it would wait for ever. Or time stands
    still, since something is always ready. Or the time that the run was given is over."""


class Network(Protocol):
    """What stands in for sockets (`memory_network.MemoryNetwork`)."""

    def create_server(self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int) -> Any: ...

    async def create_connection(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]: ...


class _Post:
    """What a handle is to the loop, and no more: half of all that happens in a run is the arrival of something."""

    __slots__ = ("_args", "_callback", "_context")
    _cancelled = False

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        self._callback = callback
        self._args = args
        self._context = context

    def _run(self) -> None:
        self._context.run(self._callback, *self._args)


class VirtualLoop(base_events.BaseEventLoop):
    """Run it with `run`. `network` takes the place of sockets."""

    # Of BaseEventLoop, which has no public way to replace how it waits.
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _closed: bool

    def __init__(self, limit_s: float = float("inf")) -> None:
        """`limit_s`: virtual seconds after which it raises Stalled, for a main task that waits beside busy timers."""
        super().__init__()
        self._now_s = START_S
        self._limit_s = START_S + limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = 0
        self._timers_cancelled = 0
        self._turns_at_instant = 0
        self.turns = 0
        """How often the loop went round; a measure of work that is the same on every machine."""
        self.network: Network | None = None
        self.problems: list[str] = []
        """What callbacks and forgotten tasks raised: on a real loop it would only be logged."""
        self.set_exception_handler(self._note_problem)

    # -- time ----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def monotonic_ns(self) -> int:
        return round(self._now_s * 1e9)

    def wall_ns(self) -> int:
        """Unix time in nanoseconds."""
        return WALL_CLOCK_START_NS + round((self._now_s - START_S) * 1e9)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_set += 1
        # A tuple compares in C, and its number keeps timers of one instant in order.
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def post(self, when: float, context: Context, callback: Callable[..., object], *args: Any) -> None:
        """`call_at` for what is never cancelled and never raises."""
        self._timers_set += 1
        heapq.heappush(
            self._timers, (when, self._timers_set, cast(asyncio.TimerHandle, _Post(callback, args, context)))
        )

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._timers_cancelled += 1
        if self._timers_cancelled > _COMPACT_FROM and self._timers_cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    # -- turning -------------------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        """Turns until the loop is stopped: what BaseEventLoop does between two turns is nothing here."""
        ready, popleft = self._ready, self._ready.popleft
        while True:
            if not ready and not self._stopping:
                self._advance()
            timers, now_s = self._timers, self._now_s
            while timers and timers[0][0] <= now_s:
                ready.append(heapq.heappop(timers)[2])
            self.turns += 1
            self._turns_at_instant += 1
            if self._turns_at_instant > TURNS_PER_INSTANT_MAX:
                next_up = ready[0] if ready else "nothing"
                raise Stalled(f"time stands still at {now_s - START_S:.6f} s; next: {next_up}")
            for _ in range(len(ready)):
                handle = popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:
                return

    def _advance(self) -> None:
        """To the instant of the next timer that is not cancelled."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._timers_cancelled = max(0, self._timers_cancelled - 1)
        if not timers:
            raise Stalled(f"nothing will ever happen after {self._now_s - START_S:.6f} s")
        if timers[0][0] > self._limit_s:
            raise Stalled(f"the run did not end within {self._limit_s - START_S:g} s")
        if timers[0][0] > self._now_s:
            self._now_s = timers[0][0]
            self._turns_at_instant = 0

    def _write_to_self(self) -> None:
        pass  # Wakes a loop that sleeps in a system call; this one never does.

    def _process_events(self, event_list: object) -> None:
        pass

    # -- the world outside ---------------------------------------------------------------------------------------

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return self._sockets().create_server(protocol_factory, host, port)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        if options.get("ssl"):
            raise NotImplementedError("there is no TLS in the simulation")
        return await self._sockets().create_connection(protocol_factory, host, port)

    def _sockets(self) -> Network:
        if self.network is None:
            raise RuntimeError("this virtual loop has no network")
        return self.network

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError("a thread would not wait for virtual time")

    def _note_problem(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.problems.append(f"{context.get('message')}{f': {error!r}' if error else ''}")


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop | None = None) -> T:
    """Runs `main` to its end in virtual time, then cancels what it left behind, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=lambda: loop or VirtualLoop()) as runner:
        return runner.run(main)
