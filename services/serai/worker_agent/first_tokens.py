"""How long first tokens took, for whoever decides how many instances there are. Pure."""

from __future__ import annotations

from serai.contracts.admission import Lease

SLOW_SHARE = 0.8
"""Of the target; see `InstanceReport.slow_first_tokens_total`."""


class FirstTokens:
    """Totals since the instance started: a report that is lost takes nothing with it."""

    def __init__(self) -> None:
        self.count = 0
        self.slow = 0
        self.sum_s = 0.0

    def said_first(self, lease: Lease | None, since_offered_s: float) -> None:
        """A request has its first token. One without a target is not counted."""
        if lease is None or lease.best_effort or lease.slo_ttft_s <= 0:
            return
        ttft_s = lease.waited_s + since_offered_s
        self.count += 1
        self.sum_s += ttft_s
        self.slow += ttft_s > SLOW_SHARE * (lease.waited_s + lease.slo_ttft_s)
