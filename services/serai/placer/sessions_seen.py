"""What the registry says of sessions, as plans need it. Pure: takes `now`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from serai.contracts.placement import ASSIGNMENT_LABEL
from serai.placer.carrying_out import Seen, SeenRun
from serai.placer.pools import PoolView
from serai.placer.told import Told
from serai.runtime.registry_replica import RegistryReplica


def others(replica: RegistryReplica, views: Sequence[PoolView], models: Collection[str], now: float) -> dict[str, int]:
    """Sessions of each model that serve and are of no pool."""
    ours = {run.session for view in views for run in view.report.runs}
    counts = {
        model: sum(
            record.session not in ours and ASSIGNMENT_LABEL not in record.metadata.labels
            for record in replica.routable(model, now)
        )
        for model in models
    }
    return {model: count for model, count in counts.items() if count}


def in_flight(replica: RegistryReplica, views: Sequence[PoolView]) -> dict[str, int]:
    """Requests of each session of the pools."""
    ours = {run.session for view in views for run in view.report.runs if run.session}
    statuses = {session: replica.status(session) for session in ours}
    return {session: status.in_flight for session, status in statuses.items() if status is not None}


def seen_now(
    replica: RegistryReplica, views: Sequence[PoolView], told: Told, models: Collection[str], now: float
) -> Seen:
    """How things are, for a plan under way."""
    runs = {run.assignment.id: SeenRun(view.name, run.state, run.problem) for view in views for run in view.report.runs}
    return Seen(
        pools={view.name: view.gpus for view in views},
        runs=runs,
        told={view.name: told.run_of(view.name) for view in views},
        settled=frozenset([view.name for view in views if told.settled(view.report)]),
        serving={model: len(replica.routable(model, now)) for model in models},
    )
