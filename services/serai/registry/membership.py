"""Who is taken to have left. Pure: records and silences in, effects out.

Silence stops routing at each observer by itself (`RegistryReplica.suspected`); what is decided here is only when a
silence is so long that the record is closed, and when a closed record may be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from serai.contracts.session_record import Lifecycle, SessionRecord

VANISHED_SHARE_MAX = 0.5
"""Mass-loss brake: when more than this share of the open sessions is silent at once, the observer doubts itself."""
BRAKE_FROM_SESSIONS = 3
"""With fewer open sessions than this, a share says nothing."""


@dataclass(frozen=True, slots=True)
class CloseRecord:
    """Write LEFT for this session."""

    record: SessionRecord


@dataclass(frozen=True, slots=True)
class ForgetRecord:
    """Drop the record of a session that left long ago."""

    session: str


@dataclass(frozen=True, slots=True)
class Observation:
    """One session as this observer sees it."""

    record: SessionRecord
    silent_s: float
    suspected: bool


def due(
    observations: Iterable[Observation], *, observed_for_s: float, silence_grace_s: float, retention_s: float
) -> list[CloseRecord | ForgetRecord]:
    """What to do now. `observed_for_s`: how long this observer has been listening without a break; it closes
    nothing that it has not itself missed for the whole grace."""
    seen = list(observations)
    effects: list[CloseRecord | ForgetRecord] = [
        ForgetRecord(one.record.session)
        for one in seen
        if one.record.lifecycle is Lifecycle.LEFT and min(one.silent_s, observed_for_s) > retention_s
    ]
    open_ones = [one for one in seen if one.record.lifecycle is not Lifecycle.LEFT]
    if _mass_loss(open_ones):
        return effects
    effects += [
        CloseRecord(one.record.advanced(Lifecycle.LEFT))
        for one in open_ones
        if min(one.silent_s, observed_for_s) > silence_grace_s
    ]
    return effects


def _mass_loss(open_ones: list[Observation]) -> bool:
    silent = sum(one.suspected for one in open_ones)
    return len(open_ones) >= BRAKE_FROM_SESSIONS and silent > VANISHED_SHARE_MAX * len(open_ones)
