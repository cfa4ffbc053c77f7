"""One instance as its macro-scheduler sees it: the last report, leases on their way, and what has happened since by
prediction. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from serai.contracts.admission import InstanceReport, Lease


class StepPredictor(NamedTuple):
    """Step times of one instance, in seconds: from a latency model or from measurements."""

    prefill_s: Callable[[int], float]
    """Of one prefill step over so many prompt tokens."""
    decode_s: Callable[[int, int], float]
    """Of a decode step of so many sequences with so many tokens of context in all."""


class PendingLease(NamedTuple):
    """A lease that no report has acknowledged yet."""

    request_id: str
    lease: Lease
    made_at_s: float


class InstanceView:
    """One instance of one group."""

    def __init__(self, session: str, kv_tokens_total: int, predict: StepPredictor) -> None:
        self.session = session
        self.predict = predict
        self.epoch = 0
        self.sequence = 0
        """Of the last lease given."""
        self.report: InstanceReport | None = None
        self.reported_at_s = 0.0
        self.kv_tokens_total = kv_tokens_total
        self.leases: dict[int, PendingLease] = {}
        """Not acknowledged yet, by sequence."""

    @property
    def load(self) -> int:
        """Requests that it has or will have."""
        reported = 0 if self.report is None else self.report.waiting + self.report.decoding.count
        return reported + len(self.leases)
