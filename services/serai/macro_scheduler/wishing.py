"""How many instances a model's group wants, told to whoever starts and ends them: the site's placer, or its launcher.

What is told is a level and not a change: told again every few seconds, it does no harm when it is lost or comes twice.
It goes along in the leader's lease, so that the next leader wants the same.
"""

from __future__ import annotations

from collections.abc import Callable

from serai.contracts.admission import ScaleWish
from serai.contracts.codec import encode
from serai.contracts.subjects import MACRO_WISH
from serai.macro_scheduler.membership import Membership
from serai.runtime.bus import Bus, BusError

NOBODY = "none"
EVERY_S = 3.0
HOLDS_S = 30.0
"""A leader that dies is followed long before that."""


class Wishing:
    """One term's. `owner`: who is to act on it."""

    def __init__(
        self, bus: Bus, site: str, model: str, epoch: int, owner: str, before: int, instances_min: int = 1
    ) -> None:
        """`before`: what the last leader wanted; 0 = there was none."""
        self.before = before
        self.wanted = max(before, instances_min)
        """Instances in all."""
        self._why = "as before"
        self._bus = bus
        self._subject = MACRO_WISH.of_site(site)
        self._model = model
        self._epoch = epoch
        self._owner = owner
        self._told_at_s = float("-inf")

    def scaled(self, members: Membership, change: int, why: str) -> None:
        """The group wants so many more, or fewer, than it has."""
        serving = sum([len(macro.members) for macro in members.macros])
        self.wanted = max(0, serving + (members.starting if change > 0 else change))
        self._why = why
        self._told_at_s = float("-inf")

    def look(self, held: Callable[[], bool], now_s: float) -> None:
        """To be called often."""
        if self._owner == NOBODY or now_s - self._told_at_s < EVERY_S or not held():
            return
        self._told_at_s = now_s
        wish = ScaleWish(self._model, self.wanted, self._owner, self._epoch, HOLDS_S, self._why)
        try:
            self._bus.publish(self._subject, encode(wish))
        except BusError:
            pass  # It is told again.
