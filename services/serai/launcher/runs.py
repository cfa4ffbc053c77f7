"""One job of a slot, as two witnesses tell of it: the batch system, and the sessions in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from serai.launcher.jobs import JobId, JobState
from serai.launcher.slots import Slot
from serai.runtime.session_state import SessionState

_ALIVE = frozenset(
    {
        SessionState.SERVING,
        SessionState.LOADING,
        SessionState.QUEUED,
        SessionState.DRAINING,
        SessionState.ASLEEP,
        SessionState.STALLED,
    }
)
HAS_NODES = frozenset({JobState.STARTING, JobState.RUNNING, JobState.SUSPENDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSession:
    """One session as the registry copy tells it."""

    session: str
    allocation: str
    state: SessionState
    in_flight: int | None = None
    """None = not heard."""
    requests_total: int = 0
    remaining_s: float | None = None
    """Time left in its allocation; None = no end known."""

    @property
    def alive(self) -> bool:
        return self.state in _ALIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job of a slot. Times are of the launcher's own monotonic clock."""

    name: str
    slot: Slot
    generation: int
    id: JobId | None = None
    """None: submitted, and no number told yet."""
    state: JobState | None = None
    """None: the batch system has not shown it yet."""
    why: str = ""
    """Why it waits, in the batch system's words."""
    allocation: str = ""
    submitted_at_s: float
    submission_seen: bool = False
    """False: found, or restored; what it waited is not known."""
    started_at_s: float | None = None
    served_at_s: float | None = None
    """When its first token was seen, since it started last."""
    time_limit_s: float = 0.0
    ends_at_s: float | None = None
    absent: int = 0
    """Answers in a row in which it was missing."""
    sessions: tuple[SeenSession, ...] = ()
    """All that are known and have not left."""
    joined: bool = False
    """A session of it has been alive, since it started last."""
    silent_since_s: float | None = None
    """No session of it is alive, though one was."""
    left_since_s: float | None = None
    """All its sessions have left, though its job goes on."""
    draining_since_s: float | None = None
    cancelled_at_s: float | None = None
    dismissed: bool = False
    """Cancelled because it is not needed: its end is no failure."""

    @property
    def live(self) -> tuple[SeenSession, ...]:
        return tuple(one for one in self.sessions if one.alive)

    @property
    def serving(self) -> bool:
        """A session of it takes requests."""
        return any(one.state is SessionState.SERVING for one in self.sessions)

    @property
    def draining(self) -> bool:
        """Its sessions take no more requests, and end."""
        return bool(self.live) and all(one.state is SessionState.DRAINING for one in self.live)

    @property
    def started(self) -> bool:
        return self.state in HAS_NODES or self.state is JobState.COMPLETING or bool(self.live)

    @property
    def in_flight(self) -> int | None:
        """Requests in it now; None when a session that may have some does not tell."""
        if any(not one.alive and one.state is SessionState.SUSPECTED for one in self.sessions):
            return None
        counts = [one.in_flight for one in self.live]
        return None if None in counts else sum(count or 0 for count in counts)

    def remaining_s(self, now: float) -> float | None:
        """By the batch system or by its sessions, whoever sees the end sooner."""
        known = [one.remaining_s for one in self.live if one.remaining_s is not None]
        if self.ends_at_s is not None:
            known.append(self.ends_at_s - now)
        return max(0.0, min(known)) if known else None

    @property
    def text(self) -> str:
        """For people: number, state, and what its sessions are."""
        number = str(self.id) if self.id else "no number yet"
        state = "not seen yet" if self.state is None else str(self.state)
        missing = f", missing from {self.absent} answer(s)" if self.absent else ""
        sessions = f", {', '.join(sorted(str(one.state) for one in self.sessions))}" if self.sessions else ""
        return f"{number} {state}{missing}{sessions} (generation {self.generation})"


# -- what happened ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    run: Run
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Served:
    run: Run
    load_s: float | None


@dataclass(frozen=True, slots=True)
class Requeued:
    """It waits again, under the same number: what it was is over, what comes is another session."""

    run: Run


@dataclass(frozen=True, slots=True)
class Ended:
    run: Run
    state: JobState | None
    """None: it was missing for so long that it must be over."""
    failed: bool


Event = Started | Served | Requeued | Ended
