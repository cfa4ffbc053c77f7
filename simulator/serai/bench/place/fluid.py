"""Queues of many models over hours, as fluids: what arrives, what is served, and how long who arrives has to wait.

A request meets its targets when it begins within the TTFT target of its arrival; that tokens then come in time is what
the capacity of an instance means (`placer.capacity`). Who has waited for `PATIENCE_S` goes away. Checked against the
fast simulator on a piece (`dynamic.check`).
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_S = 120.0
SUB_STEP_S = 10.0


@dataclass(slots=True)
class FluidQueue:
    """Requests of one model that wait."""

    slo_ttft_s: float
    waiting: float = 0.0
    arrived: float = 0.0
    met: float = 0.0
    left: float = 0.0
    """Who went away."""
    recent: float = 0.0
    """Arrived within the patience, while nobody served."""

    def step(self, arriving: float, capacity_s: float, span_s: float) -> None:
        """`arriving` requests come evenly over `span_s`, while `capacity_s` a second are served."""
        self.arrived += arriving
        if capacity_s <= 0:
            self.waiting += arriving
            self.recent = self.recent * (1 - min(1.0, span_s / PATIENCE_S)) + arriving
            gone = max(0.0, self.waiting - self.recent)
            self.waiting -= gone
            self.left += gone
            return
        before = self.waiting / capacity_s
        after = max(0.0, self.waiting + arriving - capacity_s * span_s)
        self.met += arriving * _share_below(self.slo_ttft_s, before, after / capacity_s)
        gone = max(0.0, after - capacity_s * PATIENCE_S)
        self.left += gone
        self.waiting = after - gone
        self.recent = min(self.recent, self.waiting)


def _share_below(limit: float, first: float, last: float) -> float:
    """The share of waits that are below `limit` when they go evenly from `first` to `last`."""
    low, high = min(first, last), max(first, last)
    if limit >= high:
        return 1.0
    return 0.0 if limit <= low else (limit - low) / (high - low)
