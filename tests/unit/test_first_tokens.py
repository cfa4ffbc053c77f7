"""What an instance counts of its first tokens."""

from __future__ import annotations

import msgspec

from serai.contracts.admission import Lease
from serai.worker_agent.first_tokens import FirstTokens

LEASE = Lease(1, 1, 0.1, 500, 3.0, slo_ttft_s=4.0, slo_tpot_s=0.1, waited_s=1.0)


def test_time_spent_before_the_lease_counts() -> None:
    """Of a target of 5 s, 4 s are the limit: 1 s was spent before."""
    counts = FirstTokens()
    counts.said_first(LEASE, 2.9)
    assert (counts.count, counts.slow, counts.sum_s) == (1, 0, 3.9)
    counts.said_first(LEASE, 3.1)
    assert (counts.count, counts.slow, counts.sum_s) == (2, 1, 8.0)


def test_what_has_no_target_is_not_counted() -> None:
    counts = FirstTokens()
    counts.said_first(None, 9.0)
    counts.said_first(msgspec.structs.replace(LEASE, best_effort=True), 9.0)
    counts.said_first(msgspec.structs.replace(LEASE, slo_ttft_s=0.0), 9.0)
    assert (counts.count, counts.slow, counts.sum_s) == (0, 0, 0.0)
