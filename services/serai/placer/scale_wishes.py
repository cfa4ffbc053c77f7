"""What models' macro-schedulers want: so many instances each, as long as it is said again. Pure: takes `now_s`.

A wish counts as demand: as much as so many instances of the model serve. So it weighs as usage does, against other
models and under the same rules. No more instances than that are given: whoever sees each request says how many it
needs, and usage says so again when the wishes end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from serai.contracts.admission import ScaleWish
from serai.placer.demand import ModelDemand

OWNER = "placer"
INSTANCES_MAX = 10_000
HOLDS_MAX_S = 600.0
_UNLESS_FULL = 0.5
"""An instance less would not be enough, and none more is needed."""


class ScaleWishes:
    """Of one site."""

    def __init__(self) -> None:
        self._wishes: dict[str, tuple[ScaleWish, float]] = {}

    def hear(self, wish: ScaleWish, models: Collection[str], now_s: float) -> str:
        """Why it is not obeyed; empty: it is."""
        if wish.owner != OWNER:
            return f"it is for the {wish.owner}"
        if wish.model not in models:
            return f"the placement file has no model {wish.model!r}"
        if not (0 <= wish.instances <= INSTANCES_MAX and 0 < wish.holds_s <= HOLDS_MAX_S):
            most = f"{INSTANCES_MAX} instances, for up to {HOLDS_MAX_S:g} s"
            return f"it wants {wish.instances} instances for {wish.holds_s:g} s: give 0 to {most}"
        known = self._wishes.get(wish.model)
        if known is not None and known[0].epoch > wish.epoch and known[1] > now_s:
            return f"it is of epoch {wish.epoch}, and the model's group is led with epoch {known[0].epoch}"
        self._wishes[wish.model] = (wish, now_s + wish.holds_s)
        return ""

    def wanted(self, now_s: float) -> dict[str, int]:
        """Instances by model, of wishes that are not over."""
        self._wishes = {model: kept for model, kept in self._wishes.items() if kept[1] > now_s}
        return {model: wish.instances for model, (wish, _) in self._wishes.items()}


def as_wished(demand: ModelDemand, instances: int | None, one_requests_s: float, elsewhere: int = 0) -> ModelDemand:
    """`demand`, with what makes just so many instances needed, within the bounds that it has; one of them serves
    `one_requests_s`, and `elsewhere` are of no pool. None: nobody wishes for anything, and usage alone says."""
    if instances is None:
        return demand
    least, most = max(1, demand.min_replicas), demand.max_replicas
    here = instances - elsewhere
    count = max(least, here if most is None else min(here, most))
    wanted_s = max(demand.requests_s, (count + elsewhere - _UNLESS_FULL) * one_requests_s)
    high = demand.requests_s_high
    return replace(
        demand,
        requests_s=wanted_s,
        requests_s_high=None if high is None else max(high, wanted_s),
        max_replicas=count,
    )
