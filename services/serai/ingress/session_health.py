"""Which sessions get requests for now, judged by how their last ones ended. Pure: outcomes and `now` in, a choice out.

The rule in plain words:

* An answer below 500, errors of the caller's included, speaks for a session. 429 and 503 (busy) speak neither for nor
  against it: it is left in peace for as long as its `Retry-After` says, within bounds. Any other 5xx, a lost
  connection and a silent engine speak against it.
* `consecutive_max` failures in a row, or more than `rate_max` of the requests within the window, open its circuit: it
  gets nothing for `open_s`, doubled each time in a row. Then one request at a time is let through on trial, the next
  when the answer to the one before has begun; `trials_needed` good ones close the circuit, one bad one opens it again.
* A session whose engine takes no connection has begun on nothing, and asking it again burdens nobody. It is out at once
  and for `absent_s` only, and when it is back nothing is held against it.
* Never more than half of a model's sessions are out at a time, whatever they do: when all fail, it is not they.
* Being busy is a wish, not a ban: when nobody else is left, the busy ones get the request and say so themselves.
* A replica that fails fast always looks idle, and would get most of the work. So each failure counts as
  `penalty_requests` of load, fading by half every `penalty_half_life_s`, long before a circuit opens.

This is an ingress's own opinion, of a session and not of an engine: one that comes back under a new id starts clean.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from serai.contracts.inference import FailureCode, InferenceFailure
from serai.contracts.session_record import SessionRecord

OUTCOMES_MAX = 256
"""Remembered per session. At more than that within the window, it is the latest that count."""
PENALTY_MAX = 64.0
"""Requests. Beyond, a session is last in any fleet, and must not stay so for longer."""


class Outcome(StrEnum):
    """What the end of a try says of the session that had it."""

    SUCCESS = "success"
    BUSY = "busy"
    FAILURE = "failure"
    ABSENT = "absent"
    """Its engine takes no connection."""
    NOTHING = "nothing"
    """It was cancelled, or failed for a reason that lies elsewhere."""


_BUSY_STATUSES = frozenset({429, 503})
_BUSY_CODES = frozenset({FailureCode.BUSY, FailureCode.DRAINING})
_ELSEWHERE = frozenset(
    {
        FailureCode.BODY_TOO_LARGE,
        FailureCode.BAD_REQUEST_FRAME,
        FailureCode.DEADLINE,  # The caller's own limit; an engine that makes no progress is ENGINE_SILENT.
        FailureCode.CREDIT_STARVED,  # The client reads nothing.
        FailureCode.CANCELLED,
        FailureCode.BUS_LOST,  # This ingress itself is cut off.
        FailureCode.STOPPED,  # It ends.
        FailureCode.LEASE_REFUSED,  # Its scheduler had promised too much.
    }
)


def of_status(status: int) -> Outcome:
    """Of an engine's whole answer."""
    if status in _BUSY_STATUSES:
        return Outcome.BUSY
    return Outcome.SUCCESS if status < 500 else Outcome.FAILURE


def of_failure(failure: InferenceFailure) -> Outcome:
    """Of a try without a whole answer."""
    if failure.code in _BUSY_CODES:
        return Outcome.BUSY
    if failure.code is FailureCode.ENGINE_UNREACHABLE:
        return Outcome.ABSENT
    return Outcome.NOTHING if failure.code in _ELSEWHERE else Outcome.FAILURE


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Durations in seconds. As in Envoy's outlier detection where it has the same notion."""

    consecutive_max: int = 5
    rate_max: float = 0.5
    rate_samples_min: int = 10
    """Fewer outcomes than this within the window are no rate."""
    window_s: float = 30.0
    open_s: float = 5.0
    open_max_s: float = 120.0
    trial_s: float = 60.0
    """A trial that has not ended by then no longer keeps the next one back."""
    trials_needed: int = 2
    absent_s: float = 1.0
    out_share_max: float = 0.5
    cool_s: float = 1.0
    """For a busy session that does not say how long; doubled each time in a row."""
    cool_max_s: float = 30.0
    penalty_requests: float = 4.0
    penalty_half_life_s: float = 5.0


