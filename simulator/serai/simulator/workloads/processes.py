"""When requests arrive: gaps of a family, at a mean rate that may change over time.

Gaps are drawn with mean 1 and laid on the integral of the rate, so that each family works with each course of the rate,
and that two rates with one seed get the same pattern, stretched: policies and rates are compared on common randomness.
A process is stationary from its start (its first gap is what is left of a gap already begun); otherwise bursty
families would have more arrivals than their rate says, by (CV² − 1) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from serai.runtime.fields import BadInput

NS = 1_000_000_000
CV_MIN, CV_MAX = 0.02, 50.0
"""Outside, a family is either even in all but name or one burst and silence."""


class Gaps(Protocol):
    """A family of gaps between arrivals, with mean 1."""

    def first(self, random: Random) -> float:
        """From any moment to the next arrival."""

    def draw(self, random: Random) -> float:
        """From one arrival to the next."""


@dataclass(frozen=True, slots=True)
class PoissonGaps:
    """Independent users: CV 1."""

    def first(self, random: Random) -> float:
        return -math.log(1.0 - random.random())

    draw = first


@dataclass(frozen=True, slots=True)
class EvenGaps:
    """All gaps the same: CV 0. Begins with half a gap, so that a duration holds exactly rate · duration arrivals."""

    def first(self, random: Random) -> float:
        return 0.5

    def draw(self, random: Random) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class GammaGaps:
    """Gamma with a coefficient of variation: shape 1 / CV²."""

    cv: float

    def __post_init__(self) -> None:
        _check_cv(self.cv)

    def first(self, random: Random) -> float:
        # A moment falls into gaps in proportion to their length; length-biased, the shape grows by one.
        square = self.cv * self.cv
        return random.random() * random.gammavariate(1.0 / square + 1.0, square)

    def draw(self, random: Random) -> float:
        square = self.cv * self.cv
        return random.gammavariate(1.0 / square, square)


class WeibullGaps:
    """Weibull with a coefficient of variation; its shape is found by bisection."""

    __slots__ = ("_scale", "cv", "shape")

    def __init__(self, cv: float) -> None:
        _check_cv(cv)
        self.cv = cv
        self.shape = weibull_shape(cv)
        self._scale = math.exp(-math.lgamma(1.0 + 1.0 / self.shape))

    def first(self, random: Random) -> float:
        # Length-biased, (gap / scale) ** shape is Gamma-distributed with shape 1 + 1 / shape.
        biased = random.gammavariate(1.0 + 1.0 / self.shape, 1.0) ** (1.0 / self.shape)
        return random.random() * self._scale * float(biased)

    def draw(self, random: Random) -> float:
        return self._scale * float((-math.log(1.0 - random.random())) ** (1.0 / self.shape))


def weibull_shape(cv: float) -> float:
    """The shape k with Γ(1 + 2/k) / Γ(1 + 1/k)² = 1 + CV²."""
    target = math.log1p(cv * cv)
    low, high = 0.05, 200.0
    while high / low > 1.0 + 1e-12:
        middle = math.sqrt(low * high)
        spread = math.lgamma(1.0 + 2.0 / middle) - 2.0 * math.lgamma(1.0 + 1.0 / middle)
        low, high = (middle, high) if spread > target else (low, middle)
    return math.sqrt(low * high)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time in which the mean rate stays or moves in a straight line."""

    duration_s: float
    rate_from_per_s: float
    rate_to_per_s: float

    def __post_init__(self) -> None:
        if not (0 < self.duration_s < math.inf):
            raise BadInput("duration_s", f"is {self.duration_s}", "give seconds above 0")
        for name in ("rate_from_per_s", "rate_to_per_s"):
            if not (0 <= getattr(self, name) < math.inf):
                raise BadInput(name, f"is {getattr(self, name)}", "give requests per second, 0 or more")

    @property
    def mean_arrivals(self) -> float:
        """Arrivals to expect."""
        return self.duration_s * (self.rate_from_per_s + self.rate_to_per_s) / 2.0

    def when_s(self, arrivals: float) -> float:
        """Seconds into the segment at which `arrivals` are to be expected. A root of the parabola, in the form that
        does not cancel."""
        start = self.rate_from_per_s
        slope = (self.rate_to_per_s - start) / self.duration_s
        root = math.sqrt(max(0.0, start * start + 2.0 * slope * arrivals))
        return 0.0 if arrivals == 0.0 else min(self.duration_s, 2.0 * arrivals / (start + root))


Course = Callable[[Random], Iterable[Segment]]
"""How the mean rate goes over time; made anew, with its own randomness, each time."""


@dataclass(frozen=True, slots=True)
class OnOff:
    """Bursts: exponential times on and off, each with a rate of its own (a Markov-modulated Poisson process
    with two states, given Poisson gaps)."""

    rate_on_per_s: float
    rate_off_per_s: float
    mean_on_s: float
    mean_off_s: float
    duration_s: float

    @property
    def mean_rate_per_s(self) -> float:
        """Over a long time."""
        on, off = self.mean_on_s, self.mean_off_s
        return (self.rate_on_per_s * on + self.rate_off_per_s * off) / (on + off)

    def __call__(self, random: Random) -> Iterator[Segment]:
        left_s = self.duration_s
        on = random.random() * (self.mean_on_s + self.mean_off_s) < self.mean_on_s
        while left_s > 0:
            drawn_s = -math.log(1.0 - random.random()) * (self.mean_on_s if on else self.mean_off_s)
            # Whole nanoseconds: a last bit of the logarithm must not move what follows.
            length_s = min(left_s, max(1, round(drawn_s * NS)) / NS)
            rate = self.rate_on_per_s if on else self.rate_off_per_s
            yield Segment(length_s, rate, rate)
            left_s, on = left_s - length_s, not on


def steady(rate_per_s: float, duration_s: float) -> Course:
    """One mean rate."""
    segment = Segment(duration_s, rate_per_s, rate_per_s)
    return lambda random: (segment,)


def steps_and_ramps(segments: Iterable[Segment]) -> Course:
    """A given course: steps where one segment ends at another rate than the next begins."""
    given = tuple(segments)
    return lambda random: given


def arrival_times_ns(gaps: Gaps, course: Course, seed: int | str, *, thinned: float = 1.0) -> Iterator[int]:
    """Times of arrival in nanoseconds, in order, until the course ends. `thinned` 5: a fifth of the rate."""
    random = Random(f"{seed}/gaps")
    # Gaps become integers as they are drawn: sums are exact, and the last bit of a logarithm does not reach them.
    unit = thinned * NS
    begin_ns, begin, arrival = 0, 0, round(gaps.first(random) * unit)
    for segment in course(Random(f"{seed}/course")):
        end = begin + round(segment.mean_arrivals * NS)
        while arrival < end:
            yield begin_ns + round(segment.when_s((arrival - begin) / NS) * NS)
            arrival += round(gaps.draw(random) * unit)
        begin_ns, begin = begin_ns + round(segment.duration_s * NS), end


def _check_cv(cv: float) -> None:
    if not CV_MIN <= cv <= CV_MAX:
        raise BadInput("cv", f"is {cv}", f"give {CV_MIN} to {CV_MAX}, or use `even` for gaps without variation")
