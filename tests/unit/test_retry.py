"""One or two further tries, and only where they cannot double work or spread an overload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.inference import FailureCode, InferenceFailure
from serai.ingress.retry import (
    BUSY_TRIES_MAX,
    MARK,
    NOBODY_THERE_TRIES_MAX,
    TRIES_MAX,
    Price,
    RetryBudget,
    RetryBudgetSettings,
    Verdict,
    after_failure,
    after_status,
    mark,
)

CONNECTION_LOST = {
    FailureCode.NO_RESPONDERS,
    FailureCode.AGENT_SILENT,
    FailureCode.AGENT_LEFT,
    FailureCode.ENGINE_UNREACHABLE,
    FailureCode.ENGINE_CUT,
}
FULL, LOSS, FREE = (Verdict(True, "x", price) for price in (Price.FULL, Price.LOSS, Price.NOTHING))


@pytest.mark.parametrize("code", FailureCode)
def test_a_first_try_is_repeated_when_the_connection_was_lost_or_no_engine_had_begun(code: FailureCode) -> None:
    assert after_failure(InferenceFailure(code, "x"), 1).again == (
        code in CONNECTION_LOST | {FailureCode.BUSY, FailureCode.LEASE_REFUSED}
    )
    verdict = after_failure(InferenceFailure(code, "x", retry_safe=True), 1)
    assert verdict.again
    assert code.value in verdict.reason


@given(st.sampled_from(FailureCode), st.booleans(), st.integers(TRIES_MAX, 9), st.booleans())
def test_there_is_never_a_fourth_try(code: FailureCode, safe: bool, tries: int, rested: bool) -> None:
    given_back = safe and code in (FailureCode.AGENT_LEFT, FailureCode.DRAINING)
    if code not in (FailureCode.NO_RESPONDERS, FailureCode.LEASE_REFUSED) and not given_back:
        assert not after_failure(InferenceFailure(code, "x", retry_safe=safe), tries, rested=rested).again
    assert not any(after_status(status, tries, rested=rested, marked_safe=safe).again for status in range(100, 600))


def test_sessions_of_a_site_that_was_cut_off_do_not_use_up_the_tries() -> None:
    """Nobody received anything, so nobody's load is multiplied; but there is an end to it."""
    gone = InferenceFailure(FailureCode.NO_RESPONDERS, "x")
    assert all(after_failure(gone, tries).again for tries in range(1, NOBODY_THERE_TRIES_MAX))
    assert not after_failure(gone, NOBODY_THERE_TRIES_MAX).again


@pytest.mark.parametrize("code", [FailureCode.AGENT_LEFT, FailureCode.DRAINING])
def test_what_a_draining_session_gives_back_untouched_uses_up_no_try(code: FailureCode) -> None:
    """Two sessions were lost before; the third drains, and no engine has begun there."""
    given_back = InferenceFailure(code, "x", retry_safe=True)
    assert after_failure(given_back, TRIES_MAX).again
    assert not after_failure(given_back, NOBODY_THERE_TRIES_MAX).again
    assert not after_failure(InferenceFailure(code, "x"), TRIES_MAX).again


def test_a_refused_lease_costs_neither_tries_nor_budget() -> None:
    refused = InferenceFailure(FailureCode.LEASE_REFUSED, "its slack is spent", retry_safe=True)
    verdict = after_failure(refused, TRIES_MAX)
    assert verdict.again
    assert verdict.price is Price.NOTHING
    assert not after_failure(refused, NOBODY_THERE_TRIES_MAX).again


@given(st.integers(100, 599), st.integers(1, TRIES_MAX - 1))
def test_only_a_gateways_statuses_are_worth_another_session(status: int, tries: int) -> None:
    verdict = after_status(status, tries, rested=False)
    assert verdict.again == (status in (502, 504))
    assert str(status) in verdict.reason


@given(st.integers(400, 499), st.integers(1, 5), st.booleans())
def test_an_error_of_the_caller_is_never_repeated(status: int, tries: int, safe: bool) -> None:
    if status != 429:
        assert not after_status(status, tries, rested=True, marked_safe=safe).again


