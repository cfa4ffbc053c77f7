"""Who acts for a site: one launcher, by a key in KV that holds its state too.

The key is written by compare-and-set before each action, so that whoever has lost it finds out before it acts, and
whoever takes it over knows what was begun. It has no TTL (a key that expired refuses to be made again, H60) and no time
of any clock: a holder has gone when its beat has stood still for the length of a lease, as long as the observer itself
has listened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.launcher import LauncherState
from serai.runtime.bus import BusError

log = structlog.get_logger()


class StateKeys(Protocol):
    """Where the key lies: `NatsBucket`. Raises BusError."""

    async def get(self, key: str) -> tuple[bytes, int] | None: ...

    async def update(self, key: str, value: bytes, revision: int) -> bool: ...


class Lease:
    """`state(beat)` says what is to be kept; `taken(state)` is told what the holder before knew."""

    def __init__(
        self,
        keys: StateKeys,
        key: str,
        owner: str,
        lease_s: float,
        clock: Callable[[], float],
        state: Callable[[int], LauncherState],
        taken: Callable[[LauncherState], None],
    ) -> None:
        self._keys, self._key, self._owner = keys, key, owner
        self._lease_s = lease_s
        self._clock = clock
        self._state = state
        self._taken = taken
        self._lock = asyncio.Lock()
        self._seen: tuple[str, int] | None = None
        self._seen_since_s = 0.0
        self._beaten_at_s: float | None = None
        self._beat = 0
        self._problem = "it has not been asked for yet"

    @property
    def held(self) -> bool:
        """Nobody else can have it: the last beat is younger than half a lease."""
        return self._beaten_at_s is not None and self._clock() - self._beaten_at_s < self._lease_s / 2

    @property
    def why_not(self) -> str:
        """Empty while it is held."""
        return "" if self.held else self._problem

    async def beat(self) -> bool:
        """Takes or keeps it, and writes the state. False: it is not ours now, and nothing may be done."""
        async with self._lock:
            began_s = self._clock()
            try:
                done = await self._try(began_s)
            except BusError as error:
                self._problem = f"the launcher's state in NATS cannot be read or written: {error}"
                return False
            if done:
                self._beaten_at_s = began_s
            return done

    async def _try(self, now: float) -> bool:
        found = await self._keys.get(self._key)
        known, revision = (LauncherState(), 0) if found is None else (_read(found[0]), found[1])
        ours = known.holder == self._owner or (found is None and self._beaten_at_s is not None)
        if not ours and not self._free(known, now):
            self._lost(known.holder)
            return False
        if not ours or self._beaten_at_s is None:
            self._taken(known)
            log.info("launcher.lease_taken", before=known.holder, runs=len(known.runs))
        self._beat = max(self._beat, known.beat) + 1
        if not await self._keys.update(self._key, encode(self._state(self._beat)), revision):
            self._lost("another launcher, a moment ago")
            return False
        return True

    def _free(self, known: LauncherState, now: float) -> bool:
        if not known.holder:
            return True
        if self._seen != (known.holder, known.beat):
            self._seen, self._seen_since_s = (known.holder, known.beat), now
        return now - self._seen_since_s > self._lease_s

    def _lost(self, holder: str) -> None:
        if self._beaten_at_s is not None:
            log.warning("launcher.lease_lost", holder=holder)
        self._beaten_at_s = None
        self._problem = f"another launcher acts for the site: {holder}"

    async def read(self) -> LauncherState:
        """What is kept now. Raises BusError."""
        found = await self._keys.get(self._key)
        return LauncherState() if found is None else _read(found[0])

    async def give_back(self, state: LauncherState) -> None:
        """So that the next one need not wait. `state` has no holder."""
        async with self._lock:
            if self._beaten_at_s is None:
                return
            try:
                found = await self._keys.get(self._key)
                if found is not None and _read(found[0]).holder == self._owner:
                    await self._keys.update(self._key, encode(state), found[1])
            except BusError as error:
                log.warning("launcher.lease_not_given_back", error=str(error), effect="the next one waits for it")
            self._beaten_at_s = None

    @property
    def beats(self) -> int:
        return self._beat


def _read(value: bytes) -> LauncherState:
    try:
        return decode(LauncherState, value)
    except MalformedMessage as error:
        log.error("launcher.state_unreadable", error=str(error), effect="jobs are found by their names")
        return LauncherState()
