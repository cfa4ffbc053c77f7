"""`serai simulate goodput`: the PaDG paper's main comparison, in virtual time.

Three clusters, three models, three sets of lengths with the paper's targets, and nine systems: vLLM-like and Sarathi-
like instances, behind round robin and with arrivals of their own; DistServe and Mooncake as released; and macro-
scheduled ones under the paper's policy, its released code's and ours. Goodput at a level is the highest rate at which
that share of requests meets both targets, by the paper's definition of them; rates rise until the system has failed for
good, and the lowest failing rate is told beside.

--slo asks the same of one set-up under tighter targets (the paper's sensitivity experiment).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from serai.bench.report import Report, hand_out, say
from serai.bench.simulate.study.cells import MODELS, TARGETS, Slice, paper_slice
from serai.bench.simulate.study.command import (
    add_study_arguments,
    check_study_arguments,
    flat,
    raw_cell,
    runs_of,
    seeds_of,
    spent_note,
)
from serai.bench.simulate.study.comparison import (
    Comparison,
    Goodput,
    GoodputTable,
    average_ratio,
    ratio_range,
)
from serai.bench.simulate.study.paper_figures import (
    BASELINES,
    INDEPENDENT,
    NODG,
    RATIOS,
    TIGHTER_SLO,
    TIGHTER_SLO_LOSS,
    PaperRatio,
)
from serai.bench.simulate.study.runs import Runs
from serai.bench.simulate.study.scans import FULL, QUICK, Effort
from serai.runtime.fields import BadInput
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.fast.presets import IDEAL
from serai.simulator.outcomes import SloTarget
from serai.simulator.reports.drawing import ExtraMissing
from serai.simulator.reports.study_pictures import grouped_bars
from serai.simulator.reports.tables import write_table_csv

OURS = ("padg-paper", "padg-author-code", "serai")
OTHERS = (*BASELINES, *INDEPENDENT.values())
SYSTEMS = (*OTHERS, *OURS)
ASKED_FOR = ("mooncake-direct", *IDEAL.values())
"""Disaggregated systems whose engines hand KV over at less cost, or none: only where they are named."""
DIRECT = {"distserve": "distserve", "mooncake": "mooncake-direct"}
LEVELS = (0.9, 0.99)
"""Not P50: what it asks of a system, rates at which half of all requests miss, costs more than all else, and the
paper's ratios are at P90 and P99."""
QUICK_SYSTEMS = (*BASELINES, "padg-paper", "serai")
TIGHTER = (SloTarget(5, 0.1), SloTarget(3, 0.08), SloTarget(3, 0.05), SloTarget(1, 0.08), SloTarget(1, 0.05))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate goodput`."""
    add_study_arguments(parser, __doc__)
    parser.add_argument("--slo", action="store_true", help="tighter targets instead: CodeLlama-34B, A800, ShareGPT")
    _choice(parser, "--clusters", list(CLUSTERS))
    _choice(parser, "--models", list(MODELS))
    _choice(parser, "--datasets", list(TARGETS))
    _choice(parser, "--systems", [*SYSTEMS, *ASKED_FOR])


def _choice(parser: argparse.ArgumentParser, flag: str, choices: list[str]) -> None:
    parser.add_argument(flag, nargs="+", choices=choices, metavar="NAME", help=f"only these of {', '.join(choices)}")


def run(arguments: argparse.Namespace) -> int:
    """Run and print. Exit status 2 for flags that cannot be."""
    try:
        check_study_arguments(arguments)
        report = (tighter if arguments.slo else compared)(arguments)
    except (BadInput, ExtraMissing) as error:
        print(f"serai simulate goodput: {error}", file=sys.stderr)
        return 2
    hand_out(report, arguments)
    return 0


def compared(arguments: argparse.Namespace) -> Report:
    """The main comparison."""
    comparison = Comparison(
        arguments.systems or (QUICK_SYSTEMS if arguments.quick else SYSTEMS),
        _slices(arguments),
        effort_of(arguments),
        ratios_max=1 if arguments.quick else 3,
    )
    runs = _run(comparison, arguments)
    table = comparison.table()
    rows = [("goodput, requests/s", *(f"P{level * 100:g}" for level in LEVELS), "first failing"), *slice_rows(table)]
    if arguments.out is not None:
        _write(arguments.out, table, comparison.slices)
    figures = ratio_figures(table, comparison.slices)
    config = _config(arguments, comparison)
    notes = [*paper_notes(table, comparison.slices), spent_note(runs)]
    return Report("simulate goodput", config, figures, rows, notes, _raw(runs, table))


def tighter(arguments: argparse.Namespace) -> Report:
    """T7: one set-up under targets from loose to tight, at P99."""
    slos = (TIGHTER[0], TIGHTER[-1]) if arguments.quick else TIGHTER
    slices = [paper_slice("a800", "codellama-34b", "sharegpt", slo) for slo in slos]
    comparison = Comparison(
        arguments.systems or (QUICK_SYSTEMS if arguments.quick else SYSTEMS),
        slices,
        effort_of(arguments),
        ratios_max=1 if arguments.quick else 3,
    )
    runs = _run(comparison, arguments)
    table = comparison.table()
    rows = [("goodput P99, requests/s", *(_slo_name(slo) for slo in slos), "lost", "paper: lost")]
    figures = {}
    for system in comparison.systems:
        held = [found[0.99].held_per_s if (found := table.get((where, system))) else None for where in slices]
        lost = lost_share(held[0], held[-1])
        figures[f"{flat(system)}_loss_tightest"] = lost
        figures |= {
            f"{flat(system)}_p99_{_slo_flat(slo)}": value for slo, value in zip(slos, held, strict=True) if value
        }
        said = TIGHTER_SLO_LOSS.get(system)
        rows.append((system, *map(_rate, held), _percent(lost), "" if said is None else _percent(said)))
    notes = []
    for system in NODG:
        loose, tight = (TIGHTER_SLO["padg-paper"][n] / TIGHTER_SLO[system][n] for n in (0, 1))
        notes.append(
            f"the paper's own ratio over {system}: {loose:.2f} at 5 s and 100 ms, {tight:.2f} at 1 s and 50 ms"
        )
    if arguments.out is not None:
        write_table_csv(arguments.out / "tighter.csv", rows)
    return Report(
        "simulate goodput slo",
        _config(arguments, comparison),
        figures,
        rows,
        [*notes, spent_note(runs)],
        _raw(runs, table),
    )


def effort_of(arguments: argparse.Namespace) -> Effort:
    """By --quick and --seeds."""
    if arguments.quick:
        return replace(QUICK, seeds=seeds_of(arguments, 1), levels=LEVELS)
    return replace(FULL, seeds=seeds_of(arguments, 3), levels=LEVELS)


def _slices(arguments: argparse.Namespace) -> list[Slice]:
    quick = arguments.quick
    clusters = arguments.clusters or list(CLUSTERS)
    models = arguments.models or (["codellama-34b"] if quick else list(MODELS))
    datasets = arguments.datasets or (["sharegpt"] if quick else list(TARGETS))
    return [paper_slice(*where) for where in product(clusters, models, datasets)]


def _run(comparison: Comparison, arguments: argparse.Namespace) -> Runs:
    jobs = comparison.plan()
    say(f"{len(jobs)} scans of rates: {len(comparison.systems)} systems on {len(comparison.slices)} set-ups")
    runs = runs_of(arguments, "goodput")
    runs.complete(jobs)
    return runs


# Telling


def ratio_figures(table: GoodputTable, slices: Sequence[Slice]) -> dict[str, float]:
    """Flat, by cluster: mean ratio over its slices, and the range over seeds."""
    figures: dict[str, float] = {}
    for cluster, ours, other, level in product(CLUSTERS, OURS, (*OTHERS, *ASKED_FOR), LEVELS):
        here = [where for where in slices if where.cluster == cluster]
        mean, count = average_ratio(table, here, ours, [other], level)
        name = f"{cluster}_{flat(ours)}_over_{flat(other)}_p{level * 100:g}"
        if not count:
            continue
        figures[name] = mean
        low, high = ratio_range(table, here, ours, other, level)
        figures |= {f"{name}_low": low, f"{name}_high": high}
    for level in LEVELS:
        figures |= _ours_over_paper(table, slices, level)
    return figures


def _ours_over_paper(table: GoodputTable, slices: Sequence[Slice], level: float) -> dict[str, float]:
    ratios = [
        mean
        for where in slices
        if math.isfinite(mean := average_ratio(table, [where], "serai", ["padg-paper"], level)[0])
    ]
    name = f"serai_over_paper_p{level * 100:g}"
    return {f"{name}_mean": sum(ratios) / len(ratios), f"{name}_worst": min(ratios)} if ratios else {}


def slice_rows(table: GoodputTable) -> list[tuple[str, ...]]:
    """A row a slice and system. `first failing` is told at P90, where it is below what holds with a mark."""
    rows: list[tuple[str, ...]] = []
    for (where, system), found in table.items():
        middle = found[LEVELS[0]]
        failing = _rate(middle.failing_per_s) + ("" if middle.monotone else " !")
        rows.append((f"{where.name}: {system}", *(_held(found[level]) for level in LEVELS), failing))
    return rows


def paper_table(table: GoodputTable, slices: Sequence[Slice]) -> list[tuple[str, ...]]:
    """The paper's averages beside ours, of its policy and of ours: T1 to T6."""
    head = (
        "EcoServe ÷ baseline, P90",
        "paper",
        "Algorithm 1 here",
        "difference",
        "its code here",
        "difference",
        "serai",
    )
    rows: list[tuple[str, ...]] = [(*head, "of")]
    for published in (
        *RATIOS,
        *_of_others(RATIOS, INDEPENDENT),
        *_of_others(RATIOS, DIRECT),
        *_of_others(RATIOS, IDEAL),
    ):
        here = [where for where in slices if _belongs(where, published)]
        means = {ours: average_ratio(table, here, ours, published.baselines, 0.9) for ours in OURS}
        count = max(number for _, number in means.values())
        if count:
            literal, code, serai = (means[ours][0] for ours in OURS)
            theirs = (text for mean in (literal, code) for text in _beside(mean, published.ratio))
            rows.append((published.name, f"{published.ratio:.2f}", *theirs, _ratio(serai), str(count)))
    return rows


def _of_others(ratios: Sequence[PaperRatio], others: Mapping[str, str]) -> list[PaperRatio]:
    """The same figures over `others` of the baselines: with arrivals of their own, or ideal."""
    return [
        replace(one, baselines=tuple(others[name] for name in one.baselines))
        for one in ratios
        if all(name in others for name in one.baselines) and one.baselines != tuple(map(others.get, one.baselines))
    ]


def _beside(mean: float, published: float) -> tuple[str, str]:
    return _ratio(mean), "" if math.isnan(mean) else f"{mean / published - 1:+.0%}"


def _ratio(mean: float) -> str:
    return "" if math.isnan(mean) else f"{mean:.2f}"


def paper_notes(table: GoodputTable, slices: Sequence[Slice]) -> list[str]:
    """The same as lines under the table."""
    head, *rows = paper_table(table, slices)
    return [f"{head[0]}: {', '.join(head[1:])}", *(f"{row[0]}: {', '.join(row[1:])}" for row in rows)]


def _belongs(where: Slice, published: PaperRatio) -> bool:
    axes = ((published.clusters, where.cluster), (published.models, where.model), (published.datasets, where.dataset))
    return all(not chosen or value in chosen for chosen, value in axes)


def lost_share(before: float | None, after: float | None) -> float:
    """The share of a goodput that is lost; NaN without one before, all of it without one after."""
    return 1 - (after or 0.0) / before if before else math.nan


def _config(arguments: argparse.Namespace, comparison: Comparison) -> Mapping[str, object]:
    effort = comparison.effort
    return {
        "quick": arguments.quick,
        "systems": list(comparison.systems),
        "slices": [where.name for where in comparison.slices],
        "seeds": list(effort.seeds),
        "counted_s": effort.counted_s,
        "requests_min": effort.requests_min,
        "overheads": {"step_s": 0.018, "mixed_s": 0.012},
    }


def _raw(runs: Runs, table: GoodputTable) -> object:
    return {
        "goodput": [
            {
                "where": where.name,
                "system": system,
                **{f"p{level * 100:g}": _goodput(at) for level, at in found.items()},
            }
            for (where, system), found in table.items()
        ],
        "runs": [raw_cell(cell, result) for cell, result in runs.known.items()],
    }


def _goodput(found: Goodput) -> dict[str, object]:
    return {"held": found.held_per_s, "lowest_failing": found.failing_per_s, "by_seed": list(found.by_seed)}


def _write(out: Path, table: GoodputTable, slices: Sequence[Slice]) -> None:
    write_table_csv(out / "goodput.csv", [("where", *map(str, LEVELS), "first failing"), *slice_rows(table)])
    write_table_csv(out / "paper.csv", paper_table(table, slices))
    for level in LEVELS:
        _bars(out, table, slices, level, lambda where: where.cluster)


def _bars(out: Path, table: GoodputTable, slices: Sequence[Slice], level: float, group: Callable[[Slice], str]) -> None:
    for name in dict.fromkeys(map(group, slices)):
        here = [where for where in slices if group(where) == name]
        heights = {
            system: {
                f"{where.model}\n{where.dataset}": found[level].held_per_s or 0.0
                for where in here
                if (found := table.get((where, system))) is not None
            }
            for system in (*SYSTEMS, *ASKED_FOR)
        }
        title = f"Goodput at P{level * 100:g} on {name}"
        grouped_bars(out / f"goodput-{name}-p{level * 100:g}", heights, what="requests/s", title=title)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _held(found: Goodput) -> str:
    return ("≥ " if found.open_ended else "") + (_rate(found.held_per_s) if found.held_per_s else "none")


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _slo_name(slo: SloTarget) -> str:
    return f"{slo.ttft_s:g} s, {slo.tpot_s * 1000:g} ms"


def _slo_flat(slo: SloTarget) -> str:
    return f"{slo.ttft_s:g}s_{slo.tpot_s * 1000:g}ms"
