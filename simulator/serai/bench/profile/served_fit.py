"""Fits profiles to the served rows: what Hopper GPUs reach per operator class, and what each engine adds.

All engines run on the same silicon, so each efficiency factor is one number shared by the engines plus a deviation of
each, drawn to zero. So are the overheads that every model pays (per sequence, kernel and all-reduce): an engine that
was measured on models with experts alone takes from the others what it cannot tell of dense ones. What is left, per
step, per layer with experts and per expert, is each engine's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from math import log

from serai.bench.profile.silicon import PATH, STACKS, ServedRow
from serai.bench.report import rounded
from serai.performance.fitting import Block, Parameter, fit
from serai.performance.latency_profile import (
    Efficiency,
    LatencyProfile,
    Overheads,
    Provenance,
    ServingHabits,
)
from serai.performance.roofline import RooflineModel
from serai.performance.serving import closed_loop

FACTORS = (
    # name, guess, spread of the shared number, ceiling. Guesses are what NVIDIA's kernel tables of H100 and H200 show
    # (aiconfigurator-core 0.12: medians of large GEMMs, attention, grouped GEMMs and all-reduce under the engines).
    # What those tables pin down better than served rows can has a small spread: GEMM rates, and how little slower a
    # GEMM is at 64 rows than at 4 (1.04 to 1.10 times), which is the sharpness of the ridge.
    Parameter("linear_compute", 0.76, 0.25, 1.0),
    Parameter("narrow_compute", 0.71, 0.2, 1.0),
    Parameter("linear_memory", 0.86, 0.15, 1.0),
    Parameter("experts_compute", 0.25, 0.6, 1.0),
    Parameter("experts_narrow_compute", 0.8, 0.8, 1.0),
    Parameter("experts_memory", 0.65, 0.5, 1.0),
    Parameter("attention_compute", 0.45, 0.4, 1.0),
    Parameter("attention_memory", 0.85, 0.3, 1.0),
    Parameter("elementwise_memory", 0.5, 0.8, 1.0),
    Parameter("link_bandwidth", 0.4, 0.5, 2.0),
    Parameter("ridge_sharpness", 3.0, 0.05),
    Parameter("routing_evenness", 3.0, 1.0),
)
DEVIATION = 0.25
"""How far an engine may stray from the shared factor, on the unbounded scale."""
_DEVIATIONS = {
    "experts_compute": 0.7,
    "experts_narrow_compute": 0.7,
    "experts_memory": 0.4,
    "ridge_sharpness": 0.05,
    "sequence_s": 0.3,
    "kernel_s": 0.2,
    "all_reduce_s": 0.15,
}
"""The same for what has less or more room: kernels of experts differ by engine, the shape of the ridge does not."""

SHARED_OVERHEADS = (
    Parameter("sequence_s", 1.5e-5, 0.7),
    Parameter("kernel_s", 4.5e-6, 0.4),
    Parameter("all_reduce_s", 4.4e-6, 0.25),
)
SHARED = FACTORS + SHARED_OVERHEADS
OWN = (
    # Little room per step: what a model with experts adds belongs to its layers, not to every model.
    Parameter("step_s", 5e-4, 0.1),
    Parameter("experts_layer_s", 3.5e-5, 0.5),
    Parameter("expert_s", 1e-7, 1.0),
    Parameter("prompts_together", 1.5, 0.7),
)

IN_ONE_WAVE = {"sglang-0.5.1"}
"""Stacks measured with all requests sent at once and none after: of the others' prompts the half that comes later
falls between a request's own tokens."""
DELAY_SHARE_LOOP, DELAY_SHARE_WAVE = 0.9, 0.5
"""`ServingHabits.delay_share`. Not fitted: rows of models with experts cannot tell it from the time of their prompts,
and a stack fitted on such rows alone took a share that dense models then contradicted."""
PROMPTS_FIRST = {"sglang", "sglang-0.5.1"}
"""Engines whose default loop runs prompts in steps of their own; the others mix their chunks into decode steps."""

SHARED_ERROR = 0.5
"""Exponent of the weight by size of configuration: 0 counts every row alike, 1 every configuration."""
MEMORY = 0.1
"""How far a GPU's reached memory bandwidth may stray from the shared factors: little, since the share of the peak
that HBM gives differs by a few percent between generations, and few models were measured on both GPUs."""
_MEMORY_FACTORS = ("linear_memory", "experts_memory", "attention_memory")

Key = tuple[str, str]
"""GPU and engine."""


