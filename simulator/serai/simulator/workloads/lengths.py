"""How many tokens a request brings and asks for: distributions, and the datasets of the papers by name.

All draw one uniform number per length and turn it into tokens by the inverse of the distribution, so that two
workloads with one seed differ only where their distributions do.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from statistics import NormalDist
from typing import Protocol

from serai.runtime.fields import BadInput

_NORMAL = NormalDist()
_LEAST = 2.0**-54
_TOKENS_MAX = 10_000_000


class Tokens(Protocol):
    """A distribution of one length."""

    def draw(self, random: Random) -> int:
        """Tokens, at least 1."""


class Lengths(Protocol):
    """A distribution of prompt and output together."""

    def draw(self, random: Random) -> tuple[int, int]:
        """Tokens of the prompt and of the output."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= _TOKENS_MAX:
            raise BadInput("tokens", f"is {self.tokens}", f"give 1 to {_TOKENS_MAX:,}")

    def draw(self, random: Random) -> int:
        return self.tokens


class LogNormal:
    """Log-normal with a given mean and median, as papers tell them. With `maximum`, log-normal cut off there, and the
    parameters are such that mean and median still hold."""

    __slots__ = ("_center", "_share", "_spread", "maximum", "mean", "median")

    def __init__(self, mean: float, median: float, maximum: int | None = None) -> None:
        if not 0 < median < mean < (math.inf if maximum is None else maximum):
            raise BadInput(
                "mean and median",
                f"are {mean} and {median}{'' if maximum is None else f' with a maximum of {maximum}'}",
                "a log-normal needs 0 < median < mean < maximum; a `truncated-normal` has its mean below its median",
            )
        self.mean, self.median, self.maximum = mean, median, maximum
        if maximum is None:
            self._center, self._spread, self._share = math.log(median), math.sqrt(2 * math.log(mean / median)), 1.0
        else:
            self._center, self._spread, self._share = _cut_log_normal(mean, median, maximum)

    def draw(self, random: Random) -> int:
        drawn = math.exp(self._center + self._spread * _standard(random.random() * self._share))
        return max(1, round(drawn) if self.maximum is None else min(self.maximum, round(drawn)))


def _cut_log_normal(mean: float, median: float, maximum: int) -> tuple[float, float, float]:
    """Centre and spread of the logarithm, and the share below `maximum`, of the log-normal that has `mean` and
    `median` when what lies above `maximum` is left out. Two bisections, one in the other."""

    def with_spread(spread: float) -> tuple[float, float]:
        # The centre for which half of what is below the maximum is below the median.
        low, high = math.log(median) - 10 * spread, math.log(maximum) + 40 * spread
        for _ in range(80):
            center = (low + high) / 2
            share = _NORMAL.cdf((math.log(maximum) - center) / spread)
            halved = _NORMAL.cdf((math.log(median) - center) / spread)
            low, high = (low, center) if share < 1e-12 or halved < share / 2 else (center, high)
        return low, _NORMAL.cdf((math.log(maximum) - low) / spread)

    def mean_of(spread: float) -> float:
        center, share = with_spread(spread)
        whole = math.exp(center + spread * spread / 2)
        return whole * _NORMAL.cdf((math.log(maximum) - center) / spread - spread) / share

    narrow, wide = math.sqrt(2 * math.log(mean / median)) / 4, 4.0
    if not mean_of(narrow) < mean < mean_of(wide):
        raise BadInput("maximum", f"is {maximum}", f"no log-normal below it has mean {mean} and median {median}")
    for _ in range(60):
        middle = (narrow + wide) / 2
        narrow, wide = (middle, wide) if mean_of(middle) < mean else (narrow, middle)
    center, share = with_spread(wide)
    return center, wide, share


@dataclass(frozen=True, slots=True)
class ClampedNormal:
    """Normal, and what falls below `minimum` becomes `minimum`: OpenTela's lengths. The mean of what comes out is
    higher than `mean`."""

    mean: float
    deviation: float
    minimum: int = 1

    def __post_init__(self) -> None:
        if not (self.deviation > 0 and abs(self.mean) < _TOKENS_MAX and self.minimum >= 1):
            raise BadInput(
                "mean, deviation and minimum",
                f"are {self.mean}, {self.deviation} and {self.minimum}",
                "give a deviation above 0 and a minimum of at least 1",
            )

    def draw(self, random: Random) -> int:
        # OpenTela takes the integer part.
        return max(self.minimum, int(self.mean + self.deviation * _standard(random.random())))


