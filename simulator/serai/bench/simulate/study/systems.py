"""Cells made real: instances, a dispatch policy, arrivals. And what one run comes to."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from serai.bench.simulate.study.cells import CONTEXT_TOKENS, Cell, Load, Slice
from serai.bench.simulate.study.paper_figures import INDEPENDENT
from serai.bench.simulate.study.trace_loads import TRACES
from serai.macro_scheduler import admission
from serai.macro_scheduler.group import GroupSettings
from serai.simulator.data_folder import data_folder
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.macro_scheduled import MacroScheduled, MacroSettings, ReportPath
from serai.simulator.fast.paper_clusters import CLUSTERS, PROMPT_TOKENS_MAX
from serai.simulator.fast.presets import (
    DISAGGREGATED,
    System,
    disaggregated_system,
    engine_preset,
    instance_spec,
    ratios,
    whole_system,
)
from serai.simulator.fast.run import NS, Run
from serai.simulator.outcomes import LatencyDefinition, Outcomes, SloTarget, Window, attainment
from serai.simulator.summary import tpots_s, ttfts_s
from serai.simulator.workloads.lengths import dataset
from serai.simulator.workloads.processes import GammaGaps, Gaps, PoissonGaps, steady
from serai.simulator.workloads.synthetic import Traffic, synthetic
from serai.simulator.workloads.workload import Arrival

DRAIN_S = 240.0
MACRO_SCHEDULED = {"padg-paper": "paper", "padg-author-code": "author_code", "serai": "serai"}
"""Systems by name, and the admission policy of each."""
_ENGINE = {independent: engine for engine, independent in INDEPENDENT.items()}


def is_macro_scheduled(system: str) -> bool:
    """Whether the macro-scheduler and the phase gate take part."""
    return system in MACRO_SCHEDULED


@dataclass(frozen=True, slots=True)
class Result:
    """What one run came to. Latencies by the strict definition; stalls are between two tokens of a request."""

    attainment: float
    attainment_industry: float
    requests: int
    refused: int
    unfinished: int
    ttft_met: float
    tpot_met: float
    ttft_p99_s: float
    tpot_p99_s: float
    tpot_p999_s: float
    stall_p99_s: float
    stall_max_s: float
    busy_gpu_s_per_1k: float
    """GPU-seconds of work per 1,000 requests that met their target."""
    preemptions: int
    simulated_s: float
    steps: int
    wall_s: float
    """Of the machine that ran it; the only field that is not the same everywhere."""


def measured(cell: Cell) -> Result:
    """Run `cell`."""
    began_s = time.process_time()
    run = run_cell(cell)
    load = cell.load
    window = Window(round(load.lead_s * NS), round((load.lead_s + load.counted_s) * NS))
    return _result(run, cell.where.slo, window, time.process_time() - began_s)


def run_cell(cell: Cell, *, phases: bool = False) -> Run:
    """The run itself; with `phases` it can be drawn."""
    system = built(cell)
    cluster = CLUSTERS[cell.where.cluster]
    settings = ClusterSettings(
        network=cluster.network,
        copies_between_steps=cell.candidate.system == "distserve-ideal",
        drain_s=DRAIN_S,
        keep_phases=phases,
    )
    specs = [replace(spec, energy_j=None) for spec in system.instances]
    return simulate(specs, arrivals(cell.where, cell.load), system.dispatch(), settings)


def built(cell: Cell) -> System:
    """Its system. Raises ValueError for one that cannot be built there, as DistServe with one instance a node."""
    where, candidate = cell.where, cell.candidate
    cluster = CLUSTERS[where.cluster]
    model, gpus = cluster.latency_model(where.model), cluster.tensor[where.model]
    if candidate.system in DISAGGREGATED:
        prefill = candidate.prefill
        per_node = cluster.instances_per_node(where.model, candidate.system)
        return disaggregated_system(
            candidate.system,
            model,
            prefill,
            where.instances - prefill,
            per_node,
            overheads=where.overheads,
            gpus=gpus,
        )
    if is_macro_scheduled(candidate.system):
        return _macro_scheduled(cell)
    policy = "uniform-random" if candidate.system in _ENGINE else "round-robin"
    engine = _ENGINE.get(candidate.system, candidate.system)
    return whole_system(engine, model, where.instances, overheads=where.overheads, policy=policy, gpus=gpus)


def _macro_scheduled(cell: Cell) -> System:
    where, load = cell.where, cell.load
    cluster = CLUSTERS[where.cluster]
    model, gpus = cluster.latency_model(where.model), cluster.tensor[where.model]
    specs = [instance_spec(engine_preset("padg"), model, where.overheads, gpus=gpus)] * where.instances
    options: dict[str, Any] = dict(cell.candidate.options)
    group = GroupSettings(
        policy=MACRO_SCHEDULED[cell.candidate.system],
        slo_ttft_s=where.slo.ttft_s,
        slo_tpot_s=where.slo.tpot_s,
        pending_max=1_000_000,
        **options,
    )
    path = ReportPath(delay_s=cell.delay_s, loss=cell.loss, seed=load.seed)
    settings = MacroSettings(group, path, hold_output=cell.candidate.system == "padg-author-code")
    return System(cell.candidate.name, specs, lambda: MacroScheduled(specs, settings))


def prefill_choices(system: str, where: Slice) -> list[int]:
    """Every number of prefill instances that a disaggregated `system` can have at `where`."""
    per_node = CLUSTERS[where.cluster].instances_per_node(where.model, system)
    return [prefill for prefill, _ in ratios(where.instances, per_node, system)]


def serai_parts() -> Sequence[str]:
    """Parts of our policy that can be switched off, one at a time, by the option `without`."""
    return getattr(admission, "SERAI_PARTS", ())


@lru_cache(maxsize=8)
def arrivals(where: Slice, load: Load) -> Sequence[Arrival]:
    """The same for every system, so they are kept while one slice and rate is looked at."""
    if where.dataset in TRACES:
        return list(TRACES[where.dataset].workload(data_folder(), load.seed, load.whole_s))
    gaps: Gaps = PoissonGaps() if load.cv == 1 else GammaGaps(load.cv)
    context = PROMPT_TOKENS_MAX.get(where.model, CONTEXT_TOKENS)
    traffic = Traffic(gaps, steady(load.rate_per_s, load.whole_s), dataset(where.dataset), context_tokens=context)
    return list(synthetic(where.dataset, "", traffic, load.seed))


def _result(run: Run, slo: SloTarget, window: Window, wall_s: float) -> Result:
    counted = run.outcomes.arriving_in(window)
    strict = LatencyDefinition.STRICT
    ttfts, tpots = ttfts_s(counted, strict), tpots_s(counted, strict)
    stalls = _stalls_s(counted)
    figures = run.figures()
    good = attainment(run.outcomes, slo, strict) * len(run.outcomes) if len(run.outcomes) else 0.0
    return Result(
        attainment=attainment(counted, slo, strict),
        attainment_industry=attainment(counted, slo, LatencyDefinition.INDUSTRY),
        requests=len(counted),
        refused=sum(counted.columns["refused"]),
        unfinished=sum(
            1
            for ended, no in zip(counted.columns["finished_ns"], counted.columns["refused"], strict=True)
            if ended < 0 and not no
        ),
        ttft_met=_share_within(ttfts, slo.ttft_s),
        tpot_met=_share_within(tpots, slo.tpot_s),
        ttft_p99_s=_quantile(ttfts, 0.99),
        tpot_p99_s=_quantile(tpots, 0.99),
        tpot_p999_s=_quantile(tpots, 0.999),
        stall_p99_s=_quantile(stalls, 0.99),
        stall_max_s=max(stalls, default=math.nan),
        busy_gpu_s_per_1k=figures["busy_gpu_s"] / good * 1000 if good else math.nan,
        preemptions=int(figures["preemptions"]),
        simulated_s=figures["simulated_s"],
        steps=run.steps,
        wall_s=wall_s,
    )


def _stalls_s(outcomes: Outcomes) -> list[float]:
    columns = outcomes.columns
    return [
        gap / NS
        for gap, output in zip(columns["itl_max_ns"], columns["output_tokens"], strict=True)
        if output > 1 and gap >= 0
    ]


def _share_within(values: Sequence[float], target: float) -> float:
    return sum(1 for value in values if value <= target) / len(values) if values else math.nan


def _quantile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else math.nan


def as_fields(result: Result) -> dict[str, Any]:
    """For a file that others read. What is infinite or unknown is left out: JSON has neither."""
    return {name: value for name, value in asdict(result).items() if math.isfinite(value)}
