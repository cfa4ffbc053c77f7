"""`serai simulate burst`: what burstiness costs. Gamma arrivals of rising coefficient of variation, mean rate by scan.

The PaDG paper's set-up: CodeLlama-34B on its A800 cluster under ShareGPT lengths, 5 s and 100 ms; goodput at P90 and
P99 for CV 1, 1.2, 1.5 and 2. The first figures are at CV 2, where bursts hurt most: our policy over the paper's, and
over vLLM-like serving.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence

from serai.bench.report import Report, hand_out, say
from serai.bench.simulate.goodput import LEVELS, effort_of, lost_share
from serai.bench.simulate.study.cells import TARGETS, Slice, paper_slice
from serai.bench.simulate.study.command import (
    add_study_arguments,
    check_study_arguments,
    flat,
    raw_cell,
    runs_of,
    spent_note,
)
from serai.bench.simulate.study.comparison import Comparison, Goodput, GoodputTable, ratio, ratio_range
from serai.bench.simulate.study.paper_figures import BURST_LOSS
from serai.runtime.fields import BadInput
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.reports.drawing import ExtraMissing
from serai.simulator.reports.study_pictures import lines
from serai.simulator.reports.tables import write_table_csv

SYSTEMS = ("vllm", "sarathi", "distserve", "mooncake", "padg-paper", "serai")
QUICK_SYSTEMS = ("vllm", "padg-paper", "serai")
CVS = (1.0, 1.2, 1.5, 2.0)
QUICK_CVS = (1.2, 2.0)

Found = Mapping[tuple[str, float], Mapping[float, Goodput]]
"""By system and CV, then by level."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate burst`."""
    add_study_arguments(parser, __doc__)
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="a800", help="%(default)s")
    parser.add_argument("--model", default="codellama-34b", help="%(default)s")
    parser.add_argument("--dataset", choices=list(TARGETS), default="sharegpt", help="%(default)s")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help=f"of {', '.join(SYSTEMS)} (all)")


def run(arguments: argparse.Namespace) -> int:
    """Run and print. Exit status 2 for flags that cannot be."""
    try:
        check_study_arguments(arguments)
        if arguments.model not in CLUSTERS[arguments.cluster].tensor:
            known = ", ".join(CLUSTERS[arguments.cluster].tensor)
            raise BadInput("--model", f"is `{arguments.model}`", f"give one of {known}")
        report = bursts(arguments)
    except (BadInput, ExtraMissing) as error:
        print(f"serai simulate burst: {error}", file=sys.stderr)
        return 2
    hand_out(report, arguments)
    return 0


def bursts(arguments: argparse.Namespace) -> Report:
    """The whole study."""
    quick = arguments.quick
    where = paper_slice(arguments.cluster, arguments.model, arguments.dataset)
    systems = arguments.systems or (QUICK_SYSTEMS if quick else SYSTEMS)
    comparisons = {
        cv: Comparison(systems, [where], effort_of(arguments), ratios_max=1, cv=cv)
        for cv in (QUICK_CVS if quick else CVS)
    }
    jobs = [job for comparison in comparisons.values() for job in comparison.plan()]
    say(f"{len(jobs)} scans of rates: {len(systems)} systems, CV {', '.join(f'{cv:g}' for cv in comparisons)}")
    runs = runs_of(arguments, "burst")
    runs.complete(jobs)
    tables = {cv: comparison.table() for cv, comparison in comparisons.items()}
    found = {
        (system, cv): table[where, system]
        for cv, table in tables.items()
        for system in systems
        if (where, system) in table
    }
    figures: dict[str, float] = {}
    for other, name in (("padg-paper", "paper"), ("vllm", "vllm"), ("sarathi", "sarathi")):
        figures |= _ratios(tables, where, other, name)
    figures |= _losses(found, systems)
    rows = _rows(found, systems, list(tables))
    if arguments.out is not None:
        write_table_csv(arguments.out / "burst.csv", rows)
        for level in LEVELS:
            curves = {
                system: [(cv, found[system, cv][level].held_per_s or 0.0) for cv in tables if (system, cv) in found]
                for system in systems
            }
            title = f"Goodput at P{level * 100:g} by burstiness, {where.name}"
            lines(arguments.out / f"burst-p{level * 100:g}", curves, across="CV of gaps", up="requests/s", title=title)
    config = {"quick": quick, "where": where.name, "cv": list(tables), "seeds": list(effort_of(arguments).seeds)}
    raw = [raw_cell(cell, result) for cell, result in runs.known.items()]
    return Report("simulate burst", config, figures, rows, [spent_note(runs)], raw)


def _ratios(tables: Mapping[float, GoodputTable], where: Slice, other: str, name: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    for cv, table in tables.items():
        for level in LEVELS:
            stem = f"serai_over_{name}_p{level * 100:g}_cv{_flat(cv)}"
            figures[stem] = ratio(table, where, "serai", other, level)
            low, high = ratio_range(table, [where], "serai", other, level)
            figures |= {f"{stem}_low": low, f"{stem}_high": high}
    return {stem: value for stem, value in figures.items() if math.isfinite(value)}


def _losses(found: Found, systems: Sequence[str]) -> dict[str, float]:
    """Of P99 goodput, from CV 1.2 to 2, as the paper tells it (T8)."""
    figures = {}
    for system in systems:
        if (system, 1.2) in found and (system, 2.0) in found:
            figures[f"{flat(system)}_loss_p99_cv1_2_to_cv2"] = _lost(found, system, 0.99)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _lost(found: Found, system: str, level: float) -> float:
    before, after = (found[system, cv][level].held_per_s for cv in (1.2, 2.0))
    return lost_share(before, after)


def _rows(found: Found, systems: Sequence[str], cvs: Sequence[float]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("goodput, requests/s", *(f"CV {cv:g}" for cv in cvs), "lost, CV 1.2 to 2", "paper: lost")
    ]
    for level in LEVELS:
        for system in systems:
            if (system, cvs[0]) not in found:
                continue
            held = (found[system, cv][level].held_per_s for cv in cvs)
            cells = (f"{value:g}" if value else "none" for value in held)
            said = BURST_LOSS.get(system) if level == LEVELS[-1] else None
            lost = _lost(found, system, level)
            rows.append(
                (
                    f"P{level * 100:g} {system}",
                    *cells,
                    "–" if math.isnan(lost) else f"{lost:.1%}",
                    "" if said is None else f"{said:.1%}",
                )
            )
    return rows


def _flat(cv: float) -> str:
    return f"{cv:g}".replace(".", "_")
