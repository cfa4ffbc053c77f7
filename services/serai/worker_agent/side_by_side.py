"""Engines side by side in one agent process (`--engines N`): each with sessions, restarts and GPUs of its own.

They have in common what is the process's: the connection to NATS, the end of the allocation, the word to end. One that
fails for good leaves the others alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from serai.runtime.bus import Bus
from serai.runtime.service import ServiceFailure
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.drain_shell import Endings, Notice
from serai.worker_agent.session import Session
from serai.worker_agent.settings import AgentSettings

log = structlog.get_logger()


class Host(Protocol):
    """One engine after the other, each with a session: `NodeAgent`."""

    @property
    def session(self) -> Session:
        """The present one."""

    async def host_sessions(self, notice: Notice) -> None:
        """Until `notice` is given. Raises ServiceFailure."""


class SideBySide:
    """Collaborators come from outside; `run` returns when the last engine has ended."""

    def __init__(
        self, hosts: Sequence[Host], settings: AgentSettings, bus: Bus, allocation_end: AllocationEnd | None = None
    ) -> None:
        self._hosts = hosts
        self._settings = settings
        self._bus = bus
        self._allocation_end = allocation_end
        self._failures: dict[int, ServiceFailure] = {}
        """Of those that have ended by themselves, by their number, in that order."""

    async def run(self, stop: asyncio.Event, warned: asyncio.Event | None = None) -> None:
        """Until `stop`, until the allocation's time is up, or until each engine has ended by itself: then it raises
        ServiceFailure with the reasons. `warned`: the batch system says that the end is near."""
        self._bus.on_disconnect(lambda: self._each(lambda session: session.on_disconnect()))
        self._bus.on_reconnect(lambda: self._each(lambda session: session.on_reconnect()))
        endings = Endings(self._settings, self._allocation_end)
        async with asyncio.TaskGroup() as tasks:
            living = [
                tasks.create_task(self._following_allocation()),
                tasks.create_task(endings.watching(stop, warned or asyncio.Event())),
            ]
            try:
                async with asyncio.TaskGroup() as hosting:
                    for number, host in enumerate(self._hosts, 1):
                        hosting.create_task(self._host(number, host, endings.notice))
            finally:
                for task in living:
                    task.cancel()
        if len(self._failures) == len(self._hosts):
            raise _all_failed(self._failures)

    async def _host(self, number: int, host: Host, notice: Notice) -> None:
        if len(self._hosts) > 1:
            structlog.contextvars.bind_contextvars(engine_number=number)  # In this task and those that it starts.
        try:
            await host.host_sessions(notice)
        except ServiceFailure as failure:
            self._failures[number] = failure
            others = len(self._hosts) - len(self._failures)
            if others:
                log.error("agent.engine_given_up", why=str(failure), exit_code=failure.exit_code, others=others)

    def _each(self, what: Callable[[Session], None]) -> None:
        for host in self._hosts:
            what(host.session)

    async def _following_allocation(self) -> None:
        """Keeps in the records when our allocation ends. Sessions that begin later know it from the start."""
        while (end := self._allocation_end) is not None:
            if await end.ask():
                at = end.ends_at()
                log.info("allocation.ends", at=at)
                for host in self._hosts:
                    host.session.allocation_ends(at)
            await end.pause()


def _all_failed(failures: dict[int, ServiceFailure]) -> ServiceFailure:
    """The only one, or all of them as one, with the exit code of the last: that is the one that ended the process."""
    last = list(failures.values())[-1]
    texts = {str(failure) for failure in failures.values()}
    if len(failures) == 1:
        return last
    if len(texts) == 1:
        return ServiceFailure(f"each of {len(failures)} engines: {last}", last.exit_code)
    told = "\n".join(f"engine {number}: {failure}" for number, failure in sorted(failures.items()))
    return ServiceFailure(f"none of {len(failures)} engines is left:\n{told}", last.exit_code)
