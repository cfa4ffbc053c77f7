"""What launchers are asked for: more pool agents where models lack what no pool has room for, fewer where pools have
been empty. Pure.

Growth is at once; a pool is given back only when one has been empty for `IDLE_S`, one at a time, since a job in a queue
is dearer than an idle one that one has. Which job ends then, the launcher says; what still ran there is started on an
empty pool first. Kubernetes gives no time for that, so there all of them have to be empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serai.placer.options import Option
from serai.placer.placement import Missing
from serai.placer.placement_file import Launchable, PlacedModel
from serai.placer.pools import PoolView

IDLE_S = 600.0


@dataclass(frozen=True, slots=True)
class Wish:
    """So many pool agents of one launchable, and why."""

    launchable: Launchable
    count: int
    why: str


def wishes(
    launchables: Sequence[Launchable],
    views: Sequence[PoolView],
    models: Mapping[str, PlacedModel],
    options: Sequence[Option],
    missing: Sequence[Missing],
    empty_s: Mapping[str, float],
    asked: Mapping[str, int],
) -> list[Wish]:
    """One for each launchable. `empty_s`: pools without an engine, and for how long; `asked`: what was asked for last,
    by launchable."""
    lacking = {one.model: one.amount for one in missing if one.what in ("capacity", "replicas", "option")}
    return [_wish(one, views, models, options, dict(lacking), empty_s, asked) for one in launchables]


def _wish(
    one: Launchable,
    views: Sequence[PoolView],
    models: Mapping[str, PlacedModel],
    options: Sequence[Option],
    lacking: dict[str, float],
    empty_s: Mapping[str, float],
    asked: Mapping[str, int],
) -> Wish:
    ours = [view for view in views if (view.gpu, view.gpus, view.report.provider) == (one.gpu, one.gpus, one.provider)]
    there = len(ours)
    before = asked.get(one.name, there)
    needed = {model: _pools_for(model, amount, one, models, options) for model, amount in lacking.items()}
    more = sum(needed.values())
    if more:
        count = min(one.most, max(before, there + more))
        who = " and ".join(f"{model} lacks {lacking[model]:.2f}" for model, pools in sorted(needed.items()) if pools)
        return Wish(one, count, who)
    idle = [view.name for view in ours if empty_s.get(view.name, 0.0) >= IDLE_S]
    enough = len(idle) == there if one.launcher == "kubernetes" else bool(idle)
    if idle and enough and before > one.least and there >= before:
        return Wish(one, before - 1, f"{idle[0]} has been empty for {empty_s[idle[0]]:.0f} s")
    return Wish(one, min(one.most, max(one.least, before)), "as before")


def _pools_for(
    model: str, amount: float, one: Launchable, models: Mapping[str, PlacedModel], options: Sequence[Option]
) -> int:
    """How many such pools would bring what the model lacks; 0 when they bring nothing."""
    placed = models.get(model)
    if placed is None or (placed.demand.providers_allowed and one.provider not in placed.demand.providers_allowed):
        return 0
    fits = [
        option
        for option in (*placed.instances, *options)
        if (option.model, option.gpu) == (model, one.gpu) and option.gpus <= one.gpus and option.requests_s > 0
    ]
    if not fits:
        return 0
    best = max(option.requests_s * (one.gpus // option.gpus) for option in fits)
    return max(1, math.ceil(amount / best))
