"""From usage to demand: what was asked of each model lately, and how sure that is. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from serai.contracts.usage import DemandAnswer, LengthQuantiles, ModelUse
from serai.placer.demand import CV_MAX, RATE_MAX_PER_S, TOKENS_MAX, LengthSpread, ModelDemand
from serai.placer.placement_file import PlacedModel

_Z = 1.645
"""Nine times of ten a Poisson count lies within so many deviations."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What usage says of one model."""

    requests_s: float = 0.0
    low: float = 0.0
    high: float = 0.0
    burstiness_cv: float = 1.0
    prompt: LengthSpread | None = None
    output: LengthSpread | None = None
    prefix_reuse: float = 0.0
    unused_s: float = math.inf
    """Since the last request, as far back as was asked; infinite = none in all that time."""


NOTHING_SEEN = Observed()


def observed(answer: DemandAnswer, *, bucket_s: float, window_s: float, age_s: float) -> dict[str, Observed]:
    """Per model. `window_s`: arrivals of so long count. `age_s`: how much of the last bucket is over."""
    return {use.model: _observed(use, bucket_s, window_s, min(age_s, bucket_s)) for use in answer.models}


def _observed(use: ModelUse, bucket_s: float, window_s: float, age_s: float) -> Observed:
    buckets = max(1, math.ceil(window_s / bucket_s))
    recent = use.arrivals[-buckets:]
    seconds = max(bucket_s * (len(recent) - 1) + age_s, age_s, 1e-3)
    count = sum(recent)
    rate = min(count / seconds, RATE_MAX_PER_S)
    spread = _Z * math.sqrt(count) * _cv(recent[:-1] or recent) / seconds
    last = next((place for place, arrived in enumerate(reversed(use.arrivals)) if arrived), None)
    unused_s = math.inf if last is None else 0.0 if last == 0 else age_s + (last - 1) * bucket_s
    return Observed(
        rate,
        max(0.0, rate - spread),
        min(rate + spread, RATE_MAX_PER_S),
        min(_cv(recent[:-1] or recent), CV_MAX),
        _spread(use.prompt),
        _spread(use.output),
        min(1.0, max(0.0, use.cached_share)),
        unused_s,
    )


def _cv(counts: Sequence[int]) -> float:
    """Burstiness by the spread of counts: their variance over their mean is 1 for Poisson."""
    if len(counts) < 3 or not (mean := sum(counts) / len(counts)):
        return 1.0
    variance = sum((count - mean) ** 2 for count in counts) / (len(counts) - 1)
    return math.sqrt(max(0.25, variance / mean))


def _spread(found: LengthQuantiles) -> LengthSpread | None:
    if found.mean <= 0:
        return None
    return LengthSpread(*[min(max(1.0, value), TOKENS_MAX) for value in (found.mean, found.p50, found.p90, found.p99)])


def demand_of(model: PlacedModel, seen: Observed) -> ModelDemand:
    """What the file says, or what usage says where that is more."""
    given = model.demand
    lengths = (given.prompt, given.output)
    if not model.lengths_given:
        lengths = (seen.prompt or given.prompt, seen.output or given.output)
    if seen.requests_s <= given.requests_s:
        return replace(given, prompt=lengths[0], output=lengths[1])
    most = given.requests_s_high or 0.0
    return replace(
        given,
        requests_s=seen.requests_s,
        requests_s_low=min(max(seen.low, given.requests_s_low or 0.0), seen.requests_s),
        requests_s_high=max(seen.high, most, seen.requests_s),
        burstiness_cv=seen.burstiness_cv,
        prefix_reuse=max(given.prefix_reuse, seen.prefix_reuse),
        prompt=lengths[0],
        output=lengths[1],
    )
