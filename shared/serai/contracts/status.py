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
