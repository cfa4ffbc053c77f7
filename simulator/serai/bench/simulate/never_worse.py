"""`serai simulate never-worse`: is our policy anywhere worse than ordinary serving?

Cells are drawn from the product of clusters, models, lengths, three levels of targets, 1 to 11 instances, an engine of
the PaDG paper's time and one of today, burstiness (CV 1 to 2) and rates from low to overload, so that each value of
each axis occurs equally often (a stratified sample with a fixed seed). In each, our policy and the two ordinary ways to
serve (vLLM-like: prompts first; Sarathi-like: chunks beside decoding) get the same arrivals, with three seeds; the gap
is our attainment less the better of the two, in points, by means over seeds. Cells that look worse than half a point
are looked at again, with as many other seeds and four times the requests, and only the second look counts: the worst of
hundreds of short looks would be the unluckiest one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, stdev
from typing import Generic, TypeVar

from serai.bench.report import Report, hand_out, say
from serai.bench.simulate.study.cells import (
    MODELS,
    TARGETS,
    V0,
    V1,
    Candidate,
    Cell,
    Load,
    Slice,
    long_enough,
    reference_rate_per_s,
)
from serai.bench.simulate.study.command import (
    add_study_arguments,
    check_study_arguments,
    flat,
    runs_of,
    seeds_of,
    spent_note,
)
from serai.bench.simulate.study.runs import FixedCells, Runs
from serai.runtime.fields import BadInput
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.outcomes import SloTarget
from serai.simulator.reports.drawing import ExtraMissing
from serai.simulator.reports.study_pictures import histogram
from serai.simulator.reports.tables import write_table_csv

_T = TypeVar("_T")
ORDINARY = ("vllm", "sarathi")
GOAL_POINTS = -1.0
SERVED = 0.9
"""Where an ordinary way attains that, it is no overload."""
CELLS, QUICK_CELLS, CELLS_MAX = 315, 24, 20_000
REQUESTS_MIN, QUICK_REQUESTS_MIN = 100, 100
LOOK_AGAIN_POINTS = -0.5
FIRST_LOOK_S, SECOND_LOOK_S = 100.0, 300.0
"""Nobody waits longer for those requests."""
CLOSER = 4
SHOWN = 12

LEVELS = ((1.0, 1.0), (0.6, 0.8), (0.2, 0.5))
"""Of the dataset's targets, TTFT and TPOT: as the paper's sensitivity experiment tightens them."""

INSTANCES = (1, 2, 4, 8, 11)
ENGINES = (V0, V1)
CVS = (1.0, 1.5, 2.0)
SHARES = (0.15, 0.4, 0.6, 0.75, 0.9, 1.1, 1.4)
"""Rates, as shares of the slice's reference rate at its full target; above 1 is overload for most systems."""
AXES = {
    "cluster": len(CLUSTERS),
    "model": len(MODELS),
    "dataset": len(TARGETS),
    "level": len(LEVELS),
    "instances": len(INSTANCES),
    "engine": len(ENGINES),
    "cv": len(CVS),
    "rate": len(SHARES),
}
"""How many values each axis has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate never-worse`."""
    add_study_arguments(parser, __doc__)
    parser.add_argument("--cells", type=int, metavar="N", help=f"how many cells ({CELLS}; with --quick {QUICK_CELLS})")
    parser.add_argument("--system", default="serai", metavar="NAME", help="whom to judge (%(default)s)")
    parser.add_argument("--cell", type=int, metavar="NUMBER", help="only this cell of the sample")


def run(arguments: argparse.Namespace) -> int:
    """Run and print. Exit status 2 for flags that cannot be."""
    try:
        check_study_arguments(arguments)
        if arguments.cells is not None and not 1 <= arguments.cells <= CELLS_MAX:
            raise BadInput("--cells", f"is {arguments.cells}", f"give 1 to {CELLS_MAX}")
        report = judged(arguments)
    except (BadInput, ExtraMissing) as error:
        print(f"serai simulate never-worse: {error}", file=sys.stderr)
        return 2
    hand_out(report, arguments)
    return 0


