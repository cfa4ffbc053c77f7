"""`serai simulate fleet`: ten thousand sessions and a hundred readers in virtual time, with churn.

The registry and all readers are the real code; the agents are real in what they say of themselves and have no engine.
Figures: bytes a second on an agent's connection, both ways; how long a reader goes on routing to a session that has
gone, or not yet to one that has come; the memory of one reader's copy.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Sequence

from serai.bench.percentiles import percentile
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.contracts.codec import decode, encode
from serai.contracts.session_record import SessionRecord
from serai.contracts.status import SessionStatus
from serai.runtime.registry_replica import RegistryReplica
from serai.runtime.settings import refuse
from serai.simulator.whole.fleet_run import FleetPlan, FleetResult, fleet_run

_QUICK = {"sessions": 300, "replicas": 10, "measured_s": 20.0, "churn_per_min": 0.3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate fleet`."""
    parser.description = __doc__
    add_report_arguments(parser)
    plan = FleetPlan()
    parser.add_argument("--sessions", type=int, help=f"sessions ({plan.sessions})")
    parser.add_argument("--replicas", type=int, help=f"readers, each with its own copy ({plan.replicas})")
    parser.add_argument("--measured-s", type=float, help=f"virtual seconds measured ({plan.measured_s:g})")
    parser.add_argument(
        "--churn-per-min", type=float, help=f"share of the sessions replaced in a minute ({plan.churn_per_min:g})"
    )
    parser.add_argument("--heartbeats-only", action="store_true", help="as where no disconnect events are granted")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run once and print. Exit status 0 when it ran, whatever the figures."""
    plan = _plan(arguments)
    began_s = time.process_time()
    result = fleet_run(arguments.seed, plan, say)
    figures = _figures(result, plan, time.process_time() - began_s)
    config = {name: getattr(plan, name) for name in FleetPlan.__slots__} | {"seed": arguments.seed}
    table = [["", "value"], *[[name, f"{value:,.4g}"] for name, value in figures.items()]]
    hand_out(Report("simulate fleet", config, figures, table, [], {"stale_s": sorted(result.stale_s)}), arguments)
    return 0


def _plan(arguments: argparse.Namespace) -> FleetPlan:
    base = FleetPlan()
    values = {}
    for name in _QUICK:
        asked = getattr(arguments, name)
        values[name] = asked if asked is not None else _QUICK[name] if arguments.quick else getattr(base, name)
        if not values[name] > 0:
            refuse(f"--{name.replace('_', '-')} {values[name]}: must be above 0")
    return FleetPlan(
        sessions=int(values["sessions"]),
        replicas=int(values["replicas"]),
        measured_s=float(values["measured_s"]),
        churn_per_min=float(values["churn_per_min"]),
        disconnect_events=not arguments.heartbeats_only,
    )


def _figures(result: FleetResult, plan: FleetPlan, cpu_s: float) -> dict[str, float]:
    stale_ms = [seconds * 1000 for seconds in result.stale_s]
    return {
        "bytes_per_s_per_agent": result.agent_bytes / result.measured_s / plan.sessions,
        "stale_route_ms_p50": percentile(stale_ms, 0.50) if stale_ms else 0.0,
        "stale_route_ms_p99": percentile(stale_ms, 0.99) if stale_ms else 0.0,
        "stale_route_ms_max": max(stale_ms, default=0.0),
        "never_learned": result.never,
        "replica_mb": replica_mb(result.records),
        "unequal_replicas": result.unequal_replicas,
        "ended": result.ended,
        "joined": result.joined,
        "cpu_s": cpu_s,
    }


def replica_mb(records: Sequence[SessionRecord]) -> float:
    """What one reader's copy of `records` takes, in MB (10⁶ bytes): each record and status decoded from its own bytes,
    as a reader does."""
    messages = [encode(record) for record in records]
    tracemalloc.start()
    try:
        replica = RegistryReplica()
        for number, message in enumerate(messages):
            record = decode(SessionRecord, message)
            replica.merge(record, 0.0, heard=True)
            status = SessionStatus(record.session, number + 1, record.lifecycle, record.version, 1.0)
            replica.hear(decode(SessionStatus, encode(status)), 0.0)
        return tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()
