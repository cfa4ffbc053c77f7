"""The drain conversation: somebody who looks after allocations asks one session to end, or its engine to sleep.

It is a request, not a kill: the session takes no new requests, lets those that fit run to their end, hands the others
over, and leaves. Asked again, it ends by the earlier of the two times.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Ask a session to end."""

    reason: str
    """For people: it stands in the session's record and in its log."""
    within_s: float
    """When it must be gone, in seconds from now. 0 = at once: everything that runs is handed over."""


@dataclass(frozen=True, slots=True)
class DrainAnswer:
    """The word of `session`."""

    session: str
    accepted: bool
    """False: the request was none (`why`). A session that drains already accepts."""
    in_flight: int
    """Requests that it has now."""
    why: str = ""
    """Why it was not accepted."""


@dataclass(frozen=True, slots=True)
class SleepRequest:
    """Ask a session to put its engine to sleep once it has drained, or to wake it. Asked again it changes nothing."""

    asleep: bool
    within_s: float = 0.0
    """For sleep: how long requests may still run; what is left then is handed over."""
    reason: str = ""
    """For people."""


@dataclass(frozen=True, slots=True)
class SleepAnswer:
    """The word of `session`; that it sleeps, or serves again, its record says."""

    session: str
    accepted: bool
    why: str = ""
    """Why it was not accepted: its engine cannot sleep, or it ends."""
