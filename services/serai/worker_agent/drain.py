"""How a session ends: it says so, takes no new requests, lets those run that fit into the time that is left, hands the
others over, and leaves. Pure: takes `now`.

The rule in plain words:

* What is predicted to end in time by itself (tokens left, at the pace it has shown) is let alone. So is everything
  else for as long as possible: most answers end before their limit, and what was said stays said.
* Those that do not fit are handed over before the time is up, one after the other, so that the sessions that go on
  with them are not given all their prompts at once: those with most left first, `GAP_S` apart; when there are many,
  within the second half of the time.
* When the time is up nothing is left, whatever was predicted. Told again, it is the earlier end that counts; only the
  batch system's own word may move it to a later one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from statistics import median

WITHDRAWAL_S = 0.25
"""After the word that we drain: how long a request that was already on its way is still taken."""
LEAVING_S = 2.0
"""To send the last frames, and to tell the registry that we have left, beside what the engine takes to stop."""
GAP_S = 0.1
"""Between two requests that are handed over: each is a prompt for somebody else."""
FITS_WITH = 1.2
"""A prediction may be wrong by so much."""


class Reason(StrEnum):
    """Why a session ends. Closed set: it is a label of metrics."""

    STOPPING = "stopping"
    """Somebody, or what runs the process, told it to end."""
    PREEMPTED = "preempted"
    """The batch system gives its place to another job."""
    ALLOCATION_END = "allocation_end"
    """Its time is up."""
    ASKED = "asked"
    """By a message on its drain subject."""


@dataclass(frozen=True, slots=True)
class Ending:
    """That a session is to end, why, and when nothing of it may be left, in seconds from now."""

    reason: Reason
    left_s: float
    why: str = ""
    """For people."""
    requests_s: float = math.inf
    """For how long requests may run at most, however much time there is."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request that runs, as far as is known."""

    key: int
    since_s: float
    """When it came."""
    tokens_said: int = 0
    tokens_max: int = 0
    """As the request says; 0 = it does not."""
    s_per_token: float = 0.0
    """The pace of its answer; 0 = it has none yet."""


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """It is to end. `final`: this is the batch system's own word on when, and may be later than what was thought."""

    ending: Ending
    final: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """What runs now; nothing that was handed over is among it."""

    running: Sequence[Running]


# -- effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announce:
    """Say that we drain, and for how long requests may still run, in seconds."""

    reason: Reason
    requests_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Take no new requests."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """End these requests here, so that others go on with them."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing is left to do."""


Effect = Announce | Refuse | HandOver | Leave


class Stage(Enum):
    SERVING = 0
    ANNOUNCED = 1
    DRAINING = 2
    LEFT = 3


class Drain:
    """One session's. Looked at often once it was told (`Look`); `Leave` comes once."""

    def __init__(self, engine_stop_s: float) -> None:
        """`engine_stop_s`: how long the engine may take to end."""
        self._reserve_s = engine_stop_s + LEAVING_S
        self.stage = Stage.SERVING
        self._told_at_s = 0.0
        self._until_s = math.inf
        """When no request may run any more."""
        self._gap_s = GAP_S

    def handle(self, event: Told | Look, now: float) -> list[Effect]:
        """What is to be done, in this order."""
        if isinstance(event, Told):
            return self._told(event, now)
        return self._look(event.running, now)

    @property
    def is_over(self) -> bool:
        """Nothing is left to do."""
        return self.stage is Stage.LEFT

    def requests_s(self, now: float) -> float:
        """For how much longer requests may run."""
        return max(0.0, self._until_s - now)

    # -- inside --------------------------------------------------------------------------------------------------

    def _told(self, event: Told, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            return []
        left_s = max(0.0, event.ending.left_s)
        # A short grace is shared: an engine that is killed frees its GPU, too.
        requests_s = min(left_s - min(self._reserve_s, left_s / 2), event.ending.requests_s)
        until_s = now + max(0.0, requests_s)
        if self.stage is Stage.SERVING:
            self.stage, self._told_at_s = Stage.ANNOUNCED, now
        elif not event.final and until_s >= self._until_s:
            return []
        self._until_s = until_s
        self._gap_s = 0.0  # Found anew at the next look.
        return [Announce(event.ending.reason, self.requests_s(now))]

    def _look(self, running: Sequence[Running], now: float) -> list[Effect]:
        effects: list[Effect] = []
        over = now >= self._until_s
        if self.stage is Stage.ANNOUNCED and (over or now - self._told_at_s >= WITHDRAWAL_S):
            self.stage = Stage.DRAINING
            effects.append(Refuse())
        if self.stage is not Stage.DRAINING:
            return effects
        due = [one.key for one in running] if over else self._due(running, now)
        if due:
            effects.append(HandOver(tuple(due)))
        if len(due) == len(running):
            self.stage = Stage.LEFT
            effects.append(Leave())
        return effects

    def _due(self, running: Sequence[Running], now: float) -> list[int]:
        if not self._gap_s:
            self._gap_s = min(GAP_S, (self._until_s - now) / 2 / max(1, len(running)))
        order = hand_over_order(running, self._until_s - now)
        due = 0
        while due < len(order) and now >= self._until_s - (len(order) - due) * self._gap_s:
            due += 1
        return order[:due]


def hand_over_order(running: Sequence[Running], left_s: float) -> list[int]:
    """Those of `running` that will not end by themselves within `left_s` seconds, as far as can be foreseen: those
    with most left first, and of two the one that came later."""
    paces = [one.s_per_token for one in running if one.s_per_token > 0]
    typical_s = median(paces) if paces else 0.0
    predicted = [(_remaining_s(one, typical_s), one) for one in running]
    unfit = [(remaining_s, one) for remaining_s, one in predicted if remaining_s * FITS_WITH > left_s]
    return [one.key for _, one in sorted(unfit, key=lambda item: (item[0], item[1].since_s), reverse=True)]


def _remaining_s(one: Running, typical_s: float) -> float:
    """At most so much longer; infinite when nothing is known."""
    pace_s = one.s_per_token or typical_s
    if not one.tokens_max or not pace_s:
        return math.inf
    return max(0, one.tokens_max - one.tokens_said) * pace_s
