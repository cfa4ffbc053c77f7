"""`serai simulate SCENARIO.yaml`: systems compared on a workload, in virtual time.

Scans the scenario's rates and tells each system's goodput, or, without rates, runs the workload as written and tells
latencies and costs. The same file and seeds give the same figures on any machine.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from serai.bench.report import Report, folder, hand_out, rounded
from serai.bench.simulate.points import Key, Point, Points, run_once
from serai.bench.simulate.scenario import Scenario, Variant, read_scenario
from serai.runtime.fields import BadInput
from serai.simulator.fairness import by_prompt
from serai.simulator.fast.run import NS, Run
from serai.simulator.goodput import CurvePoint, GoodputScan, judged, scan_seeds
from serai.simulator.outcomes import LatencyDefinition
from serai.simulator.queues import waiting
from serai.simulator.reports.drawing import ExtraMissing
from serai.simulator.reports.pictures import (
    PolicyCurve,
    attainment_by_rate,
    fairness_by_bucket,
    latency_cdf,
    phase_timeline,
    queue_over_time,
)
from serai.simulator.reports.tables import curves_object, write_curves_csv, write_json, write_outcomes_csv
from serai.simulator.summary import tpots_s, ttfts_s

_T = TypeVar("_T")
TIMELINE_S = 20.0
"""What a picture of phases can show: some hundred steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate SCENARIO.yaml`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("scenario", type=Path, metavar="SCENARIO.yaml", help="see docs/scenarios/")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each point, with seeds 1 to N (the file's)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    parser.add_argument("--raw", type=folder, metavar="DIR", help="keep raw results as text in DIR/<machine>-<date>/")
    parser.add_argument("--out", type=folder, metavar="DIR", help="write JSON, CSV and pictures (PNG, SVG) there")


def run(arguments: argparse.Namespace) -> int:
    """Run and print. Exit status 2 for a scenario that cannot be run."""
    try:
        if arguments.jobs is not None and arguments.jobs < 1:
            raise BadInput("--jobs", f"is {arguments.jobs}", "give 1 or more")
        if arguments.seeds is not None and arguments.seeds < 1:
            raise BadInput("--seeds", f"is {arguments.seeds}", "give 1 or more")
        scenario = read_scenario(arguments.scenario, arguments.seeds)
        report = compared(scenario, arguments.jobs or os.cpu_count() or 1, arguments.out)
    except (BadInput, ExtraMissing) as error:
        print(f"serai simulate: {error}", file=sys.stderr)
        return 2
    hand_out(report, arguments)
    return 0


def compared(scenario: Scenario, jobs: int, out: Path | None) -> Report:
    """All runs of a scenario, as a report; files in `out` when given."""
    rates: Sequence[float | None] = scenario.rates or [None]
    keys: list[Key] = [
        (place, rate, seed) for rate, place, seed in product(rates, range(len(scenario.variants)), scenario.seeds)
    ]
    with _progress(len(keys)) as bar:

        def said(point: Point) -> None:
            if bar is not None:
                bar.set_postfix_str(scenario.variants[point.variant].name)
                bar.update()

        points = Points(scenario, jobs, said)
        points.make(keys)
        chosen = _scans(scenario, points) if scenario.rates else _singles(scenario, points)
    if out is not None:
        _write(scenario, chosen, points, out)
    return _report(scenario, chosen, points)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A label's variant that is told: the only one, or the best of several ratios."""

    place: int
    variant: Variant
    scans: Mapping[float, GoodputScan]
    """By level; empty without rates."""
    tried: int


def _progress(total: int) -> Any:
    """A bar on standard error, or nothing where it would only fill a log."""
    if not sys.stderr.isatty():
        return nullcontext()
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return nullcontext()
    return tqdm(total=total, unit="run", file=sys.stderr, dynamic_ncols=True)


# Choosing


def _scans(scenario: Scenario, points: Points) -> list[Chosen]:
    """Each label's best variant by the rates as written, at the middle level; only that is scanned more finely."""
    level = scenario.levels[len(scenario.levels) // 2]

    def worth(item: tuple[int, Variant]) -> tuple[float, float]:
        curve = _curve(scenario, item[0], scenario.definition, points)
        return judged(curve, level).highest_held_per_s or 0.0, fmean(point.attainment for point in curve)

    chosen = []
    for group in _by_label(list(enumerate(scenario.variants)), [variant.label for variant in scenario.variants]):
        place, variant = max(group, key=worth)

        def attained(rate: float, seed: int, place: int = place) -> float:
            return points[place, rate, seed].attainment[scenario.definition]

        scans = scan_seeds(scenario.rates, attained, scenario.seeds, scenario.levels, refinements=scenario.refinements)
        chosen.append(Chosen(place, variant, scans, len(group)))
    return chosen


def _singles(scenario: Scenario, points: Points) -> list[Chosen]:
    found = list(enumerate(scenario.variants))

    def worth(item: tuple[int, Variant]) -> float:
        return fmean(points[item[0], None, seed].attainment[scenario.definition] for seed in scenario.seeds)

    return [
        Chosen(*max(group, key=worth), scans={}, tried=len(group))
        for group in _by_label(found, [variant.label for _, variant in found])
    ]


def _by_label(items: Sequence[_T], labels: Sequence[str]) -> list[list[_T]]:
    groups: dict[str, list[_T]] = {}
    for item, label in zip(items, labels, strict=True):
        groups.setdefault(label, []).append(item)
    return list(groups.values())


# Telling


def _report(scenario: Scenario, chosen: Sequence[Chosen], points: Points) -> Report:
    figures: dict[str, float] = {}
    if scenario.rates:
        table = _scan_table(scenario, chosen, figures)
    else:
        table = _single_table(scenario, chosen, points, figures)
    notes = list(scenario.notes)
    notes += [
        f"{one.variant.label}: best of {one.tried} ratios is {one.variant.name}" for one in chosen if one.tried > 1
    ]
    wall_s = sum(point.wall_s for point in points.known.values())
    virtual_s = sum(point.figures["simulated_s"] for point in points.known.values())
    figures["runs"] = len(points.known)
    figures["wall_s_per_sim_hour"] = wall_s / virtual_s * 3600 if virtual_s else 0.0
    notes.append(f"{len(points.known)} runs, {virtual_s:,.0f} s of virtual time in {wall_s:.1f} s of one core")
    config = {
        "scenario": scenario.file,
        "model": scenario.model.card.name,
        "gpu": scenario.model.gpu.name,
        "tp": scenario.model.parallelism.tensor,
        "instances": scenario.instances,
        "slo": {"ttft_s": scenario.slo.ttft_s, "tpot_s": scenario.slo.tpot_s},
        "definition": str(scenario.definition),
        "seeds": list(scenario.seeds),
        "workload": dict(scenario.workload),
    }
    raw = [_raw(scenario, point) for point in points.known.values()]
    return Report(f"simulate {scenario.name}", config, figures, table, notes, raw)


def _raw(scenario: Scenario, point: Point) -> dict[str, Any]:
    return {
        "system": scenario.variants[point.variant].name,
        "rate": point.rate,
        "seed": point.seed,
        **{f"attainment_{definition}": value for definition, value in point.attainment.items()},
        "figures": {name: rounded(value) for name, value in point.figures.items() if math.isfinite(value)},
        **({"sha256": point.sha256} if point.sha256 else {}),
    }


def _scan_table(scenario: Scenario, chosen: Sequence[Chosen], figures: dict[str, float]) -> list[list[str]]:
    unit = "× trace" if scenario.scales else "requests/s"
    head = [f"goodput, {unit}"]
    for level in scenario.levels:
        head += [f"P{level * 100:g}", "first failing"]
    table = [head]
    for one in chosen:
        row = [one.variant.name]
        for level in scenario.levels:
            scan = one.scans[level]
            name = f"{_flat(one.variant.label)}_goodput_p{level * 100:g}".replace(".", "_")
            held, failing = scan.highest_held_per_s, scan.lowest_failing_per_s
            figures[name] = held or 0.0
            if failing is not None:
                figures[f"{name}_lowest_failing"] = failing
            row += [
                ("≥ " if scan.open_ended else "") + (f"{held:g}" if held else "none"),
                f"{failing:g}" if failing else "–",
            ]
        table.append(row)
    return table


def _single_table(
    scenario: Scenario, chosen: Sequence[Chosen], points: Points, figures: dict[str, float]
) -> list[list[str]]:
    columns = (
        ("strict", "attainment_strict", "{:.1%}"),
        ("industry", "attainment_industry", "{:.1%}"),
        ("TTFT p50 s", "ttft_industry_p50_s", "{:.2f}"),
        ("p99 s", "ttft_industry_p99_s", "{:.2f}"),
        ("TPOT p50 ms", "tpot_industry_p50_s", "{:.1f}"),
        ("p99 ms", "tpot_industry_p99_s", "{:.1f}"),
        ("tokens/s", "output_tokens_per_s", "{:,.0f}"),
        ("busy", "busy_share", "{:.0%}"),
        ("J/token", "energy_j_per_token", "{:.2f}"),
        ("refused", "refused", "{:.0f}"),
    )
    table = [["mean over seeds", *(name for name, _, _ in columns)]]
    for one in chosen:
        of_seeds = [points[one.place, None, seed].figures for seed in scenario.seeds]
        means = {name: fmean(found[name] for found in of_seeds) for name in of_seeds[0]}
        figures |= {f"{_flat(one.variant.label)}_{name}": value for name, value in means.items()}
        cells = [form.format(means[name] * (1000 if heading.endswith("ms") else 1)) for heading, name, form in columns]
        table.append([one.variant.name, *cells])
    return table


def _flat(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower())


# Files


def _write(scenario: Scenario, chosen: Sequence[Chosen], points: Points, out: Path) -> None:
    """Everything that can be looked at. The detailed pictures are of one run a system, with the first seed: at the
    highest rate that any of them holds, where they differ."""
    write_json(out / "points.json", [_raw(scenario, point) for point in points.known.values()])
    if scenario.rates:
        curves = [
            PolicyCurve(one.variant.name, definition, _curve(scenario, one.place, definition, points))
            for one in chosen
            for definition in LatencyDefinition
        ]
        write_curves_csv(out / "curves.csv", curves)
        write_json(out / "curves.json", curves_object(curves))
        attainment_by_rate(out / "attainment", curves, levels=scenario.levels)
    rate = _telling_rate(scenario, chosen)
    runs = {one.variant.name: run_once(scenario, one.variant, rate, scenario.seeds[0]) for one in chosen}
    for name, run in runs.items():
        write_outcomes_csv(out / f"outcomes-{_flat(name)}.csv", run.outcomes)
        _write_phases(out / f"phases-{_flat(name)}", name, run)
    at = "" if rate is None else f", {rate:g} {'× trace' if scenario.scales else 'requests/s'}"
    definition = scenario.definition
    ttft = {name: ttfts_s(run.outcomes, definition) for name, run in runs.items()}
    tpot = {name: tpots_s(run.outcomes, definition) for name, run in runs.items()}
    latency_cdf(out / "ttft", ttft, scenario.slo.ttft_s, title=f"TTFT of all requests{at}")
    latency_cdf(out / "tpot", tpot, scenario.slo.tpot_s, quantity="TPOT", title=f"TPOT of all requests{at}")
    queue_over_time(out / "waiting", {name: waiting(run.outcomes) for name, run in runs.items()})
    fairness = {name: by_prompt(run.outcomes, scenario.slo, definition) for name, run in runs.items()}
    fairness_by_bucket(out / "fairness", fairness, what="prompt (tokens)")


def _curve(scenario: Scenario, place: int, definition: LatencyDefinition, points: Points) -> tuple[CurvePoint, ...]:
    rates = sorted({rate for at, rate, _ in points.known if at == place and rate is not None})
    curve = [
        CurvePoint(rate, tuple(points[place, rate, seed].attainment[definition] for seed in scenario.seeds))
        for rate in rates
    ]
    return judged(curve, scenario.levels[0]).curve


def _telling_rate(scenario: Scenario, chosen: Sequence[Chosen]) -> float | None:
    if not scenario.rates:
        return None
    held = [scan.highest_held_per_s for one in chosen for scan in one.scans.values() if scan.level >= 0.9]
    return max((rate for rate in held if rate is not None), default=scenario.rates[0])


def _write_phases(stem: Path, name: str, run: Run) -> None:
    """A stretch from the middle of the arrivals."""
    arrivals = run.outcomes.columns["arrival_ns"]
    begin_s = max(0.0, (arrivals[-1] / NS if len(arrivals) else 0.0) / 2 - TIMELINE_S / 2)
    intervals = {str(number): phases.intervals() for number, phases in enumerate(run.phases)}
    phase_timeline(stem, intervals, begin_s, begin_s + TIMELINE_S, title=f"What each instance of {name} did")
