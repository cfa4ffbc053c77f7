"""What a plan is made from: pools, engines, models, and the rules of change. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from serai.contracts.placement import Assignment, RunState
from serai.placer.demand import ModelDemand
from serai.placer.options import Option

PREDICTED_SLACK = 0.02
"""Predicted rates are some ten percent off, so a worst share that is a fiftieth lower is not known to be lower; large
fleets are solved no more exactly than that either."""


class Fairness(StrEnum):
    """Whom a shortage falls on."""

    STRICT = "strict"
    """The worst-served model's share is as large as it can be, however dear that is."""
    BALANCED = "balanced"
    """It may be down to half of that, where more requests are served in all."""

    def slack(self, options: Iterable[Option]) -> float:
        """As in `placement.Rules.worst_share_slack`. Where rates are predictions, strict is no stricter than
        `PREDICTED_SLACK`."""
        if self is Fairness.BALANCED:
            return 0.5
        return 0.0 if all(option.measured for option in options) else PREDICTED_SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """When a change is worth it. Times in seconds."""

    fairness: Fairness = Fairness.STRICT
    horizon_s: float = 1800.0
    """Over which a change must pay for itself."""
    margin: float = 1.5
    """A gain must exceed its cost by this factor."""
    fairness_gain: float = 0.05
    """A rise of the worst-served model's share by so much is worth an exchange in itself."""
    cool_down_s: float = 300.0
    """What has been started is not stopped again for so long, unless it is of no use at all."""
    cold_after_s: float | None = 900.0
    """A model without a request for so long lets its engines go, but for its minimum; None = never."""
    drain_s: float = 60.0
    """How long running requests may take when an engine ends."""
    moves_per_hour: int = 60
    """Starts and stops."""
    gpu_share_per_change: float = 0.5
    """Of all GPUs, at most so many change hands in one plan; one engine may always."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An engine that runs or is about to, at one pool."""

    id: str
    option: Option
    pool: str
    assignment: Assignment
    state: RunState
    session: str = ""
    age_s: float = 0.0
    """Since it was started, as far as is known."""
    pinned: bool = False
    in_flight: int = 0

    @property
    def model(self) -> str:
        return self.option.model

    @property
    def serving(self) -> bool:
        return self.state is RunState.SERVING


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """How a model's engines are started, and what is known of its use."""

    demand: ModelDemand
    engine: str = "vllm"
    path: str = ""
    arguments: tuple[str, ...] = ()
    others_requests_s: float = 0.0
    """Capacity of sessions that are not of pools."""
    unused_s: float = 0.0
    """How long no request has come."""
    prewarm: bool = False
    """A burst is predicted: it is not cold, whatever it was asked lately."""

    @property
    def model(self) -> str:
        return self.demand.model


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What a plan needs to know of a pool."""

    name: str
    gpu: str
    gpus: int
    provider: str = ""
    engines: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is known when a plan is made."""

    pools: Sequence[PoolFacts]
    instances: Sequence[Instance]
    """Live ones: those that drain or have failed are not among them."""
    models: Sequence[ModelFacts]
    moves_last_hour: int = 0
    failed: Mapping[str, float] = field(default_factory=dict)
    """`MODEL at POOL` that is not tried again for so many seconds."""
    warm: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Pools that had a cold model last."""
    turns: Mapping[str, int] = field(default_factory=dict)
    """How often within the hour a model turned from more engines to fewer, or back."""


def failed_key(model: str, pool: str) -> str:
    """Names a model's failure at a pool."""
    return f"{model} at {pool}"
