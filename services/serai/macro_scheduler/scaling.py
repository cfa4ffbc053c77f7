"""When a model's group wants more instances or fewer. Pure: takes `now_s`.

Two rules, by name:

* `serai` (default): one more when the 90th percentile of TTFT is above 0.8 of its target, when the oldest request that
  waits for a place has done so for 0.3 of the target, or when the group is utilised beyond what it can carry. One less
  after three windows without any of that, and only if those that stay would be utilised less than 0.75.
* `paper` (EcoServe §3.4): one more when the mean TTFT is above its target (Eq. 1); one less when the mean saved TPOT of
  n instances is above S_TTFT · (n + 1) / n (Eq. 2). The second never comes true for short answers: with 15 s and 100 ms
  a request must be 150 tokens ahead.

Both look every 5 s at the last 30 s. After a change nothing is asked for until an instance could have started, since
what is seen until then is the same shortage; but `serai` asks for as many as the utilisation says are missing, up to
four at once, and for more of them while others start. The utilisation of an instance is what PaDG's windows are made
of: the share of time that prefills take, and the share that decoding must have lest TPOT is missed, step time ÷
S_TPOT; or the share of its KV cache that is in use, if that is more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from serai.macro_scheduler.mitosis import Scale

TTFT_SHARE_MAX = 0.8
"""Of the target: instances count first tokens that took longer."""
SLOW_SHARE_MAX = 0.1
SAMPLES_MAX = 100_000
"""Of one window; beyond that the oldest go."""


class Trigger(StrEnum):
    """Whose rule decides."""

    SERAI = "serai"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """When, and how far. Raises ValueError for settings that cannot hold together."""

    trigger: Trigger = Trigger.SERAI
    instances_min: int = 1
    instances_max: int = 64
    evaluate_every_s: float = 5.0
    window_s: float = 30.0
    start_s: float = 180.0
    """From the wish for an instance until it serves; a 34B model takes 3 min from a local disk (EcoServe §4.5)."""
    queue_age_share_max: float = 0.3
    utilisation_high: float = 0.9
    """Beyond this the queue of an instance grows faster than its windows can empty it."""
    utilisation_low: float = 0.75
    """Of those that would stay."""
    calm_windows: int = 3
    step_max: int = 4
    """So many are asked for at once at most; `paper` asks for one."""
    drain_s: float = 60.0
    """What a session that is taken away may still take to end its requests."""
    sleeps: bool = False
    """Engines that are not needed sleep, where they can, and are woken before others are started."""

    def __post_init__(self) -> None:
        for name in ("evaluate_every_s", "window_s", "utilisation_high", "utilisation_low"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: must be above 0")
        for name in ("start_s", "drain_s", "queue_age_share_max"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 0")
        if not 1 <= self.instances_min <= self.instances_max:
            raise ValueError(
                f"instances_min is {self.instances_min} and instances_max {self.instances_max}: "
                f"must be at least 1, the first not above the second"
            )
        if self.utilisation_low >= self.utilisation_high:
            raise ValueError(
                f"utilisation_low is {self.utilisation_low} and utilisation_high {self.utilisation_high}: the first "
                f"must be below the second, or an instance would come and go for ever"
            )
        if self.calm_windows < 1 or self.step_max < 1:
            raise ValueError(f"calm_windows is {self.calm_windows}, step_max {self.step_max}: must be at least 1")
        if self.evaluate_every_s > self.window_s:
            raise ValueError(
                f"evaluate_every_s is {self.evaluate_every_s}: must not be above window_s, {self.window_s}"
            )


@dataclass(frozen=True, slots=True)
class Load:
    """A group as it has been over the last window. Raises ValueError for targets of 0."""

    slo_ttft_s: float
    instances: int
    """That serve and do not drain."""
    starting: int = 0
    """Asked for, and not here yet."""
    requests: int = 0
    """First tokens in the window, and requests that wait for a place; without any, TTFT says nothing."""
    ttft_mean_s: float = 0.0
    ttft_slow_share: float = 0.0
    """Share of them that took more than `TTFT_SHARE_MAX` of the target; above 0.1, the 90th percentile did."""
    queue_age_s: float = 0.0
    """How long the oldest request has waited that has no place yet."""
    utilisation: float = 0.0
    """Of all instances together; 1 = what they can carry."""
    saved_tpot_mean_s: float = 0.0
    """Of the streams that decode now."""

    def __post_init__(self) -> None:
        if not self.slo_ttft_s > 0:
            raise ValueError(f"the TTFT target is {self.slo_ttft_s} s: must be above 0")


def utilisation(
    prefill_s: float, over_s: float, instances: int, step_s: float, slo_tpot_s: float, kv_used_share: float
) -> float:
    """Of `instances` to which prefills of `prefill_s` together came within `over_s`; `step_s`: of a decode step on
    average. Infinite without instances or time."""
    if instances < 1 or over_s <= 0:
        return math.inf
    decode_share = step_s / slo_tpot_s if slo_tpot_s > 0 else 0.0
    return max(prefill_s / over_s / instances + decode_share, kv_used_share)


class Samples:
    """Values with their times, of one sliding window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)

    def add(self, value: float, now_s: float) -> None:
        self._kept.append((now_s, value))

    def values(self, now_s: float) -> list[float]:
        """Those of the window that ends now, in no order that means anything."""
        kept = self._kept
        while kept and kept[0][0] <= now_s - self._window_s:
            kept.popleft()
        return [value for _, value in kept]


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return math.fsum(values) / len(values) if values else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of them do not exceed; 0 of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


@dataclass(frozen=True, slots=True)
class Word:
    """What an evaluation came to."""

    scale: Scale | None
    reasons: tuple[str, ...]
    """Of a change, or of none."""


