"""`serai simulate ablation`: what the parts of a policy are worth.

Of the paper's policy: which instance is asked next (in a circle, or at random), and when a window ends (adaptively, or
after ¼, ½, ¾ or all of the TTFT target). Of ours: each part switched off alone. Goodput by scan on the PaDG paper's
A800 cluster under ShareGPT lengths.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

from serai.bench.report import Report, hand_out, say
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
from serai.bench.simulate.study.scans import ScanJob
from serai.bench.simulate.study.systems import serai_parts
from serai.runtime.fields import BadInput
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.reports.drawing import ExtraMissing
from serai.simulator.reports.study_pictures import grouped_bars
from serai.simulator.reports.tables import write_table_csv

INTERVALS = (0.25, 0.5, 0.75, 1.0)

Table = Mapping[tuple[Slice, str], Mapping[float, Goodput]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate ablation`."""
    add_study_arguments(parser, __doc__)
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="a800", help="%(default)s")
    parser.add_argument("--dataset", choices=list(TARGETS), default="sharegpt", help="%(default)s")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME", help=f"of {', '.join(MODELS)} (all)")
    parser.add_argument("--policy", choices=("paper", "serai"), help="only the variants of this one (both)")
    parser.add_argument("--cv", type=float, default=1.0, help="burstiness of arrivals (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run and print. Exit status 2 for flags that cannot be."""
    try:
        check_study_arguments(arguments)
        if not 0.1 <= arguments.cv <= 10:
            raise BadInput("--cv", f"is {arguments.cv:g}", "give 0.1 to 10")
        report = ablated(arguments)
    except (BadInput, ExtraMissing) as error:
        print(f"serai simulate ablation: {error}", file=sys.stderr)
        return 2
    hand_out(report, arguments)
    return 0


def variants(quick: bool, policy: str | None = None) -> dict[str, Candidate]:
    """By name: the paper's policy and its variants, ours whole and without each part; of one `policy`, or of both."""
    found = {} if policy == "serai" else _of_the_paper(quick)
    if policy != "paper":
        found |= _of_ours()
    return found


def _of_the_paper(quick: bool) -> dict[str, Candidate]:
    found = {
        "paper": Candidate("padg-paper"),
        "paper_random_next": Candidate("padg-paper", (("scan", "random"),)),
    }
    for share in (0.5,) if quick else INTERVALS:
        found[f"paper_interval_{share * 100:g}"] = Candidate("padg-paper", (("interval_share", share),))
    if not quick:
        found["author_code"] = Candidate("padg-author-code")
    return found


def _of_ours() -> dict[str, Candidate]:
    found = {"serai": Candidate("serai"), "serai_median_slack": Candidate("serai", (("attainment", 0.5),))}
    for part in serai_parts():
        found[f"serai_without_{flat(part)}"] = Candidate("serai", (("without", part),))
    return found


def ablated(arguments: argparse.Namespace) -> Report:
    """The whole study."""
    quick = arguments.quick
    models = arguments.models or (MODELS[1:2] if quick else MODELS)
    slices = [paper_slice(arguments.cluster, model, arguments.dataset) for model in models]
    candidates = variants(quick, arguments.policy)
    effort = effort_of(arguments)
    jobs = {
        (where, name): ScanJob(where, candidate, effort, cv=arguments.cv)
        for where in slices
        for name, candidate in candidates.items()
    }
    say(f"{len(jobs)} scans of rates: {len(candidates)} variants, {len(slices)} models")
    runs = runs_of(arguments, "ablation")
    runs.complete(list(jobs.values()))
    table: Table = {key: {level: told(scan) for level, scan in job.scans().items()} for key, job in jobs.items()}
    figures = relative_figures(table, slices, list(candidates))
    rows = _rows(table, slices, list(candidates))
    if arguments.out is not None:
        write_table_csv(arguments.out / "ablation.csv", rows)
        for level in LEVELS:
            heights = {
                name: {where.model: table[where, name][level].held_per_s or 0.0 for where in slices}
                for name in candidates
            }
            title = f"Goodput at P{level * 100:g}, {arguments.cluster}, {arguments.dataset}"
            grouped_bars(arguments.out / f"ablation-p{level * 100:g}", heights, what="requests/s", title=title)
    config = {
        "quick": quick,
        "slices": [where.name for where in slices],
        "cv": arguments.cv,
        "seeds": list(effort.seeds),
    }
    raw = [raw_cell(cell, result) for cell, result in runs.known.items()]
    return Report("simulate ablation", config, figures, rows, [spent_note(runs)], raw)


def relative_figures(table: Table, slices: Sequence[Slice], names: Sequence[str]) -> dict[str, float]:
    """Goodput of a variant over that of its whole policy, the mean over slices; 0 where it holds no rate."""
    figures = {}
    for name in names:
        whole = "serai" if name.startswith("serai") else "paper"
        if name == whole:
            continue
        for level in LEVELS:
            ratios = [_relative(table, where, name, whole, level) for where in slices]
            known = [ratio for ratio in ratios if math.isfinite(ratio)]
            if known:
                figures[f"{name}_over_{whole}_p{level * 100:g}"] = fmean(known)
    return figures


def _relative(table: Table, where: Slice, name: str, whole: str, level: float) -> float:
    base = table[where, whole][level].held_per_s
    return (table[where, name][level].held_per_s or 0.0) / base if base else math.nan


def _rows(table: Table, slices: Sequence[Slice], names: Sequence[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("goodput, requests/s", *(f"P{level * 100:g}" for level in LEVELS), "lowest failing P90", "lowest failing P99")
    ]
    for where in slices:
        for name in names:
            found = table[where, name]
            held = (f"{value:g}" if (value := found[level].held_per_s) else "none" for level in LEVELS)
            failing = (f"{value:g}" if (value := found[level].failing_per_s) else "–" for level in (0.9, 0.99))
            rows.append((f"{where.name}: {name}", *held, *failing))
    return rows
