"""The session record: one engine, wrapped once, in one allocation; a join-semilattice (design §4).

`join` is commutative, associative and idempotent, so that records may arrive in any order, any number of times, from
any source, and every copy of the registry ends up equal. SUSPECTED is never in the record: it is each observer's own
opinion. LOADING and DRAINING are metadata, since they can be left again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import lru_cache
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
class GpuDevice:
    """One GPU of a session."""

    uuid: str
    name: str = ""
    memory_bytes: int = 0


ENGINE_DIED = "engine died"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that may be the node's doing: an engine that served and ended by itself, or a GPU that is broken."""

    what: str
    """ENGINE_DIED, or what is wrong with the GPU."""
    at: str = ""
    """When the agent saw it, ISO 8601 in UTC."""
    gpu: str = ""
    """UUID; empty = not known which."""


@dataclass(frozen=True, slots=True)
class EngineParallelism:
    """How the engine is spread over its GPUs."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1


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
    asleep: bool = False
    """Its engine has freed its GPUs and keeps what it needs to serve again within seconds; nobody is sent there."""
    agent_version: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    allocation_ends_at: str = ""
    """When the allocation ends, ISO 8601 in UTC, for people; what decides is `SessionStatus.allocation_remaining_s`."""
    connection: str = ""
    """Name of the agent's NATS connection: the server's word that it closed names it."""
    worker_group: str = ""
    """Agents that were launched together and for one purpose."""
    gpus: list[GpuDevice] = field(default_factory=list)
    parallelism: EngineParallelism = EngineParallelism()
    kv_tokens_max: int = 0
    """Size of the engine's KV cache, in tokens; 0 = unknown."""
    endpoints: list[str] = field(default_factory=list)
    """Paths below the engine's root that the agent found it to serve (`/v1/embeddings`); empty = not known."""
    restart_count: int = 0
    """How often the batch system has requeued the allocation."""
    faults: list[Fault] = field(default_factory=list)
    """Oldest first; what a quarantine of the host is judged by."""
    quantization: str = ""
    """Of the weights, as the engine calls it; `none` = as they were trained; empty = not known."""
    dtype: str = ""
    """In what it computes, e.g. `bfloat16`; empty = not known."""
    engine_version: str = ""
    failure: str = ""
    """Why the engine's run ended, when nobody wanted it to: its cause, and a line for people."""


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


RECORD_BYTES_MAX = 16 * 1024
LABELS_MAX = 64
TEXT_CHARACTERS_MAX = 512
GPUS_MAX = 64
FAULTS_MAX = 8

_SESSION_ID = re.compile(r"[A-Za-z0-9_=-]{1,200}")


class BadRecord(ValueError):
    """A record that no honest agent writes; the text names the field, and says what was expected."""


def checked(record: SessionRecord) -> SessionRecord:
    """`record` itself. Raises BadRecord when a field is out of its bounds, or when the session's id was not made for
    the site and allocation that the record names (a forged site)."""
    metadata = record.metadata
    if not _SESSION_ID.fullmatch(record.session):
        raise BadRecord(f"session: {record.session[:40]!r} is no session id (1 to 200 of A-Z a-z 0-9 _ - =)")
    if record.version < 0:
        raise BadRecord(f"version: {record.version} is below 0")
    expected = session_prefix(metadata.site, metadata.allocation, metadata.restart_count)
    if not record.session.startswith(expected):
        raise BadRecord(f"metadata.site: {metadata.site[:40]!r} is not the site this session was named for")
    if not metadata.model:
        raise BadRecord("metadata.model: is empty")
    progress = metadata.loading_progress
    if progress is not None and not 0 <= progress <= 1:
        raise BadRecord(f"metadata.loading_progress: {progress} is not within 0 and 1")
    if len(metadata.labels) > LABELS_MAX:
        raise BadRecord(f"metadata.labels: {len(metadata.labels)} labels; at most {LABELS_MAX}")
    if len(metadata.gpus) > GPUS_MAX:
        raise BadRecord(f"metadata.gpus: {len(metadata.gpus)} GPUs; at most {GPUS_MAX}")
    if len(metadata.faults) > FAULTS_MAX:
        raise BadRecord(f"metadata.faults: {len(metadata.faults)} faults; at most {FAULTS_MAX}")
    for name in _TEXT_FIELDS:
        _check_text(name, getattr(metadata, name))
    for label, value in metadata.labels.items():
        _check_text("labels", label)
        _check_text(f"labels[{label[:40]}]", value)
    for gpu in metadata.gpus:
        _check_text("gpus", gpu.uuid + gpu.name)
    for fault in metadata.faults:
        _check_text("faults", fault.what + fault.at + fault.gpu)
    return record


def _check_text(name: str, text: str) -> None:
    if len(text) > TEXT_CHARACTERS_MAX:
        raise BadRecord(f"metadata.{name}: {len(text)} characters; at most {TEXT_CHARACTERS_MAX}")


_TEXT_FIELDS = tuple([field.name for field in fields(SessionMetadata) if field.type == "str"])


def new_session_id(site: str, allocation: str, restart_count: int, random_part: str) -> str:
    """Session id: site, allocation, restart count, random part, as one token valid in subjects and KV keys.

    A long or odd site or allocation name is shortened to a readable head and a digest; the record's metadata holds
    the full names. The random part makes the id new each time: a session that comes back is another session.
    """
    return checked_session_id(f"{session_prefix(site, allocation, restart_count)}{random_part}")


def session_prefix(site: str, allocation: str, restart_count: int) -> str:
    """What the ids of all sessions of one run of an allocation begin with."""
    return f"{_readable(site)}-{_readable(allocation)}-{restart_count}-"


def checked_session_id(session: str) -> str:
    """`session` itself, or ValueError when it could not stand in a subject or a KV key."""
    if not _SESSION_ID.fullmatch(session):
        raise ValueError(f"not a session id: {session!r}")
    return session


@lru_cache(maxsize=4096)  # Each record that comes is checked, and most come again.
def _readable(name: str) -> str:
    head = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:40]
    if head == name:
        return head
    return f"{head}_{sha256(name.encode()).hexdigest()[:8]}"
