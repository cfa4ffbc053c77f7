"""`serai simulate staleness`: what late and lost status costs. Instances' reports reach the scheduler 0 to 1,000 ms
late, and a share of them never.

For each system its attainment is told at rates that it holds well with fresh status: shares of our own P99 goodput
there. The loss is fresh attainment less stale, in points, the mean over seeds; the worst over rates counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

from serai.bench.report import Report, hand_out, say
from serai.bench.simulate.goodput import effort_of
from serai.bench.simulate.study.cells import TARGETS, Candidate, Cell, Load, long_enough, paper_slice
from serai.bench.simulate.study.command import (
    add_study_arguments,
    check_study_arguments,
    flat,
    raw_cell,
    runs_of,
    seeds_of,
    spent_note,
)
from serai.bench.simulate.study.runs import FixedCells
from serai.bench.simulate.study.scans import ScanJob
from serai.runtime.fields import BadInput
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.reports.drawing import ExtraMissing
from serai.simulator.reports.study_pictures import lines
from serai.simulator.reports.tables import write_table_csv

SYSTEMS = ("serai", "padg-paper")
DELAYS_S = (0.0, 0.1, 0.25, 0.5, 1.0)
QUICK_DELAYS_S = (0.0, 0.1, 1.0)
SHARES = (0.75, 0.9, 1.0)
QUICK_SHARES = (0.75, 1.0)
GOAL_POINTS = 2.0

Attained = Mapping[tuple[str, float, float], float]
"""By system, rate and delay: the mean over seeds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate staleness`."""
    add_study_arguments(parser, __doc__)
    parser.add_argument(
        "--loss", type=float, default=0.05, help="share of reports lost when they are late (%(default)s)"
    )
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="a800", help="%(default)s")
    parser.add_argument("--model", default="codellama-34b", help="%(default)s")
    parser.add_argument("--dataset", choices=list(TARGETS), default="sharegpt", help="%(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Run and print. Exit status 2 for flags that cannot be."""
    try:
        check_study_arguments(arguments)
        if not 0 <= arguments.loss < 1:
            raise BadInput("--loss", f"is {arguments.loss:g}", "give 0 to below 1")
        if arguments.model not in CLUSTERS[arguments.cluster].tensor:
            known = ", ".join(CLUSTERS[arguments.cluster].tensor)
            raise BadInput("--model", f"is `{arguments.model}`", f"give one of {known}")
        report = stale(arguments)
    except (BadInput, ExtraMissing) as error:
        print(f"serai simulate staleness: {error}", file=sys.stderr)
        return 2
    hand_out(report, arguments)
    return 0


def stale(arguments: argparse.Namespace) -> Report:
    """The whole study."""
    quick = arguments.quick
    where = paper_slice(arguments.cluster, arguments.model, arguments.dataset)
    systems = SYSTEMS
    delays, shares = (QUICK_DELAYS_S, QUICK_SHARES) if quick else (DELAYS_S, SHARES)
    seeds = seeds_of(arguments, 1 if quick else 3)
    runs = runs_of(arguments, "staleness")
    say("our goodput with fresh status")
    scan = ScanJob(where, Candidate("serai"), effort_of(arguments))
    runs.complete([scan])
    held = _held(scan)
    rates = [float(f"{held * share:.4g}") for share in shares]
    say(f"{len(systems)} systems at {len(rates)} rates, {len(delays)} delays, {len(seeds)} seeds")
    cells = {
        (system, rate, delay_s, seed): Cell(
            where,
            Candidate(system),
            long_enough(Load(rate, seed, counted_s=30.0 if quick else 45.0), 500),
            delay_s=delay_s,
            loss=arguments.loss if delay_s else 0.0,
        )
        for system in systems
        for rate in rates
        for delay_s in delays
        for seed in seeds
    }
    job = FixedCells(cells.values())
    runs.complete([job])
    attained = {
        (system, rate, delay_s): fmean(job.results[cells[system, rate, delay_s, seed]].attainment for seed in seeds)
        for system, rate, delay_s, _ in cells
    }
    figures = loss_figures(attained, systems, rates, delays)
    rows = _rows(attained, systems, rates, delays)
    if arguments.out is not None:
        write_table_csv(arguments.out / "staleness.csv", rows)
        curves = {
            f"{system}, {rates[-1]:g}/s": [(delay_s * 1000, attained[system, rates[-1], delay_s]) for delay_s in delays]
            for system in systems
        }
        title = f"Attainment by lateness of status, {arguments.loss:.0%} of it lost, {where.name}"
        up = "requests that met TTFT and TPOT"
        lines(arguments.out / "staleness", curves, across="delay (ms)", up=up, title=title, shares=True)
    config = {
        "quick": quick,
        "where": where.name,
        "loss": arguments.loss,
        "delays_ms": [delay_s * 1000 for delay_s in delays],
        "rates_per_s": rates,
        "seeds": list(seeds),
    }
    raw = [raw_cell(cell, result) for cell, result in runs.known.items()]
    return Report("simulate staleness", config, figures, rows, [spent_note(runs)], raw)


def _held(scan: ScanJob) -> float:
    """Its goodput at the highest level at which it has one; else the lowest rate tried."""
    scans = scan.scans()
    known = [scans[level].highest_held_per_s for level in sorted(scans, reverse=True)]
    return next((rate for rate in known if rate is not None), scans[max(scans)].curve[0].rate_per_s)


def loss_figures(
    attained: Attained, systems: Sequence[str], rates: Sequence[float], delays: Sequence[float]
) -> dict[str, float]:
    """Points lost at each delay, at the rate where most are."""
    figures = {}
    for system in systems:
        for delay_s in delays[1:]:
            lost = [100 * (attained[system, rate, delays[0]] - attained[system, rate, delay_s]) for rate in rates]
            figures[f"{flat(system)}_loss_points_{delay_s * 1000:g}ms"] = max(lost)
    return figures


def _rows(
    attained: Attained, systems: Sequence[str], rates: Sequence[float], delays: Sequence[float]
) -> list[tuple[str, ...]]:
    head = ("attainment, reports late by", *(f"{delay_s * 1000:g} ms" for delay_s in delays), "lost, points")
    rows: list[tuple[str, ...]] = [head]
    for system in systems:
        for rate in rates:
            shares = [attained[system, rate, delay_s] for delay_s in delays]
            lost = 100 * (shares[0] - shares[-1])
            rows.append((f"{system}, {rate:g}/s", *(f"{share:.1%}" for share in shares), f"{lost:+.2f}"))
    return rows
