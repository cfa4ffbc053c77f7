"""How a session ends: what is let run, what is handed over, and that it always ends (H04, H05, H07)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.worker_agent.drain import (
    GAP_S,
    LEAVING_S,
    WITHDRAWAL_S,
    Announce,
    Drain,
    Effect,
    Ending,
    HandOver,
    Leave,
    Look,
    Reason,
    Refuse,
    Running,
    Told,
    hand_over_order,
)

ENGINE_STOP_S = 10.0
RESERVE_S = ENGINE_STOP_S + LEAVING_S


def told(
    left_s: float, reason: Reason = Reason.PREEMPTED, *, final: bool = False, requests_s: float = math.inf
) -> Told:
    return Told(Ending(reason, left_s, requests_s=requests_s), final)


def request(key: int, said: int = 0, most: int = 0, s_per_token: float = 0.0, since_s: float = 0.0) -> Running:
    return Running(key, since_s, said, most, s_per_token)


def run_to_the_end(plan: Drain, running: list[Running], from_s: float, step_s: float = 0.05) -> dict[float, Effect]:
    """All effects by their time, until it leaves; requests end by themselves when their last token is due."""
    found: dict[float, Effect] = {}
    now = from_s
    ends = {
        one.key: from_s + (one.tokens_max - one.tokens_said) * one.s_per_token if one.tokens_max else math.inf
        for one in running
    }
    while True:
        running = [one for one in running if ends[one.key] > now]
        for index, effect in enumerate(plan.handle(Look(running), now)):
            found[now + index * 1e-6] = effect
            if isinstance(effect, HandOver):
                running = [one for one in running if one.key not in effect.keys]
            if isinstance(effect, Leave):
                assert not running
                return found
        now += step_s
        assert now < from_s + 1000


def handed(effects: dict[float, Effect]) -> list[int]:
    return [key for effect in effects.values() if isinstance(effect, HandOver) for key in effect.keys]


def left_at_s(effects: dict[float, Effect]) -> float:
    return next(at_s for at_s, effect in effects.items() if isinstance(effect, Leave))


def test_it_says_so_at_once_and_refuses_a_moment_later() -> None:
    plan = Drain(ENGINE_STOP_S)
    assert plan.handle(Look([request(1)]), 99.0) == []
    assert plan.handle(told(60), 100.0) == [Announce(Reason.PREEMPTED, 60 - RESERVE_S)]
    assert plan.handle(Look([request(1)]), 100.1) == []
    assert plan.handle(Look([request(1)]), 100.0 + WITHDRAWAL_S) == [Refuse()]
    assert plan.handle(Look([]), 100.5) == [Leave()]
    assert plan.is_over


def test_an_idle_session_leaves_as_soon_as_nothing_can_be_on_its_way() -> None:
    plan = Drain(ENGINE_STOP_S)
    plan.handle(told(120), 0.0)
    assert plan.handle(Look([]), 0.1) == []
    assert plan.handle(Look([]), 0.3) == [Refuse(), Leave()]


@pytest.mark.parametrize("left_s", [30.0, 120.0])
def test_h05_those_that_fit_finish_and_the_others_are_handed_over_before_the_kill(left_s: float) -> None:
    fits_s = left_s - RESERVE_S
    lengths = [5, fits_s / 2, fits_s * 0.75, fits_s * 1.5, 10_000]
    running = [request(key, 0, round(length_s / 0.05), 0.05) for key, length_s in enumerate(lengths)]
    plan = Drain(ENGINE_STOP_S)
    plan.handle(told(left_s), 0.0)
    effects = run_to_the_end(plan, running, 0.0)
    assert handed(effects) == [4, 3]
    assert fits_s - 3 * GAP_S < left_at_s(effects) < fits_s + 0.1 < left_s - ENGINE_STOP_S


def test_the_others_are_handed_over_one_after_the_other_with_most_left_first() -> None:
    running = [request(key, said=key * 10, most=5000, s_per_token=0.05) for key in range(40)]
    plan = Drain(ENGINE_STOP_S)
    plan.handle(told(60), 0.0)
    effects = run_to_the_end(plan, running, 0.0)
    assert handed(effects) == list(range(40))
    assert all(len(effect.keys) == 1 for effect in effects.values() if isinstance(effect, HandOver))
    first_s = min(at_s for at_s, effect in effects.items() if isinstance(effect, HandOver))
    assert first_s == pytest.approx(48 - 40 * GAP_S, abs=0.1)


def test_many_are_spread_over_the_second_half_of_the_time() -> None:
    running = [request(key) for key in range(1000)]
    plan = Drain(ENGINE_STOP_S)
    plan.handle(told(32), 0.0)
    effects = run_to_the_end(plan, running, 0.0)
    batches = {at_s: len(effect.keys) for at_s, effect in effects.items() if isinstance(effect, HandOver)}
    assert sum(batches.values()) == 1000
    assert min(batches) == pytest.approx(10, abs=0.3)
    assert max(batches.values()) <= 10, "even: 1000 requests in 10 s, looked at 20 times a second"


def test_a_short_grace_is_shared_between_the_requests_and_the_engine() -> None:
    plan = Drain(ENGINE_STOP_S)
    assert plan.handle(told(6), 0.0) == [Announce(Reason.PREEMPTED, 3.0)]


def test_no_time_at_all_means_that_everything_is_handed_over_at_once() -> None:
    plan = Drain(ENGINE_STOP_S)
    plan.handle(told(0), 5.0)
    assert plan.handle(Look([request(1), request(2)]), 5.0) == [Refuse(), HandOver((1, 2)), Leave()]


def test_requests_may_be_given_less_than_there_is() -> None:
    plan = Drain(ENGINE_STOP_S)
    assert plan.handle(told(100, requests_s=0.5), 0.0) == [Announce(Reason.PREEMPTED, 0.5)]


def test_of_two_words_the_earlier_end_counts_and_only_the_batch_system_moves_it_later() -> None:
    plan = Drain(ENGINE_STOP_S)
    plan.handle(told(100, Reason.ALLOCATION_END), 0.0)
    assert plan.handle(told(200), 1.0) == []
    assert plan.handle(told(30, Reason.STOPPING), 2.0) == [Announce(Reason.STOPPING, 18.0)]
    assert plan.handle(told(120, final=True), 2.1) == [Announce(Reason.PREEMPTED, 108.0)]
    plan.handle(Look([]), 3.0)
    assert plan.is_over
    assert plan.handle(told(1), 4.0) == []
    assert plan.handle(Look([]), 4.0) == []


def test_what_is_not_known_counts_as_long_and_a_pace_is_borrowed_from_the_others() -> None:
    slow = request(1, 0, 1000, 0.1)
    waiting = request(2, 0, 50)  # Has said nothing: 50 tokens at the others' pace, 5 s.
    unbounded = request(3, 500, 0, 0.1)
    assert hand_over_order([slow, waiting, unbounded], 20.0) == [3, 1]
    assert hand_over_order([waiting], 20.0) == [2]


def test_of_two_alike_the_later_one_goes_first() -> None:
    assert hand_over_order([request(1, since_s=5), request(2, since_s=9), request(3, since_s=7)], 10.0) == [2, 3, 1]


requests = st.lists(
    st.builds(
        Running,
        key=st.integers(0, 10**6),
        since_s=st.floats(0, 100),
        tokens_said=st.integers(0, 2000),
        tokens_max=st.integers(0, 2000),
        s_per_token=st.sampled_from([0.0, 0.01, 0.1]),
    ),
    unique_by=lambda one: one.key,
    max_size=30,
)
words = st.tuples(st.floats(0, 20), st.floats(0, 60), st.booleans())


@given(requests, st.lists(words, min_size=1, max_size=4), st.data())
def test_it_always_ends_in_time_and_leaves_nobody_behind(
    running: list[Running], said: list[tuple[float, float, bool]], data: st.DataObject
) -> None:
    """Whatever is said when, and whoever ends by itself: it leaves once, with nothing running, never hands a request
    over twice, and none that fits before the time is up."""
    plan = Drain(ENGINE_STOP_S)
    here = {one.key: one for one in running}
    gone: set[int] = set()
    words_left = sorted(said)
    until_s = math.inf
    now = 0.0
    while not plan.is_over:
        while words_left and words_left[0][0] <= now:
            _, left_s, final = words_left.pop(0)
            if plan.handle(told(left_s, final=final), now):
                until_s = now + plan.requests_s(now)
        for key in list(here):
            if data.draw(st.booleans(), label="ends by itself") and now > 1:
                del here[key]
        for effect in plan.handle(Look(list(here.values())), now):
            if isinstance(effect, HandOver):
                assert not gone & set(effect.keys)
                gone |= set(effect.keys)
                unfit = hand_over_order(list(here.values()), until_s - now)
                assert now >= until_s or set(effect.keys) <= set(unfit)
                for key in effect.keys:
                    del here[key]
            elif isinstance(effect, Leave):
                assert not here
        assert now <= until_s + 1.0 or plan.is_over
        now += 0.5
