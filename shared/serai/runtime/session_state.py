"""One word for what a session is to an observer: its record and the observer's own opinion together. Pure."""

from __future__ import annotations

from enum import StrEnum

from serai.contracts.session_record import Lifecycle
from serai.runtime.registry_replica import RegistryReplica


class SessionState(StrEnum):
    """In the order of how much use a session is."""

    SERVING = "serving"
    """It gets requests."""
    LOADING = "loading"
    QUEUED = "queued"
    """It waits for something before it can load."""
    DRAINING = "draining"
    ASLEEP = "asleep"
    """Its engine has freed its GPUs; it can be woken within seconds."""
    STALLED = "stalled"
    """Its agent lives, its engine makes no progress."""
    SUSPECTED = "suspected"
    """No sign of life on any path, or its connection has closed; or none has come yet."""
    DOWN = "down"
    LEFT = "left"


QUEUED_PHASE = "queued"


def state_of(replica: RegistryReplica, session: str, now: float) -> SessionState:
    """The state of a session that `replica` knows. SERVING exactly when it is routed to."""
    record = replica.get(session)
    if record is None or record.lifecycle is Lifecycle.LEFT:
        return SessionState.LEFT
    if record.lifecycle is Lifecycle.DOWN:
        return SessionState.DOWN
    if replica.suspected(session, now):
        return SessionState.SUSPECTED
    if record.lifecycle is Lifecycle.JOIN:
        return SessionState.QUEUED if record.metadata.loading_phase == QUEUED_PHASE else SessionState.LOADING
    if record.metadata.draining is not None:
        return SessionState.DRAINING
    if record.metadata.asleep:
        return SessionState.ASLEEP
    return SessionState.STALLED if replica.stalled_s(session) > 0 else SessionState.SERVING
