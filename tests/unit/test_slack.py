"""Slack of streams, and leaks: requests that the engine keeps after they were cancelled (H41)."""

from __future__ import annotations

import pytest

from serai.contracts.status import SlackSummary
from serai.worker_agent.leaks import Leaks
from serai.worker_agent.slack import slack_s, summary_of, tokens_said, tpot_target_s


def test_slack_is_tokens_times_target_less_time() -> None:
    assert slack_s(11, 0.1, 0.25) == pytest.approx(0.75)
    assert slack_s(1, 0.1, 0.25) == pytest.approx(-0.25)
    assert slack_s(0, 0.1, 0.25) == pytest.approx(-0.25)


def test_a_summary_tells_of_those_who_are_worst_off() -> None:
    assert summary_of([]) is None
    assert summary_of([number / 10 for number in range(20, 0, -1)]) == SlackSummary(20, 1.05, 0.3, 0.1)
    assert summary_of([-1.0]) == SlackSummary(1, -1.0, -1.0, -1.0)


@pytest.mark.parametrize(
    ("text", "target_s"),
    [("50", 0.05), ("0.5", 0.0005), ("0", None), ("-1", None), ("soon", None), ("inf", None), ("nan", None)],
)
def test_targets_in_headers(text: str, target_s: float | None) -> None:
    assert tpot_target_s({"x-slo-tpot-ms": text}) == target_s
    assert tpot_target_s({}) is None


def test_usage_in_events_counts_more_than_events() -> None:
    assert tokens_said(4, b'data: {"choices":[]}\n\n') == 4
    event = b'data: {"choices":[{}],"usage":{"prompt_tokens":3,"completion_tokens": %d}}\n\n'
    assert tokens_said(4, event % 9 + event % 12) == 12
    assert tokens_said(4, event % 2) == 4


def test_h41_a_cancelled_request_that_runs_on_is_counted_once() -> None:
    leaks = Leaks()
    leaks.cancelled(10.0)
    assert leaks.waits
    assert leaks.looked(beyond=1, now=10.5) == 0  # Not yet: a second is allowed.
    assert leaks.looked(beyond=1, now=11.0) == 1
    assert not leaks.waits
    assert leaks.looked(beyond=1, now=12.0) == 0


def test_h41_requests_that_nobody_cancelled_are_no_leaks() -> None:
    leaks = Leaks()
    assert leaks.looked(beyond=3, now=1.0) == 0
    leaks.cancelled(1.0)
    leaks.cancelled(1.9)
    assert leaks.looked(beyond=5, now=2.0) == 1
    assert leaks.looked(beyond=-2, now=3.0) == 0
