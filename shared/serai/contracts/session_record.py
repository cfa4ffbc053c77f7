"""The session record: one engine, wrapped once, in one allocation; a join-semilattice (design §4).

`join` is commutative, associative and idempotent, so that records may arrive in any order, any number of times, from
any source, and every copy of the registry ends up equal. SUSPECTED is never in the record: it is each observer's own
opinion. LOADING and DRAINING are metadata, since they can be left again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import IntEnum
from hashlib import sha256

import msgspec


class Lifecycle(IntEnum):
    """Rank of a session's life; it only ever goes up. A session that comes back has a new id."""

    JOIN = 0
    SERVING = 1
    DOWN = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class Draining:
    """No new requests; why, and how long those that run may still take."""

    reason: str
    remaining_s: float


@dataclass(frozen=True, slots=True)
class SessionMetadata:
    """What an observer needs to know of a session to use it, beside its lifecycle."""

    model: str
    """The name clients ask for."""
    engine_model: str
    """The name the engine answers to; the request body is edited when it differs from `model`."""
    engine: str
    """Engine kind: `llamacpp`, `vllm`, `openai`, `emulated`."""
    site: str = "local"
    provider: str = "local"
    allocation: str = ""
    host: str = ""
    fingerprint: str = ""
    """What the model really is (weights, quantisation, context limit, template, engine), as one short digest."""
    context_tokens_max: int = 0
    """Longest prompt plus answer the engine takes, in tokens; 0 = unknown."""
    concurrency_max: int = 0
    """How many requests the agent accepts at once."""
    loading_progress: float | None = None
    """Share of the start done, 0..1, while the engine loads; None when it is not loading or does not tell."""
    loading_phase: str = ""
    draining: Draining | None = None
    agent_version: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One writer per key: the session's own agent (or, for LEFT after long silence, its site's registry)."""

    session: str
    lifecycle: Lifecycle
    version: int
    metadata: SessionMetadata

    def advanced(self, lifecycle: Lifecycle, metadata: SessionMetadata | None = None) -> SessionRecord:
        """The owner's next word. Raises ValueError when the lifecycle would go back."""
        if lifecycle < self.lifecycle:
            raise ValueError(f"session {self.session}: {self.lifecycle.name} cannot become {lifecycle.name}")
        return replace(self, lifecycle=lifecycle, version=self.version + 1, metadata=metadata or self.metadata)


def join(a: SessionRecord, b: SessionRecord) -> SessionRecord:
    """The least record that knows all that `a` and `b` know: higher lifecycle, then higher version.

    Two different records with equal lifecycle and version mean two writers of one key, which the rules forbid; the
    larger encoded form wins then, so that every observer still ends with the same record.
    Raises ValueError when the records are of different sessions.
    """
    if a.session != b.session:
        raise ValueError(f"cannot join records of two sessions: {a.session} and {b.session}")
    rank_a, rank_b = (a.lifecycle, a.version), (b.lifecycle, b.version)
    if rank_a != rank_b:
        return a if rank_a > rank_b else b
    if a == b:
        return a
    return max(a, b, key=lambda record: msgspec.json.encode(record, order="deterministic"))


_SESSION_ID = re.compile(r"[A-Za-z0-9_=-]{1,200}")


def new_session_id(site: str, allocation: str, restart_count: int, random_part: str) -> str:
    """Session id: site, allocation, restart count, random part, as one token valid in subjects and KV keys.

    A long or odd site or allocation name is shortened to a readable head and a digest; the record's metadata holds
    the full names. The random part makes the id new each time: a session that comes back is another session.
    """
    session = f"{_readable(site)}-{_readable(allocation)}-{restart_count}-{random_part}"
    return checked_session_id(session)


def checked_session_id(session: str) -> str:
    """`session` itself, or ValueError when it could not stand in a subject or a KV key."""
    if not _SESSION_ID.fullmatch(session):
        raise ValueError(f"not a session id: {session!r}")
    return session


def _readable(name: str) -> str:
    head = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:40]
    if head == name:
        return head
    return f"{head}_{sha256(name.encode()).hexdigest()[:8]}"
