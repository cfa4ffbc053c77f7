"""What the operator of an ingress has configured beside its settings: projects, aliases, policies, prices, the queue.

All of it may change while the ingress runs (`Ingress.apply`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from serai.ingress.limits import Limits, Price
from serai.ingress.queueing import QueueSettings
from serai.ingress.requirements import Providers

DEFAULT_PROJECT = "default"
"""Of keys that name none."""


class Period(StrEnum):
    """For how long a budget is; it begins anew with the next day, Monday or month (UTC), or never."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    EVER = "ever"


@dataclass(frozen=True, slots=True)
class Project:
    """Who pays: all keys and people of one project share what stands here."""

    limits: Limits = Limits()
    budget_period: Period = Period.MONTH
    weight: float = 1.0
    """With 2 it is due twice as much of a queue as others."""
    priority: str = "normal"
    """One of `queueing.CLASSES`: the highest class that its requests may have."""
    models: tuple[str, ...] | None = None
    """Patterns (`*`, `?`, `[abc]`) of the models it may use; None = all."""
    providers: Providers = Providers()
    may_opt_out: bool = False
    """Whether its callers may ask not to be in the usage records by name."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """In effect at one time. Patterns are looked at in their order, a name that is written out goes before them."""

    projects: Mapping[str, Project] = field(default_factory=lambda: {DEFAULT_PROJECT: Project()})
    keys: Mapping[str, Limits] = field(default_factory=dict)
    """Limits of single keys, by the key's name; from the keys file."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other names of models: the first target that can answer now is taken."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Routing policies, by model or pattern; all others have the one of the settings."""
    prices: Mapping[str, Price] = field(default_factory=dict)
    """By model or pattern."""
    queue: QueueSettings = QueueSettings()
