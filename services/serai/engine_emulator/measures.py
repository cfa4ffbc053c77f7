"""What the engine measures of itself: histograms cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets, those of vLLM 0.20's `/metrics`."""


class Histogram:
    """Counts of values by bucket, as Prometheus has them."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        """`times` values of `value`."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> str:
        """The histogram in Prometheus' text format; `labels` is what stands between the braces."""
        below = 0
        out = [f"# TYPE {name} histogram\n"]
        for bound, number in zip((*map(float, self.bounds), "+Inf"), self._counts, strict=True):
            below += number
            out.append(f'{name}_bucket{{{labels},le="{bound}"}} {below}\n')
        out.append(f"{name}_sum{{{labels}}} {self.total}\n{name}_count{{{labels}}} {below}\n")
        return "".join(out)


class Measures:
    """The histograms of one engine. Seconds, but for tokens of a step."""

    __slots__ = (
        "between_tokens_s",
        "decode_s",
        "first_token_s",
        "per_token_s",
        "prefill_s",
        "queue_s",
        "request_s",
        "step_tokens",
    )

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(BETWEEN_TOKENS_S)
        self.per_token_s = Histogram(BETWEEN_TOKENS_S)
        """Means of whole requests."""
        self.queue_s = Histogram(WHOLE_REQUEST_S)
        self.prefill_s = Histogram(WHOLE_REQUEST_S)
        self.decode_s = Histogram(WHOLE_REQUEST_S)
        self.request_s = Histogram(WHOLE_REQUEST_S)
        self.step_tokens = Histogram(STEP_TOKENS)
