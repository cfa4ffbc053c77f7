"""Who acts, when several processes could: one holder, by a key in KV that may hold its state too.

The key is written by compare-and-set before each action, so that whoever has lost it finds out before it acts, and
whoever takes it over knows what was begun. It has no TTL (a key that expired refuses to be made again, H60) and no time
of any clock: a holder has gone when its beat has stood still for the length of a lease, as long as the observer itself
has listened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.runtime.bus import BusError

log = structlog.get_logger()


class StateKeys(Protocol):
    """Where the key lies: `NatsBucket`. Raises BusError."""

    async def get(self, key: str) -> tuple[bytes, int] | None: ...

    async def update(self, key: str, value: bytes, revision: int) -> bool: ...


class HeldState(Protocol):
    """What stands in the key: who holds it, and how often it has said so, beside whatever else."""

    @property
    def holder(self) -> str:
        """Empty = nobody."""

    @property
    def beat(self) -> int: ...


State = TypeVar("State", bound=HeldState)


class KvLease(Generic[State]):
    """`state(beat)` says what is to be kept; `taken(state)` is told what the holder before knew. `nobody` stands for a
    key that is not there; `acts` says for people what the holder does, as in "launcher acts for the site"; the names of
    log events begin with `name`."""

    def __init__(
        self,
        keys: StateKeys,
        key: str,
        owner: str,
        lease_s: float,
        clock: Callable[[], float],
        state: Callable[[int], State],
        taken: Callable[[State], None],
        *,
        nobody: State,
        name: str,
        acts: str,
    ) -> None:
        self._keys, self._key, self._owner = keys, key, owner
        self._lease_s = lease_s
        self._clock = clock
        self._state = state
        self._taken = taken
        self._nobody = nobody
        self._name, self._acts = name, acts
        self._lock = asyncio.Lock()
        self._seen: tuple[str, int] | None = None
        self._seen_since_s = 0.0
        self._gone = ""
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

    @property
    def seen_holder(self) -> str:
        """Who else held it when it was last looked at; empty = nobody else."""
        return self._seen[0] if self._seen is not None and self._beaten_at_s is None else ""

    def holder_gone(self, holder: str) -> None:
        """There is positive evidence that `holder` has gone: the next beat need not wait for its lease to run out. If
        it was none, epochs must keep the two apart."""
        self._gone = holder

    async def beat(self) -> bool:
        """Takes or keeps it, and writes the state. False: it is not ours now, and nothing may be done."""
        async with self._lock:
            began_s = self._clock()
            try:
                done = await self._try(began_s)
            except BusError as error:
                self._problem = f"the {self._name}'s state in NATS cannot be read or written: {error}"
                return False
            if done:
                self._beaten_at_s = began_s
            return done

    async def _try(self, now: float) -> bool:
        found = await self._keys.get(self._key)
        gone, self._gone = self._gone, ""  # Evidence is for one beat.
        known, revision = (self._nobody, 0) if found is None else (self._read(found[0]), found[1])
        ours = known.holder == self._owner or (found is None and self._beaten_at_s is not None)
        if not ours and not self._free(known, gone, now):
            self._lost(known.holder)
            return False
        if not ours or self._beaten_at_s is None:
            self._taken(known)
            log.info(f"{self._name}.lease_taken", key=self._key, before=known.holder)
        self._beat = max(self._beat, known.beat) + 1
        if not await self._keys.update(self._key, encode(self._state(self._beat)), revision):
            self._lost(f"another {self._name}, a moment ago")
            return False
        return True

    def _free(self, known: State, gone: str, now: float) -> bool:
        if not known.holder or known.holder == gone:
            return True
        if self._seen != (known.holder, known.beat):
            self._seen, self._seen_since_s = (known.holder, known.beat), now
        return now - self._seen_since_s > self._lease_s

    def _lost(self, holder: str) -> None:
        if self._beaten_at_s is not None:
            log.warning(f"{self._name}.lease_lost", key=self._key, holder=holder)
        self._beaten_at_s = None
        self._problem = f"another {self._acts}: {holder}"

    async def read(self) -> State:
        """What is kept now. Raises BusError."""
        found = await self._keys.get(self._key)
        return self._nobody if found is None else self._read(found[0])

    async def give_back(self, state: State) -> None:
        """So that the next one need not wait. `state` has no holder."""
        async with self._lock:
            if self._beaten_at_s is None:
                return
            try:
                found = await self._keys.get(self._key)
                if found is not None and self._read(found[0]).holder == self._owner:
                    await self._keys.update(self._key, encode(state), found[1])
            except BusError as error:
                effect = "the next one waits for it"
                log.warning(f"{self._name}.lease_not_given_back", key=self._key, error=str(error), effect=effect)
            self._beaten_at_s = None

    @property
    def beats(self) -> int:
        return self._beat

    def _read(self, value: bytes) -> State:
        try:
            return decode(type(self._nobody), value)
        except MalformedMessage as error:
            log.error(f"{self._name}.state_unreadable", key=self._key, error=str(error), effect="taken for empty")
            return self._nobody
