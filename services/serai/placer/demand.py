"""What is asked for, per model: rate, burstiness, lengths, targets, and the rules that bind a model. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from serai.runtime.fields import BadInput

RATE_MAX_PER_S = 1e6
TOKENS_MAX = 10_000_000
CV_MAX = 1000.0


class BadDemand(BadInput):
    """A demand that cannot be: which model and field, what is wrong, what to do."""


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """Tokens of prompts or answers: mean and percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def about(cls, mean: float, spread: float = 0.8) -> LengthSpread:
        """A log-normal around `mean` whose logarithm has the deviation `spread`, where no more is known."""
        median = mean * math.exp(-spread * spread / 2)
        return cls(mean, median, median * math.exp(1.2816 * spread), median * math.exp(2.3263 * spread))


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """What is asked of one model. Rates are requests a second."""

    model: str
    requests_s: float
    """The expected mean over the horizon."""
    prompt: LengthSpread
    output: LengthSpread
    requests_s_low: float | None = None
    requests_s_high: float | None = None
    """Between these it will lie, nine times of ten; None: not known."""
    burstiness_cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals; 1 is Poisson."""
    prefix_reuse: float = 0.0
    """Share of prompt tokens that a prefix cache finds."""
    slo_ttft_s: float = math.inf
    slo_tpot_s: float = math.inf
    priority: float = 1.0
    """Weight in the total; the worst-served model counts whatever its priority."""
    min_replicas: int = 0
    """Instances in as many failure domains."""
    max_replicas: int | None = None
    providers_allowed: tuple[str, ...] = ()
    """Where its data may go; empty: anywhere."""
    gpus_allowed: tuple[str, ...] = ()
    """Kinds of GPU, by catalogue name; empty: any."""
    quantisations: tuple[str, ...] = ()
    """Weight formats that exist of it; empty: the checkpoint's own."""
    project: str = ""
    """Whose quota its GPUs count against (`Rules.quota_gpus`)."""

    def __post_init__(self) -> None:
        for name in ("requests_s", "requests_s_low", "requests_s_high"):
            _within(self.model, name, getattr(self, name), 0.0, RATE_MAX_PER_S)
        _within(self.model, "burstiness_cv", self.burstiness_cv, 0.0, CV_MAX)
        _within(self.model, "prefix_reuse", self.prefix_reuse, 0.0, 1.0)
        _within(self.model, "priority", self.priority, 1e-6, 1e6)
        for name in ("prompt", "output"):
            _within(self.model, f"{name}.mean", getattr(self, name).mean, 1.0, TOKENS_MAX)
        for name in ("slo_ttft_s", "slo_tpot_s"):
            if not getattr(self, name) > 0:
                raise BadDemand(_at(self.model, name), f"is {getattr(self, name)}", "give seconds above 0")
        if not self.model:
            raise BadDemand("model", "is empty", "name the model")
        low, high = self.requests_s_low or 0.0, self.requests_s_high
        if high is not None and not low <= self.requests_s <= high:
            raise BadDemand(
                _at(self.model, "requests_s"),
                f"{self.requests_s} is not between requests_s_low {low} and requests_s_high {high}",
                "correct one of the three",
            )
        if self.min_replicas < 0 or (self.max_replicas is not None and self.max_replicas < self.min_replicas):
            raise BadDemand(
                _at(self.model, "min_replicas"),
                f"{self.min_replicas} contradicts max_replicas {self.max_replicas}",
                "give 0 ≤ min_replicas ≤ max_replicas",
            )

    @property
    def planned_requests_s(self) -> float:
        """What capacity is planned for: the upper estimate where there is one."""
        return self.requests_s if self.requests_s_high is None else self.requests_s_high


def checked(demands: Sequence[ModelDemand]) -> tuple[ModelDemand, ...]:
    """`demands`, or BadDemand when a model is asked for twice."""
    twice = [name for name, times in Counter(demand.model for demand in demands).items() if times > 1]
    if twice:
        raise BadDemand(f"model `{twice[0]}`", "appears twice", "add its demands up")
    return tuple(demands)


def _at(model: str, name: str) -> str:
    return f"demand of `{model}`, {name}"


def _within(model: str, name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise BadDemand(_at(model, name), f"is {value}", f"give {least:g} to {most:g}")
