"""What the operator of an ingress has configured beside its settings: who may do what, names, policies, prices, the
queue. Pure; `configuration_file` reads it.

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
"""Of keys that name none. It is there even when nobody has written it, without limits."""
DEFAULT_POLICY = "least-loaded"


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
    """Of the project's budget, and of those of its keys."""
    weight: float = 1.0
    """With 2 it is due twice as much of a queue as others."""
    priority: str = "normal"
    """One of `queueing.CLASSES`: the highest class that its requests may have."""
    models: tuple[str, ...] | None = None
    """Patterns of the models it may use; None = all."""
    providers: Providers = Providers()
    may_opt_out: bool = False
    """Whether its callers may ask not to be in the usage records by name."""


@dataclass(frozen=True, slots=True)
class Issuer:
    """An OpenID provider whose tokens are taken."""

    issuer: str
    """As it stands in `iss`, and where its keys are found."""
    audience: tuple[str, ...]
    """One of them must be in `aud`."""
    projects: Mapping[str, str]
    """By group: the project of its members. The first that fits counts; the group `*` is everyone."""
    groups_claim: str = "groups"
    name_claim: str = "sub"
    """What people are called in usage records and logs."""
    models: tuple[str, ...] | None = None
    providers: Providers = Providers()
    algorithms: tuple[str, ...] = ("RS256", "ES256", "PS256", "EdDSA")
    leeway_s: float = 30.0
    """How far its clock and ours may differ."""


class Interchange(StrEnum):
    """Whether sessions of one model that differ in their fingerprint stand in for one another."""

    SAME = "same"
    """Never: a request that has been at one goes to others of the same fingerprint only."""
    RETRIES = "retries"
    """Before the client has seen a byte, yes; a stream that broke off goes on at the same fingerprint only."""
    ANY = "any"
    """A stream goes on at another, too."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """In effect at one time. What goes by model goes by name or pattern (`patterns`)."""

    projects: Mapping[str, Project] = field(default_factory=lambda: {DEFAULT_PROJECT: Project()})
    keys: Mapping[str, Limits] = field(default_factory=dict)
    """Limits of single keys, by the key's name; from the keys file, never from the configuration's."""
    oidc: tuple[Issuer, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other names of models, with the models they may mean (`flattened`): the first that can answer now is taken."""
    policy: str = DEFAULT_POLICY
    policies: Mapping[str, str] = field(default_factory=dict)
    """Routing policies by model; all others have `policy`."""
    fingerprints: Mapping[str, Interchange] = field(default_factory=dict)
    """By model; `Interchange.RETRIES` for all others."""
    prices: Mapping[str, Price] = field(default_factory=dict)
    """By model; all others cost nothing."""
    queue: QueueSettings = QueueSettings()

    def targets(self, asked: str) -> tuple[str, ...]:
        """The models that the name `asked` may mean, in their order."""
        return self.aliases.get(asked) or (asked,)


class AliasCycle(ValueError):
    """An alias that leads back to itself; the text shows the way."""


def flattened(aliases: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Each alias with the models it means in the end: targets that are aliases themselves are followed. An alias among
    its own targets is the model of that name, so `a: [a, b]` is "a, or b in its stead". Raises AliasCycle."""

    found: dict[str, tuple[str, ...]] = {}

    def followed(alias: str, way: tuple[str, ...]) -> tuple[str, ...]:
        if alias in way:
            raise AliasCycle(" → ".join([*way[way.index(alias) :], alias]))
        if alias not in found:
            models: list[str] = []
            for target in aliases[alias]:
                is_model = target == alias or target not in aliases
                models += [target] if is_model else followed(target, (*way, alias))
            found[alias] = tuple(dict.fromkeys(models))
        return found[alias]

    return {alias: followed(alias, ()) for alias in aliases}
