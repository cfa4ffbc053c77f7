"""The status plane: what a session says of itself about once a second on core NATS. It may be lost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from serai.contracts.session_record import Lifecycle


class Phase(StrEnum):
    """What an engine did since its last status, as far as its counters and its streams show."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SlackSummary:
    """How far ahead of their TPOT targets the running streams are that have one (`x-slo-tpot-ms`), in seconds: tokens
    after the first, times the target, less the time since the first. Below 0: behind."""

    streams: int
    mean_s: float
    low_s: float
    """A tenth of the streams have less."""
    least_s: float


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Liveness is judged from the arrival of these, on the receiver's own clock; no sender time is in it."""

    session: str
    sequence: int
    lifecycle: Lifecycle
    version: int
    """Of the session's record: a receiver whose copy is older asks for the record."""
    interval_s: float
    """When to expect the next one, in seconds."""
    in_flight: int = 0
    """Requests the agent holds now, of all ingresses."""
    requests_total: int = 0
    output_bytes_total: int = 0
    queued: int = 0
    """Requests held back or waiting in the engine, as far as is known."""
    stalled_s: float = 0.0
    """For how long the engine has made no progress beyond what its work explains; 0 = it works or is idle. A session
    whose engine is stalled gets no requests. Said at once when it changes."""
    allocation_remaining_s: float | None = None
    """Time left in the allocation, in seconds; None = no end known."""
    running: int | None = None
    """Requests that the engine works on, by its own word; None = it does not say."""
    kv_tokens_used: int | None = None
    """Of the engine's KV cache. What idle prefixes hold is free with vLLM, and not with all others."""
    kv_tokens_free: int | None = None
    prefill_tokens_per_s: float | None = None
    """Since the engine was last asked, a second or so before; None = it does not say."""
    decode_tokens_per_s: float | None = None
    phase: Phase = Phase.UNKNOWN
    slack: SlackSummary | None = None
    """None = no running stream has a target."""
    gpu_power_w: float | None = None
    """Of the session's GPUs together, as the last three; None = not known."""
    gpu_energy_j: float | None = None
    """Used since the session began. Only ever grows."""
    gpu_celsius: float | None = None
    """Of the hottest."""
    gpu_throttled: bool = False
    """One of them is slowed down by heat or power."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Asks a session whether it is there; with `about`, to ask another one, on the asker's behalf."""

    about: str = ""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The answer of `session`, which is the one that was asked or the one asked about. `reached` is False when the
    session asked about did not answer the one in between."""

    session: str
    reached: bool = True
    lifecycle: Lifecycle | None = None
    version: int = 0
    stalled_s: float = 0.0
