"""Logs: what went wrong and where, never what was asked."""

from __future__ import annotations

import pytest
import structlog

from serai.runtime.telemetry import set_up_logs


@pytest.mark.parametrize("json", [True, False])
def test_a_traceback_tells_the_place_and_no_values(json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def fails_with(prompt: str) -> None:
        raise ValueError("cannot do that")

    set_up_logs("ingress", json=json)
    try:
        fails_with("a secret" + " question")
    except ValueError:
        structlog.get_logger().exception("http.failed")
    told = capsys.readouterr().err
    assert "http.failed" in told
    assert "cannot do that" in told
    assert "fails_with" in told
    assert "secret question" not in told
