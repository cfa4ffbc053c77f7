"""What the ledger has told over days, and what that says of the next minutes. Pure; times are seconds since 1970.

Short spans are added as they come; at the start the last week is read once, in half hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from serai.contracts.usage import DemandAnswer
from serai.placer.forecast import DAY_S, LEVEL_S, Forecaster
from serai.placer.observed import NOTHING_SEEN, Observed

WEEK_BUCKET_S, WEEK_BUCKETS = 1800.0, 336
AHEAD_S = 600.0
"""So far ahead a rise counts, beside what an engine takes to load."""


class Past:
    """Of the models of one placement file."""

    def __init__(self) -> None:
        self._forecaster = Forecaster()
        self.told_until_s = 0.0
        """Of what came before, all is known; 0 = nothing is."""

    def hear(self, answer: DemandAnswer, models: Iterable[str], since_s: float, bucket_s: float, buckets: int) -> None:
        """Spans that end after what is known already; silent ones count, too."""
        arrivals = {use.model: use.arrivals for use in answer.models}
        fresh = [
            place for place in range(buckets) if since_s + (place + 1) * bucket_s > self.told_until_s + bucket_s / 2
        ]
        for model in models:
            counts = arrivals.get(model, ())
            for place in fresh:
                count = counts[place] if place < len(counts) else 0
                self._forecaster.observe(model, since_s + (place + 1) * bucket_s, count, bucket_s)
        self.told_until_s = max(self.told_until_s, since_s + buckets * bucket_s)

    def with_rises(
        self, usage: Mapping[str, Observed], loads_s: Mapping[str, float], window_s: float, now_s: float
    ) -> dict[str, Observed]:
        """`usage`, and what is expected to be more by the time an engine could serve. A window shorter than the
        forecast's own memory is meant to follow demand faster than that, and is left as it is."""
        if window_s < LEVEL_S:
            return dict(usage)
        raised = {}
        for model, seen in usage.items():
            ahead = self._forecaster.ahead(model, now_s, loads_s.get(model, 0.0), AHEAD_S)
            raised[model] = replace(seen, high=max(seen.high, ahead.requests_s)) if seen != NOTHING_SEEN else seen
        return raised

    def prewarm(self, loads_s: Mapping[str, float], now_s: float) -> frozenset[str]:
        """Models that are silent now, and usually are not in the minutes to come."""
        load_s = max(loads_s.values(), default=0.0)
        return self._forecaster.prewarm(now_s, min(load_s, DAY_S / 4), AHEAD_S)
