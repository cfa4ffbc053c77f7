"""Steps of an engine that does not tell them, from what its streams say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.worker_agent.untold_steps import UntoldSteps


def decoding(*keys: str) -> UntoldSteps:
    steps = UntoldSteps(lambda: 0.001)
    for key in keys:
        steps.released(key, 10, 0.0)
        steps.first(key, 1.0, shows=True)
    steps.look({}, 1.0)
    return steps


def test_a_first_token_ends_a_prefill() -> None:
    steps = UntoldSteps(lambda: 0.001)
    steps.released("a", 100, 5.0)
    steps.released("b", 50, 5.0)
    first, second = steps.first("a", 5.3, shows=True), steps.first("b", 5.5, shows=True)
    assert first is not None
    assert second is not None
    assert (first.duration_s, first.prompt_tokens, first.backlog_tokens, first.first) == (
        pytest.approx(0.3), 100, 50, ("a",),
    )  # fmt: skip
    assert (second.duration_s, second.backlog_tokens) == (pytest.approx(0.2), 0)
    assert steps.first("a", 6.0, shows=True) is None
    steps.released("c", 70, 9.0)
    third = steps.first("c", 9.25, shows=True)
    assert third is not None
    assert third.duration_s == pytest.approx(0.25)


def test_until_then_prompts_are_worked_on_as_fast_as_usual_but_never_done() -> None:
    steps = UntoldSteps(lambda: 0.001)
    steps.look({}, 5.0)
    steps.released("a", 100, 5.0)
    steps.released("b", 50, 5.0)
    seen = [steps.look({}, 5.0 + 0.03 * n)[0] for n in range(1, 8)]
    assert [step.prompt_tokens for step in seen] == [30, 30, 30, 30, 28, 1, 1]
    assert [step.backlog_tokens for step in seen] == [120, 90, 60, 30, 2, 2, 2]
    done = steps.first("a", 5.25, shows=True)
    assert done is not None
    assert (done.prompt_tokens, done.backlog_tokens) == (1, 2)
    steps.ended("b")
    assert steps.look({}, 5.3)[0] == steps.look({}, 5.3)[0]._replace(duration_s=0.0, prompt_tokens=0, backlog_tokens=0)


def test_streams_that_run_together_make_their_steps_together() -> None:
    steps = decoding("a", "b")
    made = steps.look({"a": 4, "b": 4}, 1.3)
    assert [step.decoded for step in made] == [True] * 3
    assert made[0].duration_s == pytest.approx(0.1)
    # One of two has moved: half a step, and the other half comes with the next.
    assert not any(step.decoded for step in steps.look({"a": 5}, 1.35))
    assert sum(step.decoded for step in steps.look({"b": 5}, 1.4)) == 1


def test_time_in_which_prompts_were_worked_on_says_nothing_of_decoding() -> None:
    steps = decoding("a")
    steps.look({"a": 11}, 2.0)
    assert steps.decode_s == pytest.approx(0.1)
    steps.released("b", 10, 2.0)
    mixed = steps.look({"a": 12}, 4.0)
    assert [(step.duration_s, step.prompt_tokens, step.backlog_tokens) for step in mixed] == [(2.0, 9, 1)]
    steps.first("b", 4.5, shows=True)
    steps.look({"a": 13}, 5.0)
    assert steps.decode_s == pytest.approx(0.1)
    steps.look({"a": 23, "b": 11}, 6.0)
    assert steps.decode_s == pytest.approx(0.1)


def test_who_does_not_show_it_goes_on_as_fast_as_others_did() -> None:
    steps = decoding("a")
    steps.look({"a": 11}, 2.0)
    steps.ended("a")
    steps.released("whole", 10, 2.0)
    steps.first("whole", 2.1, shows=False)
    steps.look({}, 2.1)
    assert sum(step.decoded for step in steps.look({}, 3.1)) == 10
    steps.ended("whole")
    assert not any(step.decoded for step in steps.look({}, 4.1))


def test_rest_is_no_part_of_a_prefill() -> None:
    steps = decoding("a")
    steps.ended("a")
    steps.look({}, 1.1)
    steps.released("b", 1000, 60.0)
    assert [step.duration_s for step in steps.look({}, 60.03)] == [pytest.approx(0.03)]


def test_who_ends_without_a_token_leaves_no_backlog() -> None:
    steps = decoding("a")
    steps.released("b", 500, 1.0)
    empty = steps.ended("b")
    assert empty is not None
    assert (empty.duration_s, empty.prompt_tokens, empty.backlog_tokens) == (0.0, 0, 0)
    assert steps.ended("nobody") is None
    assert steps.ended("a") is None, "who has answered was no work any more"
    steps = decoding("a")
    assert steps.look({}, 1.1)[0].backlog_tokens == 0


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=30))
def test_no_step_is_lost_or_made_up(gains: list[list[int]]) -> None:
    steps = decoding("0", "1", "2")
    said, made, now_s = [1, 1, 1], 0, 1.0
    for gain in gains:
        now_s += 0.03
        said = [before + more for before, more in zip(said, gain, strict=True)]
        moved = {str(n): said[n] for n in range(3) if gain[n]}
        made += sum(step.decoded for step in steps.look(moved, now_s))
    assert made == pytest.approx((sum(said) - 3) / 3, abs=1.0)
