"""`serai place bench scale`: how soon the placer has a plan for a large fleet, and how good it is known to be.

142 models on 5,000 GPUs of six kinds, asked for more than there is: seconds to the first whole placement, and the gap
of every level after 60 s. Then ten models on 56 GPUs: seconds to a proved optimum. Every placement is checked by the
verifier.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from serai.bench.place.scale_case import Case, scale_case
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.placer.options import make_options
from serai.placer.placement import Placement, SolveLimits
from serai.placer.solve import solve
from serai.placer.verify import violations

REQUESTS_S = 9000.0
"""More than 5,000 GPUs serve: there is something to decide."""
SMALL_REQUESTS_S = 150.0
SMALL_SEEDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai place bench scale`."""
    add_report_arguments(parser)
    parser.add_argument("--models", type=int, default=142, help="(%(default)s)")
    parser.add_argument("--gpus", type=int, default=5000, help="(%(default)s)")
    parser.add_argument("--requests", type=float, default=REQUESTS_S, help="a second, of all models (%(default)s)")
    parser.add_argument("--time-s", type=float, help="for the large problem (60; 20 when quick)")
    parser.add_argument("--workers", type=int, default=2, help="threads of CP-SAT (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """The large problem once, small ones several times."""
    time_s = arguments.time_s if arguments.time_s is not None else 20.0 if arguments.quick else 60.0
    case = scale_case(arguments.seed, models=arguments.models, gpus=arguments.gpus, requests_s=arguments.requests)
    say(f"{len(case.demands)} models, {case.fleet.gpus} GPUs in {len(case.fleet.nodes)} nodes")
    options_s, large, wrong = _solved(case, SolveLimits(time_s, arguments.workers))
    _tell(large)
    small = []
    for seed in range(1, (2 if arguments.quick else SMALL_SEEDS) + 1):
        little = scale_case(seed, models=10, gpus=56, requests_s=SMALL_REQUESTS_S, kinds=2)
        _, placement, bad = _solved(little, SolveLimits(10.0, arguments.workers))
        wrong += bad
        small.append(placement)
        say(f"10 models, {little.fleet.gpus} GPUs: {placement.status} in {placement.solve_s:.2f} s")
    hand_out(_report(large, small, options_s, wrong, arguments, time_s), arguments)
    return 0


def _solved(case: Case, limits: SolveLimits) -> tuple[float, Placement, int]:
    """Seconds for the options, the placement, and how much is wrong with it."""
    began_s = time.perf_counter()
    options = make_options(case.demands, case.fleet, cards=case.cards)
    options_s = time.perf_counter() - began_s
    placement = solve(case.fleet, case.demands, options.feasible, limits=limits, clock=time.perf_counter)
    wrong = violations(case.fleet, case.demands, placement, cards=case.cards)
    for sentence in wrong:
        say(f"WRONG: {sentence}")
    return options_s, placement, len(wrong)


def _tell(placement: Placement) -> None:
    say(f"first plan after {placement.first_plan_s:.2f} s; {placement.status} after {placement.solve_s:.1f} s")
    for level in placement.levels:
        say(f"  {level.name}: {level.value:.6g}, bound {level.bound:.6g}, gap {level.gap:.2%} in {level.solve_s:.1f} s")


def _report(
    large: Placement,
    small: list[Placement],
    options_s: float,
    wrong: int,
    arguments: argparse.Namespace,
    time_s: float,
) -> Report:
    gaps = {level.name: level.gap for level in large.levels}
    figures = {
        "first_plan_s": large.first_plan_s,
        "options_s": options_s,
        # The objective is lexicographic: the first level is what a plan is judged by.
        "gap_60s": gaps.get("worst share", 1.0),
        "gap_60s_total": gaps.get("total", 1.0),
        "gap_60s_cost": gaps.get("cost", 1.0),
        "worst_share": min(large.served_share.values()),
        "small_optimal_s": median(placement.solve_s for placement in small),
        "small_optimal_s_max": max(placement.solve_s for placement in small),
        "small_proved": float(all(placement.proved for placement in small)),
        "violations": float(wrong),
    }
    rows = [["level", "value", "bound", "gap", "s"]]
    rows += [
        [level.name, f"{level.value:.6g}", f"{level.bound:.6g}", f"{level.gap:.2%}", f"{level.solve_s:.1f}"]
        for level in large.levels
    ]
    notes = [
        f"first plan after {large.first_plan_s:.2f} s, with options made before in {options_s:.1f} s",
        f"10 models on 56 GPUs: {'proved optimal' if figures['small_proved'] else 'done, and not proved,'} in "
        f"{figures['small_optimal_s']:.2f} s (median)",
    ]
    config = {
        "models": arguments.models,
        "gpus": arguments.gpus,
        "requests_s": arguments.requests,
        "time_s": time_s,
        "workers": arguments.workers,
        "seed": arguments.seed,
    }
    raw = {"levels": [[lv.name, lv.value, lv.bound, lv.solve_s] for lv in large.levels], "shares": large.served_share}
    return Report("place bench scale", config, figures, rows, notes, raw)