class TruncatedNormal:
    """Normal between `minimum` and `maximum`, nothing outside, with the given mean. Its median may lie above
    its mean."""

    __slots__ = ("_center", "_high", "_low", "deviation", "maximum", "mean", "minimum")

    def __init__(self, mean: float, deviation: float, minimum: int, maximum: int) -> None:
        self._center = _truncated_center(mean, deviation, minimum, maximum)
        self.mean, self.deviation, self.minimum, self.maximum = mean, deviation, minimum, maximum
        self._low = _NORMAL.cdf((minimum - self._center) / deviation)
        self._high = _NORMAL.cdf((maximum - self._center) / deviation)

    def draw(self, random: Random) -> int:
        share = self._low + random.random() * (self._high - self._low)
        return min(self.maximum, max(self.minimum, round(self._center + self.deviation * _standard(share))))


def _truncated_center(mean: float, deviation: float, minimum: int, maximum: int) -> float:
    if not (1 <= minimum < mean < maximum and deviation > 0):
        raise BadInput(
            "mean, deviation, minimum and maximum",
            f"are {mean}, {deviation}, {minimum} and {maximum}",
            "give 1 ≤ minimum < mean < maximum and a deviation above 0",
        )
    low, high = minimum - 7 * deviation, maximum + 7 * deviation
    for _ in range(80):
        center = (low + high) / 2
        below, above = (minimum - center) / deviation, (maximum - center) / deviation
        share = _NORMAL.cdf(above) - _NORMAL.cdf(below)
        found = center + deviation * (_NORMAL.pdf(below) - _NORMAL.pdf(above)) / share if share > 1e-13 else center
        low, high = (center, high) if found < mean else (low, center)
    return (low + high) / 2


class Histogram:
    """Lengths with their weights."""

    __slots__ = ("_sums", "_values")

    def __init__(self, weights: Mapping[int, float]) -> None:
        if not weights or min(weights) < 1 or min(weights.values()) < 0 or not sum(weights.values()) > 0:
            raise BadInput("weights", "are not lengths of at least 1 with shares", "give {tokens: share, …}")
        self._values = sorted(weights)
        self._sums = list(accumulate(weights[value] for value in self._values))

    @property
    def mean(self) -> float:
        """Mean tokens."""
        shares = zip(self._values, self._sums, [0.0, *self._sums], strict=False)
        return sum(value * (above - below) for value, above, below in shares) / self._sums[-1]

    def draw(self, random: Random) -> int:
        place = bisect_right(self._sums, random.random() * self._sums[-1])
        return self._values[min(place, len(self._values) - 1)]


@dataclass(frozen=True, slots=True)
class Independent:
    """Prompt and output without relation to each other."""

    prompt: Tokens
    output: Tokens

    def draw(self, random: Random) -> tuple[int, int]:
        return self.prompt.draw(random), self.output.draw(random)


class Recorded:
    """Pairs of a trace, drawn with replacement: prompt and output stay together."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            raise BadInput("pairs", "there are none", "name a trace with requests in it")
        self._pairs = pairs

    def draw(self, random: Random) -> tuple[int, int]:
        return self._pairs[int(random.random() * len(self._pairs))]


def fitted(prompt_tokens: int, output_tokens: int, context_tokens: int | None) -> tuple[int, int]:
    """Cut to a context of `context_tokens`: first the output to what fits beside one prompt token, then the prompt to
    what the output leaves."""
    if context_tokens is None:
        return prompt_tokens, output_tokens
    output = min(output_tokens, context_tokens - 1)
    return min(prompt_tokens, context_tokens - output), output


def _alpaca() -> Lengths:
    """Alpaca-gpt4: prompts 20.63 (median 17), answers 163.80 (119)."""
    return Independent(LogNormal(20.63, 17), LogNormal(163.80, 119))


def _sharegpt() -> Lengths:
    """ShareGPT: prompts 343.76 (median 148), answers 237.20 (152)."""
    return Independent(LogNormal(343.76, 148), LogNormal(237.20, 152))


def _longbench() -> Lengths:
    """LongBench: prompts 2686.89 (median 2736.5), answers 101.78 (19).

    No log-normal has its mean below its median, so prompts are a normal cut off at 1 and 4096 with a deviation of 880,
    which has that mean and that median. Answers, half of them a few words and some of them summaries, are a log-normal
    cut off at 2048: uncut, its mean would hang on one answer in a thousand.
    """
    return Independent(TruncatedNormal(2686.89, 880, 1, 4096), LogNormal(101.78, 19, maximum=2048))


DATASETS: Mapping[str, Callable[[], Lengths]] = {"alpaca": _alpaca, "sharegpt": _sharegpt, "longbench": _longbench}
"""By the means and medians of PaDG's Table 4."""


def dataset(name: str) -> Lengths:
    """A dataset's lengths by its name."""
    if name not in DATASETS:
        raise BadInput("dataset", f"`{name}` is not known", f"choose one of {', '.join(DATASETS)}")
    return DATASETS[name]()


def _standard(share: float) -> float:
    return _NORMAL.inv_cdf(min(max(share, _LEAST), 1.0 - _LEAST))
