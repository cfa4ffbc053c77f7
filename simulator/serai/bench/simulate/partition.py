"""`serai simulate partition`: two sites whose link is cut and healed, in virtual time, many seeds.

Each seed is one run of the real services: at each site a NATS server, a registry, an ingress and agents of one model,
with clients that ask steadily. The link loses, doubles and reorders records, statuses and beats; it is cut for 3 to
40 s while agents of both sites leave and others come, and healed. What must hold: no request fails, nothing that left
comes back, nobody alive is taken to have left, and the copies of both sites are equal within seconds of healing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from typing import Any

from serai.bench.percentiles import percentile
from serai.runtime.settings import refuse
from serai.simulator.whole.partition_run import PartitionPlan, PartitionResult, partition_run

TRACE_LINES = 60
HEAL_P99_S_MAX = 5.0
FORGOTTEN_WITHIN_S = 75.0
"""A registry that lost all its memory is believed to know its site once it has listened for a minute: what it does not
know then is dropped elsewhere. Until then such sessions stay in the other site's copy, silent and not routed to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate partition`."""
    parser.description = __doc__
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds, from 1 (%(default)s)")
    parser.add_argument("--seed", type=int, help="only this seed, with a trace of its last events")
    parser.add_argument("--agents", type=int, default=3, help="agents at each site (%(default)s)")
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second at each site (%(default)s)")
    parser.add_argument("--loss", type=float, default=0.1, help="share of messages lost on the link (%(default)s)")
    parser.add_argument("--doubled", type=float, default=0.1, help="share that comes twice (%(default)s)")
    parser.add_argument("--reordered", type=float, default=0.1, help="share that comes late (%(default)s)")
    parser.add_argument(
        "--silent", action="store_true", help="packets vanish, instead of a link that is known to be cut"
    )
    parser.add_argument("--registry-dies", action="store_true", help="one registry is killed in each cut, KV and all")
    parser.add_argument("--trace", type=int, default=TRACE_LINES, help="events shown of one seed (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures instead")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 when a goal is missed."""
    plan = _plan(arguments)
    seeds = [arguments.seed] if arguments.seed is not None else list(range(1, arguments.seeds + 1))
    began_s = time.monotonic()
    results: list[PartitionResult] = []
    for seed in seeds:
        result = partition_run(seed, plan)
        results.append(result)
        if not arguments.json or not result.holds:
            _show(result, sys.stderr if arguments.json else sys.stdout, arguments)
    heal_s_max = FORGOTTEN_WITHIN_S if arguments.registry_dies else HEAL_P99_S_MAX
    figures = _figures(results, heal_s_max, time.monotonic() - began_s)
    if arguments.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        sys.stdout.write(_summary(figures) + "\n")
    return 0 if figures["holds"] else 1


def _plan(arguments: argparse.Namespace) -> PartitionPlan:
    for name in ("seeds", "agents", "rate"):
        if not getattr(arguments, name) > 0:
            refuse(f"--{name} {getattr(arguments, name)}: must be above 0")
    for name in ("loss", "doubled", "reordered"):
        if not 0 <= getattr(arguments, name) < 1:
            refuse(f"--{name} {getattr(arguments, name)}: must be at least 0 and below 1")
    plan = PartitionPlan()
    return replace(
        plan,
        requests_per_s=arguments.rate,
        lost=arguments.loss,
        doubled=arguments.doubled,
        reordered=arguments.reordered,
        registry_dies=arguments.registry_dies,
        silent=arguments.silent,
        scene=replace(plan.scene, agents=arguments.agents),
    )


def _show(result: PartitionResult, out: Any, arguments: argparse.Namespace) -> None:
    lines = result.trace[-arguments.trace :] if arguments.seed is not None and arguments.trace else []
    out.write("\n".join([*lines, result.line]) + "\n")
    out.flush()


def _figures(results: list[PartitionResult], heal_s_max: float, wall_s: float) -> dict[str, Any]:
    heals = [math.inf if result.heal_s is None else result.heal_s for result in results]
    p99_s = percentile(heals, 0.99)
    figures: dict[str, Any] = {
        "runs": len(results),
        "resurrections": sum(result.resurrections for result in results),
        "failed_requests": sum(result.failed for result in results),
        "heal_s_p50": _number(percentile(heals, 0.5)),
        "heal_s_p99": _number(p99_s),
        "heal_s_max": _number(max(heals)),
        "requests": sum(result.requests for result in results),
        "streams_cut_with_link": sum(result.streams_cut for result in results),
        "closed_alive": sum(result.closed_alive for result in results),
        "sessions_left": sum(result.left for result in results),
        "problems": sum(len(result.problems) for result in results),
        "failing_seeds": [result.seed for result in results if not result.holds],
        "wall_s": round(wall_s, 3),
    }
    figures["holds"] = not figures["failing_seeds"] and p99_s <= heal_s_max
    return figures


def _number(seconds: float) -> float | None:
    """None for never: JSON has no infinity."""
    return round(seconds, 3) if math.isfinite(seconds) else None


def _summary(figures: dict[str, Any]) -> str:
    shown = ("runs", "resurrections", "failed_requests", "heal_s_p50", "heal_s_p99", "closed_alive", "requests")
    text = ", ".join(f"{name} {figures[name]}" for name in shown)
    if failing := figures["failing_seeds"]:
        text += f"; again with: serai simulate partition --seed {failing[0]}"
    return text
