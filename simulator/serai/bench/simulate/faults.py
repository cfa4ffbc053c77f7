"""`serai simulate faults`: the real services in virtual time under random faults, and what must hold whatever fails.

Each seed is one run: agents, ingresses, a registry, emulated engines and a simulated NATS under a steady load, while
processes are killed, cut off, partitioned and stalled, engines hang and lie, and NATS and its KV lose what they had.
Then there is peace, and everything must serve again and hold nothing. A run that fails is its seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from serai.runtime.settings import refuse
from serai.simulator.whole.fault_run import FaultPlan, FaultRunResult, fault_run
from serai.simulator.whole.faults import FaultKind
from serai.simulator.whole.system import Scene

TRACE_LINES = 60
VIOLATIONS_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate faults`."""
    parser.description = __doc__
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds, from 1 (%(default)s)")
    parser.add_argument("--seed", type=int, help="only this seed, with a trace of its last events")
    parser.add_argument("--duration-s", type=float, default=60.0, help="virtual seconds under load (%(default)s)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second (%(default)s)")
    parser.add_argument("--fault-every-s", type=float, default=2.5, help="mean time between faults (%(default)s)")
    parser.add_argument("--agents", type=int, default=4, help="agents, each with its engine (%(default)s)")
    parser.add_argument("--ingresses", type=int, default=2, help="ingresses (%(default)s)")
    parser.add_argument("--kinds", default="", help=f"only these, separated by commas: {', '.join(FaultKind)}")
    parser.add_argument("--trace", type=int, default=TRACE_LINES, help="events shown of a run (%(default)s)")
    parser.add_argument("--once", action="store_true", help="do not run the first seed twice to compare the hashes")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures instead")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 when something did not hold, or when the same seed did not give the same run."""
    plan = _plan(arguments)
    seeds = [arguments.seed] if arguments.seed is not None else list(range(1, arguments.seeds + 1))
    began_s = time.monotonic()
    results: list[FaultRunResult] = []
    for result in _runs(seeds, plan):
        results.append(result)
        if not arguments.json:
            _show(result, trace=arguments.trace if result.violations or arguments.seed is not None else 0)
    stable = arguments.once or fault_run(seeds[0], plan).digest == results[0].digest
    figures = _figures(results, stable, time.monotonic() - began_s)
    if arguments.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        sys.stdout.write(_summary(figures) + "\n")
    return 1 if figures["violations"] or figures["streams_unmarked"] or not stable else 0


def _plan(arguments: argparse.Namespace) -> FaultPlan:
    for name in ("seeds", "duration_s", "rate", "fault_every_s", "agents", "ingresses"):
        if not getattr(arguments, name) > 0:
            refuse(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be above 0")
    names = [name.strip() for name in arguments.kinds.split(",") if name.strip()]
    unknown = sorted(set(names) - set(FaultKind))
    if unknown:
        refuse(f"--kinds: there is no fault {unknown[0]!r}; there are {', '.join(FaultKind)}")
    return FaultPlan(
        duration_s=arguments.duration_s,
        requests_per_s=arguments.rate,
        fault_every_s=arguments.fault_every_s,
        kinds=tuple(FaultKind(name) for name in names) or tuple(FaultKind),
        scene=Scene(agents=arguments.agents, ingresses=arguments.ingresses),
    )


def _runs(seeds: list[int], plan: FaultPlan) -> Iterator[FaultRunResult]:
    for seed in seeds:
        yield fault_run(seed, plan)


def _show(result: FaultRunResult, trace: int) -> None:
    lines = result.trace[-trace:] if trace else []
    lines += [f"  {violation}" for violation in result.violations[:VIOLATIONS_SHOWN]]
    sys.stdout.write("\n".join([*lines, result.line]) + "\n")
    sys.stdout.flush()


def _figures(results: list[FaultRunResult], stable: bool, wall_s: float) -> dict[str, Any]:
    outcomes: dict[str, int] = {}
    for result in results:
        for outcome, count in result.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    return {
        "runs": len(results),
        "violations": sum(len(result.violations) for result in results),
        "requests": sum(result.requests for result in results),
        "failed_unary": sum(result.failed_unary for result in results),
        "streams_unmarked": outcomes.get("unmarked", 0),
        "hash_stable": stable,
        "outcomes": outcomes,
        "faults": sum(result.faults for result in results),
        "failing_seeds": [result.seed for result in results if result.violations],
        "virtual_s": round(sum(result.virtual_s for result in results), 3),
        "wall_s": round(wall_s, 3),
    }


def _summary(figures: dict[str, Any]) -> str:
    shown = ("runs", "violations", "requests", "failed_unary", "streams_unmarked", "hash_stable")
    text = ", ".join(f"{name} {figures[name]}" for name in shown)
    failing = figures["failing_seeds"]
    if failing:
        text += f"; again with: serai simulate faults --seed {failing[0]}"
    return text
