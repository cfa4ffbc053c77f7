"""Whether a plan is still about what is there, and whether two plans do the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from serai.contracts.placement import ActionKind, PlanAction, RunState
from serai.placer.pools import PoolView


def gone(actions: Sequence[PlanAction], views: Sequence[PoolView]) -> str:
    """What a plan is about and is not there any more; empty = all is."""
    pools = {view.name for view in views}
    runs = {run.assignment.id: run for view in views for run in view.report.runs}
    for one in actions:
        if one.pool not in pools:
            return f"pool {one.pool} has gone"
        run = runs.get(one.assignment.id)
        if one.kind is not ActionKind.START and (run is None or run.state in (RunState.DRAINING, RunState.FAILED)):
            return f"{one.assignment.model} on {one.pool} has gone (session {one.session or one.assignment.id})"
    return ""


def content(actions: Sequence[PlanAction]) -> set[tuple[object, ...]]:
    """What a plan does, whatever its steps are called."""
    found: set[tuple[object, ...]] = set()
    for place, action in enumerate(one for one in actions if one.kind is not ActionKind.KEEP):
        one = action.assignment
        name = place if action.kind is ActionKind.START else one.id
        found.add((action.kind, action.pool, one.model, one.tensor, one.pipeline, one.data, one.quantization, name))
    return found
