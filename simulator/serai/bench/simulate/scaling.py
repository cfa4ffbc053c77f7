"""`serai simulate scaling`: goodput by the number of instances.

The PaDG paper's set-up: its L20 cluster under ShareGPT lengths at P90, CodeLlama-34B (TP 4) and Qwen2-72B (TP 8), one
to four instances, and beyond. More instances can serve more than in proportion: windows of many are staggered, one has
nobody to take turns with.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from serai.bench.report import Report, hand_out, say
from serai.bench.simulate.dynamic_scaling import dynamic
from serai.bench.simulate.goodput import LEVELS, effort_of
from serai.bench.simulate.study.cells import MODELS, TARGETS, Candidate, Slice, paper_slice
from serai.bench.simulate.study.command import (
    add_study_arguments,
    check_study_arguments,
    flat,
    raw_cell,
    runs_of,
    spent_note,
)
from serai.bench.simulate.study.comparison import Goodput, told
from serai.bench.simulate.study.paper_figures import STATIC_SCALING
from serai.bench.simulate.study.scans import ScanJob
from serai.runtime.fields import BadInput
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.reports.drawing import ExtraMissing
from serai.simulator.reports.study_pictures import lines
from serai.simulator.reports.tables import write_table_csv

SYSTEMS = ("vllm", "sarathi", "padg-paper", "serai")
INSTANCES = (1, 2, 3, 4, 8, 16)
QUICK_INSTANCES = (1, 4)

Table = Mapping[tuple[str, str, int], Mapping[float, Goodput]]
"""By model, system and number of instances, then by level."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate scaling`."""
    add_study_arguments(parser, __doc__)
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="l20", help="%(default)s")
    parser.add_argument("--dataset", choices=list(TARGETS), default="sharegpt", help="%(default)s")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--instances", nargs="+", type=int, metavar="N", help=f"({' '.join(map(str, INSTANCES))})")
    parser.add_argument(
        "--dynamic", action="store_true", help="instead: a group that grows from 8 to 16 while the load rises"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run and print. Exit status 2 for flags that cannot be."""
    try:
        check_study_arguments(arguments)
        for count in arguments.instances or ():
            if not 1 <= count <= 256:
                raise BadInput("--instances", f"has {count}", "give 1 to 256")
        report = dynamic(arguments) if arguments.dynamic else scaled(arguments)
    except (BadInput, ExtraMissing) as error:
        print(f"serai simulate scaling: {error}", file=sys.stderr)
        return 2
    hand_out(report, arguments)
    return 0


def scaled(arguments: argparse.Namespace) -> Report:
    """The whole study."""
    quick = arguments.quick
    models = arguments.models or (["codellama-34b"] if quick else list(STATIC_SCALING))
    counts = sorted(set(arguments.instances or (QUICK_INSTANCES if quick else INSTANCES)))
    jobs = {
        (model, system, count): ScanJob(_slice(arguments, model, count), Candidate(system), effort_of(arguments))
        for model in models
        for count in counts
        for system in SYSTEMS
    }
    say(f"{len(jobs)} scans of rates: {len(SYSTEMS)} systems, {len(models)} models, {len(counts)} numbers of instances")
    runs = runs_of(arguments, "scaling")
    runs.complete(list(jobs.values()))
    table: Table = {key: {level: told(scan) for level, scan in job.scans().items()} for key, job in jobs.items()}
    figures = {
        f"{flat(system)}_{flat(model)}_{count}_over_{counts[0]}_p{level * 100:g}": value
        for model in models
        for system in SYSTEMS
        for count in counts[1:]
        for level in LEVELS
        if math.isfinite(value := grown(table, model, system, counts[0], count, level))
    }
    rows = _rows(table, models, counts)
    if arguments.out is not None:
        write_table_csv(arguments.out / "scaling.csv", rows)
        for model in models:
            curves = {
                system: [(count, table[model, system, count][0.9].held_per_s or 0.0) for count in counts]
                for system in SYSTEMS
            }
            title = f"Goodput at P90 by instances, {arguments.cluster}, {model}, {arguments.dataset}"
            lines(arguments.out / f"scaling-{model}", curves, across="instances", up="requests/s", title=title)
    config = {
        "quick": quick,
        "cluster": arguments.cluster,
        "dataset": arguments.dataset,
        "models": list(models),
        "instances": counts,
        "seeds": list(effort_of(arguments).seeds),
    }
    raw = [raw_cell(cell, result) for cell, result in runs.known.items()]
    return Report("simulate scaling", config, figures, rows, [spent_note(runs)], raw)


def grown(table: Table, model: str, system: str, few: int, many: int, level: float) -> float:
    """Goodput of many instances over that of few; NaN when the few have none."""
    before, after = (table[model, system, count][level].held_per_s for count in (few, many))
    return (after or 0.0) / before if before else math.nan


def _slice(arguments: argparse.Namespace, model: str, count: int) -> Slice:
    return replace(paper_slice(arguments.cluster, model, arguments.dataset), instances=count)


def _rows(table: Table, models: Sequence[str], counts: Sequence[int]) -> list[tuple[str, ...]]:
    few = counts[0]
    head = ("goodput P90, requests/s", *(f"N={count}" for count in counts), f"4 over {few}", "paper: 4 over 1")
    rows: list[tuple[str, ...]] = [head]
    for model in models:
        for system in SYSTEMS:
            held = (table[model, system, count][0.9].held_per_s for count in counts)
            growth = grown(table, model, system, few, 4, 0.9) if 4 in counts else math.nan
            said = STATIC_SCALING.get(model) if system == "padg-paper" else None
            rows.append(
                (
                    f"{model}: {system}",
                    *(f"{value:g}" if value else "none" for value in held),
                    "–" if math.isnan(growth) else f"{growth:.2f}",
                    "" if said is None else f"{said:.2f}",
                )
            )
    return rows
