"""What the placer shows to Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Gauge, Histogram

from serai.contracts.placement import ModelWord
from serai.placer.pools import PoolView
from serai.runtime.metrics import Counts, Histograms

LOAD_BOUNDS_S = (1, 3, 10, 30, 60, 120, 300, 600, 1200, 3600)

ACTING = Gauge("serai_placer_acting", "1 = this one acts for the site, and sees enough to")
POOLS = Gauge("serai_placer_pools", "Pool agents that are there")
UNUSABLE = Gauge("serai_placer_pools_unusable", "Pool agents on which nothing new is placed")
GPUS = Gauge("serai_placer_gpus", "GPUs of all pools")
INSTANCES = Gauge("serai_placer_instances", "Engines that serve", ["model"])
WANTED = Gauge("serai_placer_wanted_instances", "Engines that the plan wants", ["model"])
SHARE = Gauge("serai_placer_served_share", "Of the demand of a model, by the plan", ["model"])
DEMAND = Gauge("serai_placer_demand_requests_per_second", "Planned for", ["model"])
MOVES = Counts("serai_placer_moves", "Engines started or stopped, by kind", ["kind"])
PLANS = Counts("serai_placer_plans", "Plans by what became of them", ["fate"])
FAILURES = Counts("serai_placer_failures", "Engines that came to nothing at a pool", ["model"])
SOLVE_S = Histogram("serai_placer_solve_seconds", "Time to a placement", buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30))


LOADS = Histograms("serai_placer_load_seconds", "Assignment to first token", ["model"], LOAD_BOUNDS_S)


def show(words: Sequence[ModelWord], views: Sequence[PoolView]) -> None:
    """Of all models and pools."""
    POOLS.set(len(views))
    UNUSABLE.set(sum(bool(view.problem) for view in views))
    GPUS.set(sum(view.gpus for view in views))
    for word in words:
        INSTANCES.labels(word.model).set(word.instances)
        WANTED.labels(word.model).set(word.wanted)
        SHARE.labels(word.model).set(word.served_share)
        DEMAND.labels(word.model).set(word.demand_requests_s)
