"""In which order the steps of a plan are done: starts first; what ends waits for what takes its place. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from serai.contracts.placement import ActionKind, PlanAction


def in_order(actions: Sequence[PlanAction], starting: Mapping[str, Collection[str]]) -> list[PlanAction]:
    """Starts before stops. A stop waits for the new engines of its model, unless they in turn need the GPUs that it
    frees; and for those of `starting` (ids by model), which load already."""
    starts = [action for action in actions if action.kind is ActionKind.START]
    stops = [action for action in actions if action.kind is ActionKind.STOP]
    freed = {stop.pool for stop in stops}
    waits: dict[str, set[str]] = {}
    ordered = list(starts)
    for stop in stops:
        model = stop.assignment.model
        after = sorted(starting.get(model, ()))
        for start in starts:
            if start.assignment.model != model:
                continue
            if start.pool in freed:
                if _reaches(waits, start.pool, stop.pool):
                    continue
                waits.setdefault(stop.pool, set()).add(start.pool)
            after.append(start.assignment.id)
        ordered.append(replace(stop, after=after))
    return ordered


def _reaches(waits: Mapping[str, set[str]], from_pool: str, to_pool: str) -> bool:
    """Whether room at one pool waits for room at the other already."""
    seen: set[str] = set()
    open_pools = [from_pool]
    while open_pools:
        pool = open_pools.pop()
        if pool == to_pool:
            return True
        if pool not in seen:
            seen.add(pool)
            open_pools += waits.get(pool, ())
    return False
