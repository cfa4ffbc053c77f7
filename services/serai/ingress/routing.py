"""Which session gets a request. Pure: candidates in, one of them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from serai.contracts.session_record import SessionRecord


@dataclass(frozen=True, slots=True)
class Candidate:
    """A session that may be sent the request, with what is known of its load."""

    record: SessionRecord
    own_in_flight: int
    """Requests this ingress has there now."""
    reported_in_flight: int
    """Requests of all ingresses as of its last status, up to a second ago."""

    @property
    def load(self) -> int:
        """Requests there now, as well as can be known: what it reported, or what we know to be more."""
        return max(self.own_in_flight, self.reported_in_flight)


class Policy(Protocol):
    """One routing policy. It may remember; it may not wait."""

    def pick(self, model: str, candidates: Sequence[Candidate]) -> Candidate:
        """One of `candidates`, which is never empty and sorted by session id."""

    def on_request_start(self, session: str) -> None: ...

    def on_request_end(self, session: str, *, whole: bool) -> None: ...


class RoundRobin:
    """Each session in its turn, per model."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def pick(self, model: str, candidates: Sequence[Candidate]) -> Candidate:
        turn = self._turns.get(model, 0)
        self._turns[model] = turn + 1
        return candidates[turn % len(candidates)]

    def on_request_start(self, session: str) -> None: ...

    def on_request_end(self, session: str, *, whole: bool) -> None: ...


class LeastLoaded(RoundRobin):
    """The session with the fewest requests; in turn among equals, so that an idle fleet shares the work."""

    def pick(self, model: str, candidates: Sequence[Candidate]) -> Candidate:
        least = min(candidate.load for candidate in candidates)
        return super().pick(model, [candidate for candidate in candidates if candidate.load == least])


POLICIES: dict[str, Callable[[], Policy]] = {"least-loaded": LeastLoaded, "round-robin": RoundRobin}


def untried(records: Sequence[SessionRecord], tried: Sequence[SessionRecord]) -> Sequence[SessionRecord]:
    """The records a (further) try may go to: never a session twice, and another allocation where there is one."""
    if not tried:
        return records
    sessions = {record.session for record in tried}
    fresh = [record for record in records if record.session not in sessions]
    allocations = {(record.metadata.site, record.metadata.allocation) for record in tried}
    elsewhere = [r for r in fresh if (r.metadata.site, r.metadata.allocation) not in allocations]
    return elsewhere or fresh
