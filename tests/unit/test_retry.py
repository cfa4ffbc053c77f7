"""One further try, and only where it cannot double work or spread an overload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.inference import FailureCode, InferenceFailure
from serai.ingress.retry import TRIES_MAX, after_failure, after_status

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
    assert not after_failure(InferenceFailure(code, "x", retry_safe=safe), tries).again
    assert not after_status(503, tries).again


@given(st.integers(100, 599))
def test_only_a_gateways_statuses_are_worth_another_session(status: int) -> None:
    verdict = after_status(status, 1)
    assert verdict.again == (status in (502, 503, 504))
    assert str(status) in verdict.reason
