"""`serai place bench dynamic`: placement that moves against placement that stays, on bursty traffic of many models.

Two traces: a synthetic one of 142 models with the published marginals, and recorded ServeGen clients, each as a model.
The static placement is the best of several made from the day before; the dynamic one is the placer itself: forecasts,
solver, plan rules, cold starts. The same again with a quarter fewer GPUs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from serai.bench.place.dynamic_check import gaps
from serai.bench.place.policies import Static, options_of
from serai.bench.place.replay import Course
from serai.bench.place.study import HEAD, RULES, Compared, compare, dynamic, fleet_of, raw, row
from serai.bench.place.traces import RateTrace, published_marginals, servegen_models
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.placer.picture import Fairness, PlanRules
from serai.runtime.settings import refuse
from serai.simulator.data_folder import data_folder

FLEET = {"a100-sxm-80": 80, "h100-sxm-80": 64, "gh200-96": 32}
SERVEGEN_FLEET = {"a100-sxm-80": 12, "h100-sxm-80": 12}
MEAN_S = 150.0
SERVEGEN_MEAN_S = 60.0
FEWER = 0.75
DAY_STEPS = 1440


@dataclass(frozen=True)
class Half:
    """One trace's results."""

    name: str
    compared: Compared
    fewer: Course | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai place bench dynamic`."""
    add_report_arguments(parser)
    parser.add_argument("--short", action="store_true", help="not on fewer GPUs, and no check of the fluid")
    parser.add_argument("--hours", type=float, help="of the second day to replay (24; 2 when quick)")
    parser.add_argument("--seed", type=int, default=1, help="of traces (%(default)s)")
    parser.add_argument("--rate", type=float, default=MEAN_S, help="requests/s of all 142 models (%(default)s)")
    parser.add_argument(
        "--solve-s", type=float, default=0.0, help="CP-SAT's time a decision; 0 is greedy (%(default)s)"
    )
    parser.add_argument(
        "--fairness", type=Fairness, choices=list(Fairness), default=Fairness.STRICT, help="(%(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Both traces, then the check."""
    hours = arguments.hours if arguments.hours is not None else 2.0 if arguments.quick else 24.0
    if not 0 < hours <= 24:
        refuse(f"--hours {hours}: give more than 0 and at most 24")
    days = published_marginals(arguments.seed, hours=48, mean_s=arguments.rate)
    steps = round(hours * 60)
    rules = replace(RULES, fairness=arguments.fairness)
    halves = [_half(days.cut(0, DAY_STEPS), days.cut(DAY_STEPS, steps), FLEET, arguments, rules)]
    notes = []
    recorded = _servegen(arguments)
    if recorded is None:
        notes.append("no ServeGen clients: $SERAI_DATA_DIR holds none")
    else:
        # The recording is one day: its first half is the day before.
        middle = recorded.steps // 2
        rest = recorded.cut(middle, min(middle, steps))
        halves.append(_half(recorded.cut(0, middle), rest, SERVEGEN_FLEET, arguments, rules))
    checked = [] if arguments.short else _checked(days.cut(DAY_STEPS, steps), arguments.seed)
    hand_out(_report(halves, checked, notes, arguments, hours, days.cut(DAY_STEPS, steps)), arguments)
    return 0


def _checked(trace: RateTrace, seed: int) -> list[tuple[str, float, float]]:
    say("check of the fluid against the fast simulator")
    checked = gaps(trace, options_of(trace, fleet_of(FLEET)), seed)
    for key, fluid, simulated in checked:
        say(f"  {key}: fluid {fluid:.3f}, simulated {simulated:.3f}")
    return checked


def _half(
    before: RateTrace, trace: RateTrace, gpus: dict[str, int], arguments: argparse.Namespace, rules: PlanRules
) -> Half:
    solve_s: float = arguments.solve_s
    say(f"{trace.name}: {trace.steps} minutes, {sum(gpus.values())} GPUs")
    compared = compare(before, trace, fleet_of(gpus), solve_s, say, rules)
    if arguments.short:
        return Half(trace.name, compared, None)
    small = fleet_of(gpus, FEWER)
    # It starts from a placement made for the smaller fleet in the same way.
    start = Static(before, small, options_of(trace, small), compared.static_share, solve_s)
    fewer = dynamic(trace, small, start, solve_s, rules)
    say(f"dynamic on {small.gpus} GPUs: {fewer.attainment:.4f}")
    return Half(trace.name, compared, fewer)


def _servegen(arguments: argparse.Namespace) -> RateTrace | None:
    root = data_folder() / "traces" / "servegen"
    folders = [place for place in (root / "reason-deepseek-r1", root / "language-m-large") if place.is_dir()]
    if not folders:
        return None
    return servegen_models(folders, arguments.seed, hours=23.5, mean_s=SERVEGEN_MEAN_S, start_s=0.0)


def _report(
    halves: list[Half],
    checked: list[tuple[str, float, float]],
    notes: list[str],
    arguments: argparse.Namespace,
    hours: float,
    trace: RateTrace,
) -> Report:
    figures: dict[str, float] = {}
    table = [HEAD]
    courses: list[tuple[str, Course]] = []
    for prefix, half in zip(("", "servegen_"), halves, strict=False):
        static, moved, fewer = half.compared.static, half.compared.dynamic, half.fewer
        figures |= {
            f"{prefix}static_attainment": static.attainment,
            f"{prefix}static_chosen_before_attainment": half.compared.usual.attainment,
            f"{prefix}dynamic_attainment": moved.attainment,
            f"{prefix}gpu_hours_ratio": moved.gpu_hours / static.gpu_hours,
            f"{prefix}moves_per_hour": moved.moves_per_hour,
            f"{prefix}moves_per_hour_max": float(max(moved.moves_by_hour)),
            f"{prefix}cold_starts": float(moved.cold_starts),
            f"{prefix}static_model_attainment": static.model_attainment,
            f"{prefix}dynamic_model_attainment": moved.model_attainment,
        }
        if fewer is not None:
            figures[f"{prefix}fewer_gpus_attainment"] = fewer.attainment
            figures[f"{prefix}fewer_gpus_gpu_hours_ratio"] = fewer.gpu_hours / static.gpu_hours
        named = [
            (f"{half.name}: static", static),
            (f"{half.name}: static, chosen the day before", half.compared.usual),
            (f"{half.name}: dynamic", moved),
        ]
        named += [] if fewer is None else [(f"{half.name}: dynamic, fewer GPUs", fewer)]
        table += [row(name, course) for name, course in named]
        courses += named
    if checked:
        figures["fluid_gap_points"] = sum(abs(a - b) for _, a, b in checked) / len(checked) * 100
    peaks = sorted((trace.peak_over_mean(place) for place in range(len(trace.models))), reverse=True)
    figures["peak_over_mean_max"], figures["peak_over_mean_15th"] = peaks[0], peaks[14]
    notes = [
        "static: the best on this very trace of placements made for the mean, p90, p97 and p99 of the day before; "
        "beside it the one that was best on the day before",
        "who would wait for more than half the TTFT target is turned away, under both",
        f"fewer GPUs: {FEWER:.0%} of each kind, in whole nodes of four",
        *notes,
    ]
    config = {"hours": hours, "seed": arguments.seed, "rate": arguments.rate, "solve_s": arguments.solve_s}
    config["fairness"] = str(arguments.fairness)
    samples = {"courses": raw(courses), "check": checked}
    return Report("place bench dynamic", config, figures, table, notes, samples)