class _Layout:
    """Which position means what: shared numbers; each engine's deviations from them and its own; each GPU's memory."""

    def __init__(self, rows: Sequence[ServedRow]) -> None:
        self.gpus = sorted({row.system for row in rows})
        self.width = len(SHARED) + len(OWN)
        self.first_gpu = len(SHARED) + len(STACKS) * self.width

    def start(self) -> list[float]:
        """Where every position begins."""
        own = [0.0] * len(SHARED) + [p.start for p in OWN]
        return [p.start for p in SHARED] + own * len(STACKS) + [0.0] * len(self.gpus)

    def spreads(self) -> list[float]:
        """How far every position may stray."""
        own = [_DEVIATIONS.get(p.name, DEVIATION) for p in SHARED] + [p.spread for p in OWN]
        return [p.spread for p in SHARED] + own * len(STACKS) + [MEMORY] * len(self.gpus)

    def values(self, position: Sequence[float], key: Key) -> dict[str, float]:
        """Every number of one GPU under one engine, by name."""
        gpu, engine = key
        offset = len(SHARED) + STACKS.index(engine) * self.width
        memory = position[self.first_gpu + self.gpus.index(gpu)]
        found = {"delay_share": DELAY_SHARE_WAVE if engine in IN_ONE_WAVE else DELAY_SHARE_LOOP}
        for i, p in enumerate(SHARED):
            added = memory if p.name in _MEMORY_FACTORS else 0.0
            found[p.name] = p.value(position[i] + position[offset + i] + added)
        own = offset + len(SHARED)
        return found | {p.name: p.value(position[own + i]) for i, p in enumerate(OWN)}

    def depends(self, key: Key) -> list[int]:
        """The positions that the rows of one GPU under one engine depend on."""
        gpu, engine = key
        offset = len(SHARED) + STACKS.index(engine) * self.width
        own = range(offset, offset + self.width)
        return [*range(len(SHARED)), *own, self.first_gpu + self.gpus.index(gpu)]


def predicted_tpot_ms(row: ServedRow, instance: RooflineModel) -> float:
    """Predicted mean time per output token of a served row, in milliseconds."""
    return closed_loop(instance, instance.profile.serving, row.load).tpot_s * 1e3


def fit_served(rows: Sequence[ServedRow]) -> dict[Key, LatencyProfile]:
    """Profiles fitted to `rows`, every one of them, for each GPU and each engine that has rows on any GPU. The caller
    keeps held-out rows away."""
    layout = _Layout(rows)
    own: dict[Key, list[ServedRow]] = defaultdict(list)
    series: dict[tuple[Key, str], list[ServedRow]] = defaultdict(list)
    for row in rows:
        own[row.system, row.stack].append(row)
        series[(row.system, row.stack), row.configuration].append(row)
    mean = sum(_weight(found) * len(found) for found in series.values()) / max(1, len(rows))
    blocks = [_block(layout, key, found, _weight(found) / mean) for (key, _), found in series.items()]
    position = fit(layout.start(), layout.spreads(), blocks)
    stacks = sorted({stack for _, stack in own})
    keys = [(gpu, stack) for gpu in layout.gpus for stack in stacks]
    return {key: _profile(layout, key, position, own.get(key, [])) for key in keys}


def profile_from(values: dict[str, float], engine: str, gpu: str = "any") -> LatencyProfile:
    """A profile with the named numbers, everything else at its default."""
    habits = ServingHabits(
        prompts_together=values.get("prompts_together", 1.0),
        delay_share=values.get("delay_share", 1.0),
        mixed_steps=engine not in PROMPTS_FIRST,
    )
    return LatencyProfile(
        gpu,
        engine,
        Efficiency(**{f.name: values[f.name] for f in fields(Efficiency) if f.name in values}),
        Overheads(**{f.name: values[f.name] for f in fields(Overheads) if f.name in values}),
        habits,
    )


def _weight(series: Sequence[ServedRow]) -> float:
    """How much each row of one configuration counts, before scaling to a mean of one. Its rows share most of their
    error, so forty tell little more than ten."""
    return float(len(series) ** -SHARED_ERROR)


def _block(layout: _Layout, key: Key, rows: Sequence[ServedRow], weight: float) -> Block:
    measured = [log(row.tpot_ms) for row in rows]

    def residuals(position: Sequence[float]) -> list[float]:
        profile = profile_from(layout.values(position, key), key[1])
        predict = Predictor(profile)
        return [log(predict.tpot_ms(row)) - known for row, known in zip(rows, measured, strict=True)]

    return Block(residuals, layout.depends(key), weight)


class Predictor:
    """Predicts served rows with one profile, preparing each distinct instance once."""

    def __init__(self, profile: LatencyProfile) -> None:
        self.profile = profile
        self._instances: dict[tuple[object, ...], RooflineModel] = {}

    def tpot_ms(self, row: ServedRow) -> float:
        """Predicted mean time per output token, in milliseconds."""
        key = (row.configuration, row.expert, row.precision)
        instance = self._instances.get(key)
        if instance is None:
            instance = self._instances[key] = row.instance.with_profile(self.profile)
        return predicted_tpot_ms(row, instance)


def _profile(layout: _Layout, key: Key, position: Sequence[float], rows: Sequence[ServedRow]) -> LatencyProfile:
    gpu, engine = key
    values = {name: rounded(value) for name, value in layout.values(position, key).items()}
    profile = profile_from(values, engine, gpu)
    predict = Predictor(profile)
    errors = [abs(predict.tpot_ms(row) / row.tpot_ms - 1) for row in rows]
    error = rounded(sum(errors) / len(errors)) if errors else 0.0
    versions = ", ".join(sorted({row.version for row in rows if row.version}))
    note = f"versions {versions}; fitted together with the other engines and GPUs of this source"
    provenance = Provenance([f"{PATH}: InferenceX and NVIDIA gap-analysis rows"], len(rows), error, note)
    return replace(profile, provenance=provenance)
