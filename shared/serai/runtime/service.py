"""How a service starts, is told to stop, and ends. Exit codes: 0 asked to stop, 1 failed, 2 wrong usage."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import prometheus_client
import structlog
import uvloop

from serai.runtime.bus import BusError

log = structlog.get_logger()

SECOND_SIGNAL_AFTER_S = 1.0
"""A signal that comes sooner after the first is taken for the same one."""


class ServiceFailure(Exception):
    """The service cannot go on. The text is one clear line: what happened, what to do."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_service(
    name: str,
    main: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
    handlers: Mapping[signal.Signals, Callable[[], None]] | None = None,
) -> int:
    """Runs `main(stop)` on uvloop until it returns; SIGTERM and SIGINT set `stop`. Returns the exit code. `handlers`
    are for further signals.

    A second signal ends the process at once, for a person who has waited long enough.
    """
    failures: list[BaseException] = []
    try:
        uvloop.run(_with_signals(name, main, handlers or {}))
    except* (ServiceFailure, BusError) as group:
        failures += _leaves(group)
    if not failures:
        return 0
    sys.stderr.write(f"serai {name}: {failures[0]}\n")
    return int(getattr(failures[0], "exit_code", 1))


async def _with_signals(
    name: str,
    main: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
    handlers: Mapping[signal.Signals, Callable[[], None]],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    stopped_at_s = 0.0

    def on_signal(received: signal.Signals) -> None:
        nonlocal stopped_at_s
        if stop.is_set():
            if loop.time() - stopped_at_s < SECOND_SIGNAL_AFTER_S:
                return  # `timeout`, make and some supervisors pass on what the process group has got already.
            log.warning("service.killed", service=name, signal=received.name)
            loop.stop()
            raise SystemExit(128 + received)
        log.info("service.stopping", service=name, signal=received.name)
        stopped_at_s = loop.time()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    for further, handler in handlers.items():
        loop.add_signal_handler(further, handler)
    # What is alive now (modules, settings) lives for ever: keep the collector from walking it on every full run.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    await main(stop)


@asynccontextmanager
async def watch_bus(closed: Awaitable[None]) -> AsyncIterator[None]:
    """Ends the block with BusError when the bus closed for good: nothing can be done without it, and a process that
    stays would look alive."""

    async def watch() -> None:
        await closed

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()


@asynccontextmanager
async def serve_metrics(host: str, port: int) -> AsyncIterator[None]:
    """Prometheus metrics on `host:port` during the block; 0 = not at all. Raises ServiceFailure."""
    if port == 0:
        yield
        return
    try:
        server, thread = prometheus_client.start_http_server(port, addr=host)
    except OSError as error:
        raise ServiceFailure(f"--metrics-port {port}: {error.strerror}; choose another", exit_code=2) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