class Circuit(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True)
class _Health:
    outcomes: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=OUTCOMES_MAX))
    """When, and whether it failed."""
    failures_in_row: int = 0
    circuit: Circuit = Circuit.CLOSED
    opened_in_row: int = 0
    open_until_s: float = 0.0
    trial_since_s: float | None = None
    trials_passed: int = 0
    cool_until_s: float = 0.0
    busy_in_row: int = 0
    penalty: float = 0.0
    penalty_at_s: float = 0.0


class SessionHealth:
    """Health of all sessions, as this ingress has seen it. `now` is monotonic, in seconds."""

    def __init__(self, settings: HealthSettings | None = None) -> None:
        self._settings = settings or HealthSettings()
        self._sessions: dict[str, _Health] = {}
        self._noted: dict[str, None] = {}
        """Sessions whose circuit is not closed, or that cool: while there are none, all may have requests."""

    # -- what happened -------------------------------------------------------------------------------------------

    def on_start(self, session: str, now: float) -> None:
        """A request is sent to `session`. If it is on trial, this is its trial."""
        if session in self._noted and self.circuit(session, now) is Circuit.HALF_OPEN:
            health = self._sessions[session]
            health.circuit = Circuit.HALF_OPEN
            health.trial_since_s = now

    def on_first_byte(self, session: str) -> None:
        """An answer has begun. It may take minutes to end; the next trial need not wait for that."""
        if session in self._noted:
            self._sessions[session].trial_since_s = None

    def on_outcome(self, session: str, outcome: Outcome, now: float, retry_after_s: float | None = None) -> None:
        """How a request that was sent to `session` ended; once for each `on_start`."""
        health = self._sessions.get(session)
        if health is None:
            if outcome is Outcome.NOTHING:
                return
            health = self._sessions[session] = _Health()
        health.trial_since_s = None
        match outcome:
            case Outcome.SUCCESS:
                self._succeeded(session, health, now)
            case Outcome.FAILURE:
                self._failed(session, health, now)
            case Outcome.ABSENT:
                self._absent(session, health, now)
            case Outcome.BUSY:
                self._busy(session, health, now, retry_after_s)
            case Outcome.NOTHING:
                pass

    def _succeeded(self, session: str, health: _Health, now: float) -> None:
        health.outcomes.append((now, False))
        health.failures_in_row = health.busy_in_row = 0
        # A request from before the circuit opened may be the one that ends well: it is as good a witness.
        if health.circuit is Circuit.HALF_OPEN:
            health.trials_passed += 1
            if health.trials_passed >= self._settings.trials_needed:
                self._close(session, health)

    def _close(self, session: str, health: _Health) -> None:
        health.circuit = Circuit.CLOSED
        health.opened_in_row = health.trials_passed = 0
        health.outcomes.clear()  # What was is judged already.
        self._note(session, health)

    def _failed(self, session: str, health: _Health, now: float) -> None:
        settings = self._settings
        health.outcomes.append((now, True))
        health.failures_in_row += 1
        health.penalty = min(PENALTY_MAX, self._faded(health, now) + settings.penalty_requests)
        health.penalty_at_s = now
        if health.circuit is Circuit.OPEN:
            # Requests that began before it opened, or that it got because too many were out, end now.
            return
        if health.circuit is Circuit.HALF_OPEN or self._too_many_failures(health, now):
            health.circuit = Circuit.OPEN
            health.open_until_s = now + min(settings.open_max_s, settings.open_s * 2 ** min(health.opened_in_row, 16))
            health.opened_in_row += 1
            health.trials_passed = 0
            self._note(session, health)

    def _absent(self, session: str, health: _Health, now: float) -> None:
        if health.circuit is not Circuit.OPEN:
            health.circuit = Circuit.OPEN
            health.open_until_s = now + self._settings.absent_s
            health.trials_passed = 0
            self._note(session, health)

    def _too_many_failures(self, health: _Health, now: float) -> bool:
        settings = self._settings
        if health.failures_in_row >= settings.consecutive_max:
            return True
        while health.outcomes and health.outcomes[0][0] < now - settings.window_s:
            health.outcomes.popleft()
        count = len(health.outcomes)
        if count < settings.rate_samples_min:
            return False
        return sum([failed for _, failed in health.outcomes]) > settings.rate_max * count

    def _busy(self, session: str, health: _Health, now: float, retry_after_s: float | None) -> None:
        settings = self._settings
        if retry_after_s is None or not retry_after_s >= 0:  # NaN is no time either.
            retry_after_s = settings.cool_s * 2 ** min(health.busy_in_row, 16)
        health.busy_in_row += 1
        # A later word may shorten the time as well: the session knows best.
        health.cool_until_s = now + min(settings.cool_max_s, retry_after_s)
        self._note(session, health)

    def _note(self, session: str, health: _Health) -> None:
        if health.circuit is Circuit.CLOSED and health.cool_until_s == 0.0:
            self._noted.pop(session, None)
        else:
            self._noted[session] = None

    # -- what follows --------------------------------------------------------------------------------------------

    def circuit(self, session: str, now: float) -> Circuit:
        """An open circuit whose time is over is half open."""
        health = self._sessions.get(session)
        if health is None:
            return Circuit.CLOSED
        if health.circuit is Circuit.OPEN and now >= health.open_until_s:
            return Circuit.HALF_OPEN
        return health.circuit

    def cooling_s(self, session: str, now: float) -> float:
        """For how much longer it wants to be left in peace; 0 = it does not."""
        health = self._sessions.get(session)
        return max(0.0, health.cool_until_s - now) if health is not None else 0.0

    def allowed(self, session: str, now: float) -> bool:
        """Whether `session`, looked at alone, may have a request now. `usable` decides among those of a model."""
        return session not in self._noted or not (self._out(session, now) or self.cooling_s(session, now) > 0)

    def _out(self, session: str, now: float) -> bool:
        """Its circuit is open, or it is on trial with somebody else's request."""
        match self.circuit(session, now):
            case Circuit.CLOSED:
                return False
            case Circuit.OPEN:
                return True
            case Circuit.HALF_OPEN:
                since_s = self._sessions[session].trial_since_s
                return since_s is not None and now - since_s < self._settings.trial_s

    def usable(self, records: Sequence[SessionRecord], now: float) -> Sequence[SessionRecord]:
        """Those of a model's routable sessions that may have a request now, in their order; empty only when `records`
        is. No more than half are left out for their failures: those that have been out for longest come back first.
        """
        if not self._noted or self._noted.keys().isdisjoint([record.session for record in records]):
            return records
        out = sorted(
            [record.session for record in records if self._out(record.session, now)],
            key=lambda session: (self._sessions[session].open_until_s, session),
        )
        out_max = int(len(records) * self._settings.out_share_max)
        left_out = set(out[len(out) - out_max :] if len(out) > out_max else out)
        remaining = [record for record in records if record.session not in left_out]
        rested = [record for record in remaining if self.cooling_s(record.session, now) == 0]
        return rested or remaining

    def rested(self, records: Sequence[SessionRecord], now: float) -> bool:
        """Whether at least one of them is neither out nor wants to be left in peace: only then is a request that
        found one session busy worth a second one."""
        return any(self.allowed(record.session, now) for record in records)

    def retry_after_s(self, records: Sequence[SessionRecord], now: float) -> float:
        """When the first of them will have had its rest; 0 = now."""
        return min((self.cooling_s(record.session, now) for record in records), default=0.0)

    def load_penalty(self, session: str, now: float) -> float:
        """How many requests a session is counted as having for its recent failures."""
        health = self._sessions.get(session)
        return self._faded(health, now) if health is not None and health.penalty else 0.0

    def _faded(self, health: _Health, now: float) -> float:
        if health.penalty == 0.0:
            return 0.0
        faded = health.penalty * math.exp2(-max(0.0, now - health.penalty_at_s) / self._settings.penalty_half_life_s)
        if faded < 0.05:
            health.penalty = 0.0
            return 0.0
        return faded

    def retain(self, sessions: Collection[str], now: float) -> None:
        """Forgets all sessions but these, and which rests are over. To be called now and then."""
        for session in self._sessions.keys() - set(sessions):
            del self._sessions[session]
            self._noted.pop(session, None)
        for session in list(self._noted):
            health = self._sessions[session]
            if health.cool_until_s <= now:
                health.cool_until_s = 0.0
                self._note(session, health)

    def __len__(self) -> int:
        return len(self._sessions)
