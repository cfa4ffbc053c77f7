"""Whose word an instance obeys: the highest epoch counts, of one epoch the first owner, and silence ends it. Pure."""

from __future__ import annotations

from serai.contracts.admission import TakeInstance

BEATS_MISSED = 2
"""An instance that heard nothing of its owner for so many beats is its own."""
BEAT_S_MAX = 60.0


class InstanceOwner:
    """One instance's: the macro-instance that took it last, also when that has fallen silent."""

    def __init__(self) -> None:
        self.name, self.epoch = "", 0
        self.beat_s = BEAT_S_MAX
        self._heard_at_s = float("-inf")

    def is_known(self, take: TakeInstance) -> bool:
        """Whether this is its heartbeat."""
        return (take.owner, take.epoch) == (self.name, self.epoch)

    def heard(self, take: TakeInstance, now_s: float) -> bool:
        """Whether this one is obeyed from now on."""
        if take.epoch <= self.epoch and not self.is_known(take):
            return False
        self.name, self.epoch, self.beat_s = take.owner, take.epoch, take.beat_s
        self._heard_at_s = now_s
        return True

    def silent(self, now_s: float) -> bool:
        """Whether it has missed its beats."""
        return now_s - self._heard_at_s > BEATS_MISSED * self.beat_s


def nonsense_in(take: TakeInstance) -> str:
    """What is wrong with it; empty: nothing."""
    if take.epoch < 1:
        return f"epoch {take.epoch}: must be at least 1"
    if not 0 < take.beat_s <= BEAT_S_MAX:
        return f"beat_s {take.beat_s:g}: must be above 0, at most {BEAT_S_MAX:g}"
    if not 0 <= take.low_share < 1:
        return f"low_share {take.low_share:g}: must be from 0 to below 1"
    return ""
