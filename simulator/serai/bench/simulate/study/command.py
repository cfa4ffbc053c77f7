"""What the commands of the policy studies have in common: flags, checks, and what they hand out."""

from __future__ import annotations

import argparse
import os
from typing import Any

from serai.bench.report import add_report_arguments, folder, rounded
from serai.bench.simulate.study.cells import Cell
from serai.bench.simulate.study.runs import Runs
from serai.bench.simulate.study.systems import Result, as_fields
from serai.runtime.fields import BadInput

SEEDS_MAX = 100
SYSTEM_NAMES = {"padg-paper": "paper", "padg-author-code": "author_code"}
"""In figures, systems of the PaDG paper go by their policies' names."""


def add_study_arguments(parser: argparse.ArgumentParser, description: str | None) -> None:
    """The flags that every study has."""
    parser.description = description
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_report_arguments(parser)
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each point that counts, seeds 1 to N (3)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (one a core)")
    parser.add_argument("--out", type=folder, metavar="DIR", help="write tables as CSV, and pictures (PNG, SVG), there")
    parser.add_argument(
        "--cache", type=folder, metavar="DIR", help="keep results there; run again only what has changed"
    )


def check_study_arguments(arguments: argparse.Namespace) -> None:
    """Raises BadInput."""
    for name, most in (("jobs", 1024), ("seeds", SEEDS_MAX)):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= most:
            raise BadInput(f"--{name}", f"is {value}", f"give 1 to {most}")


def seeds_of(arguments: argparse.Namespace, default: int) -> tuple[int, ...]:
    """Seeds 1 to N."""
    return tuple(range(1, (arguments.seeds or default) + 1))


def runs_of(arguments: argparse.Namespace, label: str) -> Runs:
    """Where the study's cells run."""
    return Runs(arguments.jobs or len(os.sched_getaffinity(0)), arguments.cache, label=label)


def flat(name: str) -> str:
    """A part of a figure's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in SYSTEM_NAMES.get(name, name).lower())


def raw_cell(cell: Cell, result: Result) -> dict[str, Any]:
    """One run, for the file of raw results."""
    load, where = cell.load, cell.where
    found: dict[str, Any] = {
        "where": where.name,
        "system": cell.candidate.name,
        "rate_per_s": load.rate_per_s,
        "seed": load.seed,
    }
    if load.cv != 1:
        found["cv"] = load.cv
    if cell.delay_s or cell.loss:
        found |= {"delay_s": cell.delay_s, "loss": cell.loss}
    kept = ("attainment", "attainment_industry", "requests", "refused", "unfinished", "tpot_p999_s", "stall_max_s")
    values = as_fields(result)
    return found | {name: rounded(float(values[name])) for name in kept if values.get(name)}


def spent_note(runs: Runs) -> str:
    """How much was run, in words."""
    of_cache = f", {runs.from_cache} of them kept from before" if runs.from_cache else ""
    results = runs.known.values()
    virtual_h = sum(result.simulated_s for result in results) / 3600
    core_s = sum(result.wall_s for result in results)
    return f"{len(results):,} runs{of_cache}, {virtual_h:.1f} h of virtual time, {core_s:,.0f} s of one core"
