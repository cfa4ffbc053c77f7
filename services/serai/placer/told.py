"""What each pool agent is to run, and whether it has obeyed: kept in KV by compare-and-set, then told by message.

Whoever finds newer assignments in KV than its own has been overtaken by another placer, and tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.placement import Assignment, Assignments, BadReport, PoolReport, checked_report
from serai.contracts.subjects import ASSIGN
from serai.placer.pools import LIVE
from serai.runtime.bus import Bus, BusError, NoResponders
from serai.runtime.kv_lease import StateKeys

log = structlog.get_logger()

ASSIGN_TIMEOUT_S = 2.0
AGAIN_S = 2.0
"""What has not been obeyed is told again after so long."""


@dataclass(slots=True)
class _Wanted:
    run: list[Assignment]
    stops: dict[str, str] = field(default_factory=dict)
    generation: int = 0
    """Of what was told last; 0 = nothing yet."""
    changed: bool = False
    """It differs from what was told last."""
    told_at_s: float = -1e9


class Told:
    """Of all pools. `next_generation()` makes a new one, and keeps it; None: it must not act."""

    def __init__(self, bus: Bus, keys: StateKeys, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._keys = keys
        self._clock = clock
        self._pools: dict[str, _Wanted] = {}
        self.newest = 0
        """The highest generation that was seen anywhere."""

    def forget_all(self) -> None:
        """Another placer has acted meanwhile."""
        self._pools.clear()

    def forget(self, gone: Sequence[str]) -> None:
        """Pools that are no more."""
        for pool in gone:
            self._pools.pop(pool, None)

    @property
    def pools(self) -> list[str]:
        """Those that are known."""
        return list(self._pools)

    async def learn(self, report: PoolReport) -> None:
        """What a pool has been told before, by KV, or by its own word where that is newer. Raises BusError."""
        self.newest = max(self.newest, report.generation)
        known = self._pools.get(report.pool)
        if known is not None and report.generation <= known.generation:
            return
        if known is not None:
            log.warning("placer.pool_told_by_another", pool=report.pool, generation=report.generation)
            self.reset(report)
            return
        kept = await self._kept(report.pool)
        if kept is not None and kept.generation >= report.generation:
            self.newest = max(self.newest, kept.generation)
            self._pools[report.pool] = _Wanted(list(kept.run), dict(kept.stops), kept.generation)
            return
        self.reset(report)

    def reset(self, report: PoolReport) -> None:
        """Its own word is what counts."""
        run = [run.assignment for run in report.runs if run.state in LIVE]
        self._pools[report.pool] = _Wanted(run, generation=report.generation)

    def run_of(self, pool: str) -> Mapping[str, Assignment]:
        """What it is to run, by id."""
        wanted = self._pools.get(pool)
        return {} if wanted is None else {one.id: one for one in wanted.run}

    def want(self, pool: str, run: Sequence[Assignment], stops: Mapping[str, str]) -> None:
        """From now on."""
        wanted = self._pools.setdefault(pool, _Wanted([]))
        wanted.run, wanted.changed = list(run), True
        there = {one.id for one in run}
        wanted.stops = {id: why for id, why in (wanted.stops | dict(stops)).items() if id not in there}

    def settled(self, report: PoolReport) -> bool:
        """Whether the pool has obeyed the last that it is told."""
        wanted = self._pools.get(report.pool)
        return wanted is not None and not wanted.changed and report.generation >= wanted.generation

    def due(self, reports: Mapping[str, PoolReport]) -> list[str]:
        """Pools that have to be told, now."""
        now = self._clock()
        return [
            pool
            for pool, wanted in self._pools.items()
            if pool in reports
            and (wanted.changed or (not self.settled(reports[pool]) and now - wanted.told_at_s > AGAIN_S))
        ]

    async def tell(self, pool: str, generation: int, drain_s: float) -> PoolReport | None:
        """Writes it down and says it; the pool's answer, or None when there is none. Raises Overtaken or BusError."""
        wanted = self._pools[pool]
        told = Assignments(pool, generation if wanted.changed else wanted.generation, wanted.run, wanted.stops, drain_s)
        if wanted.changed or not wanted.generation:
            await self._keep(told)
            wanted.generation, wanted.changed = told.generation, False
            self.newest = max(self.newest, told.generation)
        wanted.told_at_s = self._clock()
        try:
            message = await self._bus.request(ASSIGN.of(pool), encode(told), ASSIGN_TIMEOUT_S)
            return checked_report(decode(PoolReport, message.data))
        except NoResponders:
            log.warning("placer.pool_not_there", pool=pool, effect="it will find its assignments when it is back")
        except (BusError, MalformedMessage, BadReport) as error:
            log.warning("placer.pool_not_told", pool=pool, error=str(error), effect="told again")
        return None

    async def _keep(self, told: Assignments) -> None:
        found = await self._keys.get(told.pool)
        if found is not None and (known := _read(found[0])) is not None and known.generation >= told.generation:
            self.newest = max(self.newest, known.generation)
            raise Overtaken(f"pool {told.pool} has assignments of generation {known.generation} already")
        revision = 0 if found is None else found[1]
        if not await self._keys.update(told.pool, encode(told), revision):
            raise Overtaken(f"another placer has written assignments of pool {told.pool}, a moment ago")

    async def _kept(self, pool: str) -> Assignments | None:
        found = await self._keys.get(pool)
        return None if found is None else _read(found[0])


class Overtaken(Exception):
    """Another placer acts: what we know is old."""


def _read(data: bytes) -> Assignments | None:
    try:
        return decode(Assignments, data)
    except MalformedMessage as error:
        log.error("placer.assignments_unreadable", error=str(error), effect="the pool's own word counts")
        return None
