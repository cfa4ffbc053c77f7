"""Forecasts: level, trend, time of day, burstiness, and what is remembered."""

from __future__ import annotations

import math

import pytest

from serai.placer.forecast import DAY_S, Forecaster


def _fed(rates: list[float], step_s: float = 60.0, start_s: float = 0.0) -> tuple[Forecaster, float]:
    forecaster, now_s = Forecaster(), start_s
    for rate in rates:
        now_s += step_s
        forecaster.observe("m", now_s, rate * step_s, step_s)
    return forecaster, now_s


def test_a_steady_rate_is_foreseen_with_little_doubt() -> None:
    forecaster, now_s = _fed([5.0] * 120)
    ahead = forecaster.ahead("m", now_s, 120, 300)
    assert ahead.requests_s == pytest.approx(5.0, rel=0.02)
    assert ahead.low < 5.0 < ahead.high < 6.0
    assert ahead.unused_s == 0


def test_a_rise_is_followed_and_led() -> None:
    forecaster, now_s = _fed([1.0] * 30 + [1.0 + 0.2 * minute for minute in range(30)])
    assert forecaster.ahead("m", now_s, 120, 300).requests_s > 6.0


def test_scatter_makes_doubt_and_a_burstiness() -> None:
    calm, now_s = _fed([5.0] * 240)
    wild, _ = _fed([0.0, 10.0] * 120)
    assert wild.ahead("m", now_s, 120, 300).burstiness_cv > 3 > calm.ahead("m", now_s, 120, 300).burstiness_cv
    assert wild.ahead("m", now_s, 120, 300).high > calm.ahead("m", now_s, 120, 300).high + 2


def test_silence_brings_the_level_to_nothing_and_is_counted() -> None:
    forecaster, now_s = _fed([5.0] * 60 + [0.0] * 60)
    ahead = forecaster.ahead("m", now_s, 120, 300)
    assert ahead.requests_s < 0.05
    assert ahead.unused_s == pytest.approx(3600)


def test_a_daily_burst_is_prewarmed_before_it_comes() -> None:
    step_s = 600.0
    day = [3.0 if 9 * 6 <= step < 11 * 6 else 0.0 for step in range(144)]
    forecaster, now_s = _fed(day * 3, step_s)
    assert now_s == 3 * DAY_S
    nine = 3 * DAY_S + 9 * 3600
    assert "m" in forecaster.prewarm(nine - 240, 120, 300)
    assert "m" not in forecaster.prewarm(3 * DAY_S + 3 * 3600, 120, 300)


def test_the_warm_set_is_who_was_asked_most_lately() -> None:
    forecaster = Forecaster()
    forecaster.observe("often", 60, 100, 60)
    forecaster.observe("once", 60, 1, 60)
    forecaster.observe("never", 60, 0, 60)
    assert forecaster.warm_set(DAY_S, 3) == ("often", "once")


def test_nothing_known_and_nothing_possible() -> None:
    assert math.isinf(Forecaster().ahead("m", 0, 1, 1).unused_s)
    with pytest.raises(ValueError, match="cannot have been seen"):
        Forecaster().observe("m", 0, -1, 60)
