"""One further try, and only where it cannot double work or spread an overload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.inference import FailureCode, InferenceFailure
from serai.ingress.retry import NOBODY_THERE_TRIES_MAX, TRIES_MAX, after_failure, after_status

CONNECTION_LOST = {
    FailureCode.NO_RESPONDERS,
    FailureCode.AGENT_SILENT,
    FailureCode.AGENT_LEFT,
    FailureCode.ENGINE_UNREACHABLE,
    FailureCode.ENGINE_CUT,
}


@pytest.mark.parametrize("code", FailureCode)
def test_a_first_try_is_repeated_when_the_connection_was_lost_or_no_engine_had_begun(code: FailureCode) -> None:
    assert after_failure(InferenceFailure(code, "x"), 1).again == (code in CONNECTION_LOST)
    verdict = after_failure(InferenceFailure(code, "x", retry_safe=True), 1)
    assert verdict.again
    assert code.value in verdict.reason


@given(st.sampled_from(FailureCode), st.booleans(), st.integers(TRIES_MAX, 9))
def test_there_is_never_a_third_try(code: FailureCode, safe: bool, tries: int) -> None:
    if code is not FailureCode.NO_RESPONDERS:
        assert not after_failure(InferenceFailure(code, "x", retry_safe=safe), tries).again
    assert not after_status(503, tries).again


def test_sessions_of_a_site_that_was_cut_off_do_not_use_up_the_tries() -> None:
    """Nobody received anything, so nobody's load is multiplied; but there is an end to it."""
    gone = InferenceFailure(FailureCode.NO_RESPONDERS, "x")
    assert all(after_failure(gone, tries).again for tries in range(1, NOBODY_THERE_TRIES_MAX))
    assert not after_failure(gone, NOBODY_THERE_TRIES_MAX).again


@given(st.integers(100, 599))
def test_only_a_gateways_statuses_are_worth_another_session(status: int) -> None:
    verdict = after_status(status, 1)
    assert verdict.again == (status in (502, 503, 504))
    assert str(status) in verdict.reason
