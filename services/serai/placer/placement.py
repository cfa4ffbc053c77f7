"""The words of the placement programme: what binds it, and what it answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from serai.placer.options import Option
from serai.runtime.fields import BadInput

Objective = Literal["max-min", "latency"]
Status = Literal["optimal", "feasible", "greedy"]
"""`optimal`: every level proved. `feasible`: the solver's, its time ran out. `greedy`: not the solver's."""


TIME_S_MAX = 3600.0


class BadRules(BadInput):
    """Rules that contradict each other or the fleet: which, what is wrong, what to do."""


class BadRunning(BadInput):
    """A running session that cannot be where it is said to be."""


@dataclass(frozen=True, slots=True)
class Running:
    """A session that runs now."""

    session: str
    option: Option
    nodes: tuple[tuple[str, int], ...]
    """Node and GPUs there."""
    pinned: bool = False
    """May be neither stopped nor moved."""
    since_s: float = 0.0
    """For how long it has served."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One instance of the wanted placement."""

    option: Option
    nodes: tuple[tuple[str, int], ...]
    """Node and GPUs there."""
    session: str | None = None
    """The running session that it is; None: to be started."""


@dataclass(frozen=True)
class Rules:
    """What binds all models."""

    quota_gpus: Mapping[str, int] = field(default_factory=dict)
    """At most so many GPUs for all models of a project."""
    useful_s_min: float = 300.0
    """An instance is started only where it can serve at least so long before the allocation ends."""
    horizon_s: float = 3600.0
    """Over which a change must pay for itself."""
    gpu_price: Mapping[str, float] = field(default_factory=dict)
    """Cost of a GPU-hour by kind, against `change_price`; 1 where not given."""
    worst_share_slack: float = 0.0
    """The worst-served share may be so far below its optimum, as a part of it, where the total gains; 0: max-min."""
    change_price: float = 1.0
    """Cost of a GPU-hour spent loading weights instead of serving, and of one lost with a stopped session."""


@dataclass(frozen=True, slots=True)
class SolveLimits:
    """How long to search."""

    time_s: float = 10.0
    """For all levels together; 0: greedy only."""
    workers: int = 2
    gap: float = 0.0
    """A level is good enough when its gap is no larger."""
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.time_s <= TIME_S_MAX:
            raise BadRules("time_s", f"is {self.time_s}", f"give 0 to {TIME_S_MAX:g} seconds")
        if not (self.workers >= 1 and 0 <= self.gap < 1):
            raise BadRules("workers and gap", f"are {self.workers} and {self.gap}", "give 1 or more, and 0 to 1")


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the objective, and how far it was taken."""

    name: str
    value: float
    bound: float
    """No placement is better than this, as far as was proved."""
    proved: bool
    solve_s: float

    @property
    def gap(self) -> float:
        """Relative distance between value and bound."""
        return abs(self.bound - self.value) / max(abs(self.bound), abs(self.value), 1e-12)


@dataclass(frozen=True, slots=True)
class Missing:
    """What a model lacks, and why."""

    model: str
    what: str
    """`capacity`, `replicas`, or `option`."""
    amount: float
    """Requests a second, or replicas, that are missing."""
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The wanted placement."""

    placed: tuple[Placed, ...]
    served_share: Mapping[str, float]
    """Per model the share of its planned demand that is served within its targets, at most 1."""
    levels: tuple[Level, ...]
    status: Status
    solve_s: float
    first_plan_s: float
    """When the first whole placement was there."""
    missing: tuple[Missing, ...] = ()

    @property
    def proved(self) -> bool:
        """Whether no better placement exists."""
        return bool(self.levels) and all(level.proved for level in self.levels)

    @property
    def gap(self) -> float:
        """The largest gap of any level."""
        return max((level.gap for level in self.levels), default=0.0)
