"""Questions about demand that the ledger takes, and those that it must not stumble over."""

from __future__ import annotations

import pytest

from serai.contracts.usage import DemandRequest
from serai.ledger.demand import counted, demand_conditions, why_not


@pytest.mark.parametrize(
    "since", ["", "yesterday", "2026-13-01", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"]
)
def test_what_is_no_moment_in_utc_is_refused(since: str) -> None:
    assert why_not(DemandRequest(since=since, bucket_s=60, buckets=1)).startswith("since: ")


@pytest.mark.parametrize("since", ["2026-12-01", "2026-12-01T02:00:00+02:00", "0001-01-01T00:00:00", "9999-12-31"])
def test_what_is_taken_can_be_asked_of_the_database(since: str) -> None:
    request = DemandRequest(since=since, bucket_s=60, buckets=1)
    assert why_not(request) == ""
    _, values = demand_conditions(request, "?")
    assert str(values[0]).endswith(":00.000Z")
    assert counted([("m", "2026-12-01T00:00:30", 2, 0, 5, 1)], request)[0].model == "m"
