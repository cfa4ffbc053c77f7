"""The site's records in JetStream KV: a cache that helps a registry that starts, and nothing else.

Writing happens in a task of its own, so that a slow JetStream holds nobody up: what changes meanwhile is coalesced per
session. KV may lose what it acknowledged and come back empty; so its state is asked for every few seconds, and when it
is another bucket, or has fewer keys than it should, everything is written again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable

import structlog

from serai.registry.metrics import KV_FAILURES, KV_REWRITES, UNSTORED
from serai.runtime.bus import Bucket, BusError

log = structlog.get_logger()

WRITES_AT_ONCE = 16
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 15.0
SUPERVISE_EVERY_S = 5.0
LAST_WRITES_S = 2.0
"""At the end, for what is not written yet."""


class Storing:
    """`value_of` gives what should stand in KV for a session now; None = nothing."""

    def __init__(
        self, bucket: Bucket, value_of: Callable[[str], bytes | None], sessions: Callable[[], Iterable[str]]
    ) -> None:
        self._bucket = bucket
        self._value_of = value_of
        self._sessions = sessions
        """All that should stand in KV."""
        self._waiting: dict[str, None] = {}
        self._wanted = asyncio.Event()
        self._stored: dict[str, None] = {}
        """Keys that KV has acknowledged and must have."""
        self._created: str | None = None
        self._failing = False
        self.read = False
        """Whether KV has been read since the start."""

    def changed(self, session: str) -> None:
        """What stands in KV for `session` is out of date. Cheap, and never waits."""
        self._waiting[session] = None
        self._wanted.set()

    async def entries(self) -> dict[str, bytes]:
        """Everything in KV; empty when it cannot be read, which `read` tells."""
        try:
            found = await self._bucket.entries()
        except BusError as error:
            self._failed(error)
            return {}
        self.read = True
        self._stored.update(dict.fromkeys(found))
        return found

    async def storing(self) -> None:
        """Writes what changed, until it is cancelled."""
        retry_s = RETRY_FIRST_S
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if await self.store_once():
                retry_s = RETRY_FIRST_S
                continue
            # Jittered: the registries of many sites may share a JetStream that has just come back.
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(RETRY_MAX_S, 2 * retry_s)
            self._wanted.set()

    async def store_once(self) -> bool:
        """Writes what waits now; False when some of it must be tried again."""
        turn, self._waiting = list(self._waiting), {}
        whole = True
        for start in range(0, len(turn), WRITES_AT_ONCE):
            part = turn[start : start + WRITES_AT_ONCE]
            if not whole:
                self._waiting |= dict.fromkeys(part)
                continue
            try:
                written = await asyncio.gather(*[self._write(session) for session in part])
            except asyncio.CancelledError:  # `finish` writes it: that a session left, nobody says again.
                self._waiting |= dict.fromkeys(turn[start:])
                raise
            for session, done in zip(part, written, strict=True):
                if not done:
                    self._waiting[session] = None
                    whole = False
        UNSTORED.set(len(self._waiting))
        return whole

    async def finish(self) -> None:
        """The last writes, for a moment: what is not written then, agents will say again."""
        try:
            async with asyncio.timeout(LAST_WRITES_S):
                await self.store_once()
        except TimeoutError:
            log.info("registry.not_all_stored", effect="agents announce themselves again after the next start")

    async def _write(self, session: str) -> bool:
        value = self._value_of(session)
        try:
            if value is None:
                await self._bucket.delete(session)
                self._stored.pop(session, None)
            else:
                await self._bucket.put(session, value)
                self._stored[session] = None
        except BusError as error:
            self._failed(error)
            return False
        self._works()
        return True

    async def supervising(self, read_again: Callable[[], Awaitable[None]]) -> None:
        """Looks after KV until it is cancelled. `read_again` is awaited as long as KV has not been read."""
        while True:
            await asyncio.sleep(SUPERVISE_EVERY_S * random.uniform(0.9, 1.1))
            await self.supervise()
            if not self.read:
                await read_again()

    async def supervise(self) -> None:
        """One look at KV's state."""
        try:
            state = await self._bucket.state()
        except BusError as error:
            self._failed(error)
            return
        self._works()
        expected = len(self._stored)
        if state is None:
            if expected:
                self._rewrite("it has vanished")
            self._created = None
            return
        if self._created is not None and state.created != self._created:
            self._rewrite("it was made anew")
        elif state.keys < expected:
            self._rewrite("it has fewer keys than it should", keys=state.keys, expected=expected)
        self._created = state.created

    def _rewrite(self, reason: str, **figures: int) -> None:
        KV_REWRITES.of(reason).add()
        self._stored.clear()
        for session in self._sessions():
            self.changed(session)
        effect = "everything is written again; requests do not notice"
        log.warning("registry.kv_rewritten", reason=reason, records=len(self._waiting), effect=effect, **figures)

    def _failed(self, error: BusError) -> None:
        KV_FAILURES.of().add()
        if not self._failing:
            effect = "records are kept in memory and written when KV answers; requests do not notice"
            log.warning("registry.kv_fails", error=str(error), effect=effect)
        self._failing = True

    def _works(self) -> None:
        if self._failing:
            log.info("registry.kv_works_again")
        self._failing = False
