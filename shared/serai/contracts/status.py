"""The status plane: what a session says of itself about once a second on core NATS. It may be lost."""

from __future__ import annotations

from dataclasses import dataclass

from serai.contracts.session_record import Lifecycle


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
