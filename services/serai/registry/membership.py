"""Who is taken to be there, and who to have left. Pure: events and `now` in, effects out; no clock, no I/O.

For each session this observer keeps a standing, which is its own opinion:

    UNHEARD      its record is known from a store or from another registry; it has not been heard itself
    HEARD        it spoke within the last intervals, or answered, or somebody else has just reached it
    DOUBTED      silent for 2.25 of its intervals: it is being asked by the two other paths
    SUSPECTED    silent for 3.25 of them on all three paths: nothing is routed to it
    UNREACHABLE  the bus says that it is not connected; nothing is routed to it, and only its own word lifts that
    LEFT         its record is closed, for ever

What moves it stands in one table (`TABLE`, shown in docs/state-machines.md). A record is closed for four reasons and
no others: its own word, the batch system's word that the allocation is over, another run of the same allocation
speaking in its place, or a silence beyond a grace while the mass-loss brake is off. Only sessions of the observer's
own site are ever closed. No time of another machine is in any event, so clocks may be wrong by any amount.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.runtime.registry_replica import DOUBT_INTERVALS, SILENCE_INTERVALS_MAX

VANISHED_SHARE_MAX = 0.5
"""Mass-loss brake: while more than this share of the open sessions of the site is silent, the observer doubts itself
and closes nothing."""
BRAKE_FROM_SESSIONS = 3
"""With fewer open sessions than this, a share says nothing."""
SETTLE_S = 15.0
"""After an own start, a reconnect or a long pause nothing is closed for so long, whatever the grace: agents come back
over twelve seconds (`runtime.reconnect_curve`)."""
GRACE_SHARE_MIN = 1 / 6
"""Confirmations shorten the grace to this share of it at most (memberlist: `SuspicionMaxTimeoutMult` 6)."""
CONFIRMATIONS_MAX = 3
"""So many independent observers who cannot reach it either shorten the grace to its least."""
ASK_AGAIN_S = 30.0
"""A silent session is asked after again so often, each time by way of another peer: an answer lifts the suspicion, a
failure is a confirmation."""
OWNER_COMPLETE_S = 60.0
"""When a site's own registry has listened for so long and does not know a session, it does not exist."""
FORGET_SILENT_S = 60.0
"""… and it must have been silent here for as long."""
PAUSE_MAX_S = 5.0
"""Looks that are further apart mean that this process did not run: nothing that it missed counts as silence."""
FROZEN_LOOK_S = 10.0
"""How soon a session beyond its grace is looked at again, while nothing may be closed."""
DUE_AT_ONCE = 500
"""So many sessions are judged in one look, that a mass loss does not hold the event loop up; nothing is closed by
silence while others wait for their turn."""
HISTORY = 20


class Path(StrEnum):
    """The ways in which a session can be asked, beside its own heartbeats."""

    DIRECT = "direct"
    PEER = "peer"


# -- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """The joined record of a session, whenever it is new or has changed, from whatever source."""

    record: SessionRecord


@dataclass(frozen=True, slots=True)
class Heard:
    """The session's own word: a record on its subject, or a status, which tells its interval."""

    session: str
    interval_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """It answered a probe, or somebody else has heard it `silent_s` seconds ago."""

    session: str
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NotReached:
    """It did not answer on this path. `by`: who else tried in vain, a peer session or another site's registry, whose
    failure is an independent confirmation; empty when only we did, or nobody could be asked."""

    session: str
    path: Path
    by: str = ""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The NATS server's word: its connection has closed."""

    session: str


@dataclass(frozen=True, slots=True)
class NobodyReceives:
    """The bus's word: nobody subscribes to its subjects now (no responders)."""

    session: str


@dataclass(frozen=True, slots=True)
class AllocationOver:
    """The batch system's word that a job, pod or host of this site is over; runs up to `restart_count`, None = all.
    "I could not find out" is not this event, and neither is an empty answer: UNKNOWN is never GONE (H01)."""

    allocation: str
    restart_count: int | None = None


@dataclass(frozen=True, slots=True)
class OwnerDoesNotKnow:
    """The registry of the session's own site has listened for `complete_s` without a break and has no record of it."""

    session: str
    complete_s: float


@dataclass(frozen=True, slots=True)
class BusCut:
    """We lost the bus: silence says nothing from now on."""


@dataclass(frozen=True, slots=True)
class BusBack:
    """We are on the bus: at the start, and after each cut."""


