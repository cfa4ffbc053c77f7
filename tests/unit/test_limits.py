"""What a project may ask for; that nobody gets more, and that everything not used goes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.limits import LimitsUse, ScopeUse
from serai.ingress.limits import (
    Limit,
    Limiter,
    Limits,
    Need,
    Price,
    Refused,
    Reservation,
    Scope,
    duration,
    need_of,
)


def limiter(**limits: int) -> Limiter:
    made = Limiter()
    made.configure("p", Limits(**limits), 0)
    return made


def scope(limits: Limiter, name: str = "p") -> Scope:
    found = limits.scope(name)
    assert found is not None
    return found


def reserved(found: Reservation | Refused) -> Reservation:
    assert isinstance(found, Reservation), found
    return found


def refused(found: Reservation | Refused) -> Refused:
    assert isinstance(found, Refused)
    return found


# -- per minute ------------------------------------------------------------------------------------------------------


def test_a_minutes_worth_may_come_at_once_and_then_they_come_evenly() -> None:
    limits = limiter(requests_per_minute=6)
    for _ in range(6):
        reserved(limits.reserve(["p"], Need(1), 0)).release()
    no = refused(limits.reserve(["p"], Need(1), 0))
    assert (no.limit, no.retry_after_s, no.code) == (Limit.REQUESTS, 10, "rate_limit_exceeded")
    assert no.message == "Limit of p on requests per minute: limit 6, left 0, requested 1. Try again in 10s."
    refused(limits.reserve(["p"], Need(1), 9.9))
    reserved(limits.reserve(["p"], Need(1), 10))
    refused(limits.reserve(["p"], Need(1), 19.9))


def test_a_refused_request_takes_nothing() -> None:
    limits = limiter(requests_per_minute=1, tokens_per_minute=100, concurrent_max=5, budget_micros=1000)
    limits.configure("full", Limits(concurrent_max=0), 0)
    before = limits.headers(["p"], 0)
    assert refused(limits.reserve(["p", "full"], Need(50, 500), 0)).scope == "full"
    assert limits.headers(["p"], 0) == before
    assert scope(limits, "p").running == 0
    reserved(limits.reserve(["p"], Need(100, 1000), 0))


def test_tokens_are_reserved_and_what_was_not_used_goes_back() -> None:
    limits = limiter(tokens_per_minute=600)
    first = reserved(limits.reserve(["p"], Need(500), 0))
    no = refused(limits.reserve(["p"], Need(200), 0))
    assert (no.limit, no.left, no.retry_after_s) == (Limit.TOKENS, 100, 10)
    first.settle(Need(50))
    reserved(limits.reserve(["p"], Need(550), 0))
    assert refused(limits.reserve(["p"], Need(1), 0)).left == 0


def test_a_bucket_never_holds_more_than_a_minutes_worth() -> None:
    limits = limiter(tokens_per_minute=60)
    running = reserved(limits.reserve(["p"], Need(60), 0))
    assert limits.headers(["p"], 60)["x-ratelimit-remaining-tokens"] == "60"
    running.release()
    assert limits.headers(["p"], 60)["x-ratelimit-remaining-tokens"] == "60"


def test_who_used_more_than_it_reserved_is_in_debt() -> None:
    limits = limiter(tokens_per_minute=60)
    reserved(limits.reserve(["p"], Need(10), 0)).settle(Need(100))
    no = refused(limits.reserve(["p"], Need(1), 0))
    assert (no.left, no.retry_after_s) == (-40, 41)
    assert "left 0" in no.message
    reserved(limits.reserve(["p"], Need(1), 41))


def test_a_request_that_can_never_fit_is_told_so() -> None:
    no = refused(limiter(tokens_per_minute=100).reserve(["p"], Need(101), 0))
    assert (no.limit, no.retry_after_s) == (Limit.REQUEST_SIZE, None)
    assert no.message.endswith("Ask for less, or with a smaller `max_tokens`.")
    assert refused(limiter(requests_per_minute=0).reserve(["p"], Need(1), 0)).retry_after_s is None


steps = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=60)


@given(steps)
def test_over_any_time_no_more_than_the_rate_and_one_minutes_worth(history: list[tuple[float, int, int]]) -> None:
    limits, now = limiter(requests_per_minute=10, tokens_per_minute=100), 0.0
    granted: list[tuple[float, int]] = []
    for pause, asked, used in history:
        now += pause
        found = limits.reserve(["p"], Need(asked), now)
        if isinstance(found, Reservation):
            used = min(used, asked)
            found.settle(Need(used))
            granted.append((now, used))
        else:
            assert found.retry_after_s is not None
            assert found.retry_after_s > 0
    for place, (start, _) in enumerate(granted):
        since = granted[place:]
        span = now - start
        assert len(since) <= 10 * (1 + span / 60) + 1e-6
        assert sum(tokens for _, tokens in since) <= 100 * (1 + span / 60) + 1e-6


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 20), st.floats(0, 30))
def test_retry_after_is_true_and_not_too_long(before: list[int], asked: int, now: float) -> None:
    limits = limiter(tokens_per_minute=30)
    for tokens in before:
        found = limits.reserve(["p"], Need(tokens), now)
        if isinstance(found, Reservation):
            found.settle(Need(tokens))
    no = limits.reserve(["p"], Need(asked), now)
    if isinstance(no, Refused):
        assert no.retry_after_s is not None
        refused(limits.reserve(["p"], Need(asked), now + no.retry_after_s * 0.99))
        reserved(limits.reserve(["p"], Need(asked), now + no.retry_after_s))


# -- at once ---------------------------------------------------------------------------------------------------------


def test_so_many_at_once_and_each_end_makes_a_place() -> None:
    limits = limiter(concurrent_max=2)
    first, second = (reserved(limits.reserve(["p"], Need(1), 0)) for _ in range(2))
    no = refused(limits.reserve(["p"], Need(1), 0))
    assert (no.limit, no.retry_after_s) == (Limit.CONCURRENT, 1)
    assert first.settle(Need(1))
    assert not first.settle(Need(1))
    assert not first.release()
    assert scope(limits, "p").running == 1
    reserved(limits.reserve(["p"], Need(1), 0))
    refused(limits.reserve(["p"], Need(1), 0))
    assert second.release()


# -- budget ----------------------------------------------------------------------------------------------------------


def test_a_hundred_at_once_cannot_overrun_a_budget_for_ten() -> None:
    limits = limiter(budget_micros=1000)
    running = [limits.reserve(["p"], Need(10, 100), 0) for _ in range(100)]
    granted = [found for found in running if isinstance(found, Reservation)]
    assert len(granted) == 10
    no = refused(running[-1])
    assert (no.limit, no.code, no.retry_after_s) == (Limit.BUDGET, "insufficient_quota", None)
    assert no.message == "The budget of p (0.001000) has 0.000000 left; this request may cost 0.000100."
    for reservation in granted:
        reservation.settle(Need(5, 50))
    assert scope(limits, "p").spent_micros == 500
    assert sum(isinstance(limits.reserve(["p"], Need(10, 100), 0), Reservation) for _ in range(100)) == 5


def test_a_spent_budget_stops_what_is_free_as_well_until_the_next_period() -> None:
    limits = limiter(budget_micros=100)
    scope(limits, "p").spent_micros = 100
    refused(limits.reserve(["p"], Need(10, 0), 0))
    scope(limits, "p").spent_micros = 0
    reserved(limits.reserve(["p"], Need(10, 0), 0))


moves = st.lists(
    st.tuples(st.sampled_from(["reserve", "reserve", "settle", "release", "leave"]), st.integers(0, 60)), max_size=80
)


@given(moves, st.integers(0, 200))
def test_used_and_reserved_never_exceed_the_budget_and_all_ends(moves: list[tuple[str, int]], budget: int) -> None:
    limits = Limiter()
    limits.configure("p", Limits(budget_micros=budget, concurrent_max=5), 0)
    limits.configure("key", Limits(), 0)
    running: list[tuple[Reservation, int]] = []
    spent = 0
    for move, amount in moves:
        if move == "reserve":
            found = limits.reserve(["key", "p", "nobody's"], Need(1, amount), 0)
            if isinstance(found, Reservation):
                running.append((found, amount))
        elif running:
            reservation, cost = running.pop(amount % len(running))
            used = min(amount, cost)
            if move == "settle":
                assert reservation.settle(Need(1, used))
                spent += used
            elif move == "release":
                assert reservation.release()
            else:
                with reservation:
                    reservation.note(Need(1, used))
                spent += used
        assert scope(limits, "p").spent_micros == scope(limits, "key").spent_micros == spent
        assert spent + sum(cost for _, cost in running) <= budget
        assert scope(limits, "p").running == scope(limits, "key").running == len(running) <= 5
    for reservation, _ in running:
        reservation.release()
    assert scope(limits, "p").running == 0


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_request_that_breaks_is_settled_with_what_was_noted_last() -> None:
    limits = limiter(budget_micros=1000, tokens_per_minute=100)
    found = reserved(limits.reserve(["p"], Need(90, 900), 0))

    def stream() -> None:
        with found:
            found.note(Need(10, 100))
            found.note(Need(30, 300))
            raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        stream()
    assert found.closed
    assert (scope(limits, "p").spent_micros, scope(limits, "p").running) == (300, 0)
    assert limits.headers(["p"], 0)["x-ratelimit-remaining-tokens"] == "70"


def test_what_was_settled_is_not_settled_again_at_the_end_of_its_with() -> None:
    limits = limiter(budget_micros=1000)
    with reserved(limits.reserve(["p"], Need(1, 100), 0)) as found:
        found.note(Need(1, 50))
        found.settle(Need(1, 70))
    assert scope(limits, "p").spent_micros == 70


def test_without_limits_everything_is_granted() -> None:
    reserved(Limiter().reserve(["p"], Need(10**9, 10**9), 0)).settle(Need(1))
    reserved(limiter().reserve(["p"], Need(10**9, 10**9), 0)).settle(Need(1))
    assert limiter().headers(["p"], 0) == Limiter().headers(["p"], 0) == {}


# -- changes ---------------------------------------------------------------------------------------------------------


def test_limits_that_change_keep_what_was_used() -> None:
    limits = limiter(requests_per_minute=10, concurrent_max=9)
    for _ in range(8):
        reserved(limits.reserve(["p"], Need(1), 0))
    limits.configure("p", Limits(requests_per_minute=5, concurrent_max=9), 0)
    assert refused(limits.reserve(["p"], Need(1), 0)).left == -3
    limits.configure("p", Limits(requests_per_minute=10, concurrent_max=9), 0)
    assert limits.headers(["p"], 0)["x-ratelimit-remaining-requests"] == "2"
    limits.configure("p", Limits(), 0)
    assert limits.headers(["p"], 0) == {}
    assert scope(limits, "p").running == 8


def test_scopes_that_are_gone_are_forgotten_when_nothing_of_theirs_runs() -> None:
    limits = limiter(concurrent_max=1)
    running = reserved(limits.reserve(["p"], Need(1), 0))
    limits.retain([])
    refused(limits.reserve(["p"], Need(1), 0))
    running.release()
    limits.retain([])
    assert not limits._scopes


# -- several processes -----------------------------------------------------------------------------------------------


def told(limits: Limiter, process: str = "other", age_s: float = 1.0) -> LimitsUse:
    return LimitsUse(process, age_s, limits.take_changed())


def test_what_another_process_takes_and_gives_back_counts_here_whichever_of_its_words_are_lost() -> None:
    here, there = limiter(tokens_per_minute=100, requests_per_minute=10), limiter(tokens_per_minute=1000)
    first = reserved(there.reserve(["p"], Need(50), 0))
    here.heard(told(there), 5)
    assert here.headers(["p"], 0)["x-ratelimit-remaining-tokens"] == "50"
    first.settle(Need(20))
    told(there)  # Lost.
    reserved(there.reserve(["p"], Need(10), 0))
    for _ in range(2):
        here.heard(LimitsUse("other", 2.0, {"p": scope(there).use}), 5)
    assert here.headers(["p"], 0)["x-ratelimit-remaining-tokens"] == "70"
    assert here.headers(["p"], 0)["x-ratelimit-remaining-requests"] == "8"
    assert list(there.running()) == list(there.take_changed()) == ["p"]
    assert not there.take_changed()


def test_places_are_counted_over_all_processes_until_one_falls_silent() -> None:
    here = limiter(concurrent_max=3)
    here.heard(LimitsUse("a", 1, {"p": ScopeUse(1, 1, 1), "unknown": ScopeUse(1, 1, 1)}), 5)
    here.heard(LimitsUse("b", 1, {"p": ScopeUse(1, 1, 1)}), 5)
    reserved(here.reserve(["p"], Need(1), 0))
    assert refused(here.reserve(["p"], Need(1), 0)).left == 0
    here.silent("a")
    reserved(here.reserve(["p"], Need(1), 0))
    here.forget("b")
    assert scope(here).running == 2


def test_what_a_process_took_before_this_one_listened_is_not_held_against_anybody() -> None:
    here = limiter(requests_per_minute=10)
    here.heard(LimitsUse("old", 100.0, {"p": ScopeUse(1000, 0, 0)}), 5)
    assert here.headers(["p"], 0)["x-ratelimit-remaining-requests"] == "10"
    here.heard(LimitsUse("old", 101.0, {"p": ScopeUse(1004, 0, 0)}), 6)
    assert here.headers(["p"], 0)["x-ratelimit-remaining-requests"] == "6"


def test_of_a_budget_a_process_spends_what_it_was_granted() -> None:
    limits = limiter(budget_micros=1000)
    scope(limits).granted_micros = 0
    refused(limits.reserve(["p"], Need(1, 0), 0))
    scope(limits).granted_micros = 100
    running = reserved(limits.reserve(["p"], Need(1, 60), 0))
    assert refused(limits.reserve(["p"], Need(1, 60), 0)).left == 40
    running.settle(Need(1, 30))
    assert scope(limits).left_micros == 70


# -- what is told ----------------------------------------------------------------------------------------------------


def test_headers_tell_of_the_scope_that_has_the_least_left() -> None:
    limits = Limiter()
    limits.configure("project", Limits(requests_per_minute=600, tokens_per_minute=1000), 0)
    limits.configure("key", Limits(requests_per_minute=60, tokens_per_minute=40_000), 0)
    reserved(limits.reserve(["key", "project"], Need(144), 0))
    assert limits.headers(["key", "project"], 0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "856",
        "x-ratelimit-reset-tokens": "8.64s",
    }
    assert limits.headers(["key", "project"], 100)["x-ratelimit-reset-tokens"] == "0ms"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (-1, "0ms"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (0.9999, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (60, "1m0s"),
        (86.4, "1m26.4s"),
        (360, "6m0s"),
        (3603, "1h0m3s"),
        (float("inf"), "never"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_need_is_the_prompt_and_all_that_may_be_said() -> None:
    price = Price(prompt_micros=2_000_000, output_micros=10_000_000)
    assert need_of(100, 50) == Need(34 + 50, 0)
    assert need_of(100, 50, price, choices=2) == Need(34 + 100, 34 * 2 + 100 * 10)
    assert need_of(0, -5, price, choices=0) == Need(0, 0)
    assert Price(1, 0).cost_micros(1, 0) == 1
