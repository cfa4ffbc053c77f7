"""One instance as its macro-scheduler sees it: the last report, leases on their way, and what has happened since by
prediction. Pure.

The ledger: a lease is debited the moment it is given (prefill time, KV tokens), and stays so until a report says that
the instance has applied its sequence: from then on the report itself contains it. So slack is never promised twice,
however late reports are. A lease that is refused is given back at once, one that nobody applies when it expires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from typing import NamedTuple

from serai.contracts.admission import GateMode, InstanceReport, Lease, Spread
from serai.macro_scheduler.grant_book import GrantBook, Place

_TYPICAL_TOKENS = 512
_OUT_SHARE = 1.1
_BACK_SHARE = 1.0


def prompt_blocks(tokens: int) -> int:
    """Blocks of 16 tokens for a prompt and its first token."""
    return (tokens + 16) // 16


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
    debit_s: float
    """Prefill time that it adds to a step which others share: its own, less what a step costs whatever is in it. Ten
    short prompts go in one step, and the gate counts them so."""


class InstanceView:
    """One instance of one group."""

    def __init__(self, session: str, kv_tokens_total: int, predict: StepPredictor, without: str = "") -> None:
        self.session = session
        self.predict = predict
        self.kv_tokens_total = kv_tokens_total
        self.without = without
        """A part of the policy that is switched off."""
        self.epoch = 0
        """0: not owned yet, so nothing may be leased."""
        self.sequence = 0
        """Of the last lease given in this epoch."""
        self.mode = GateMode.PADG
        """As it should be."""
        self.report: InstanceReport | None = None
        self.reported_at_s = 0.0
        self.leases: dict[int, PendingLease] = {}
        """Not acknowledged yet, by sequence."""
        self.grants = GrantBook()
        """Places given in advance."""
        self.leased_prefill_s = 0.0
        """Of those and these."""
        self.leased_kv_tokens = 0
        self._decode_known: tuple[tuple[int, int], float] = ((-1, -1), 0.0)
        # What the paper's policies note of a window.
        self.window = 0
        self.switched_at_s = 0.0
        """When it began."""
        self.window_prefill_s = 0.0
        """Predicted prefill time of all that this window has taken."""
        self.window_prompt_blocks = 0
        """KV blocks of their prompts."""

    @property
    def load(self) -> int:
        """Requests that it has or will have."""
        reported = 0 if self.report is None else self.report.waiting + self.report.decoding.count
        return reported + len(self.leases)

    def choose_mode(self, slo_tpot_s: float) -> GateMode:
        """PADG, or ORDINARY where a single stream is slower than its TPOT target already: no slack ever comes there, so
        a gate would only make people wait. Between the two limits it stays as it was.

        Everything else that makes windows lose (few instances, little load, targets that are nearly out of reach) needs
        no mode: the gate sees it in the slack, and mixes or opens at once."""
        report = self.report
        alone_s = self.predict.decode_s(1, _TYPICAL_TOKENS)
        if report is not None and report.step_s and report.decoding.count == 1:
            alone_s = report.step_s
        if alone_s > _OUT_SHARE * slo_tpot_s and self.without != "ordinary-mode":
            self.mode = GateMode.ORDINARY
        elif alone_s < _BACK_SHARE * slo_tpot_s:
            self.mode = GateMode.PADG
        return self.mode

    # The ledger

    def owned(self, epoch: int) -> None:
        """A new epoch: its leases are counted anew, and those of the old one are the instance's own word now."""
        self.epoch, self.sequence = epoch, 0
        self.leases.clear()
        self.grants.clear()
        self.leased_prefill_s, self.leased_kv_tokens = 0.0, 0

    def lease(self, request_id: str, lease: Lease, now_s: float) -> None:
        """Debit `lease`, whose sequence is the next."""
        self.sequence = lease.sequence
        if self.without == "leases":
            return
        debit_s = max(0.0, lease.prefill_s - self.predict.prefill_s(1))
        self.leases[lease.sequence] = PendingLease(request_id, lease, now_s, debit_s)
        self.window_prompt_blocks += prompt_blocks(lease.prompt_tokens)
        self.leased_prefill_s += debit_s
        self.leased_kv_tokens += lease.kv_tokens

    def give_back(self, sequence: int) -> None:
        """That lease is known to be applied, refused, or not to be used. Idempotent."""
        pending = self.leases.pop(sequence, None)
        if pending is None:
            return
        self.leased_kv_tokens -= pending.lease.kv_tokens
        self._credit(pending.debit_s)

    def grant(self, place: Place) -> None:
        """Debit a place that is given in advance."""
        self.grants.give(place)
        self.leased_prefill_s += place.prefill_s
        self.leased_kv_tokens += place.kv_tokens

    def _credit(self, prefill_s: float) -> None:
        left_s = self.leased_prefill_s - prefill_s
        self.leased_prefill_s = left_s if self.leases else self.grants.prefill_s  # So that rounding never adds up.

    def _credit_places(self, places: Iterable[Place]) -> None:
        for place in places:
            self.leased_kv_tokens -= place.kv_tokens
            self._credit(place.prefill_s)

    def expire(self, before_s: float) -> None:
        """Give back the leases made before then: their requests never came to the instance, or its reports do not
        come here. The same for places that were good until before then."""
        self._credit_places(self.grants.over(before_s))
        while self.leases:
            sequence = next(iter(self.leases))
            if self.leases[sequence].made_at_s >= before_s:
                return
            self.give_back(sequence)

    def take_report(self, report: InstanceReport, now_s: float) -> str:
        """Believe `report`. Why not, if it cannot be believed."""
        if report.epoch != self.epoch:
            return f"it is of epoch {report.epoch}, and {self.session} is owned with epoch {self.epoch}"
        if self.report is not None and report.sequence <= self.report.sequence:
            return f"its sequence {report.sequence} is not above {self.report.sequence}, known before"
        wrong = _wrong(report)
        if wrong:
            return wrong
        self.report, self.reported_at_s = report, now_s
        if report.granted_total:
            self._credit_places(self.grants.counted(report.granted_total))
        while self.leases:
            sequence = next(iter(self.leases))
            if sequence > report.applied:
                break
            self.give_back(sequence)
        return ""

    # The effective state

    def kv_tokens_left(self) -> float:
        """Tokens that nobody uses or was promised; infinite when the engine does not say."""
        report = self.report
        if report is None:
            return self.kv_tokens_total - self.leased_kv_tokens if self.kv_tokens_total else float("inf")
        if not report.kv_tokens_total:
            return float("inf")
        return report.kv_tokens_free - report.kv_tokens_promised - self.leased_kv_tokens

    def waiting_prefill_s(self) -> float:
        """Predicted prefill time of all that has no first token yet, leases on their way included."""
        return self.leased_prefill_s + (0.0 if self.report is None else self.report.waiting_prefill_s)

    def decode_s(self) -> float:
        """A decode step of the streams that it has and will have."""
        report, leased = self.report, len(self.leases)
        if report is None or not report.step_s:
            return self.predict.decode_s(max(1, leased), 0)
        if not leased and not report.waiting:
            return report.step_s
        key = (report.sequence, leased)
        if self._decode_known[0] != key:
            self._decode_known = (key, self._decode_with(report, leased + report.waiting))
        return self._decode_known[1]

    def _decode_with(self, report: InstanceReport, more: int) -> float:
        known = max(1, report.decoding.count)
        context = report.context_tokens // known if report.context_tokens else 512
        one_s = self.predict.decode_s(known, known * context)
        return report.step_s + max(0.0, self.predict.decode_s(known + more, (known + more) * context) - one_s)

    def ending(self) -> float:
        """Of an instance that lets long answers go: how many a prefill now would keep from ending in time, expected. Of
        leases on their way, half."""
        report = self.report
        return report.ending + 0.5 * len(self.leases) if report is not None and report.lets_go else 0.0

    def slot_in_s(self) -> float:
        """How long a further request waits for one of the engine's slots."""
        report = self.report
        if report is None or report.slots_free is None:
            return 0.0
        return max(0, len(self.leases) + 1 - report.slots_free) * report.slot_every_s

    def finish_in_s(self, prefill_s: float, slo_tpot_s: float, now_s: float) -> float:
        """When a further prefill of `prefill_s` would be done, by prediction: what waits before it, and the decode
        steps without which no slack is left for it. Since the report, that work has gone on."""
        report = self.report
        if report is None:
            return self.leased_prefill_s + prefill_s
        work_s = self.leased_prefill_s + report.waiting_prefill_s + prefill_s
        decoding = report.decoding
        if not (decoding.count or report.waiting):
            return work_s
        step_s = self.decode_s()
        slack_s = max(-1.0, decoding.low_s)
        finish_s = work_s + self.slot_in_s() + step_s - (now_s - self.reported_at_s)
        if report.lets_go:
            return max(prefill_s, finish_s)
        if decoding.count and work_s > slack_s:
            finish_s += (work_s - slack_s) / max(0.05, 1.0 - step_s / slo_tpot_s)
        return max(prefill_s, finish_s)


def _wrong(report: InstanceReport) -> str:
    """What in a report cannot be; empty: nothing. Slack below 0 can: a stream that is behind its target."""
    for name, spread in (("decoding", report.decoding), ("older", report.older)):
        if spread.count < 0 or not _ordered(spread):
            return f"{name} is {spread}: no such spread is possible"
    if report.waiting < 0 or not 0.0 <= report.waiting_prefill_s < float("inf"):
        return f"{report.waiting} waiting requests with {report.waiting_prefill_s} s of prefill are not possible"
    if not 0 <= report.kv_tokens_free <= max(report.kv_tokens_total, report.kv_tokens_free):
        return f"kv_tokens_free is {report.kv_tokens_free}"
    if not (isfinite(report.step_s) and report.step_s >= 0.0):
        return f"step_s is {report.step_s}"
    return ""


def _ordered(spread: Spread) -> bool:
    if not spread.count:
        return True
    rising = spread.least_s <= spread.low_s <= spread.most_s and spread.least_s <= spread.mean_s + 1e-6
    return rising and isfinite(spread.least_s) and isfinite(spread.most_s)
