"""What will be asked of a model soon, and how sure that is: level, trend, time of day, burstiness. Pure.

    rate(now + h) = (level + trend · h) · daily(now + h) / daily(now)

Level and trend follow the last minutes (exponential smoothing, Holt 1957); `daily` is the mean of each half-hour of the
day, learned over days, and only used once a day has been seen. Uncertainty is what the last forecasts missed, and what
a count of that size misses by chance. Burstiness is the coefficient of variation of gaps that would scatter counts as
much: cv² = variance / mean of counts (renewal processes, Cox 1962).

What was asked for before and is not now is remembered: `warm_set` names the models most likely to come back, and
`prewarm` those whose time of day comes before an engine could load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

DAY_S = 86_400.0
SLOTS = 48
"""Parts of the day that are told apart."""
LEVEL_S = 150.0
"""Over which the level forgets."""
TREND_S = 1200.0
ERROR_S = 1800.0
POPULARITY_S = 3 * DAY_S
DAYS_KEPT = 7.0
"""Over which a part of the day forgets, in days."""
_Z = 1.645
CV_MAX = 30.0
PREWARM_SHARE = 0.5
"""A burst is expected when its part of the day brings a request within the engine's first minutes so likely."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Requests a second over a span ahead."""

    requests_s: float
    low: float
    high: float
    """Nine times of ten it lies between these."""
    burstiness_cv: float
    unused_s: float
    """Since the last request; infinite when none was seen."""


NOTHING_KNOWN = Forecast(0.0, 0.0, 0.0, 1.0, math.inf)


@dataclass(slots=True)
class _Slot:
    """One part of the day: mean rate so far, by seconds seen."""

    rate: float = 0.0
    seconds: float = 0.0

    def add(self, rate: float, seconds: float) -> None:
        kept = min(self.seconds, DAYS_KEPT * DAY_S / SLOTS)
        self.rate = (self.rate * kept + rate * seconds) / (kept + seconds)
        self.seconds = kept + seconds


@dataclass(slots=True)
class _History:
    """What is known of one model."""

    level: float = 0.0
    trend: float = 0.0
    """Requests a second, a second."""
    error: float = 0.0
    """Mean absolute error of the last forecasts of one step."""
    seconds: float = 0.0
    count_mean: float = 0.0
    count_variance: float = 0.0
    last_s: float = -math.inf
    popularity: float = 0.0
    popular_at_s: float = 0.0
    slots: list[_Slot] = field(default_factory=lambda: [_Slot() for _ in range(SLOTS)])


class Forecaster:
    """One site's memory of all its models. Time is the caller's, in seconds, with midnight at a multiple of a day."""

    def __init__(self) -> None:
        self._models: dict[str, _History] = {}

    def observe(self, model: str, at_s: float, requests: float, seconds: float) -> None:
        """`requests` have come in the `seconds` before `at_s`. Call it for silent spans, too."""
        if seconds <= 0 or requests < 0:
            raise ValueError(f"{requests} requests in {seconds} s cannot have been seen")
        history = self._models.setdefault(model, _History())
        rate = requests / seconds
        self._smooth(history, rate, seconds)
        history.slots[_slot(at_s - seconds / 2)].add(rate, seconds)
        if requests:
            history.last_s = at_s
            faded = math.exp(-(at_s - history.popular_at_s) / POPULARITY_S) if history.popularity else 0.0
            history.popularity, history.popular_at_s = history.popularity * faded + requests, at_s

    def _smooth(self, history: _History, rate: float, seconds: float) -> None:
        count = rate * seconds
        if history.seconds == 0:
            history.level, history.count_mean, history.count_variance = rate, count, count
            history.seconds = seconds
            return
        expected = max(0.0, history.level + history.trend * seconds)
        weight = 1 - math.exp(-seconds / LEVEL_S)
        slow = 1 - math.exp(-seconds / TREND_S)
        level = expected + weight * (rate - expected)
        history.trend += slow * ((level - history.level) / seconds - history.trend)
        history.level = level
        far = 1 - math.exp(-seconds / ERROR_S)
        history.error += far * (abs(rate - expected) - history.error)
        step = count - history.count_mean
        history.count_mean += far * step
        history.count_variance = (1 - far) * (history.count_variance + far * step * step)
        history.seconds += seconds

    def ahead(self, model: str, now_s: float, lead_s: float, span_s: float) -> Forecast:
        """The rate from `now_s + lead_s` on, for `span_s`: the highest of that time."""
        history = self._models.get(model)
        if history is None:
            return NOTHING_KNOWN
        reach_s = min(lead_s + span_s, TREND_S)
        # A trend is believed for as long as it took to learn, and never below nothing.
        rate = max(0.0, history.level, history.level + max(0.0, history.trend) * reach_s)
        rate *= self._daily_growth(history, now_s, lead_s, span_s)
        cv = self._cv(history)
        chance = _Z * cv * math.sqrt(max(rate, 0.0) / max(span_s, LEVEL_S))
        spread = math.hypot(chance, _Z * 1.2533 * history.error)
        return Forecast(rate, max(0.0, rate - spread), rate + spread, cv, now_s - history.last_s)

    def _daily_growth(self, history: _History, now_s: float, lead_s: float, span_s: float) -> float:
        """How much more is usual then than now; 1 before a day has been seen."""
        if history.seconds < DAY_S:
            return 1.0
        now = history.slots[_slot(now_s)].rate
        then = max(history.slots[slot].rate for slot in _slots(now_s + lead_s, span_s))
        mean = sum(slot.rate for slot in history.slots) / SLOTS
        # Parts of the day that are almost silent say little about ratios.
        return (then + 0.2 * mean) / (now + 0.2 * mean) if mean > 0 and then > now else 1.0

    def _cv(self, history: _History) -> float:
        if history.count_mean <= 0:
            return 1.0
        return min(CV_MAX, max(1.0, math.sqrt(history.count_variance / history.count_mean)))

    def prewarm(self, now_s: float, load_s: float, span_s: float) -> frozenset[str]:
        """Models that are silent now and whose time of day comes before, or soon after, an engine could load."""
        found = set()
        for model, history in self._models.items():
            if history.seconds < DAY_S or now_s - history.last_s < LEVEL_S:
                continue
            usual = max(history.slots[slot].rate for slot in _slots(now_s, load_s + span_s))
            if 1 - math.exp(-usual * span_s) > PREWARM_SHARE:
                found.add(model)
        return frozenset(found)

    def warm_set(self, now_s: float, models: int) -> tuple[str, ...]:
        """The models most asked for over the last days, whether they are now or not; most popular first."""
        known = sorted(self._models.items(), key=lambda item: (-_faded(item[1], now_s), item[0]))
        return tuple(model for model, history in known[:models] if history.popularity > 0)


def _faded(history: _History, now_s: float) -> float:
    return history.popularity * math.exp(-(now_s - history.popular_at_s) / POPULARITY_S)


def _slot(at_s: float) -> int:
    return int(at_s % DAY_S / DAY_S * SLOTS) % SLOTS


def _slots(from_s: float, span_s: float) -> Iterable[int]:
    width = DAY_S / SLOTS
    return {_slot(from_s + step * width) for step in range(int(span_s // width) + 1)} | {_slot(from_s + span_s)}