@dataclass(frozen=True, slots=True)
class Place:
    """One cell of the sample: everything but system and seed."""

    number: int
    where: Slice
    rate_per_s: float
    cv: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.number}: {self.where.name}, CV {self.cv:g}, {self.rate_per_s:g}/s"


@dataclass(frozen=True, slots=True)
class Gap:
    """What one cell came to: attainments by system, means over seeds, and the gap in points with its standard error."""

    place: Place
    attainment: Mapping[str, float]
    points: float
    error_points: float


class _Deck(Generic[_T]):
    """Values dealt like cards: all of them, shuffled, before any comes again."""

    def __init__(self, values: Iterable[_T], random: Random) -> None:
        self._values = list(values)
        self._random = random
        self._hand: list[_T] = []

    def deal(self) -> _T:
        if not self._hand:
            self._hand = list(self._values)
            self._random.shuffle(self._hand)
        return self._hand.pop()


def sample(cells: int, seed: int = 1) -> list[Place]:
    """The first `cells` of an endless stratified sample: on each axis each value is equally frequent, in its first part
    as in the whole."""
    random = Random(f"never-worse/{seed}")
    clusters, models, datasets = _Deck(CLUSTERS, random), _Deck(MODELS, random), _Deck(TARGETS, random)
    levels, instances, engines = _Deck(LEVELS, random), _Deck(INSTANCES, random), _Deck(ENGINES, random)
    cvs, shares = _Deck(CVS, random), _Deck(SHARES, random)
    found = []
    for number in range(cells):
        cluster, model, dataset = clusters.deal(), models.deal(), datasets.deal()
        full, (ttft, tpot) = TARGETS[dataset], levels.deal()
        slo = SloTarget(full.ttft_s * ttft, full.tpot_s * tpot)
        where = Slice(cluster, model, dataset, slo, instances.deal(), engines.deal())
        rate = reference_rate_per_s(replace(where, slo=full)) * shares.deal()
        found.append(Place(number, where, float(f"{rate:.3g}"), cvs.deal()))
    return found


def judged(arguments: argparse.Namespace) -> Report:
    """The whole study."""
    quick = arguments.quick
    places = sample(arguments.cells or (QUICK_CELLS if quick else CELLS))
    if arguments.cell is not None:
        places = [place for place in sample(max(len(places), arguments.cell + 1)) if place.number == arguments.cell]
    seeds = seeds_of(arguments, 1 if quick else 3)
    system = arguments.system
    requests = QUICK_REQUESTS_MIN if quick else REQUESTS_MIN
    say(f"{len(places)} cells, {1 + len(ORDINARY)} systems, {len(seeds)} seeds")
    runs = runs_of(arguments, "never-worse")
    gaps = looked_at(runs, places, system, seeds, requests)
    if not quick:
        again = [gap.place for gap in gaps if gap.points < LOOK_AGAIN_POINTS]
        say(f"{len(again)} of them looked at again, {CLOSER} × as long")
        other_seeds = [seed + len(seeds) for seed in seeds]
        closer = {gap.place: gap for gap in looked_at(runs, again, system, other_seeds, CLOSER * requests)}
        gaps = [closer.get(gap.place, gap) for gap in gaps]
    return _report(gaps, arguments, seeds, spent_note(runs))


def looked_at(runs: Runs, places: Sequence[Place], system: str, seeds: Sequence[int], requests: int) -> list[Gap]:
    """The gap of each place, from as many requests a seed."""
    cells = {
        (place.number, name, seed): _cell(place, name, seed, requests)
        for place in places
        for name in (*ORDINARY, system)
        for seed in seeds
    }
    job = FixedCells(cells.values())
    runs.complete([job])
    attained = {key: job.results[cell].attainment for key, cell in cells.items()}
    return [gap_of(place, attained, seeds, system) for place in places]


def _cell(place: Place, system: str, seed: int, requests: int) -> Cell:
    # Another seed for each cell, so that one odd stretch of arrivals is not in all of them.
    load = Load(place.rate_per_s, 1000 * place.number + seed, place.cv, counted_s=12.0, lead_s=8.0, tail_s=4.0)
    longest_s = FIRST_LOOK_S if requests <= REQUESTS_MIN else SECOND_LOOK_S
    return Cell(place.where, Candidate(system), long_enough(load, requests, longest_s))


