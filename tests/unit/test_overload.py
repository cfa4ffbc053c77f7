"""More than can be held: when long answers are let go, what is known of lengths, and parts that can be switched off."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.macro_scheduler.admission import SERAI_PARTS
from serai.macro_scheduler.group import GroupSettings
from serai.worker_agent.gate_events import Position
from serai.worker_agent.overload import AnswerLengths, OfferedWork, Overload, met_share
from serai.worker_agent.step_times import StepTimes
from serai.worker_agent.window_rule import Choice, Situation, WindowSettings, choose


def lengths_of(*answers: int) -> AnswerLengths:
    known = AnswerLengths()
    for tokens in answers * (300 // len(answers)):
        known.add(tokens)
    return known


def test_who_has_said_more_than_the_short_ones_is_a_long_one() -> None:
    known = lengths_of(10, 10, 10, 1000)
    assert known.ends_within(1, 20) == pytest.approx(0.75)
    assert known.ends_within(12, 500) == 0.0
    assert known.ends_within(12, 1000) == 1.0


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=400), st.integers(1, 6000), st.floats(1, 1e4))
def test_a_probability_rises_with_time_and_stays_one(answers: list[int], said: int, tokens: float) -> None:
    known = AnswerLengths()
    for answer in answers:
        known.add(answer)
    assert 0.0 <= known.ends_within(said, tokens) <= known.ends_within(said, tokens + 10) <= 1.0
    assert known.quantiles() == sorted(known.quantiles())


def test_old_answers_are_forgotten() -> None:
    known = lengths_of(5)
    for _ in range(300):
        known.add(700)
    assert set(known.quantiles()) == {700}


def test_offered_work_is_a_rate_from_the_start_and_forgets() -> None:
    offered = OfferedWork()
    for at_s in range(60):
        assert offered.tokens_per_s(at_s) == 0.0 or offered.tokens_per_s(at_s) == pytest.approx(1000, rel=0.5)
        offered.add(1000, at_s)
    assert offered.tokens_per_s(60) == pytest.approx(1000, rel=0.05)
    assert offered.tokens_per_s(160) < 10


def test_windows_are_met_by_answers_that_end_between_two() -> None:
    # TTFT 9 s, half of the time for prefills: a window each 6 s, 3 s long; 60 decode steps of 50 ms between.
    assert met_share(0.5, [1, 2, 61], 0.05, 9.0, 0.08) == 1.0
    assert met_share(0.5, [62, 90], 0.05, 9.0, 0.08) == 0.0
    # 100 steps have 3 s of slack: as much as one window takes.
    assert met_share(0.5, [102, 121], 0.05, 9.0, 0.08) == 1.0


def decided(answers: tuple[int, ...], rate_tokens_per_s: float, decode_s: float, missing: float) -> bool:
    overload = Overload()
    overload.lengths = lengths_of(*answers)
    lets_go = False
    for tenth in range(600):
        now_s = tenth / 10
        overload.offered.add(round(rate_tokens_per_s / 10), now_s)
        lets_go = overload.decide(1e-4, decode_s, 9.0, 0.08, now_s, lambda: missing)
    return lets_go


SHORT, LONG = (5, 10, 15, 20, 400), (200, 300, 400)


def test_long_answers_are_let_go_only_in_an_overload_that_is_felt_and_where_most_are_short() -> None:
    assert decided(SHORT, 8_000, 0.05, missing=0.5)
    assert not decided(SHORT, 3_000, 0.05, missing=0.5), "what is offered can be held"
    assert not decided(SHORT, 8_000, 0.05, missing=0.0), "nobody misses anything yet"
    assert not decided(LONG, 8_000, 0.05, missing=0.5), "nothing is gained by it"


def test_where_no_slack_ever_comes_the_prediction_is_enough() -> None:
    assert decided(SHORT, 4_000, 0.078, missing=0.0)


def test_it_ends_with_the_overload() -> None:
    overload = Overload()
    overload.lengths = lengths_of(*SHORT)
    for now_s in range(60):
        overload.offered.add(8_000, now_s)
        overload.decide(1e-4, 0.05, 9.0, 0.08, now_s, lambda: 0.5)
    assert overload.lets_go
    overload.decide(1e-4, 0.05, 9.0, 0.08, 100, lambda: 0.5)
    assert not overload.lets_go


def step_with(*, window_s: float = 0.0, pays: bool = False, entering_deadline_s: float = inf) -> Choice:
    """Of an instance that lets long answers go, whose streams are all behind."""
    at = Situation(
        now_s=0.0,
        work_tokens=1000,
        head_tokens=500,
        deadline_s=3.0,
        last_deadline_s=4.0,
        decoding=3,
        low_s=-0.3,
        slo_tpot_s=0.05,
        entering=0 if entering_deadline_s == inf else 1,
        entering_deadline_s=entering_deadline_s,
        harm=lambda stall_s, others: 3.0,
        let_go=True,
        rest_pays=lambda within_s: pays and within_s > 1.0,
        window_s=window_s,
    )
    return choose(at, StepTimes(lambda tokens: 0.045 + tokens / 1000), WindowSettings())


def test_prompts_go_first_but_for_short_answers_about_to_end() -> None:
    assert step_with()[:2] == (Position.PREFILL, 1000)
    assert step_with(pays=True)[:2] == (Position.DECODE, 0)
    assert step_with(pays=True, window_s=0.5)[:2] == (Position.PREFILL, 1000), "a window that is open goes on"


def test_who_has_a_first_token_decodes_by_its_deadline() -> None:
    assert step_with(window_s=0.5, entering_deadline_s=0.1).position is Position.DECODE
    choice = step_with(window_s=0.5, entering_deadline_s=0.5)
    assert choice.position is Position.PREFILL
    assert 0 < choice.tokens < 500


def test_only_parts_that_there_are_can_be_switched_off() -> None:
    for part in SERAI_PARTS:
        assert GroupSettings(without=part).without == part
    with pytest.raises(ValueError, match="without is 'patients': use one of quantile-slack, "):
        GroupSettings(without="patients")
