"""`serai simulate failover`: macro-schedulers, instances and KV fail in virtual time, many seeds.

Each seed is one run of the real services: three macro-schedulers of which one leads, four agents with emulated engines
under the phase gate, two ingresses, a registry and clients. Leaders are killed, stopped, cut off and stalled in the
middle of windows; instances die, are cut off or drained under load; KV forgets who leads and who owns what. What must
hold: no request is lost, no token comes twice or is missing, and an instance has one owner per epoch in every
interleaving. A run that fails is its seed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from serai.bench.percentiles import percentile
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.runtime.settings import refuse
from serai.simulator.whole.failover_faults import FailoverFault
from serai.simulator.whole.failover_run import FailoverPlan, FailoverResult, failover_run

SEEDS, QUICK_SEEDS = 200, len(FailoverFault)
TRACE_LINES = 60
SEEDS_A_TASK = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate failover`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_report_arguments(parser)
    parser.add_argument("--seeds", type=int, help=f"how many seeds, from 1 ({SEEDS}; {QUICK_SEEDS} with --quick)")
    parser.add_argument("--seed", type=int, help="only this seed, with a trace of its last events")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second (%(default)s)")
    parser.add_argument("--duration-s", type=float, default=14.0, help="virtual seconds under load (%(default)s)")
    parser.add_argument("--kinds", default="", help=f"only these, separated by commas: {', '.join(FailoverFault)}")
    parser.add_argument("--trace", type=int, default=TRACE_LINES, help="events shown of one seed (%(default)s)")
    parser.add_argument("--jobs", type=int, help="processes (one a core)")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 when something did not hold, or when the same seed did not give the same run."""
    plan = _plan(arguments)
    count = arguments.seeds if arguments.seeds is not None else QUICK_SEEDS if arguments.quick else SEEDS
    seeds = [arguments.seed] if arguments.seed is not None else list(range(1, count + 1))
    jobs = arguments.jobs or len(os.sched_getaffinity(0))
    results: list[FailoverResult] = []
    for result in _runs(seeds, plan, jobs):
        results.append(result)
        if len(seeds) == 1 or not result.holds:
            _show(result, arguments.trace if len(seeds) == 1 else 0)
        if len(results) % 20 == 0:
            say(f"{len(results)} of {len(seeds)} seeds")
    again = failover_run(seeds[0], plan)
    report = _report(results, plan, stable=again.digest == results[0].digest)
    hand_out(report, arguments)
    return 0 if report.figures["holds"] and report.figures["hash_stable"] else 1


def _plan(arguments: argparse.Namespace) -> FailoverPlan:
    for name in ("seeds", "rate", "duration_s", "jobs"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            refuse(f"--{name.replace('_', '-')} {value}: must be above 0")
    if arguments.duration_s < 4:
        refuse(f"--duration-s {arguments.duration_s:g}: must be at least 4, for faults to fall into it")
    names = [name.strip() for name in arguments.kinds.split(",") if name.strip()]
    unknown = sorted(set(names) - set(FailoverFault))
    if unknown:
        refuse(f"--kinds: there is no fault {unknown[0]!r}; there are {', '.join(FailoverFault)}")
    faults = tuple([FailoverFault(name) for name in names]) or tuple(FailoverFault)
    return FailoverPlan(arguments.duration_s, arguments.rate, faults=faults)


def _runs(seeds: Sequence[int], plan: FailoverPlan, jobs: int) -> Iterator[FailoverResult]:
    """In order of seeds, in up to `jobs` processes."""
    if jobs == 1 or len(seeds) < 2 * SEEDS_A_TASK:
        yield from (failover_run(seed, plan) for seed in seeds)
        return
    tasks = [seeds[at : at + SEEDS_A_TASK] for at in range(0, len(seeds), SEEDS_A_TASK)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        for done in pool.map(_several, tasks, [plan] * len(tasks)):
            yield from done


def _several(seeds: Sequence[int], plan: FailoverPlan) -> list[FailoverResult]:
    return [failover_run(seed, plan) for seed in seeds]


def _show(result: FailoverResult, trace: int) -> None:
    lines = [*result.trace[-trace:], *[f"  {problem}" for problem in result.problems]] if trace else []
    sys.stderr.write("\n".join([*lines, result.line]) + "\n")
    sys.stderr.flush()


def _report(results: Sequence[FailoverResult], plan: FailoverPlan, *, stable: bool) -> Report:
    takeovers = [result.takeover_s for result in results if result.takeover_s is not None]
    failing = [result.seed for result in results if not result.holds]
    figures = {
        "lost_requests": sum(result.lost_requests for result in results),
        "repeated_tokens": sum(result.repeated_tokens for result in results),
        "double_owner": sum(result.double_owner for result in results),
        "runs": len(results),
        "requests": sum(result.requests for result in results),
        "leases": sum(result.leases for result in results),
        "leases_refused": sum(result.refused for result in results),
        "problems": sum(len(result.problems) for result in results),
        "takeover_s_p50": percentile(takeovers, 0.5),
        "takeover_s_max": max(takeovers, default=float("nan")),
        "hash_stable": float(stable),
        "holds": float(not failing),
    }
    table = [("figure", "value"), *[(name, f"{value:g}") for name, value in figures.items()]]
    notes = [_by_kind(results)]
    if failing:
        notes.append(f"again with: serai simulate failover --seed {failing[0]}")
    config = {"seeds": len(results), "requests_per_s": plan.requests_per_s, "duration_s": plan.duration_s}
    raw = [
        {
            "seed": result.seed,
            "faults": [str(fault) for fault in result.faults],
            "requests": result.requests,
            "lost": result.lost_requests,
            "leases": result.leases,
            "refused": result.refused,
            "takeover_s": result.takeover_s,
            "hash": result.digest,
        }
        for result in results
    ]
    return Report("simulate failover", config, figures, table, notes, raw)


def _by_kind(results: Sequence[FailoverResult]) -> str:
    kinds = [fault for result in results for fault in result.faults]
    return "faults: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in FailoverFault if kind in kinds)