@dataclass(frozen=True, slots=True)
class Look:
    """Time has passed."""


Event = (
    Known
    | Heard
    | Answered
    | NotReached
    | Disconnected
    | NobodyReceives
    | AllocationOver
    | OwnerDoesNotKnow
    | BusCut
    | BusBack
    | Look
)


# -- effects ---------------------------------------------------------------------------------------------------------


class Cause(StrEnum):
    """Why a record is closed by somebody else than its session."""

    ALLOCATION_OVER = "the batch system says that its allocation is over"
    REPLACED = "a later run of its allocation speaks in its place"
    SILENT = "it was silent on every path beyond the grace"


@dataclass(frozen=True, slots=True)
class Ask:
    """Find out by this path whether the session is there."""

    session: str
    path: Path


@dataclass(frozen=True, slots=True)
class CloseRecord:
    """Write LEFT for this session."""

    session: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class ForgetRecord:
    """Drop the record: it left long ago, or its own registry does not know it."""

    session: str


Effect = Ask | CloseRecord | ForgetRecord


# -- the table -------------------------------------------------------------------------------------------------------


class Standing(StrEnum):
    """This observer's opinion of one session."""

    UNHEARD = "unheard"
    HEARD = "heard"
    DOUBTED = "doubted"
    SUSPECTED = "suspected"
    UNREACHABLE = "unreachable"
    LEFT = "left"


class Trigger(StrEnum):
    """What moves a standing."""

    SPOKE = "it spoke itself"
    REACHED = "it answered, or another has heard it"
    DOUBT = "silent for 2.25 intervals"
    SILENCE = "silent for 3.25 intervals, no answer"
    BUS_SAYS_GONE = "disconnected, or no responders"
    CLOSED = "its record is LEFT"


SILENT_STANDINGS = frozenset({Standing.UNHEARD, Standing.SUSPECTED, Standing.UNREACHABLE})
"""Nothing is routed to these; they count as vanished for the mass-loss brake."""

TABLE: dict[Standing, dict[Trigger, Standing]] = {
    Standing.UNHEARD: {
        Trigger.SPOKE: Standing.HEARD,
        Trigger.REACHED: Standing.HEARD,
        Trigger.BUS_SAYS_GONE: Standing.UNREACHABLE,
        Trigger.CLOSED: Standing.LEFT,
    },
    Standing.HEARD: {
        Trigger.SPOKE: Standing.HEARD,
        Trigger.REACHED: Standing.HEARD,
        Trigger.DOUBT: Standing.DOUBTED,
        Trigger.BUS_SAYS_GONE: Standing.UNREACHABLE,
        Trigger.CLOSED: Standing.LEFT,
    },
    Standing.DOUBTED: {
        Trigger.SPOKE: Standing.HEARD,
        Trigger.REACHED: Standing.HEARD,
        Trigger.SILENCE: Standing.SUSPECTED,
        Trigger.BUS_SAYS_GONE: Standing.UNREACHABLE,
        Trigger.CLOSED: Standing.LEFT,
    },
    Standing.SUSPECTED: {
        Trigger.SPOKE: Standing.HEARD,
        Trigger.REACHED: Standing.HEARD,
        Trigger.BUS_SAYS_GONE: Standing.UNREACHABLE,
        Trigger.CLOSED: Standing.LEFT,
    },
    Standing.UNREACHABLE: {
        Trigger.SPOKE: Standing.HEARD,
        Trigger.REACHED: Standing.UNREACHABLE,
        Trigger.BUS_SAYS_GONE: Standing.UNREACHABLE,
        Trigger.CLOSED: Standing.LEFT,
    },
    Standing.LEFT: {
        Trigger.SPOKE: Standing.LEFT,
        Trigger.REACHED: Standing.LEFT,
        Trigger.BUS_SAYS_GONE: Standing.LEFT,
        Trigger.CLOSED: Standing.LEFT,
    },
}