def gap_of(place: Place, attained: Mapping[tuple[int, str, int], float], seeds: Sequence[int], system: str) -> Gap:
    """`system` beside the better ordinary one of this cell, by their means over seeds."""
    means = {name: fmean(attained[place.number, name, seed] for seed in seeds) for name in (*ORDINARY, system)}
    best = max(ORDINARY, key=lambda name: means[name])
    by_seed = [100 * (attained[place.number, system, seed] - attained[place.number, best, seed]) for seed in seeds]
    error = stdev(by_seed) / math.sqrt(len(by_seed)) if len(by_seed) > 1 else 0.0
    return Gap(place, means, fmean(by_seed), error)


def _report(gaps: Sequence[Gap], arguments: argparse.Namespace, seeds: Sequence[int], spent: str) -> Report:
    ranked = sorted(gaps, key=lambda gap: gap.points)
    system = arguments.system
    values = sorted(gap.points for gap in gaps)
    figures: dict[str, float] = {
        "worst_gap_points": values[0],
        "cells": len(gaps),
        "cells_worse_than_goal": sum(1 for value in values if value < GOAL_POINTS),
        "cells_better_by_1_point": sum(1 for value in values if value > 1),
        "gap_points_p01": values[math.ceil(0.01 * len(values)) - 1],
        "gap_points_p05": values[math.ceil(0.05 * len(values)) - 1],
        "gap_points_median": values[(len(values) - 1) // 2],
        "gap_points_mean": fmean(values),
    }
    served = [gap for gap in gaps if max(gap.attainment[name] for name in ORDINARY) >= SERVED]
    figures["cells_served_well"] = len(served)
    figures["worst_gap_points_served_well"] = min((gap.points for gap in served), default=math.nan)
    for axis_value, chosen in _by_axis(gaps).items():
        figures[f"worst_gap_points_{axis_value}"] = min(gap.points for gap in chosen)
    head = (f"worst of {len(gaps)}: attainment", system, *ORDINARY, "gap, points", "± error")
    rows = [head, *(_row(gap, system) for gap in ranked[:SHOWN])]
    if arguments.out is not None:
        write_table_csv(arguments.out / "never-worse.csv", [head, *(_row(gap, system) for gap in ranked)])
        title = f"{system} less the better of {' and '.join(ORDINARY)}, {len(gaps)} cells"
        histogram(
            arguments.out / "never-worse",
            values,
            across="points of attainment",
            up="cells",
            title=title,
            mark=GOAL_POINTS,
        )
    config = {
        "quick": arguments.quick,
        "system": system,
        "seeds": list(seeds),
        "sample": "stratified, seed 1: values of each axis dealt like cards",
        "looked at again": f"below {LOOK_AGAIN_POINTS} points, other seeds, {CLOSER} × the requests",
        "axes": AXES,
        "of": math.prod(AXES.values()),
    }
    raw = [
        {"cell": gap.place.name, "gap_points": round(gap.points, 3), "error_points": round(gap.error_points, 3)}
        | {flat(name): round(value, 5) for name, value in gap.attainment.items()}
        for gap in ranked
    ]
    return Report("simulate never-worse", config, figures, rows, [spent], raw)


def _by_axis(gaps: Sequence[Gap]) -> dict[str, list[Gap]]:
    """By number of instances and by lengths: where weaknesses show first."""
    found: dict[str, list[Gap]] = {}
    for gap in gaps:
        found.setdefault(f"n{gap.place.where.instances}", []).append(gap)
        found.setdefault(gap.place.where.dataset, []).append(gap)
    return dict(sorted(found.items()))


def _row(gap: Gap, system: str) -> tuple[str, ...]:
    shares = (f"{gap.attainment[name]:.1%}" for name in (system, *ORDINARY))
    return (gap.place.name, *shares, f"{gap.points:+.2f}", f"{gap.error_points:.2f}")
