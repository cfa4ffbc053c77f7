"""Whether a request that failed before the client saw a byte may be tried on another session. Pure.

The rule in plain words:

* A lost connection, 502, 504, and a 500 that the engine itself marks as safe: on up to two other sessions, in another
  allocation where there is one (`routing.untried`). When NATS says at once that nobody receives, or a session that
  drains gives back what no engine has begun on, further.
* Busy (429, 503, an agent that is full): on one other, and only when one is there that is not busy itself. A repeat
  elsewhere spreads an overload; five of them, as peers do, multiply it.
* Any other answer is the caller's to see: all other 4xx, and a 500 that is not marked.
* All models have a budget of retries: a share of their requests, and a few. So whatever fails, retries add at most
  that share to the load.

An engine marks an answer with `x-should-retry`, as OpenAI's servers do: `true`, or `false`, which makes it final.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

from serai.contracts.inference import FailureCode, InferenceFailure

TRIES_MAX = 3
"""One try and two more."""
BUSY_TRIES_MAX = 2
"""One try and one more: each further one would multiply an overload."""
NOBODY_THERE_TRIES_MAX = 8
"""When NATS says at once that nobody receives, or a session that drains gives back what no engine has begun on, nobody
has been burdened. When the link to a site is cut, all its sessions say so one after the other, in the first
milliseconds."""
MARK = "x-should-retry"

_CONNECTION_LOST = frozenset(
    {
        FailureCode.NO_RESPONDERS,
        FailureCode.AGENT_SILENT,
        FailureCode.AGENT_LEFT,
        FailureCode.ENGINE_UNREACHABLE,
        FailureCode.ENGINE_CUT,
    }
)
_GIVEN_BACK = frozenset({FailureCode.AGENT_LEFT, FailureCode.DRAINING})
_GATEWAY_STATUSES = frozenset({502, 504})
_BUSY_STATUSES = frozenset({429, 503})


class Price(Enum):
    """What a retry takes from the budget."""

    NOTHING = "nothing"
    """Nobody has begun on it, so there is no second burden."""
    LOSS = "loss"
    """A session that is lost frees what it was doing, so its requests are no additional load; but an engine that
    breaks under a load must not hand it on for ever."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to try again, and why (for the log and the trace)."""

    again: bool
    reason: str
    price: Price = Price.FULL


@cache
def _verdict(again: bool, reason: str, price: Price = Price.FULL) -> Verdict:
    return Verdict(again, reason, price)


def after_failure(failure: InferenceFailure, tries: int, *, rested: bool = True) -> Verdict:
    """After a failure of try number `tries` (from 1) of which the client has seen nothing. `rested`: among the
    sessions that are left, one is not known to be busy or ill."""
    code = failure.code
    if code is FailureCode.BUSY:
        return _after_busy(code, tries, rested)
    if code is FailureCode.LEASE_REFUSED:
        again = tries < NOBODY_THERE_TRIES_MAX  # `leased_pick.LEASES_REFUSED_MAX` comes first.
        return _verdict(again, f"{code}: its scheduler had promised too much", Price.NOTHING)
    unburdened = code is FailureCode.NO_RESPONDERS or (failure.retry_safe and code in _GIVEN_BACK)
    if tries >= (NOBODY_THERE_TRIES_MAX if unburdened else TRIES_MAX):
        return _verdict(False, "tried enough")
    if failure.retry_safe:
        return _verdict(True, f"{code}: no engine has begun on it", Price.NOTHING)
    if code in _CONNECTION_LOST:
        price = Price.NOTHING if code is FailureCode.NO_RESPONDERS else Price.LOSS
        return _verdict(True, f"{code}: connection lost before the first byte", price)
    return _verdict(False, f"{code} is final")


def after_status(status: int, tries: int, *, rested: bool | None = None, marked_safe: bool | None = None) -> Verdict:
    """After an engine's whole answer with `status`. `rested` as above; None = not known, and then 429 is final.
    `marked_safe`: see `mark`."""
    if marked_safe is False:
        return _verdict(False, f"status {status}: the engine says not to repeat it")
    if status in _BUSY_STATUSES:
        return _after_busy(f"status {status}", tries, status == 503 if rested is None else rested)
    if status in _GATEWAY_STATUSES or (status == 500 and marked_safe):
        return _verdict(True, f"status {status}") if tries < TRIES_MAX else _verdict(False, "tried enough")
    return _verdict(False, f"status {status} is final")


def _after_busy(what: str, tries: int, rested: bool) -> Verdict:
    if tries >= BUSY_TRIES_MAX:
        return _verdict(False, f"{what}: two were busy")
    if not rested:
        return _verdict(False, f"{what}: the others are busy, too")
    return _verdict(True, f"{what}: busy, one other is tried")


def mark(headers: Mapping[str, str]) -> bool | None:
    """The engine's word on whether a repeat is safe; None = it says nothing."""
    match headers.get(MARK):
        case "true":
            return True
        case "false":
            return False
        case _:
            return None


@dataclass(frozen=True, slots=True)
class RetryBudgetSettings:
    """As in Finagle: a share of requests, and some without any."""

    share: float = 0.2
    """Retries that each request earns its model."""
    reserve: float = 10.0
    """Retries that a model has to begin with, and the most it can save up."""
    per_s: float = 1.0
    """Retries that come back with time, for models with few requests."""
    loss_credit: float = 256.0
    """So far into debt the loss of sessions may lead: the requests that a large engine holds."""


class RetryBudget:
    """Retries that models have left. Over any time, a model's retries that cost anything number at most
    `share` × its requests + `per_s` × seconds + `reserve` (+ `loss_credit` with lost sessions)."""

    def __init__(self, settings: RetryBudgetSettings | None = None) -> None:
        self._settings = settings or RetryBudgetSettings()
        self._left: dict[str, tuple[float, float]] = {}
        """Per model: how many are left, and as of when."""

    def on_request(self, model: str, now: float) -> None:
        """A request, on its first try. Only for models that exist: names come from clients."""
        self._left[model] = (self._level(model, now) + self._settings.share, now)

    def take(self, model: str, verdict: Verdict, now: float) -> bool:
        """Takes what the retry costs; False when it is not to be had, and then the failure is final."""
        if verdict.price is Price.NOTHING:
            return True
        level = self._level(model, now) - 1.0
        if level < (-self._settings.loss_credit if verdict.price is Price.LOSS else 0.0):
            return False
        self._left[model] = (level, now)
        return True

    def left(self, model: str, now: float) -> float:
        """For the metrics; below 0 after losses."""
        return self._level(model, now)

    def retain(self, models: Collection[str]) -> None:
        """Forgets all models but these."""
        for model in self._left.keys() - set(models):
            del self._left[model]

    def _level(self, model: str, now: float) -> float:
        settings = self._settings
        level, at_s = self._left.get(model, (settings.reserve, now))
        return min(settings.reserve, level + settings.per_s * max(0.0, now - at_s))
