"""When tokens are due."""

from __future__ import annotations

import pytest

from serai.engine_emulator.timing import FixedTiming, StepCalendar


def test_tokens_are_due_one_token_time_apart_after_the_first() -> None:
    timing = FixedTiming(ttft_s=0.5, tpot_s=0.1)
    assert [timing.due_at(tokens, 10.0) for tokens in (0, 1, 2, 11)] == pytest.approx([10.5, 10.5, 10.6, 11.5])


def test_small_lateness_is_made_good_and_large_is_not() -> None:
    timing = FixedTiming(ttft_s=0.5, tpot_s=0.1)
    assert timing.next_due_at(1.0, now=1.05) == pytest.approx(1.1)
    assert timing.next_due_at(1.0, now=1.35) == pytest.approx(1.45)


def test_slowed_timing_takes_that_much_longer() -> None:
    assert FixedTiming(0.5, 0.1).slowed(3) == FixedTiming(1.5, pytest.approx(0.3))


def test_the_calendar_gives_out_what_is_due_in_steps_and_in_order() -> None:
    calendar: StepCalendar[str] = StepCalendar(0.010)
    for name, due_at in (("b", 0.021), ("a", 0.009), ("c", 0.029), ("d", 0.031)):
        calendar.add(name, due_at)
    assert calendar.next_at() == pytest.approx(0.010)
    assert list(calendar.pop_due(0.005)) == []
    assert list(calendar.pop_due(0.030)) == ["a", "b", "c"]
    assert list(calendar.pop_due(1.0)) == ["d"]
    assert calendar.next_at() is None
