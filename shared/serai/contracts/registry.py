"""The registry's conversations: beats, digests, pages, opinions; and the batch system's word that a job is over.

Each site has one registry. It is the authority for its own site's sessions and keeps a copy of the others'. What is
different between two copies is found by digests (`registry_digest.py`) and fetched by bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serai.contracts.session_record import SessionRecord


@dataclass(frozen=True, slots=True)
class RegistryBeat:
    """Sent by each registry every few seconds, and soon after a change: whoever compares finds out what it missed."""

    site: str
    epoch: str
    """New with each start of the registry."""
    sequence: int
    """Counts the changes of this epoch."""
    interval_s: float
    roots: dict[str, int] = field(default_factory=dict)
    """Per site it knows: the digest of that site's records that have not left (`Digest.root`)."""
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Asks a registry for the buckets of one site's digest."""

    site: str


@dataclass(frozen=True, slots=True)
class DigestAnswer:
    """The buckets; a bucket that differs holds records to fetch."""

    site: str
    buckets: list[int]


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Asks for the page of records whose session ids come after `after`, of all sites or one, of all buckets or
    some."""

    after: str = ""
    site: str = ""
    """Empty = all sites."""
    buckets: list[int] = field(default_factory=list)
    """Empty = all buckets."""


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """Records in the order of their session ids, those that left among them. `more` is true when another page
    follows the last of them."""

    records: list[SessionRecord]
    more: bool = False
    silent_s: list[float | None] = field(default_factory=list)
    """Beside each record: seconds since the registry heard the session itself; None = it has not. A new reader need
    not wait for a sign of life that others have just had."""
    complete_since_s: float = 0.0
    """For how long the registry has been listening without a break: what it does not know after long listening does
    not exist in its site."""


@dataclass(frozen=True, slots=True)
class OpinionRequest:
    """Asks a registry what it thinks of a session; it probes the session itself when it has not just heard it."""

    session: str


@dataclass(frozen=True, slots=True)
class Opinion:
    """A registry's view of one session. `alive`: it answered or was heard within the last seconds; False: it did not
    answer now; None: the registry does not know the session."""

    session: str
    alive: bool | None
    silent_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The NATS server's word, passed on by the registry: these sessions' connections have closed. Routing to them
    stops at once; nothing ends, for an agent may be back in a second."""

    sessions: list[str]


@dataclass(frozen=True, slots=True)
class HostCleared:
    """Somebody's word that a host is well: the faults of its sessions that have left are no longer held against it."""

    site: str
    host: str
    sessions: int = 0
    """In the answer: how many sessions had faults."""


@dataclass(frozen=True, slots=True)
class AllocationEnded:
    """The batch system's word that a job, pod or host is over: all its sessions have left."""

    site: str
    allocation: str
    reason: str = ""
    restart_count: int | None = None
    """Only runs up to this one are over; None = all."""
