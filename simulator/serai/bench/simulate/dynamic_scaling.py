"""`serai simulate scaling --dynamic`: a group grows from 8 to 16 instances while the load rises.

The PaDG paper's set-up (EcoServe, OSDI '26): CodeLlama-34B (TP 4) on its L20 cluster, ShareGPT lengths, 20 to 50
requests/s, a step every 2 minutes, attainment of each 30 s; N_l = 6, N_u = 11. An instance takes 3 minutes to start,
as the paper says of its own. Compared are the paper's policy with its triggers and with ours, our policy with ours,
instances that only have to be woken, and fixed numbers of instances.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

from serai.bench.report import Report, rounded, say
from serai.bench.simulate.study.cells import CONTEXT_TOKENS, TARGETS, V0
from serai.macro_scheduler.group import GroupSettings
from serai.macro_scheduler.scaling import ScalingSettings, Trigger
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.macro_scaled import Change, MacroScaled, MacroSettings
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.fast.presets import engine_preset, instance_spec
from serai.simulator.fast.run import NS
from serai.simulator.outcomes import LatencyDefinition, Outcomes, Window, attainment
from serai.simulator.workloads.lengths import dataset
from serai.simulator.workloads.processes import PoissonGaps, Segment, steps_and_ramps
from serai.simulator.workloads.synthetic import Traffic, synthetic
from serai.simulator.workloads.workload import Arrival

RATES = (20, 25, 30, 35, 40, 45, 50)
INSTANCES, INSTANCES_MAX = 8, 16
SAMPLE_S = 30.0
DRAIN_S = 240.0
GOOD = 0.9


@dataclass(frozen=True, slots=True)
class Variant:
    """One group. `trigger` None: so many instances from the start to the end."""

    name: str
    policy: str
    trigger: Trigger | None
    start_s: float
    instances: int = INSTANCES


VARIANTS = (
    Variant("paper, its triggers", "paper", Trigger.PAPER, 180.0),
    Variant("paper, our triggers", "paper", Trigger.SERAI, 180.0),
    Variant("serai", "serai", Trigger.SERAI, 180.0),
    Variant("serai, woken in 10 s", "serai", Trigger.SERAI, 10.0),
    Variant("serai, always 8", "serai", None, 0.0),
    Variant("serai, always 16", "serai", None, 0.0, INSTANCES_MAX),
)
SHORT = {"paper, its triggers": "paper", "paper, our triggers": "paper_our_triggers", "serai": "serai"}
SHORT |= {"serai, woken in 10 s": "serai_woken", "serai, always 8": "serai_8", "serai, always 16": "serai_16"}


@dataclass(frozen=True, slots=True)
class Course:
    """What one run came to."""

    variant: str
    seed: int
    attainment: float
    sampled: tuple[float, ...]
    """Of each 30 s, by arrival."""
    changes: tuple[Change, ...]
    moves: int
    gpu_s_per_1k: float
    """GPU-seconds that instances held, by 1,000 requests that met their targets."""
    instances_end: int
    wall_s: float


def dynamic(arguments: argparse.Namespace) -> Report:
    """The whole study."""
    step_s = 40.0 if arguments.quick else 120.0
    seeds = range(1, 1 + (arguments.seeds or (1 if arguments.quick else 3)))
    variants = [_quicker(variant) if arguments.quick else variant for variant in VARIANTS]
    jobs = arguments.jobs or len(os.sched_getaffinity(0))
    say(f"{len(variants)} groups, {len(seeds)} seeds, {len(RATES) * step_s:g} s each")
    found: dict[tuple[str, int], Course] = {}
    for course in _courses([(variant, seed, step_s) for variant in variants for seed in seeds], jobs):
        found[course.variant, course.seed] = course
        say(f"{course.variant}, seed {course.seed}: {course.attainment:.3f}, {course.wall_s:.0f} s")
    return _report(variants, list(seeds), step_s, found)


def _quicker(variant: Variant) -> Variant:
    return replace(variant, start_s=variant.start_s / 3)


def _courses(work: Sequence[tuple[Variant, int, float]], jobs: int) -> Iterator[Course]:
    if jobs == 1:
        yield from (course(*one) for one in work)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(work)), mp_context=context) as pool:
        for done in as_completed([pool.submit(course, *one) for one in work]):
            yield done.result()


def course(variant: Variant, seed: int, step_s: float) -> Course:
    """One run."""
    began_s = time.process_time()
    cluster, target = CLUSTERS["l20"], TARGETS["sharegpt"]
    model, gpus = cluster.latency_model("codellama-34b"), cluster.tensor["codellama-34b"]
    spec = replace(instance_spec(engine_preset("padg"), model, V0, gpus=gpus), energy_j=None)
    scaling = None
    if variant.trigger is not None:
        scaling = ScalingSettings(
            variant.trigger, instances_min=4, instances_max=INSTANCES_MAX, start_s=variant.start_s
        )
    group = GroupSettings(
        policy=variant.policy,
        slo_ttft_s=target.ttft_s,
        slo_tpot_s=target.tpot_s,
        pending_max=1_000_000,
        scaling=scaling,
    )
    dispatch = MacroScaled([spec] * variant.instances, MacroSettings(group), variant.start_s)
    settings = ClusterSettings(drain_s=DRAIN_S, keep_phases=False)
    run = simulate([spec] * variant.instances, rising(seed, step_s), dispatch, settings)
    until_s = len(RATES) * step_s
    whole = attainment(run.outcomes, target, LatencyDefinition.STRICT)
    held_s = gpus * sum(_held_s(variant.instances, dispatch.changes, until_s))
    return Course(
        variant.name,
        seed,
        whole,
        tuple(_sampled(run.outcomes, until_s)),
        tuple([change for change in dispatch.changes if change.at_s <= until_s]),
        dispatch.moves,
        held_s / max(1e-9, whole * len(run.outcomes)) * 1000,
        sum(dispatch.sizes),
        time.process_time() - began_s,
    )


def _held_s(first: int, changes: Sequence[Change], until_s: float) -> Iterator[float]:
    """How long each instance had its GPUs while the load lasted: from the wish for it until it had left."""
    left_s = {change.instance: change.at_s for change in changes if change.what == "left"}
    began_s = [0.0] * first + [change.at_s for change in changes if change.what == "wished"]
    for instance, at_s in enumerate(began_s):
        yield max(0.0, min(until_s, left_s.get(instance, until_s)) - at_s)


def rising(seed: int, step_s: float) -> list[Arrival]:
    """20 to 50 requests/s in equal steps, ShareGPT lengths."""
    segments = [Segment(step_s, rate, rate) for rate in RATES]
    traffic = Traffic(PoissonGaps(), steps_and_ramps(segments), dataset("sharegpt"), context_tokens=CONTEXT_TOKENS)
    return list(synthetic("rising", "20 to 50 requests/s", traffic, seed))


def _sampled(outcomes: Outcomes, until_s: float) -> Iterator[float]:
    target = TARGETS["sharegpt"]
    for place in range(round(until_s / SAMPLE_S)):
        window = Window(round(place * SAMPLE_S * NS), round((place + 1) * SAMPLE_S * NS))
        yield attainment(outcomes, target, LatencyDefinition.STRICT, window)


# -- what comes out ----------------------------------------------------------------------------------------------------


def _report(
    variants: Sequence[Variant], seeds: Sequence[int], step_s: float, found: Mapping[tuple[str, int], Course]
) -> Report:
    head = ("group", "attainment", "worst 30 s", f"s below {GOOD:.0%}", "instances", "GPU-s per 1k", "moved")
    table: list[tuple[str, ...]] = [head]
    figures: dict[str, float] = {}
    for variant in variants:
        ours = [found[variant.name, seed] for seed in seeds]
        table.append(_row(variant, ours))
        figures |= _figures(SHORT[variant.name], ours)
    notes = [_split_note(found[variant.name, seeds[0]]) for variant in variants if variant.trigger is not None]
    config = {"rates_per_s": list(RATES), "step_s": step_s, "seeds": len(seeds), "instances": [8, 16], "n": [6, 11]}
    raw = [_raw(one) for one in found.values()]
    return Report("simulate scaling dynamic", config, figures, table, [note for note in notes if note], raw)


def _row(variant: Variant, courses: Sequence[Course]) -> tuple[str, ...]:
    sizes = {one.instances_end for one in courses}
    return (
        variant.name,
        _range([one.attainment for one in courses], "{:.3f}"),
        _range([min(one.sampled) for one in courses], "{:.3f}"),
        _range([_below_s(one) for one in courses], "{:.0f}"),
        f"{variant.instances} → {'/'.join(map(str, sorted(sizes)))}",
        _range([one.gpu_s_per_1k for one in courses], "{:,.0f}"),
        _range([one.moves for one in courses], "{:.0f}"),
    )


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}–{high}"


def _below_s(one: Course) -> float:
    return SAMPLE_S * sum(value < GOOD for value in one.sampled)


def _figures(name: str, courses: Sequence[Course]) -> dict[str, float]:
    count = len(courses)
    return {
        f"{name}_attainment": sum(one.attainment for one in courses) / count,
        f"{name}_worst_30s": min(min(one.sampled) for one in courses),
        f"{name}_below_90_s": sum(_below_s(one) for one in courses) / count,
        f"{name}_instances_end": sum(one.instances_end for one in courses) / count,
        f"{name}_gpu_s_per_1k": sum(one.gpu_s_per_1k for one in courses) / count,
    }


def _split_note(one: Course) -> str:
    """When the group split, and how attainment went before and after each instance came."""
    joins = [change for change in one.changes if change.what == "joined"]
    split = next((change for change in joins if len(change.macros) > 1), None)
    said = f"{one.variant}, seed {one.seed}: {len(joins)} joined"
    if split is not None:
        said += f"; at {split.at_s:.0f} s the {sum(split.macros)}th split it into {' + '.join(map(str, split.macros))}"
    return f"{said}; attainment of each 30 s: {' '.join([f'{value:.2f}' for value in one.sampled])}"


def _raw(one: Course) -> dict[str, Any]:
    return {
        "group": one.variant,
        "seed": one.seed,
        "attainment": rounded(one.attainment),
        "sampled": [round(value, 4) for value in one.sampled],
        "changes": [
            [round(change.at_s, 1), change.what, change.instance, list(change.macros)] for change in one.changes
        ],
        "moves": one.moves,
        "gpu_s_per_1k": rounded(one.gpu_s_per_1k),
    }
