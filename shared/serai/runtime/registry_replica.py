"""A service's own copy of the registry: joined records, and its own opinion of who is alive. No I/O, no clock.

Liveness is judged from what reaches this observer, on its monotonic clock (`now`, in seconds), so clock skew between
machines changes nothing. Three paths tell of a session: its own status messages, a direct probe, and a peer's word
(a registry that has just heard it). While one of them speaks, it is alive; when all are silent it is SUSPECTED, which
stops routing and never changes a record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from serai.contracts.registry_digest import Digest
from serai.contracts.session_record import Lifecycle, SessionMetadata, SessionRecord, join
from serai.contracts.status import SessionStatus

DOUBT_INTERVALS = 2.25
"""A session whose status did not come for this many of its own intervals is asked after, by the two other paths."""
SILENCE_INTERVALS_MAX = 3.25
"""After this many without a word on any path it is suspected. With the default interval of a second, and a look every
quarter of one, that is within the 3.5 s that heartbeats alone may take."""

DEFAULT_INTERVAL_S = 1.0
"""Of a session whose status has not been heard yet."""
CHANGES_REMEMBERED = 10_000
ROUTABLE_FOR_S = 0.05
"""How long the list of routable sessions of a model is used again, when nothing was heard meanwhile, in seconds."""


@dataclass(slots=True)
class Sighting:
    """What this observer has noticed of one session."""

    known_since_s: float
    heard_at_s: float | None = None
    """By any path. None = never by this observer: the record came from a store or a snapshot."""
    status: SessionStatus | None = None
    unreachable: bool = False
    """The bus said that nobody receives what is sent to it, or that its connection has closed; the next word of the
    session itself lifts that."""
    asked_at_s: float | None = None
    """When it was last asked after, since it was last heard."""


class RegistryReplica:
    """All records this observer knows, joined, with its own sightings beside them."""

    def __init__(self) -> None:
        self._records: dict[str, SessionRecord] = {}
        self._sightings: dict[str, Sighting] = {}
        self._by_model: dict[str, set[str]] = {}
        self._digests: dict[str, Digest] = {}
        self._routable: dict[str, tuple[float, list[SessionRecord]]] = {}
        """Per model: when it was worked out, and the answer. Dropped by every change; silence alone shows within
        `ROUTABLE_FOR_S`."""
        self._shortest_interval_s = DEFAULT_INTERVAL_S
        self._in_doubt: dict[str, None] = {}
        """Sessions asked after, which have not been found to be suspected yet."""
        self._model_heard_at_s: dict[str, float] = {}
        self._changed_sessions: deque[str] = deque(maxlen=CHANGES_REMEMBERED)
        self.changes = 0
        """Counts everything that may change what is said of any session: records, and opinions of who is alive."""

    def __len__(self) -> int:
        return len(self._records)

    def get(self, session: str) -> SessionRecord | None:
        return self._records.get(session)

    def knows_newer(self, record: SessionRecord) -> bool:
        """Whether `record` tells of an earlier time of its session than this copy knows of."""
        known = self._records.get(record.session)
        return known is not None and (record.lifecycle, record.version) < (known.lifecycle, known.version)

    def records(self) -> list[SessionRecord]:
        """All records in the order of their session ids."""
        return [self._records[session] for session in sorted(self._records)]

    def records_of_site(self, site: str) -> list[SessionRecord]:
        """The records of one site in the order of their session ids."""
        return [record for record in self.records() if record.metadata.site == site]

    def digest(self, site: str) -> Digest:
        """The digest of what this copy knows of `site`."""
        return self._digests.setdefault(site, Digest())

    @property
    def sites(self) -> list[str]:
        """Sites of which there are, or were, records."""
        return sorted(self._digests)

    def merge(self, record: SessionRecord, now: float, *, heard: bool = False) -> bool:
        """Joins `record` in; True when that changed this copy. `heard` = the session itself has just said it; a
        record from a store only proves that it was written, and its session is suspected until it is heard."""
        sighting = self._sightings.get(record.session)
        if sighting is None:
            sighting = self._sightings[record.session] = Sighting(known_since_s=now)
        if heard:
            self._heard(record.session, sighting, now)
            sighting.unreachable = False
        known = self._records.get(record.session)
        joined = record if known is None else join(known, record)
        if joined is known:
            return False
        self._replace(known, joined)
        if heard:
            self._model_heard_at_s[joined.metadata.model] = now
        return True

    def _replace(self, known: SessionRecord | None, joined: SessionRecord | None) -> None:
        for record in (known, joined):
            if record is not None:
                self._changed(record)
        if known is not None:
            self.digest(known.metadata.site).remove(known)
            there = self._by_model[known.metadata.model]
            there.discard(known.session)
            if not there:
                del self._by_model[known.metadata.model]
                self._model_heard_at_s.pop(known.metadata.model, None)
        if joined is not None:
            self.digest(joined.metadata.site).add(joined)
            self._records[joined.session] = joined
            self._by_model.setdefault(joined.metadata.model, set()).add(joined.session)

    def _changed(self, record: SessionRecord) -> None:
        self.changes += 1
        self._changed_sessions.append(record.session)
        self._routable.pop(record.metadata.model, None)

    def _opinion_changed(self, session: str) -> None:
        if record := self._records.get(session):
            self._changed(record)

    def changed_since(self, changes: int) -> set[str] | None:
        """Sessions of which something else may be said than when `changes` was that; None = it may be any. Silence is
        noticed by `doubtful`."""
        count = self.changes - changes
        if count > len(self._changed_sessions):
            return None
        return set(islice(reversed(self._changed_sessions), count))

    def _heard(self, session: str, sighting: Sighting, now: float) -> None:
        if sighting.heard_at_s is None or sighting.asked_at_s is not None or sighting.unreachable:
            self._opinion_changed(session)
        if sighting.heard_at_s is None or now > sighting.heard_at_s:
            sighting.heard_at_s = now
            sighting.asked_at_s = None  # Older news answers no question.
            if record := self._records.get(session):
                self._model_heard_at_s[record.metadata.model] = now

    def hear(self, status: SessionStatus, now: float) -> bool:
        """Notes a status; True when its record is unknown here or newer than this copy, and should be asked for."""
        sighting = self._sightings.get(status.session)
        if sighting is None:
            return True
        before = sighting.status
        if before is not None and status.sequence <= before.sequence:
            return False
        self._heard(status.session, sighting, now)
        if before is None or (before.stalled_s > 0) != (status.stalled_s > 0):
            self._opinion_changed(status.session)
        sighting.status = status
        sighting.unreachable = False
        if status.interval_s < self._shortest_interval_s:
            self._shortest_interval_s = status.interval_s
        known = self._records[status.session]
        return (status.lifecycle, status.version) > (known.lifecycle, known.version)

    def vouch(self, session: str, now: float, *, silent_s: float = 0.0) -> None:
        """Another path says that `session` was alive `silent_s` seconds ago: a probe it answered, or a peer that has
        heard it. Does not lift `unreachable`, which is the bus's own word."""
        sighting = self._sightings.get(session)
        if sighting is not None:
            self._heard(session, sighting, now - silent_s)

    def unreachable(self, session: str) -> None:
        """Nobody receives what is sent to `session` now: stop routing to it until it is heard again."""
        if sighting := self._sightings.get(session):
            sighting.unreachable = True
            self._opinion_changed(session)

    def excuse(self, seconds: float, now: float) -> None:
        """This observer itself heard nothing for `seconds`, cut off or held up: that is nobody's silence."""
        for sighting in self._sightings.values():
            sighting.known_since_s = min(now, sighting.known_since_s + seconds)
            if sighting.heard_at_s is not None:
                sighting.heard_at_s = min(now, sighting.heard_at_s + seconds)
        self.changes += 1
        self._changed_sessions.clear()
        self._routable.clear()

    def doubtful(self, now: float) -> list[str]:
        """Sessions that have been silent for long enough to be asked after, each once per silence; they count as
        asked from now on."""
        found = []
        soon_enough_s = now - DOUBT_INTERVALS * self._shortest_interval_s  # Nearly all, in one comparison.
        for session, sighting in self._sightings.items():
            heard_at_s = sighting.heard_at_s
            if heard_at_s is None or heard_at_s >= soon_enough_s or sighting.asked_at_s is not None:
                continue
            record = self._records[session]
            if record.lifecycle is Lifecycle.LEFT:
                continue
            if now - heard_at_s > DOUBT_INTERVALS * _interval_s(sighting):
                sighting.asked_at_s = now
                self._in_doubt[session] = None
                found.append(session)
        for session in [session for session in self._in_doubt if self._decided(session, now)]:
            del self._in_doubt[session]
            self._opinion_changed(session)
        return sorted(found)

    def _decided(self, session: str, now: float) -> bool:
        """Whether a session that was asked after has been heard again, or is suspected now."""
        sighting = self._sightings.get(session)
        return sighting is None or sighting.asked_at_s is None or self.suspected(session, now)

    def suspected(self, session: str, now: float) -> bool:
        """This observer's opinion, never part of a record."""
        sighting = self._sightings.get(session)
        if sighting is None or sighting.heard_at_s is None or sighting.unreachable:
            return True
        return now - sighting.heard_at_s > SILENCE_INTERVALS_MAX * _interval_s(sighting)

    def stalled_s(self, session: str) -> float:
        """For how long the session's engine has made no progress, by its own word; 0 = it works or is idle."""
        sighting = self._sightings.get(session)
        return sighting.status.stalled_s if sighting is not None and sighting.status is not None else 0.0

    def is_unreachable(self, session: str) -> bool:
        """Whether the bus's last word is that the session is not connected."""
        sighting = self._sightings.get(session)
        return sighting is not None and sighting.unreachable

    def silent_s(self, session: str, now: float) -> float:
        """Seconds since `session` was last heard, or since this observer has known of it."""
        sighting = self._sightings[session]
        return now - (sighting.known_since_s if sighting.heard_at_s is None else sighting.heard_at_s)

    def heard_ago_s(self, session: str, now: float) -> float | None:
        """Seconds since `session` was last heard by any path; None = never by this observer."""
        sighting = self._sightings.get(session)
        return None if sighting is None or sighting.heard_at_s is None else now - sighting.heard_at_s

    def heard_model_ago_s(self, model: str, now: float) -> float | None:
        """Seconds since any session of `model` was last heard; None = none was by this observer."""
        heard_at_s = self._model_heard_at_s.get(model)
        return None if heard_at_s is None else now - heard_at_s

    def status(self, session: str) -> SessionStatus | None:
        sighting = self._sightings.get(session)
        return sighting.status if sighting else None

    def routable(self, model: str, now: float) -> list[SessionRecord]:
        """Sessions that may be sent a request for `model`: serving, not draining, not stalled, not suspected; sorted
        by id."""
        known = self._routable.get(model)
        if known is not None and 0 <= now - known[0] < ROUTABLE_FOR_S:
            return known[1]
        routable = [
            record
            for session in sorted(self._by_model.get(model, ()))
            if self.why_not_routable(session, now) is None
            for record in (self._records[session],)
        ]
        if routable:  # Names that nobody serves come from clients, and there is no end of them.
            self._routable[model] = (now, routable)
        return routable

    def why_not_routable(self, session: str, now: float) -> str | None:
        """The first reason why `session` gets no requests from this observer, in plain words; None when it does."""
        record = self._records.get(session)
        if record is None:
            return "not known here"
        if record.lifecycle is not Lifecycle.SERVING:
            return f"its lifecycle is {record.lifecycle.name}{_detail(record.metadata)}"
        if record.metadata.draining is not None:
            return f"it is draining: {record.metadata.draining.reason}"
        if record.metadata.asleep:
            return "its engine is asleep"
        sighting = self._sightings[session]
        if sighting.heard_at_s is None:
            return "its record is known, but no sign of life has come yet"
        if sighting.unreachable:
            return "its connection to NATS has closed; its next sign of life lifts that"
        if self.suspected(session, now):
            return f"it is suspected: no sign of life on any path for {now - sighting.heard_at_s:.1f} s"
        if sighting.status is not None and sighting.status.stalled_s > 0:
            return f"its engine has made no progress for {sighting.status.stalled_s:.1f} s"
        return None

    @property
    def model_names(self) -> list[str]:
        """Names of all models of which there are records, whatever has become of their sessions."""
        return sorted(self._by_model)

    def sessions_of(self, model: str) -> list[str]:
        """All sessions of `model`, those that left among them."""
        return sorted(self._by_model.get(model, ()))

    @property
    def sessions(self) -> list[str]:
        """All sessions of which there are records, in no order."""
        return list(self._records)

    def models(self, now: float) -> list[str]:
        """Names that have at least one routable session."""
        return sorted(model for model in self._by_model if self.routable(model, now))

    def records_of_model(self, model: str) -> list[SessionRecord]:
        """Sessions of `model` that are not down and have not left, routable or not."""
        records = [self._records[session] for session in self._by_model.get(model, ())]
        return [record for record in records if record.lifecycle < Lifecycle.DOWN]

    def knows_model(self, model: str) -> bool:
        """Whether a session of `model` exists that has not left, routable or not: then its absence is temporary."""
        return bool(self.records_of_model(model))

    def forget(self, sessions: Iterable[str]) -> None:
        """Drops records for good. Only for those that LEFT so long ago that nobody can bring them back."""
        for session in sessions:
            record = self._records.pop(session, None)
            self._sightings.pop(session, None)
            if record is not None:
                self._replace(record, None)


def _interval_s(sighting: Sighting) -> float:
    return sighting.status.interval_s if sighting.status else DEFAULT_INTERVAL_S


def _detail(metadata: SessionMetadata) -> str:
    """How far its start is, or why it failed; with a space before it."""
    if metadata.failure:
        return f" ({metadata.failure})"
    share = "" if metadata.loading_progress is None else f" {metadata.loading_progress:.0%}"
    return f" ({metadata.loading_phase}{share})" if metadata.loading_phase else ""
