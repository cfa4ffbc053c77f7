"""Deployments with as many slots as they have now: the site file's, or more where somebody asks for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from serai.contracts.launcher import ScaleRequest
from serai.launcher.deployments import Deployment, wished_slots


class Scaled:
    """Of one site file."""

    def __init__(self, deployments: Sequence[Deployment]) -> None:
        self.now = {one.name: one for one in deployments}
        self.asked: dict[str, int] = {}
        """What was asked for last, by deployment."""
        self._given = {one.name: one.count for one in deployments}

    @property
    def names(self) -> str:
        """For people."""
        return ", ".join(sorted(self.now)) or "none"

    def why_not(self, request: ScaleRequest) -> str:
        """Empty = it may."""
        known = self.now.get(request.deployment)
        if known is None:
            return f"there is no deployment {request.deployment!r} (there is {self.names})"
        if not 0 <= request.count <= max(known.scale_to, self._given[known.name] if known.scale_to else -1):
            return (
                f"deployment {known.name!r} may be scaled to {known.scale_to} at most, and {request.count} was asked "
                "for; the site file says `scale_to`"
            )
        return ""

    def to(self, name: str, count: int) -> bool:
        """So many slots from now on; whether that is a change. One that may not be scaled stays as it is."""
        known = self.now.get(name)
        if known is None or not known.scale_to:
            return False
        self.now[name] = replace(known, count=min(count, max(known.scale_to, self._given[name])))
        self.asked[name] = count
        return known.count != self.now[name].count

    def restore(self, asked: Mapping[str, int]) -> None:
        """As the launcher before had it."""
        for name, count in asked.items():
            self.to(name, count)

    def wished(self, model: str, instances: int) -> tuple[str, int] | None:
        """Which deployment is to have how many slots for so many instances of a model; None when none may be scaled."""
        ours = [one for one in self.now.values() if one.model == model]
        return wished_slots(ours, instances, self._given)
