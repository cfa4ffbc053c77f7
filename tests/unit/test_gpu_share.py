"""The shares of a session's requests add up to the time in which it was busy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress.gpu_share import GpuShares, Share


def test_two_requests_share_what_they_have_together() -> None:
    shares = GpuShares()
    first = shares.begin("s", 0.0)
    second = shares.begin("s", 4.0)
    assert shares.seconds(first, 6.0) == 5.0
    shares.end(second, 6.0)
    shares.end(first, 7.0)
    assert (shares.seconds(first, 99.0), shares.seconds(second, 99.0)) == (6.0, 1.0)


steps = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5)), max_size=40)


@given(steps)
def test_shares_add_up_to_the_time_in_which_somebody_was_there(steps: list[tuple[float, int]]) -> None:
    """Each step lets time pass, then ends the request of that number, or begins one."""
    shares, now, busy = GpuShares(), 0.0, 0.0
    running: list[Share] = []
    everyone: list[Share] = []
    for passed, number in steps:
        now += passed
        busy += passed if running else 0.0
        if number < len(running):
            shares.end(running.pop(number), now)
        else:
            running.append(shares.begin("s", now))
            everyone.append(running[-1])
    assert sum(shares.seconds(share, now) for share in everyone) == pytest.approx(busy)


def test_the_power_is_shared_as_the_time_is() -> None:
    shares = GpuShares()
    first = shares.begin("s", 0.0)
    shares.report("s", 1, 1, 0.0, 500.0)
    second = shares.begin("s", 4.0)
    shares.report("s", 2, 2, 6.0, 700.0)
    assert shares.joules(first, 6.0) == 4 * 500 + 2 * 250
    shares.end(second, 8.0)
    assert shares.joules(second, 8.5) == 2 * 250 + 2 * 350
    shares.report("s", 3, 1, 9.0)
    assert shares.joules(first, 20.0) == 4 * 500 + 2 * 250 + 2 * 350 + 1 * 700, "then nobody knew"


@given(steps)
def test_no_joule_is_charged_twice(steps: list[tuple[float, int]]) -> None:
    shares, now, drawn_j, power_w = GpuShares(), 0.0, 0.0, 0.0
    running: list[Share] = []
    everyone: list[Share] = []
    for sequence, (passed, number) in enumerate(steps):
        now += passed
        drawn_j += passed * power_w if running else 0.0
        if number < len(running):
            shares.end(running.pop(number), now)
        else:
            running.append(shares.begin("s", now))
            everyone.append(running[-1])
        power_w = 100.0 * number
        shares.report("s", sequence, len(running), now, power_w)
    assert sum(shares.joules(share, now) for share in everyone) == pytest.approx(drawn_j)


def test_others_requests_count_once_reports_agree_on_them() -> None:
    shares = GpuShares()
    mine = shares.begin("s", 0.0)
    shares.report("s", 1, 2, 1.0)
    assert shares.seconds(mine, 1.0) == 1.0, "one report may have seen a request of ours that has ended since"
    for sequence in range(2, 20):
        shares.report("s", sequence, 2, 1.0)
        shares.report("s", sequence, 9, 1.0)  # The same report again.
    assert shares.seconds(mine, 3.0) == 2.0


def test_a_session_that_is_gone_is_forgotten_when_its_last_request_has_ended() -> None:
    shares = GpuShares()
    share = shares.begin("s", 0.0)
    shares.retain(())
    assert shares.sessions == ["s"]
    shares.end(share, 1.0)
    shares.end(share, 5.0)
    shares.retain(())
    assert shares.sessions == []
    assert shares.seconds(share, 9.0) == 1.0
