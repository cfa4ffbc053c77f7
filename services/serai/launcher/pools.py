"""Pool agents as a launcher sees them: to its job such an agent is what a session is to others. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from serai.contracts.placement import PoolReport, RunState
from serai.launcher.runs import SeenSession
from serai.runtime.registry_replica import RegistryReplica
from serai.runtime.session_state import SessionState, state_of

SILENT_INTERVALS = 5.0
GONE_S = 600.0
"""What was silent for so long is forgotten; its job's end is the batch system's to tell."""


@dataclass(frozen=True, slots=True)
class _Heard:
    report: PoolReport
    at_s: float


class PoolSessions:
    """Of one site. They are heard directly, and nobody keeps them for whoever starts later: they speak every few
    seconds."""

    def __init__(self, site: str) -> None:
        self._site = site
        self._heard: dict[str, _Heard] = {}

    def hear(self, report: PoolReport, now: float) -> None:
        """A pool agent's word."""
        if report.site == self._site:
            self._heard[report.pool] = _Heard(report, now)

    def of(self, allocations: AbstractSet[str], now: float) -> list[SeenSession]:
        """Those of these allocations."""
        self._heard = {pool: heard for pool, heard in self._heard.items() if now - heard.at_s < GONE_S}
        return [_seen(heard, now) for _, heard in sorted(self._heard.items()) if heard.report.allocation in allocations]


def _seen(heard: _Heard, now: float) -> SeenSession:
    report, silent_s = heard.report, now - heard.at_s
    runs = [run for run in report.runs if run.state is not RunState.FAILED]
    if silent_s <= SILENT_INTERVALS * report.interval_s:
        state = SessionState.DRAINING if report.stopping else SessionState.SERVING
    else:
        state = SessionState.LEFT if report.stopping and not runs else SessionState.SUSPECTED
    remaining_s = report.allocation_remaining_s
    return SeenSession(
        session=report.pool,
        allocation=report.allocation,
        state=state,
        in_flight=len(runs),
        remaining_s=None if remaining_s is None else max(0.0, remaining_s - silent_s),
    )


def seen_sessions(
    replica: RegistryReplica, pools: PoolSessions, site: str, allocations: AbstractSet[str], now: float
) -> Iterator[SeenSession]:
    """What serves in these allocations: pool agents and sessions."""
    agents = pools.of(allocations, now)
    yield from agents
    # What runs in a pool is the placer's business; the pool's agent is what its job is for.
    wanted = allocations - {agent.allocation for agent in agents}
    for record in replica.records_of_site(site) if wanted else ():
        if record.metadata.allocation not in wanted:
            continue
        status = replica.status(record.session)
        yield SeenSession(
            session=record.session,
            allocation=record.metadata.allocation,
            state=state_of(replica, record.session, now),
            in_flight=None if status is None else status.in_flight,
            requests_total=0 if status is None else status.requests_total,
            remaining_s=None if status is None else status.allocation_remaining_s,
        )
