"""A service's own copy of the registry: joined records, and its own opinion of who is alive. No I/O, no clock.

Liveness is judged from the arrival of status messages on the receiver's monotonic clock (`now`, in seconds), so
clock skew between machines changes nothing. Silence stops routing; it never changes a record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from serai.contracts.session_record import Lifecycle, SessionRecord, join
from serai.contracts.status import SessionStatus

SILENCE_INTERVALS_MAX = 3.5
"""A session whose status did not come for this many of its own intervals is suspected."""

ROUTABLE_FOR_S = 0.05
"""How long the list of routable sessions of a model is used again, when nothing was heard meanwhile, in seconds."""


@dataclass(slots=True)
class Sighting:
    """What this observer has noticed of one session."""

    known_since_s: float
    heard_at_s: float | None = None
    """None = never heard by this observer: the record came from a store or a snapshot."""
    status: SessionStatus | None = None
    unreachable: bool = False
    """The bus said that nobody receives what is sent to it; the next status lifts that."""


class RegistryReplica:
    """All records this observer knows, joined, with its own sightings beside them."""

    def __init__(self) -> None:
        self._records: dict[str, SessionRecord] = {}
        self._sightings: dict[str, Sighting] = {}
        self._by_model: dict[str, set[str]] = {}
        self._routable: dict[str, tuple[float, list[SessionRecord]]] = {}
        """Per model: when it was worked out, and the answer. Emptied by every change; silence alone shows within
        `ROUTABLE_FOR_S`."""

    def __len__(self) -> int:
        return len(self._records)

    def get(self, session: str) -> SessionRecord | None:
        return self._records.get(session)

    def records(self) -> list[SessionRecord]:
        """All records in the order of their session ids."""
        return [self._records[session] for session in sorted(self._records)]

    def merge(self, record: SessionRecord, now: float, *, heard: bool = False) -> bool:
        """Joins `record` in; True when that changed this copy. `heard` = the session itself has just said it; a
        record from a store only proves that it was written, and its session is suspected until it is heard."""
        self._routable.clear()
        sighting = self._sightings.setdefault(record.session, Sighting(known_since_s=now))
        if heard:
            sighting.heard_at_s = now
        known = self._records.get(record.session)
        joined = record if known is None else join(known, record)
        if joined is known:
            return False
        if known is not None and known.metadata.model != joined.metadata.model:
            self._by_model[known.metadata.model].discard(record.session)
        self._records[record.session] = joined
        self._by_model.setdefault(joined.metadata.model, set()).add(record.session)
        return True

    def hear(self, status: SessionStatus, now: float) -> bool:
        """Notes a status; True when its record is unknown here or newer than this copy, and should be asked for."""
        self._routable.clear()
        sighting = self._sightings.get(status.session)
        if sighting is None:
            return True
        if sighting.status is not None and status.sequence <= sighting.status.sequence:
            return False
        sighting.heard_at_s = now
        sighting.status = status
        sighting.unreachable = False
        known = self._records[status.session]
        return (status.lifecycle, status.version) > (known.lifecycle, known.version)

    def unreachable(self, session: str) -> None:
        """Nobody receives what is sent to `session` now: stop routing to it until it is heard again."""
        self._routable.clear()
        if sighting := self._sightings.get(session):
            sighting.unreachable = True

    def suspected(self, session: str, now: float) -> bool:
        """This observer's opinion, never part of a record."""
        sighting = self._sightings.get(session)
        if sighting is None or sighting.heard_at_s is None or sighting.unreachable:
            return True
        interval_s = sighting.status.interval_s if sighting.status else 1.0
        return now - sighting.heard_at_s > SILENCE_INTERVALS_MAX * interval_s

    def silent_s(self, session: str, now: float) -> float:
        """Seconds since `session` was last heard, or since this observer has known of it."""
        sighting = self._sightings[session]
        return now - (sighting.known_since_s if sighting.heard_at_s is None else sighting.heard_at_s)

    def status(self, session: str) -> SessionStatus | None:
        sighting = self._sightings.get(session)
        return sighting.status if sighting else None

    def routable(self, model: str, now: float) -> list[SessionRecord]:
        """Sessions that may be sent a request for `model`: serving, not draining, not suspected; sorted by id."""
        known = self._routable.get(model)
        if known is not None and 0 <= now - known[0] < ROUTABLE_FOR_S:
            return known[1]
        routable = [
            record
            for session in sorted(self._by_model.get(model, ()))
            if (record := self._records[session]).lifecycle is Lifecycle.SERVING
            and record.metadata.draining is None
            and not self.suspected(session, now)
        ]
        if routable:  # Names that nobody serves come from clients, and there is no end of them.
            self._routable[model] = (now, routable)
        return routable

    def models(self, now: float) -> list[str]:
        """Names that have at least one routable session."""
        return sorted(model for model in self._by_model if self.routable(model, now))

    def knows_model(self, model: str) -> bool:
        """Whether a session of `model` exists that has not left, routable or not: then its absence is temporary."""
        return any(self._records[s].lifecycle < Lifecycle.DOWN for s in self._by_model.get(model, ()))

    def forget(self, sessions: Iterable[str]) -> None:
        """Drops records for good. Only for those that LEFT so long ago that nobody can bring them back."""
        self._routable.clear()
        for session in sessions:
            record = self._records.pop(session, None)
            self._sightings.pop(session, None)
            if record is not None:
                self._by_model[record.metadata.model].discard(session)
                if not self._by_model[record.metadata.model]:
                    del self._by_model[record.metadata.model]
