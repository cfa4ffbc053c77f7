"""`serai simulate traces`: recorded traffic under each system.

Azure 2023 conversation and code, Mooncake conversation, and ServeGen's clients, three parts of each. The number of
instances rises until the wanted share of requests is within target (or the largest number is reached): told are
attainment at a common number of instances, the fewest that hold 90 % and 99 % with their GPU-seconds per 1,000
requests, and what single requests suffer: TPOT at p99.9 over its target, and the longest stall between two tokens.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

from serai.bench.profile.data_folder import add_data_argument
from serai.bench.report import Report, hand_out, say
from serai.bench.simulate.study.cells import Candidate, Cell, Load, Slice
from serai.bench.simulate.study.command import (
    add_study_arguments,
    check_study_arguments,
    flat,
    raw_cell,
    runs_of,
    seeds_of,
    spent_note,
)
from serai.bench.simulate.study.systems import Result
from serai.bench.simulate.study.trace_loads import TRACES
from serai.runtime.fields import BadInput
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.reports.drawing import ExtraMissing
from serai.simulator.reports.study_pictures import lines
from serai.simulator.reports.tables import write_table_csv

SYSTEMS = ("vllm", "sarathi", "padg-paper", "serai")
INSTANCES = (1, 2, 3, 4, 6, 8, 12, 16)
QUICK_INSTANCES = (2, 4, 8)
LEVELS = (0.9, 0.99)
COUNTED_S, QUICK_COUNTED_S = 240.0, 60.0


class InstanceScan:
    """A job: one system on one trace, with more instances each time, until the highest level holds."""

    def __init__(self, trace: str, system: str, counts: Sequence[int], seeds: Sequence[int], counted_s: float) -> None:
        self.trace = trace
        self.system = system
        self.by_count: dict[int, list[Result]] = {}
        self.results: dict[Cell, Result] = {}
        self._left = list(counts)
        self._seeds = seeds
        self._counted_s = counted_s
        self._awaited = 0

    def wanted(self) -> list[Cell]:
        """All parts of the trace with the next number of instances."""
        if self._awaited or not self._left or self._holds():
            return []
        count = self._left.pop(0)
        self._awaited = len(self._seeds)
        return [self._cell(count, seed) for seed in self._seeds]

    def learn(self, cell: Cell, result: Result) -> None:
        """One part's result."""
        self._awaited -= 1
        self.results[cell] = result
        self.by_count.setdefault(cell.where.instances, []).append(result)

    def attainment(self, count: int) -> float:
        """Over all requests of all parts; 1 where fewer instances sufficed already, so that it was not run."""
        results = self.by_count.get(count)
        if results is None:
            return 1.0 if self.by_count and count > max(self.by_count) else math.nan
        requests = sum(result.requests for result in results)
        return sum(result.attainment * result.requests for result in results if result.requests) / max(1, requests)

    def fewest(self, level: float) -> int | None:
        """The least number of instances that holds `level`."""
        return next((count for count in sorted(self.by_count) if self.attainment(count) >= level), None)

    def gpu_s_per_1k(self, level: float) -> float:
        """GPU-seconds, idle ones too, that the fewest instances have in the time of 1,000 requests."""
        count = self.fewest(level)
        if count is None:
            return math.nan
        load = TRACES[self.trace]
        gpus = CLUSTERS[load.cluster].tensor[load.model] * count
        results = self.by_count[count]
        return gpus * self._counted_s * len(results) / sum(result.requests for result in results) * 1000

    def _holds(self) -> bool:
        return bool(self.by_count) and self.attainment(max(self.by_count)) >= max(LEVELS)

    def _cell(self, count: int, seed: int) -> Cell:
        load = TRACES[self.trace]
        where = Slice(load.cluster, load.model, self.trace, load.slo, count)
        # Rate and CV are the trace's own.
        return Cell(where, Candidate(self.system), Load(1.0, seed, counted_s=self._counted_s, lead_s=30.0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate traces`."""
    add_study_arguments(parser, __doc__)
    add_data_argument(parser)
    names = list(TRACES)
    parser.add_argument("--traces", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)} (all)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help=f"of {', '.join(SYSTEMS)} (all)")


def run(arguments: argparse.Namespace) -> int:
    """Run and print. Exit status 2 for flags that cannot be."""
    try:
        check_study_arguments(arguments)
        report = replayed_all(arguments)
    except (BadInput, ExtraMissing) as error:
        print(f"serai simulate traces: {error}", file=sys.stderr)
        return 2
    hand_out(report, arguments)
    return 0


def replayed_all(arguments: argparse.Namespace) -> Report:
    """The whole study."""
    quick = arguments.quick
    # Cells are run in other processes, which look for traces where this one was told to.
    os.environ["SERAI_DATA_DIR"] = str(arguments.data.resolve())
    wanted = arguments.traces or (list(TRACES)[:2] if quick else list(TRACES))
    names = [name for name in wanted if (arguments.data / TRACES[name].file).exists()]
    if not names:
        raise BadInput(str(arguments.data), "holds none of the traces", "name the data folder with --data")
    systems = arguments.systems or SYSTEMS
    seeds = seeds_of(arguments, 1 if quick else 3)
    counts = QUICK_INSTANCES if quick else INSTANCES
    counted_s = QUICK_COUNTED_S if quick else COUNTED_S
    jobs = {
        (trace, system): InstanceScan(trace, system, counts, seeds, counted_s) for trace in names for system in systems
    }
    say(f"{len(names)} traces, {len(systems)} systems, {len(seeds)} parts of {counted_s:g} s")
    runs = runs_of(arguments, "traces")
    runs.complete(list(jobs.values()))
    figures: dict[str, float] = {}
    for (trace, system), job in jobs.items():
        common = common_count(jobs, trace)
        figures |= _figures(job, f"{flat(trace)}_{flat(system)}", common)
    rows = _rows(jobs)
    if arguments.out is not None:
        write_table_csv(arguments.out / "traces.csv", rows)
        for trace in names:
            curves = {
                system: [
                    (count, jobs[trace, system].attainment(count)) for count in sorted(jobs[trace, system].by_count)
                ]
                for system in systems
            }
            up = "requests that met TTFT and TPOT"
            title = f"Attainment by instances, {trace}"
            lines(
                arguments.out / f"{trace}", curves, across="instances", up=up, title=title, shares=True, levels=LEVELS
            )
    notes = [f"{name}: not in the data folder" for name in wanted if name not in names]
    config = {
        "quick": quick,
        "traces": {name: f"{TRACES[name].cluster} {TRACES[name].model}" for name in names},
        "parts": list(seeds),
        "counted_s": counted_s,
    }
    raw = [raw_cell(cell, result) for cell, result in runs.known.items()]
    return Report("simulate traces", config, figures, rows, [*notes, spent_note(runs)], raw)


def common_count(jobs: Mapping[tuple[str, str], InstanceScan], trace: str) -> int:
    """The number of instances at which systems are compared: the fewest with which any of them holds 99 %, or the
    largest number that was tried."""
    here = [job for (name, _), job in jobs.items() if name == trace]
    fewest = [count for job in here if (count := job.fewest(LEVELS[-1])) is not None]
    return min(fewest) if fewest else max(max(job.by_count) for job in here)


def _figures(job: InstanceScan, stem: str, common: int) -> dict[str, float]:
    slo = TRACES[job.trace].slo
    results = job.by_count.get(common, [])
    found = {f"{stem}_attainment_n{common}": job.attainment(common)}
    if results:
        found |= {
            f"{stem}_tpot_p999_over_target": max(result.tpot_p999_s for result in results) / slo.tpot_s,
            f"{stem}_stall_max_s": max(result.stall_max_s for result in results),
            f"{stem}_stall_p99_s": fmean(result.stall_p99_s for result in results),
        }
    for level in LEVELS:
        fewest = job.fewest(level)
        if fewest is not None:
            found[f"{stem}_instances_p{level * 100:g}"] = fewest
            found[f"{stem}_gpu_s_per_1k_requests_p{level * 100:g}"] = job.gpu_s_per_1k(level)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _rows(jobs: Mapping[tuple[str, str], InstanceScan]) -> list[tuple[str, ...]]:
    head = (
        "trace, system",
        "attained",
        "with",
        "for 90 %",
        "GPU-s per 1,000",
        "for 99 %",
        "GPU-s per 1,000",
        "TPOT p99.9 / target",
        "longest stall",
    )
    rows: list[tuple[str, ...]] = [head]
    for (trace, system), job in jobs.items():
        common = common_count(jobs, trace)
        found = _figures(job, "", common)
        rows.append(
            (
                f"{trace}: {system}",
                f"{job.attainment(common):.1%}",
                f"N={common}",
                *(text for level in LEVELS for text in _needed(job, level)),
                _text(found.get("_tpot_p999_over_target"), "{:.2f}"),
                _text(found.get("_stall_max_s"), "{:.2f} s"),
            )
        )
    return rows


def _needed(job: InstanceScan, level: float) -> tuple[str, str]:
    fewest = job.fewest(level)
    if fewest is None:
        return f"> {max(job.by_count)}", "–"
    return f"N={fewest}", f"{job.gpu_s_per_1k(level):,.0f}"


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
