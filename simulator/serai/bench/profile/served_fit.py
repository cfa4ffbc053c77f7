"""Fits profiles to the served rows: what Hopper GPUs reach per operator class, and what each engine adds.

All engines run on the same silicon, so each efficiency factor is one number shared by the engines plus a deviation of
each, drawn to zero; overheads and habits are each engine's own. That lets a model measured under one engine inform the
others, which matters where an engine was measured on few models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import log

from serai.bench.profile.silicon import ENGINES, PATH, ServedRow
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
    # name, guess, spread of the shared number, ceiling
    Parameter("linear_compute", 0.7, 0.6, 1.0),
    Parameter("narrow_compute", 0.8, 0.8, 1.0),
    Parameter("linear_memory", 0.8, 0.6, 1.0),
    Parameter("experts_compute", 0.4, 0.8, 1.0),
    Parameter("experts_narrow_compute", 0.8, 0.8, 1.0),
    Parameter("experts_memory", 0.6, 0.8, 1.0),
    Parameter("attention_compute", 0.5, 0.8, 1.0),
    Parameter("attention_memory", 0.8, 0.6, 1.0),
    Parameter("elementwise_memory", 0.5, 0.8, 1.0),
    Parameter("link_bandwidth", 0.8, 1.0, 2.0),
    Parameter("ridge_sharpness", 3.0, 0.3),
    Parameter("routing_evenness", 3.0, 1.0),
)
DEVIATION = 0.4
"""How far an engine may stray from the shared factor, on the unbounded scale."""

ROUTING = 0.7
"""How far a model's routing evenness may stray from the shared one; a model not fitted has the shared one."""

OVERHEADS = (
    Parameter("step_s", 1e-3, 1.0),
    Parameter("sequence_s", 1.5e-5, 1.0),
    Parameter("kernel_s", 5e-6, 0.7),
    Parameter("all_reduce_s", 6e-6, 0.7),
)
HABITS = (Parameter("prompts_together", 1.5, 0.7), Parameter("delay_share", 0.9, 0.3))
MIXED_STEPS = {"vllm": True, "trtllm": True, "sglang": False}
"""Whether the engine's default loop mixes prompt chunks into decode steps. SGLang's runs prompts first."""

_OWN = OVERHEADS + HABITS
_EVENNESS = next(i for i, p in enumerate(FACTORS) if p.name == "routing_evenness")
_WIDTH = len(FACTORS) + len(_OWN)


@dataclass(frozen=True, slots=True)
class ServedFit:
    """Profiles by engine; the same factors serve every GPU of the fit."""

    by_engine: dict[str, LatencyProfile]


def predicted_tpot_ms(row: ServedRow, instance: RooflineModel) -> float:
    """Predicted mean time per output token of a served row, in milliseconds."""
    return closed_loop(instance, instance.profile.serving, row.load).tpot_s * 1e3


def fit_served(rows: Sequence[ServedRow], note: str = "") -> ServedFit:
    """Profiles fitted to `rows`, every one of them. The caller keeps the held-out ones away."""
    routed = sorted({row.model for row in rows if row.instance.card.experts is not None})
    parameters = _parameters(len(routed))
    blocks = [_block(index, engine, rows, routed) for index, engine in enumerate(ENGINES)]
    position = fit([p[0] for p in parameters], [p[1] for p in parameters], blocks)
    return ServedFit(
        {engine: _profile(index, engine, position, rows, routed, note) for index, engine in enumerate(ENGINES)}
    )


def _parameters(routed: int) -> list[tuple[float, float]]:
    """Start and spread of every position: shared factors; per engine its deviations, overheads and habits; per model
    with experts its routing."""
    found = [(p.start, p.spread) for p in FACTORS]
    for _ in ENGINES:
        found += [(0.0, DEVIATION)] * len(FACTORS)
        found += [(p.start, p.spread) for p in _OWN]
    return found + [(0.0, ROUTING)] * routed


def _values(index: int, position: Sequence[float]) -> dict[str, float]:
    offset = len(FACTORS) + index * _WIDTH
    values = {p.name: p.value(position[i] + position[offset + i]) for i, p in enumerate(FACTORS)}
    own = offset + len(FACTORS)
    return values | {p.name: p.value(position[own + i]) for i, p in enumerate(_OWN)}


def _routing(position: Sequence[float], routed: Sequence[str]) -> dict[str, float]:
    """Evenness of each fitted model."""
    shared = position[_EVENNESS]
    first = len(FACTORS) + len(ENGINES) * _WIDTH
    return {name: FACTORS[_EVENNESS].value(shared + position[first + i]) for i, name in enumerate(routed)}


def profile_from(
    values: dict[str, float], engine: str, gpu: str = "any", routing: dict[str, float] | None = None
) -> LatencyProfile:
    """A profile with the named numbers, everything else at its default."""
    habits = ServingHabits(
        prompts_together=values.get("prompts_together", 1.0),
        delay_share=values.get("delay_share", 1.0),
        mixed_steps=MIXED_STEPS.get(engine, True),
    )
    return LatencyProfile(
        gpu,
        engine,
        Efficiency(**{f.name: values[f.name] for f in fields(Efficiency) if f.name in values}),
        Overheads(**{f.name: values[f.name] for f in fields(Overheads) if f.name in values}),
        habits,
        routing=routing or {},
    )


def _block(index: int, engine: str, rows: Sequence[ServedRow], routed: Sequence[str]) -> Block:
    own = [row for row in rows if row.engine == engine]
    measured = [log(row.tpot_ms) for row in own]

    def residuals(position: Sequence[float]) -> list[float]:
        predict = Predictor(profile_from(_values(index, position), engine, routing=_routing(position, routed)))
        return [log(predict.tpot_ms(row)) - known for row, known in zip(own, measured, strict=True)]

    offset = len(FACTORS) + index * _WIDTH
    first = len(FACTORS) + len(ENGINES) * _WIDTH
    seen = {row.model for row in own}
    models = [first + i for i, name in enumerate(routed) if name in seen]
    return Block(residuals, [*range(len(FACTORS)), *range(offset, offset + _WIDTH), *models])


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


def _profile(
    index: int, engine: str, position: Sequence[float], rows: Sequence[ServedRow], routed: Sequence[str], note: str
) -> LatencyProfile:
    routing = {name: rounded(value) for name, value in _routing(position, routed).items()}
    values = {name: rounded(value) for name, value in _values(index, position).items()}
    profile = profile_from(values, engine, routing=routing)
    own = [row for row in rows if row.engine == engine]
    predict = Predictor(profile)
    errors = [abs(predict.tpot_ms(row) / row.tpot_ms - 1) for row in own]
    error = rounded(sum(errors) / len(errors)) if errors else 0.0
    provenance = Provenance([f"{PATH}: InferenceX and NVIDIA gap-analysis rows"], len(own), error, note)
    return replace(profile, provenance=provenance)