@pytest.mark.parametrize("status", [429, 503])
def test_busy_is_tried_on_one_other_and_only_when_one_is_not_busy(status: int) -> None:
    assert after_status(status, 1, rested=True).again
    assert not after_status(status, 1, rested=False).again
    assert not after_status(status, BUSY_TRIES_MAX, rested=True).again


@pytest.mark.parametrize("safe", [True, False])
def test_an_agent_that_is_full_is_busy_whatever_it_says_of_safety(safe: bool) -> None:
    full = InferenceFailure(FailureCode.BUSY, "x", retry_safe=safe)
    assert after_failure(full, 1).again
    assert not after_failure(full, 1, rested=False).again
    assert not after_failure(full, BUSY_TRIES_MAX).again


def test_what_is_not_known_of_the_others_decides_for_503_and_against_429() -> None:
    assert after_status(503, 1).again
    assert not after_status(429, 1).again


def test_a_500_is_repeated_when_the_engine_says_so_and_nothing_is_when_it_says_not() -> None:
    assert not after_status(500, 1, rested=True).again
    assert after_status(500, 1, rested=True, marked_safe=True).again
    assert not any(
        after_status(status, 1, rested=True, marked_safe=False).again for status in (429, 500, 502, 503, 504)
    )


@pytest.mark.parametrize(
    ("headers", "said"),
    [({}, None), ({MARK: "true"}, True), ({MARK: "false"}, False), ({MARK: "maybe"}, None)],
)
def test_the_engines_mark_is_read(headers: dict[str, str], said: bool | None) -> None:
    assert mark(headers) is said


# -- budget ----------------------------------------------------------------------------------------------------------


def test_retries_cost_what_they_add_to_the_load() -> None:
    def price(code: FailureCode, safe: bool = False) -> Price:
        return after_failure(InferenceFailure(code, "x", retry_safe=safe), 1).price

    assert price(FailureCode.NO_RESPONDERS) is price(FailureCode.DRAINING, safe=True) is Price.NOTHING
    assert price(FailureCode.ENGINE_CUT) is price(FailureCode.AGENT_LEFT) is Price.LOSS
    assert price(FailureCode.BUSY, safe=True) is after_status(502, 1).price is Price.FULL


def test_when_everything_fails_retries_add_a_fifth_and_a_few() -> None:
    budget, retries = RetryBudget(), 0
    for _ in range(1000):
        budget.on_request("m", 0)
        retries += budget.take("m", FULL, 0)
    assert 200 <= retries <= 211


def test_losing_a_session_with_all_it_did_is_within_the_budget_and_losing_for_ever_is_not() -> None:
    budget = RetryBudget()
    assert all(budget.take("m", LOSS, 0) for _ in range(256))
    assert not all(budget.take("m", LOSS, 0) for _ in range(256))
    assert not budget.take("m", FULL, 0)
    assert budget.take("m", FREE, 0)
    assert budget.take("another", FULL, 0)
    assert budget.take("m", FULL, 300)  # Debts are paid with time.


def test_models_that_are_gone_are_forgotten() -> None:
    budget = RetryBudget()
    while budget.take("m", FULL, 0):
        pass
    assert budget.left("m", 0) < 1
    budget.retain(["another"])
    assert budget.left("m", 0) == 10


steps = st.lists(st.tuples(st.sampled_from(["request", "full", "loss", "free"]), st.floats(0, 3)), max_size=200)


@given(steps)
def test_retries_never_exceed_the_budget(history: list[tuple[str, float]]) -> None:
    settings = RetryBudgetSettings(share=0.2, reserve=3, per_s=0.5, loss_credit=5)
    budget, now, requests, taken, losses = RetryBudget(settings), 0.0, 0, 0, 0
    for kind, pause in history:
        now += pause
        if kind == "request":
            budget.on_request("m", now)
            requests += 1
        elif kind == "full":
            taken += budget.take("m", FULL, now)
        elif kind == "loss":
            losses += budget.take("m", LOSS, now)
        else:
            assert budget.take("m", FREE, now)
        earned = 0.2 * requests + 0.5 * now + 3
        assert taken <= earned + 1e-6
        assert taken + losses <= earned + 5 + 1e-6
        assert budget.left("m", now) <= 3
