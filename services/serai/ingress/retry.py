"""Whether a request that failed before the client saw a byte may be tried on another session. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from serai.contracts.inference import FailureCode, InferenceFailure

TRIES_MAX = 2
"""One try and one more: each further one would multiply an overload."""
NOBODY_THERE_TRIES_MAX = 8
"""When NATS says at once that nobody receives, nobody has been burdened. When the link to a site is cut, all its
sessions say so one after the other, in the first milliseconds."""

_CONNECTION_LOST = frozenset(
    {
        FailureCode.NO_RESPONDERS,
        FailureCode.AGENT_SILENT,
        FailureCode.AGENT_LEFT,
        FailureCode.ENGINE_UNREACHABLE,
        FailureCode.ENGINE_CUT,
    }
)
_GATEWAY_STATUSES = frozenset({502, 503, 504})


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to try again, and why (for the log and the trace)."""

    again: bool
    reason: str


def after_failure(failure: InferenceFailure, tries: int) -> Verdict:
    """After a failure of try number `tries` (from 1) of which the client has seen nothing."""
    if tries >= (NOBODY_THERE_TRIES_MAX if failure.code is FailureCode.NO_RESPONDERS else TRIES_MAX):
        return Verdict(False, "tried enough")
    if failure.retry_safe:
        return Verdict(True, f"{failure.code}: no engine has begun on it")
    if failure.code in _CONNECTION_LOST:
        return Verdict(True, f"{failure.code}: connection lost before the first byte")
    return Verdict(False, f"{failure.code} is final")


@cache
def after_status(status: int, tries: int) -> Verdict:
    """After an engine's whole answer with `status`. 4xx are the caller's to see, 429 above all: a repeat elsewhere
    would only spread an overload."""
    if status in _GATEWAY_STATUSES and tries < TRIES_MAX:
        return Verdict(True, f"status {status}")
    return Verdict(False, f"status {status} is final")
