"""Outcomes, attainment by both definitions, summaries, goodput by scanning, fairness, queues."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.simulator.fairness import by_arrival, by_client, by_output, by_prompt, jain
from serai.simulator.goodput import CurvePoint, judged, scan, scan_seeds
from serai.simulator.outcomes import (
    NS,
    LatencyDefinition,
    Outcome,
    Outcomes,
    SloTarget,
    Window,
    answered_from_ns,
    attainment,
    met,
)
from serai.simulator.queues import in_system, waiting
from serai.simulator.summary import Costs, spread, summary, ttfts_s

STRICT, INDUSTRY = LatencyDefinition.STRICT, LatencyDefinition.INDUSTRY
SLO = SloTarget(ttft_s=5.0, tpot_s=0.1)


def outcome(
    arrival_s: float = 0.0, first_s: float = 1.0, began_s: float = 2.0, ended_s: float = 3.0, **more: Any
) -> Outcome:
    """A finished request of 11 tokens; times after arrival."""
    asked = _asked(arrival_s)
    times = {"first_token_ns": first_s, "decode_began_ns": began_s, "finished_ns": ended_s}
    known = {name: asked["arrival_ns"] + round(at * NS) for name, at in times.items()}
    return Outcome(**{**asked, "instance": 0, **known, **more})


def _asked(arrival_s: float) -> dict[str, Any]:
    return {"arrival_ns": round(arrival_s * NS), "prompt_tokens": 100, "output_tokens": 11}


def refused(arrival_s: float = 0.0, **more: Any) -> Outcome:
    return Outcome(**{**_asked(arrival_s), "refused": True, **more})


def unfinished(arrival_s: float = 0.0, **more: Any) -> Outcome:
    return Outcome(**{**_asked(arrival_s), "instance": 1, **more})


# Columns


@given(
    st.lists(
        st.builds(
            Outcome,
            arrival_ns=st.integers(0, 2**62),
            prompt_tokens=st.integers(1, 10**6),
            output_tokens=st.integers(1, 10**6),
            instance=st.integers(-1, 100),
            first_token_ns=st.none() | st.integers(0, 2**62),
            decode_began_ns=st.none() | st.integers(0, 2**62),
            finished_ns=st.none() | st.integers(0, 2**62),
            preemptions=st.integers(0, 9),
            cached_tokens=st.integers(0, 9),
            refused=st.booleans(),
            model=st.sampled_from(["", "a", "b"]),
            client=st.sampled_from(["", "x", "a"]),
            itl_max_ns=st.none() | st.integers(0, 2**62),
        ),
        max_size=8,
    )
)
def test_columns_give_back_what_was_put_in(outcomes: list[Outcome]) -> None:
    table = Outcomes(outcomes)
    assert list(table) == outcomes
    assert len(table) == len(outcomes)
    assert table.digest() == Outcomes(outcomes).digest()
    assert list(table.chosen([place % 2 == 0 for place in range(len(outcomes))])) == outcomes[::2]


@pytest.mark.parametrize(
    "change", [{"instance": 3}, {"cached_tokens": 1}, {"itl_max_ns": 5}, {"client": "c"}, {"decode_began_ns": 7}]
)
def test_every_field_is_in_the_digest(change: dict[str, Any]) -> None:
    assert Outcomes([outcome()]).digest() != Outcomes([outcome(**change)]).digest()


# Attainment


def test_the_two_definitions_differ_by_the_wait_for_the_first_decode_step() -> None:
    # First token after 4.9 s, decode from 5.1 s: late by the strict definition only.
    late = outcome(first_s=4.9, began_s=5.1, ended_s=5.5)
    assert attainment([late], SLO, STRICT) == 0.0
    assert attainment([late], SLO, INDUSTRY) == 1.0
    # Ten tokens in 1.2 s after the first token, but in 0.9 s after decode began: slow by industry's only.
    slow = outcome(first_s=1.0, began_s=1.3, ended_s=2.2)
    assert attainment([slow], SLO, STRICT) == 1.0
    assert attainment([slow], SLO, INDUSTRY) == 0.0


def test_targets_are_met_exactly_on_them_and_missed_a_nanosecond_above() -> None:
    on = outcome(first_s=5.0, began_s=5.0, ended_s=6.0)
    assert attainment([on], SLO, STRICT) == 1.0
    assert on.finished_ns is not None
    assert attainment([outcome(0.0, 5.0, 5.0, 6.0, finished_ns=on.finished_ns + 1)], SLO, STRICT) == 0.0
    assert attainment([outcome(first_s=5.0 + 1e-9, began_s=5.0 + 1e-9, ended_s=5.5)], SLO, STRICT) == 0.0


def test_a_request_of_one_token_is_judged_by_its_first_token() -> None:
    one = outcome(first_s=1.0, output_tokens=1, decode_began_ns=None, ended_s=1.0)
    assert answered_from_ns(Outcomes([one]), STRICT) == [NS]
    assert attainment([one], SLO, STRICT) == attainment([one], SLO, INDUSTRY) == 1.0


@pytest.mark.parametrize("miss", [refused(), unfinished(), unfinished(first_token_ns=NS, decode_began_ns=NS)])
@pytest.mark.parametrize("definition", LatencyDefinition)
def test_refused_and_unfinished_requests_are_misses(miss: Outcome, definition: LatencyDefinition) -> None:
    assert attainment([outcome(began_s=1.5, ended_s=1.9), miss], SLO, definition) == 0.5
    assert met(Outcomes([miss]), SLO, definition) == [False]


def test_a_finished_request_without_the_time_that_is_asked_for_is_no_silent_miss() -> None:
    with pytest.raises(ValueError, match="outcome 1 is finished but has no decode_began_ns, which `strict` needs"):
        attainment([outcome(), outcome(decode_began_ns=None)], SLO, STRICT)
    assert attainment([outcome(ended_s=1.5, decode_began_ns=None)], SLO, INDUSTRY) == 1.0


def test_a_window_counts_by_arrival_also_what_finishes_after_it() -> None:
    window = Window(10 * NS, 20 * NS)
    arrivals = [9.999, 10.0, 19.999, 20.0]
    good = [outcome(at, ended_s=2.9) for at in arrivals]
    assert [o.arrival_ns for o in Outcomes(good).arriving_in(window)] == [10 * NS, round(19.999 * NS)]
    late = [outcome(9.0, first_s=99, began_s=99, ended_s=99), outcome(15.0, ended_s=2.9), unfinished(19.0)]
    assert attainment(late, SLO, STRICT, window) == 0.5
    assert math.isnan(attainment(late, SLO, STRICT, Window(50 * NS)))
    with pytest.raises(ValueError, match="must end after it begins"):
        Window(5, 5)


@given(st.lists(st.tuples(st.floats(0.01, 20), st.floats(0, 5), st.floats(0, 5)), min_size=1), st.floats(0.1, 10))
def test_looser_targets_are_never_met_less_and_strict_ttft_is_never_shorter(
    lives: list[tuple[float, float, float]], ttft_s: float
) -> None:
    table = Outcomes(outcome(0, first, first + wait, first + wait + rest) for first, wait, rest in lives)
    for definition in LatencyDefinition:
        tight = attainment(table, SloTarget(ttft_s, 0.1), definition)
        assert tight <= attainment(table, SloTarget(ttft_s * 1.5, 0.1), definition)
        assert tight <= attainment(table, SloTarget(ttft_s, 0.2), definition)
    waits = zip(ttfts_s(table, STRICT), ttfts_s(table, INDUSTRY), strict=True)
    assert all(strict >= industry for strict, industry in waits)


def test_a_target_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match=r"needs ttft_s and tpot_s above 0, not 0 and 0\.1"):
        SloTarget(0, 0.1)


# Summary


def test_percentiles_are_values_that_occurred_and_misses_are_infinite() -> None:
    hundred = spread([float(value) for value in range(1, 101)])
    assert (hundred.p50_s, hundred.p90_s, hundred.p99_s, hundred.max_s, hundred.mean_s) == (50, 90, 99, 100, 50.5)
    missing = spread([1.0] * 98 + [math.inf] * 2)
    assert (missing.p90_s, missing.p99_s, missing.mean_s) == (1.0, math.inf, 1.0)
    assert math.isnan(spread([]).p50_s)


def test_a_summary_counts_everyone_once_and_throughput_by_when_it_finished() -> None:
    runs = [
        outcome(0, ended_s=12.0, cached_tokens=50),  # arrived before the window, finished in it
        outcome(10, ended_s=3.0, preemptions=2),
        outcome(12, ended_s=30.0),  # arrived in it, finished after
        refused(14),
        unfinished(15),
    ]
    found = summary(runs, SLO, window=Window(10 * NS, 20 * NS), costs=Costs(gpu_s=80.0, energy_j=4400.0))
    assert (found.requests, found.finished, found.refused, found.unfinished) == (4, 2, 1, 1)
    assert found.strict.attainment == 0.25
    assert found.preemptions == 2
    assert found.cached_share == 0.0
    assert (found.span_s, found.requests_per_s, found.output_tokens_per_s) == (10.0, 0.2, 2.2)
    assert found.prompt_tokens_per_s == 20.0
    assert found.gpu_s_per_1k_tokens == pytest.approx(80 * 1000 / 22)
    assert found.energy_j_per_token == pytest.approx(200.0)
    assert found.strict.ttft.p50_s == 2.0
    assert found.strict.ttft.p90_s == math.inf
    assert math.isnan(found.longest_gap.p50_s)


def test_a_summary_without_a_window_spans_the_run_and_without_requests_has_no_figures() -> None:
    found = summary([outcome(5, ended_s=5.0, itl_max_ns=NS // 2)], SLO)
    assert (found.span_s, found.output_tokens_per_s, found.longest_gap.max_s) == (5.0, 2.2, 0.5)
    assert math.isnan(found.energy_j_per_token)
    empty = summary([], SLO)
    assert empty.requests == 0
    assert math.isnan(empty.output_tokens_per_s)


# Goodput


def test_a_scan_reports_the_highest_rate_that_holds_though_a_lower_one_fails() -> None:
    shares = {10.0: 0.977, 20.0: 0.98, 30.0: 0.995, 35.0: 0.995, 40.0: 0.7}
    found = scan(list(shares), shares.__getitem__, 0.99)
    assert (found.highest_held_per_s, found.lowest_failing_per_s, found.unbroken_per_s) == (35.0, 10.0, None)
    assert not found.monotone
    assert not found.open_ended
    at_90 = judged(found.curve, 0.9)
    assert (at_90.highest_held_per_s, at_90.lowest_failing_per_s, at_90.unbroken_per_s) == (35.0, 40.0, 35.0)
    assert at_90.monotone


def test_refinement_scans_every_gap_where_holding_turns() -> None:
    asked: list[float] = []

    def run(rate: float) -> float:
        asked.append(rate)
        # Fails in a hole between 20 and 24 and from 43.
        return 0.2 if 20 <= rate < 24 or rate >= 43 else 1.0

    found = scan([10, 20, 30, 40, 50], run, 0.9, refinements=2, between=4)
    assert len(asked) == len(set(asked))
    assert found.highest_held_per_s == 42.8
    assert found.lowest_failing_per_s == pytest.approx(20, abs=0.5)
    assert not found.monotone
    assert [point.rate_per_s for point in found.curve] == sorted(asked)


@given(st.floats(5, 95), st.integers(0, 3))
def test_a_falling_curve_is_found_as_finely_as_it_is_scanned(edge: float, refinements: int) -> None:
    found = scan([1, *range(10, 101, 10)], lambda rate: 1.0 if rate <= edge else 0.0, 0.9, refinements=refinements)
    step = 10 / 4**refinements
    assert found.highest_held_per_s is not None
    assert edge - step - 0.01 <= found.highest_held_per_s <= edge
    assert found.monotone


def test_several_seeds_give_a_mean_and_a_spread_and_one_curve_serves_all_levels() -> None:
    runs: list[tuple[float, int]] = []

    def run(rate: float, seed: int) -> float:
        runs.append((rate, seed))
        return {1.0: 1.0, 2.0: 0.86 + 0.1 * seed, 3.0: 0.4}[rate]

    said: list[CurvePoint] = []
    found = scan_seeds([3, 1, 2], run, seeds=(0, 1), levels=(0.5, 0.9, 0.99), said=said.append)
    assert len(runs) == 6
    assert [found[level].highest_held_per_s for level in (0.5, 0.9, 0.99)] == [2.0, 2.0, 1.0]
    assert found[0.9].highest_held_by_seed == (1.0, 2.0)
    point = found[0.9].curve[1]
    assert point.attainment == pytest.approx(0.91)
    assert point.spread == pytest.approx(0.1 / math.sqrt(2))
    assert [point.rate_per_s for point in said] == [1, 2, 3]


def test_a_grid_that_is_too_short_or_holds_nowhere_says_so() -> None:
    held = scan([1, 2], lambda rate: 1.0, 0.9)
    assert held.open_ended
    assert held.lowest_failing_per_s is None
    fails = scan([1, 2], lambda rate: math.nan, 0.9)
    assert (fails.highest_held_per_s, fails.lowest_failing_per_s) == (None, 1)
    assert fails.monotone
    for bad in ([], [0.0], [math.nan]):
        with pytest.raises(ValueError, match="rates above 0"):
            scan(bad, lambda rate: 1.0, 0.9)


# Fairness


def test_jains_index_is_1_for_equal_shares_and_1_over_n_for_one_of_n() -> None:
    assert jain([0.5, 0.5, 0.5]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) == 1.0
    assert math.isnan(jain([]))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_jains_index_lies_between_1_over_n_and_1(shares: list[float]) -> None:
    assert 1 / len(shares) - 1e-9 <= jain(shares) <= 1 + 1e-9


def _mixed_lives() -> list[Outcome]:
    short = [outcome(at, ended_s=2.9, prompt_tokens=50, client="a") for at in range(30)]
    long = [outcome(at, first_s=9, began_s=9, ended_s=9.5, prompt_tokens=5000, client="b") for at in range(10)]
    return [*short, *long, *(refused(39.0, prompt_tokens=5000, client="b") for _ in range(10))]


@pytest.mark.parametrize(
    ("by", "names", "requests"),
    [
        (by_prompt, ["< 128", "2048–8191"], [30, 20]),
        (by_client, ["a", "b"], [30, 20]),
        (by_output, ["< 16"], [50]),
    ],
)
def test_buckets_hold_every_request_once(by: Callable[..., Any], names: list[str], requests: list[int]) -> None:
    found = by(_mixed_lives(), SLO, STRICT)
    assert [bucket.name for bucket in found.buckets] == names
    assert [bucket.requests for bucket in found.buckets] == requests


def test_who_is_served_worse_is_seen() -> None:
    found = by_client(_mixed_lives(), SLO, STRICT)
    a, b = found.buckets
    assert (a.attainment, b.attainment, found.gap) == (1.0, 0.0, 1.0)
    assert found.jain == 0.5
    assert (a.served_share, b.served_share) == (1.0, 0.5)
    assert (b.ttft.p50_s, b.ttft.p99_s) == (9.0, math.inf)


def test_slices_of_arrival_show_an_overload_that_grows() -> None:
    lives = [outcome(at, first_s=at / 5, began_s=at / 5, ended_s=at / 5 + 0.5) for at in range(50)]
    found = by_arrival(lives, SLO, STRICT, slices=5)
    assert sum(bucket.requests for bucket in found.buckets) == 50
    assert [bucket.attainment for bucket in found.buckets] == pytest.approx([1, 1, 0.6, 0, 0])
    assert by_arrival([], SLO, STRICT).buckets == ()
    assert by_arrival([outcome()], SLO, STRICT).buckets[0].requests == 1


# Queues


def test_the_queue_is_who_has_come_and_has_no_token() -> None:
    lives = [
        outcome(0.5, first_s=2.0, began_s=2.5, ended_s=4.0),
        outcome(1.0, first_s=0.4),
        refused(1.0),
        unfinished(2.0),
    ]
    found = waiting(lives, step_s=1.0)
    assert found.times_s[:4] == (0.0, 1.0, 2.0, 3.0)
    # At 1 s two wait; at 2 s the second has its token and the unfinished one has come; at 3 s the first has it too.
    assert found.values[:4] == (0, 2, 2, 1)
    assert found.values[-1] == 1
    assert in_system(lives).values[-1] == 1
    assert waiting([]).values == (0, 0)
