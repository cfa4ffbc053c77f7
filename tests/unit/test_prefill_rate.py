"""Prefill times learnt from first tokens."""

from __future__ import annotations

import random

import pytest

from serai.worker_agent.prefill_rate import PrefillRate


def burst(rate: PrefillRate, now_s: float, prompts: list[int], base_s: float, s_per_token: float) -> float:
    """One prompt a step; when the last is done."""
    for _ in prompts:
        rate.released(now_s)
    for tokens in prompts:
        now_s += base_s + s_per_token * tokens
        rate.first_token(tokens, now_s)
    return now_s


def test_both_numbers_are_found_whatever_was_thought_before() -> None:
    rate, now_s, draw = PrefillRate(0.5), 0.0, random.Random(1)
    assert not rate.known
    assert rate.predict_s(100) == 50.0
    for _ in range(50):
        now_s = burst(rate, now_s + 1, [draw.randint(10, 3000) for _ in range(draw.randint(1, 6))], 0.02, 0.0004)
    assert rate.known
    assert rate.base_s == pytest.approx(0.02, rel=0.01)
    assert rate.s_per_token == pytest.approx(0.0004, rel=0.01)


def test_the_first_burst_is_worth_more_than_a_guess() -> None:
    rate = PrefillRate(0.5)
    burst(rate, 0.0, [1000], 0.0, 0.001)
    assert rate.predict_s(1000) == pytest.approx(1.0)
    assert rate.predict_s(0) == 0.0


def test_prompts_of_one_step_count_as_one() -> None:
    rate = PrefillRate(0.1)
    now_s = 0.0
    for tokens in (100, 400, 900, 200, 1500) * 5:
        for _ in range(2):
            rate.released(now_s)
        now_s += 0.05 + 0.0002 * 2 * tokens
        rate.first_token(tokens, now_s)
        rate.first_token(tokens, now_s)
    assert rate.base_s == pytest.approx(0.05, rel=0.02)
    assert rate.s_per_token == pytest.approx(0.0002, rel=0.02)


def test_what_changes_is_learnt_anew() -> None:
    rate, now_s, draw = PrefillRate(0.1), 0.0, random.Random(2)
    for s_per_token in (0.0001, 0.0008):
        for _ in range(150):
            now_s = burst(rate, now_s, [draw.randint(10, 3000)], 0.01, s_per_token)
    assert rate.predict_s(2000) == pytest.approx(0.01 + 0.0008 * 2000, rel=0.1)


def test_neither_number_is_ever_below_zero() -> None:
    rate, now_s, draw = PrefillRate(0.1), 0.0, random.Random(3)
    for _ in range(300):
        rate.released(now_s)
        now_s += draw.choice([0.001, 0.5])
        rate.first_token(draw.randint(1, 4000), now_s)
        assert rate.base_s >= 0
        assert rate.s_per_token >= 0


def test_requests_that_end_without_a_token_and_clocks_that_stand_still_say_nothing() -> None:
    rate = PrefillRate(0.1)
    rate.released(1.0)
    rate.gone()
    rate.first_token(100, 1.0)
    rate.released(2.0)
    rate.first_token(100, 2.0)
    rate.measured(0, 1.0)
    rate.measured(100, 0.0)
    assert not rate.known
    rate.measured(100, 0.2)
    assert rate.predict_s(100) == pytest.approx(0.2)
