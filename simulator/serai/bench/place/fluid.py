"""Queues of many models over hours, as fluids: what arrives, what is served, and who is turned away.

A request meets its targets when it begins within the TTFT target of its arrival; that tokens then come in time is what
the capacity of an instance means (`placer.capacity`). Who would wait for more than half the target is turned away at
once, as an ingress with a bounded queue does; without that, a queue that has once grown too long serves everybody too
late. Checked against the fast simulator on a piece (`dynamic_check`).
"""

from __future__ import annotations

from dataclasses import dataclass

SUB_STEP_S = 5.0
QUEUE_SHARE = 0.5
"""Of the TTFT target that may pass in the queue: the rest is for the prompt itself."""


@dataclass(slots=True)
class FluidQueue:
    """Requests of one model that wait."""

    slo_ttft_s: float
    waiting: float = 0.0
    arrived: float = 0.0
    met: float = 0.0
    turned_away: float = 0.0

    def step(self, arriving: float, capacity_s: float, span_s: float) -> None:
        """`arriving` requests come evenly over `span_s`, while `capacity_s` a second are served."""
        self.arrived += arriving
        # What waits when nobody serves is what came within the target; it is served if an engine is ready by then.
        room = QUEUE_SHARE * self.slo_ttft_s * (capacity_s if capacity_s > 0 else arriving / span_s)
        left = max(0.0, self.waiting + arriving - capacity_s * span_s)
        self.met += min(self.waiting + arriving, capacity_s * span_s)
        self.turned_away += max(0.0, left - room)
        self.waiting = min(left, room)