class Scaling:
    """One group's. `evaluate` at any time: it looks only when it is due."""

    def __init__(self, settings: ScalingSettings) -> None:
        self.settings = settings
        self._next_s = -math.inf
        self._changed_at_s = -math.inf
        self._calm_since_s: float | None = None

    @property
    def due_s(self) -> float:
        """When the next evaluation is due."""
        return self._next_s

    def resumed(self, now_s: float) -> None:
        """Another has decided until now: an instance that it has asked for may have to start yet."""
        self._changed_at_s = now_s

    def evaluate(self, load: Load, now_s: float) -> Word | None:
        """None when it is not due yet."""
        if now_s < self._next_s:
            return None
        self._next_s = now_s + self.settings.evaluate_every_s
        self._note_calm(load, now_s)
        word = self._word(load, now_s)
        if word.scale is not None:
            self._changed_at_s = now_s
            self._calm_since_s = None
        return word

    # -- inside --------------------------------------------------------------------------------------------------

    def _word(self, load: Load, now_s: float) -> Word:
        short = _reasons_to_grow(load, self.settings)
        missing = self._missing(load) if short else 0
        cooling_s = self._changed_at_s + self.settings.start_s - now_s
        if cooling_s > 0 and missing < 1:
            return Word(None, (f"an instance could not have started yet: looks again in {cooling_s:.0f} s", *short))
        if short:
            return self._grow(load, short, max(1, missing))
        return self._shrink(load, now_s)

    def _grow(self, load: Load, reasons: tuple[str, ...], wanted: int) -> Word:
        room = self.settings.instances_max - load.instances - load.starting
        if room <= 0:
            return Word(None, (*reasons, f"but {self.settings.instances_max} instances are the most allowed"))
        change = min(room, wanted, self.settings.step_max)
        return Word(Scale(change, "; ".join(reasons)), reasons)

    def _missing(self, load: Load) -> int:
        """So many more, beside those that start, would bring the utilisation down to the high mark."""
        if self.settings.trigger is Trigger.PAPER or not math.isfinite(load.utilisation):
            return 0
        wanted = math.ceil(load.instances * load.utilisation / self.settings.utilisation_high - 1e-9)
        return wanted - load.instances - load.starting

    def _shrink(self, load: Load, now_s: float) -> Word:
        settings = self.settings
        if load.starting:
            return Word(None, (f"{load.starting} start",))
        if load.instances <= settings.instances_min:
            return Word(None, (f"{settings.instances_min} instances are the least allowed",))
        match settings.trigger:
            case Trigger.SERAI:
                return self._shrink_when_calm(load, now_s)
            case Trigger.PAPER:
                return _shrink_by_slack(load)
            case _:
                assert_never(settings.trigger)

    def _note_calm(self, load: Load, now_s: float) -> None:
        after = _after_removal(load)
        if _reasons_to_grow(load, self.settings) or after >= self.settings.utilisation_low:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s

    def _shrink_when_calm(self, load: Load, now_s: float) -> Word:
        after = _after_removal(load)
        wanted_s = self.settings.calm_windows * self.settings.window_s
        if self._calm_since_s is None:
            return Word(None, (f"utilised {load.utilisation:.2f}; one less would be at {after:.2f}",))
        calm_s = now_s - self._calm_since_s
        if calm_s < wanted_s:
            return Word(None, (f"calm for {calm_s:.0f} s of {wanted_s:.0f}",))
        why = f"calm for {calm_s:.0f} s, and {load.instances - 1} would be utilised {after:.2f}"
        return Word(Scale(-1, why), (why,))


def _reasons_to_grow(load: Load, settings: ScalingSettings) -> tuple[str, ...]:
    match settings.trigger:
        case Trigger.PAPER:
            late = load.requests > 0 and load.ttft_mean_s > load.slo_ttft_s
            return (f"mean TTFT {load.ttft_mean_s:.2f} s > {load.slo_ttft_s:g} s (Eq. 1)",) if late else ()
        case Trigger.SERAI:
            return tuple(_serai_reasons(load, settings))
        case _:
            assert_never(settings.trigger)


def _serai_reasons(load: Load, settings: ScalingSettings) -> list[str]:
    found: list[str] = []
    if load.requests and load.ttft_slow_share > SLOW_SHARE_MAX:
        late_s = TTFT_SHARE_MAX * load.slo_ttft_s
        found.append(f"p90 TTFT > {late_s:g} s: {load.ttft_slow_share:.0%} of first tokens took longer")
    age_max_s = settings.queue_age_share_max * load.slo_ttft_s
    if load.queue_age_s > age_max_s:
        found.append(f"a request has waited {load.queue_age_s:.2f} s > {age_max_s:g} s for a place")
    if load.utilisation > settings.utilisation_high:
        found.append(f"utilised {load.utilisation:.2f} > {settings.utilisation_high:g}")
    return found


def _shrink_by_slack(load: Load) -> Word:
    bound_s = load.slo_ttft_s * (load.instances + 1) / load.instances
    if load.saved_tpot_mean_s > bound_s:
        why = f"mean saved TPOT {load.saved_tpot_mean_s:.2f} s > {bound_s:.2f} s (Eq. 2)"
        return Word(Scale(-1, why), (why,))
    return Word(None, (f"mean saved TPOT {load.saved_tpot_mean_s:.2f} s ≤ {bound_s:.2f} s (Eq. 2)",))


def _after_removal(load: Load) -> float:
    """Utilisation of those that stay when one goes, if all that it had comes to them."""
    return load.utilisation * load.instances / (load.instances - 1) if load.instances > 1 else math.inf
