"""How long things take here, by what was seen of them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

REMEMBERED = 32
"""Queues change from week to week: older ones say nothing."""
ENOUGH = 5
"""With fewer, the site file's word counts too."""
QUANTILE = 0.9


@dataclass(slots=True)
class Durations:
    """The last ones, in seconds."""

    seen: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        if math.isfinite(seconds):
            self.seen = [*self.seen, max(0.0, round(seconds, 3))][-REMEMBERED:]

    def expected_s(self, prior_s: float) -> float:
        """What nine of ten stayed below. Until there are enough of them, no less than `prior_s`, the site file's
        word."""
        ordered = sorted(self.seen)
        if not ordered:
            return prior_s
        high_s = ordered[min(len(ordered) - 1, math.ceil(QUANTILE * len(ordered)) - 1)]
        return high_s if len(ordered) >= ENOUGH else max(prior_s, high_s)