def table_text() -> str:
    """`TABLE` as Markdown; an empty cell cannot happen."""
    triggers = list(Trigger)
    lines = [
        "| standing | " + " | ".join(triggers) + " |",
        "|---" * (len(triggers) + 1) + "|",
    ]
    for standing, moves in TABLE.items():
        cells = [str(moves[trigger]) if trigger in moves else "" for trigger in triggers]
        lines.append(f"| **{standing}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class IllegalTransition(RuntimeError):
    """A bug of ours: the table has no such move. The text tells what happened before."""


def grace_s(grace_max_s: float, confirmations: int) -> float:
    """How long a silence may last before a record is closed, after so many independent confirmations (Lifeguard,
    as `hashicorp/memberlist` computes its suspicion timeout)."""
    return shortened_s(grace_max_s * GRACE_SHARE_MIN, grace_max_s, confirmations, CONFIRMATIONS_MAX)


def shortened_s(least_s: float, most_s: float, confirmations: int, expected: int) -> float:
    """`most_s` without a confirmation, `least_s` with `expected` of them, the first ones counting most."""
    share = math.log(confirmations + 1) / math.log(expected + 1)
    return max(least_s, most_s - (most_s - least_s) * share)


# -- the machine -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Session:
    name: str
    site: str
    allocation: str
    restart_count: int
    standing: Standing
    since_s: float
    """When it was last heard or reached; before that, when it became known. Of one that left: when that was known, or
    when it last spoke in spite of it."""
    interval_s: float = 1.0
    due_s: float = math.inf
    """When time alone may move it next; the only entry of the heap that counts."""
    asked_s: float = -math.inf
    confirmed_by: set[str] = field(default_factory=set)


class Membership:
    """The machine for all sessions that one registry knows. `handle` takes an event; `now` is monotonic, in seconds."""

    def __init__(self, site: str, now: float, *, silence_grace_s: float, retention_s: float) -> None:
        self._site = site
        self._grace_s = silence_grace_s
        self._retention_s = retention_s
        self._sessions: dict[str, _Session] = {}
        self._runs: dict[str, set[str]] = {}
        """Open sessions of our site by allocation."""
        self._standings: Counter[Standing] = Counter()
        """Of our site's sessions."""
        self._heap: list[tuple[float, str]] = []
        self._listening_since_s: float | None = now
        """None while the bus is away."""
        self._looked_s = now
        self._history: deque[tuple[float, str, Standing, Trigger]] = deque(maxlen=HISTORY)

    # -- views -------------------------------------------------------------------------------------------------------

    def standing(self, session: str) -> Standing | None:
        """The opinion of `session`; None when it is not known."""
        known = self._sessions.get(session)
        return known.standing if known else None

    def count(self, standing: Standing) -> int:
        """How many sessions of the own site stand so."""
        return self._standings[standing]

    def confirmations(self, session: str) -> int:
        """How many others could not reach `session` either, in this silence."""
        return len(self._sessions[session].confirmed_by)

    @property
    def listening_since_s(self) -> float | None:
        """Since when we have been listening without a break; None while the bus is away."""
        return self._listening_since_s

    @property
    def braked(self) -> bool:
        """Whether so many are silent that it is more likely that we are the ones who hear nothing."""
        silent = sum(self._standings[standing] for standing in SILENT_STANDINGS)
        still = sum(self._standings.values()) - self._standings[Standing.LEFT]
        return still >= BRAKE_FROM_SESSIONS and silent > VANISHED_SHARE_MAX * still

    # -- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about `event`. Events of sessions that are not known are late, and mean nothing."""
        match event:
            case Heard(session, interval_s):
                return self._heard(session, interval_s, now)
            case Known(record):
                self._known(record, now)
                return []
            case Look():
                return self._look(now)
            case BusCut():
                self._listening_since_s = None
                return []
            case BusBack():
                self._listening_since_s = self._looked_s = now
                return []
            case AllocationOver(allocation, restart_count):
                return self._allocation_over(allocation, restart_count, now)
            case OwnerDoesNotKnow(session, complete_s):
                return self._owner_does_not_know(session, complete_s, now)
            case Answered(session, silent_s):
                self._reached(session, silent_s, now)
                return []
            case NotReached(session, _, by):
                self._not_reached(session, by, now)
                return []
            case Disconnected(session) | NobodyReceives(session):
                self._bus_says_gone(session, now)
                return []
            case _:
                assert_never(event)

    def _known(self, record: SessionRecord, now: float) -> None:
        session = self._sessions.get(record.session)
        if session is None:
            session = self._add(record, now)
        if record.lifecycle is Lifecycle.LEFT and session.standing is not Standing.LEFT:
            self._leave(session, now)

    def _add(self, record: SessionRecord, now: float) -> _Session:
        data = record.metadata
        made = _Session(record.session, data.site, data.allocation, data.restart_count, Standing.UNHEARD, now)
        self._sessions[made.name] = made
        if self._ours(made):
            self._standings[Standing.UNHEARD] += 1
            self._runs.setdefault(made.allocation, set()).add(made.name)
            self._due(made, now + ASK_AGAIN_S)
        return made

    def _heard(self, name: str, interval_s: float | None, now: float) -> list[Effect]:
        session = self._sessions.get(name)
        if session is None:
            return []
        session.since_s = now
        if interval_s is not None:
            session.interval_s = interval_s
        if session.standing is not Standing.HEARD:
            if session.standing is Standing.LEFT:
                return []  # It does not know yet. Its record is kept: whoever still speaks is not forgotten.
            self._move(session, Trigger.SPOKE, now)
            self._speaks_again(session)
            return self._replaced_by(session, now)
        return []

    def _reached(self, name: str, silent_s: float, now: float) -> None:
        session = self._sessions.get(name)
        if session is None or session.standing is Standing.LEFT or silent_s > DOUBT_INTERVALS * session.interval_s:
            return  # What was longer ago is no news.
        self._move(session, Trigger.REACHED, now)
        session.since_s = max(session.since_s, now - silent_s)
        self._speaks_again(session)

    def _speaks_again(self, session: _Session) -> None:
        session.confirmed_by.clear()
        if self._ours(session):
            self._due(session, session.since_s + DOUBT_INTERVALS * session.interval_s)

    def _not_reached(self, name: str, by: str, now: float) -> None:
        session = self._sessions.get(name)
        if session is None or session.standing in (Standing.HEARD, Standing.LEFT) or not by:
            return
        session.confirmed_by.add(by)
        if session.standing in SILENT_STANDINGS and self._ours(session):
            self._due(session, max(now, min(session.due_s, self._closes_s(session))))

    def _bus_says_gone(self, name: str, now: float) -> None:
        session = self._sessions.get(name)
        if session is None or session.standing is Standing.LEFT:
            return
        self._move(session, Trigger.BUS_SAYS_GONE, now)
        if self._ours(session):
            self._due(session, min(now + ASK_AGAIN_S, self._closes_s(session)))

    # -- ends by positive evidence -----------------------------------------------------------------------------------

    def _replaced_by(self, speaking: _Session, now: float) -> list[Effect]:
        """Earlier runs of the allocation of the session that speaks are over: the batch system runs one at a time."""
        if not self._ours(speaking) or not speaking.allocation:
            return []
        earlier = [
            self._sessions[name]
            for name in sorted(self._runs.get(speaking.allocation, ()))
            if self._sessions[name].restart_count < speaking.restart_count
        ]
        return self._close(earlier, Cause.REPLACED, now)

    def _allocation_over(self, allocation: str, restart_count: int | None, now: float) -> list[Effect]:
        if not allocation:
            return []  # It would mean every session that does not name its allocation.
        over = [
            self._sessions[name]
            for name in sorted(self._runs.get(allocation, ()))
            if restart_count is None or self._sessions[name].restart_count <= restart_count
        ]
        return self._close(over, Cause.ALLOCATION_OVER, now)

    def _owner_does_not_know(self, name: str, complete_s: float, now: float) -> list[Effect]:
        session = self._sessions.get(name)
        if session is None or self._ours(session) or complete_s <= OWNER_COMPLETE_S:
            return []
        if self._listening_since_s is None or self._silent_s(session, now) <= FORGET_SILENT_S:
            return []
        self._forget(session)
        return [ForgetRecord(name)]

    # -- time --------------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> list[Effect]:
        if self._listening_since_s is None:
            return []  # Whoever hears nothing at all knows nothing of who is silent.
        if now - self._looked_s > PAUSE_MAX_S:
            self._listening_since_s = now
        self._looked_s = now
        effects: list[Effect] = []
        beyond_grace: list[_Session] = []
        for session in self._take_due(now):
            effects += self._on_due(session, now, beyond_grace)
        # Only now, when everybody's standing is that of this moment: else the brake would look at the past.
        behind = bool(self._heap) and self._heap[0][0] <= now
        settled_s = self._listening_since_s + min(SETTLE_S, self._grace_s)
        frozen = behind or self.braked or now < settled_s
        if beyond_grace and not frozen:
            effects += self._close(beyond_grace, Cause.SILENT, now)
        for session in beyond_grace:
            if session.standing is not Standing.LEFT:
                self._due(session, settled_s if now < settled_s else now + FROZEN_LOOK_S)
        return effects

    def _take_due(self, now: float) -> list[_Session]:
        """Some of those whose time has come; each has to be made due again."""
        found: list[_Session] = []
        while self._heap and self._heap[0][0] <= now and len(found) < DUE_AT_ONCE:
            due_s, name = heapq.heappop(self._heap)
            session = self._sessions.get(name)
            if session is None or session.due_s != due_s:
                continue
            session.due_s = math.inf
            fresh_until_s = self._quiet_since_s(session) + DOUBT_INTERVALS * session.interval_s
            if session.standing is Standing.HEARD and fresh_until_s > now:
                self._due(session, fresh_until_s)  # It spoke meanwhile: the usual case, and no work.
            else:
                found.append(session)
        return found

    def _on_due(self, session: _Session, now: float, beyond_grace: list[_Session]) -> list[Effect]:
        if session.standing is Standing.LEFT:
            if now - session.since_s > self._retention_s:
                self._forget(session)
                return [ForgetRecord(session.name)]
            self._due(session, session.since_s + self._retention_s)
            return []
        silent_s = self._silent_s(session, now)
        if session.standing is Standing.HEARD:
            self._move(session, Trigger.DOUBT, now)
        elif session.standing is Standing.DOUBTED and silent_s > SILENCE_INTERVALS_MAX * session.interval_s:
            self._move(session, Trigger.SILENCE, now)
        if session.standing is Standing.DOUBTED:
            self._due(session, now + max(0.05, SILENCE_INTERVALS_MAX * session.interval_s - silent_s))
        elif silent_s > grace_s(self._grace_s, len(session.confirmed_by)):
            beyond_grace.append(session)
            return []
        else:
            self._due(session, min(now + ASK_AGAIN_S, self._closes_s(session)))
        return self._ask(session, now)

    def _ask(self, session: _Session, now: float) -> list[Effect]:
        """By both paths, on the first doubt, and then now and then."""
        if session.asked_s > session.since_s and now - session.asked_s < ASK_AGAIN_S * 0.9:
            return []
        session.asked_s = now
        return [Ask(session.name, path) for path in Path]

    def _silent_s(self, session: _Session, now: float) -> float:
        """How long we have listened to its silence ourselves; what we were not there to hear does not count."""
        return now - self._quiet_since_s(session)

    def _quiet_since_s(self, session: _Session) -> float:
        return session.since_s if self._listening_since_s is None else max(session.since_s, self._listening_since_s)

    def _closes_s(self, session: _Session) -> float:
        """When the grace ends, as things are; just behind it, so that a look then finds it over."""
        return self._quiet_since_s(session) + grace_s(self._grace_s, len(session.confirmed_by)) + 0.001

    # -- inside ------------------------------------------------------------------------------------------------------

    def _ours(self, session: _Session) -> bool:
        return session.site == self._site

    def _due(self, session: _Session, at_s: float) -> None:
        if at_s != session.due_s:
            session.due_s = at_s
            heapq.heappush(self._heap, (at_s, session.name))

    def _move(self, session: _Session, trigger: Trigger, now: float) -> None:
        target = TABLE[session.standing].get(trigger)
        self._history.append((now, session.name, session.standing, trigger))
        if target is None:
            story = "; ".join(f"{at_s:.3f} {name}: {stood}, {why.name}" for at_s, name, stood, why in self._history)
            raise IllegalTransition(f"{session.name} is {session.standing}: no {trigger.name} then. Last: {story}")
        if self._ours(session):
            self._standings[session.standing] -= 1
            self._standings[target] += 1
        session.standing = target

    def _close(self, sessions: Iterable[_Session], cause: Cause, now: float) -> list[Effect]:
        closing = [session for session in sessions if session.standing is not Standing.LEFT]
        for session in closing:
            self._leave(session, now)
        return [CloseRecord(session.name, cause) for session in closing]

    def _leave(self, session: _Session, now: float) -> None:
        self._move(session, Trigger.CLOSED, now)
        session.since_s = now
        session.confirmed_by.clear()
        runs = self._runs.get(session.allocation)
        if runs is not None and self._ours(session):
            runs.discard(session.name)
            if not runs:
                del self._runs[session.allocation]
        self._due(session, now + self._retention_s)

    def _forget(self, session: _Session) -> None:
        del self._sessions[session.name]
        if self._ours(session):
            self._standings[session.standing] -= 1
