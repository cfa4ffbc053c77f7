"""How a group has been loaded over the last window, from leases given and reports heard. Pure: takes `now_s`.

Instances count their first tokens from their start, so reports may be lost: what counts is the difference between the
last report and one of a window ago.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import NamedTuple

from serai.contracts.admission import InstanceReport
from serai.macro_scheduler.scaling import TTFT_SHARE_MAX, Load, Samples, mean, utilisation

MARKS_EVERY_S = 1.0
"""How often an instance's totals are noted."""


class _Totals(NamedTuple):
    first_tokens: int
    slow: int
    ttft_s: float

    @classmethod
    def of(cls, report: InstanceReport) -> _Totals:
        return cls(report.first_tokens_total, report.slow_first_tokens_total, report.ttft_s_total)


class _Instance:
    """One instance's last report, and its totals once a second."""

    def __init__(self, report: InstanceReport, now_s: float) -> None:
        self.report = report
        self.marks = [(now_s, _Totals.of(report))]

    def note(self, report: InstanceReport, now_s: float, window_s: float) -> None:
        if report.first_tokens_total < self.report.first_tokens_total:
            self.marks.clear()  # Another one under the same name: it counts anew.
        self.report = report
        if not self.marks or now_s - self.marks[-1][0] >= MARKS_EVERY_S:
            self.marks.append((now_s, _Totals.of(report)))
        while len(self.marks) > 1 and self.marks[1][0] <= now_s - window_s:
            self.marks.pop(0)

    def since_window(self) -> _Totals:
        now, then = _Totals.of(self.report), self.marks[0][1]
        return _Totals(now.first_tokens - then.first_tokens, now.slow - then.slow, now.ttft_s - then.ttft_s)


class LoadMeter:
    """One group's."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._prefills = Samples(window_s)
        self._instances: dict[str, _Instance] = {}
        self._since_s: float | None = None

    @property
    def ready_at_s(self) -> float:
        """When a whole window will have been seen."""
        return inf if self._since_s is None else self._since_s + self._window_s

    def leased(self, prefill_s: float, now_s: float) -> None:
        """A lease was given."""
        self._prefills.add(prefill_s, now_s)

    def reported(self, report: InstanceReport, now_s: float) -> None:
        """The last word of an instance."""
        if self._since_s is None:
            self._since_s = now_s
        known = self._instances.get(report.session)
        if known is None:
            self._instances[report.session] = _Instance(report, now_s)
        else:
            known.note(report, now_s, self._window_s)

    def gone(self, session: str) -> None:
        """Its counts go with it."""
        self._instances.pop(session, None)

    def load(
        self,
        serving: Collection[str],
        slo_ttft_s: float,
        slo_tpot_s: float,
        now_s: float,
        *,
        starting: int = 0,
        waited_s: Sequence[float] = (),
    ) -> Load:
        """Of the last window. `serving`: sessions that get leases. `waited_s`: of all requests that have no place yet;
        they count like first tokens, with what they have waited so far, or nothing would be seen of a group that
        serves some quickly and others not at all."""
        seen = [self._instances[session] for session in serving if session in self._instances]
        reports = [one.report for one in seen]
        totals = [one.since_window() for one in seen]
        first_tokens = sum([each.first_tokens for each in totals]) + len(waited_s)
        slow = sum([each.slow for each in totals]) + sum([one > TTFT_SHARE_MAX * slo_ttft_s for one in waited_s])
        ttft_s = sum([each.ttft_s for each in totals]) + sum(waited_s)
        over_s = min(self._window_s, now_s - self._since_s) if self._since_s is not None else self._window_s
        prefill_s = sum(self._prefills.values(now_s))
        step_s = mean([report.step_s for report in reports if report.step_s > 0])
        kv_share = mean([_kv_used(report) for report in reports])
        return Load(
            slo_ttft_s=slo_ttft_s,
            instances=len(serving),
            starting=starting,
            requests=first_tokens,
            ttft_mean_s=ttft_s / first_tokens if first_tokens else 0.0,
            ttft_slow_share=slow / first_tokens if first_tokens else 0.0,
            queue_age_s=max(waited_s, default=0.0),
            utilisation=utilisation(prefill_s, max(over_s, 1.0), len(serving), step_s, slo_tpot_s, kv_share),
            saved_tpot_mean_s=_saved_s(reports),
        )


def _kv_used(report: InstanceReport) -> float:
    if report.kv_tokens_total <= 0:
        return 0.0
    return min(1.0, 1.0 - (report.kv_tokens_free - report.kv_tokens_promised) / report.kv_tokens_total)


def _saved_s(reports: Iterable[InstanceReport]) -> float:
    """Mean over all streams that decode."""
    streams = [(report.decoding.count, report.decoding.mean_s) for report in reports]
    count = sum([count for count, _ in streams])
    return sum([count * mean_s for count, mean_s in streams]) / count if count else 0.0
