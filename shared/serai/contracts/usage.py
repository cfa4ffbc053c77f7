"""The usage plane: one record for each request, whatever happened to it. Durable, never with a word of its text.

On `usage.record.<site>` a message holds one or more records, one a line (`codec.decode_lines`). A record may come any
number of times; by its `id` it counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """How a request ended; one of these, whatever happened."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """Answered with an error before any session had it: bad input, no room, no session, over a limit."""
    FAILED = "failed"
    """Answered with an error after a session had it."""
    TRUNCATED = "truncated"
    """A stream that broke off, and ended with an error event."""
    CANCELLED = "cancelled"
    """The client left."""


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one request was, and what it took. docs/usage.md says how each field comes about."""

    id: str
    """Made by the ingress, new for each request: what clients choose as a request id may well be the same twice."""
    started: str
    """When it arrived: ISO 8601 in UTC with milliseconds; of one that is not tracked only the hour."""
    outcome: Outcome
    status: int
    """HTTP status of the answer; 499 when the client had left before one began."""
    endpoint: str
    model: str = ""
    """Under which it was routed; empty when no such model was known."""
    model_asked: str = ""
    """The client's word for it, when that is another (an alias)."""
    request_id: str = ""
    project: str = ""
    key: str = ""
    """Name of the API key, or of the person."""
    tracked: bool = True
    """False: its caller has asked for anonymity, so nothing says who it was."""
    error_code: str = ""
    stream: bool = False
    queued_s: float = 0.0
    ttft_s: float | None = None
    """Arrival to the first bytes of the answer's body, in seconds; None when there were none."""
    duration_s: float = 0.0
    """Arrival to the end, in seconds."""
    attempts: int = 0
    """Sessions it was sent to."""
    resumed: int = 0
    """How often a broken stream went on at another session."""
    sessions: list[str] = []
    provider: str = ""
    """Of the last session, as are the next fields."""
    site: str = ""
    engine: str = ""
    gpu: str = ""
    """Kind of GPU, as its driver names it; empty when it is not known or there is none."""
    gpus: int = 0
    gpu_seconds: float = 0.0
    """The request's share of the time of its sessions' GPUs."""
    energy_j: float = 0.0
    """Its share of what these drew meanwhile, in joules; 0 where their power is not known."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of `prompt_tokens`, those that the engine had in its cache."""
    output_tokens: int = 0
    tokens_estimated: bool = False
    """The engine did not tell them: guessed from bytes sent and events received."""


@dataclass(frozen=True, slots=True)
class SpentRequest:
    """Asks the ledger what scopes have used. Ask again with the same words: the answer only grows."""

    scopes: list[str]
    """`project:NAME` or `key:NAME`."""
    since: str
    """ISO 8601 in UTC; requests that arrived at this moment or later count."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What one scope has used of one model; requests that are not tracked are in no scope."""

    scope: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class SpentAnswer:
    """A scope without a request has no line in it."""

    spent: list[Spent] = field(default_factory=list)
    problem: str = ""
    """Why there is no answer; then `spent` means nothing."""


@dataclass(frozen=True, slots=True)
class DemandRequest:
    """Asks the ledger how much of each model was asked for. Requests that were refused count too: a model that nobody
    serves has demand."""

    since: str
    """ISO 8601 in UTC."""
    bucket_s: float = 60.0
    """Arrivals are counted in spans of so many whole seconds from `since` on."""
    buckets: int = 60
    models: list[str] = field(default_factory=list)
    """Only of these; empty = of all."""


@dataclass(frozen=True, slots=True)
class LengthQuantiles:
    """Of a model's requests, in tokens."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What was asked of one model."""

    model: str
    """As it was routed; the client's own word for it when it could not be."""
    arrivals: list[int] = field(default_factory=list)
    """Per span; the last one may not be over yet."""
    refused: int = 0
    """Of all of them, those that no session had."""
    prompt: LengthQuantiles = LengthQuantiles()
    """Of requests whose tokens are known."""
    output: LengthQuantiles = LengthQuantiles()
    cached_share: float = 0.0
    """Of prompt tokens, those that were in an engine's cache."""


@dataclass(frozen=True, slots=True)
class DemandAnswer:
    """A model that nobody asked for has no line in it."""

    models: list[ModelUse] = field(default_factory=list)
    problem: str = ""
    """Why there is no answer; then `models` means nothing."""
