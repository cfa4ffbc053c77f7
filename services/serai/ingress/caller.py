"""Who asks, and what they may: the holder of a key, or a person who signed in. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from serai.ingress.configuration import DEFAULT_PROJECT, Project
from serai.ingress.patterns import fits
from serai.ingress.queueing import CLASSES
from serai.ingress.requirements import Providers


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of whoever asks, their project's part included."""

    name: str
    """Of the key, or of the person."""
    project: str = DEFAULT_PROJECT
    models: tuple[tuple[str, ...], ...] = ()
    """Lists of patterns; a model must fit one of each list. Empty = all models."""
    providers: Providers = Providers()
    """Who may answer it at all; a request can only narrow it."""
    priority: str = "normal"
    """One of `queueing.CLASSES`: the highest class that its requests may have."""
    weight: float = 1.0
    """Its project's share of a queue."""
    scopes: tuple[str, ...] = ()
    """Whose limits it counts against: `key:NAME`, `project:NAME`."""
    may_opt_out: bool = False
    """Whether it may ask not to be in the usage records by name."""
    expires_s: float = math.inf
    """Seconds since the epoch; then it has to be looked at again."""

    def may_use(self, model: str, alias: str = "") -> bool:
        """Whether each list has a pattern for `model`, or for the name by which it was asked for: who may use an alias
        may use what it stands for, by that name."""
        return all(fits(model, patterns) or (alias != "" and fits(alias, patterns)) for patterns in self.models)


ANONYMOUS = Caller("anonymous", scopes=(f"project:{DEFAULT_PROJECT}",))


def caller_of(
    name: str,
    project_name: str,
    project: Project,
    *,
    models: tuple[str, ...] | None,
    providers: Providers,
    priority: str | None = None,
    scopes: tuple[str, ...] = (),
    expires_s: float = math.inf,
) -> Caller:
    """Somebody of a project: what they may is what both they and their project may."""
    return Caller(
        name=name,
        project=project_name,
        models=tuple(patterns for patterns in (models, project.models) if patterns is not None),
        providers=project.providers.both(providers),
        priority=max(priority or project.priority, project.priority, key=CLASSES.index),
        weight=project.weight,
        scopes=(*scopes, f"project:{project_name}"),
        may_opt_out=project.may_opt_out,
        expires_s=expires_s,
    )
