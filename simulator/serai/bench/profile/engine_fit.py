"""Fits a profile to the samples of one engine, starting from the nearest shipped profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import log

from serai.bench.profile.engine_measuring import EngineSamples
from serai.bench.report import rounded
from serai.performance.fitting import Block, Parameter, fit
from serai.performance.latency_profile import Efficiency, LatencyProfile, Overheads, Provenance
from serai.performance.roofline import RooflineModel

_CEILING = 1.25
"""Of factors: a wrong catalogue peak should show as a factor above 1, not break the fit."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    """The profile, and how far it is from each sample."""

    profile: LatencyProfile
    prompt_errors: list[float]
    decode_errors: list[float]

    @property
    def error(self) -> float:
        """Mean absolute relative error over all samples."""
        errors = self.prompt_errors + self.decode_errors
        return sum(map(abs, errors)) / len(errors)


def fit_engine(instance: RooflineModel, samples: EngineSamples, start: LatencyProfile) -> EngineFit:
    """The profile nearest to `samples` and to `start`, whose factors and overheads are the guess.

    Only what the samples can tell is moved: matrix products, reading the cache, and overheads. Raises FitFailed when
    there are no samples.
    """
    parameters = _parameters(start)

    def profile(position: Sequence[float]) -> LatencyProfile:
        values = {p.name: p.value(x) for p, x in zip(parameters, position, strict=True)}
        return _with_values(start, values)

    def residuals(position: Sequence[float]) -> list[float]:
        prompts, decodes = _errors(instance.with_profile(profile(position)), samples)
        return [log(max(1e-6, 1 + e)) for e in prompts + decodes]

    position = fit(
        [p.start for p in parameters], [p.spread for p in parameters], [Block(residuals, range(len(parameters)))]
    )
    values = {p.name: rounded(p.value(x)) for p, x in zip(parameters, position, strict=True)}
    fitted = _with_values(start, values)
    prompts, decodes = _errors(instance.with_profile(fitted), samples)
    error = sum(map(abs, prompts + decodes)) / len(prompts + decodes)
    provenance = Provenance(
        [f"a running engine with {samples.model}", *start.provenance.sources],
        len(prompts) + len(decodes),
        rounded(error),
        "measured with `serai profile engine`; factors it cannot see are the shipped profile's",
    )
    return EngineFit(replace(fitted, provenance=provenance), prompts, decodes)


def _parameters(start: LatencyProfile) -> tuple[Parameter, ...]:
    known, added = start.efficiency, start.overheads
    factors = ("linear_compute", "linear_memory", "attention_memory")
    return (
        *(Parameter(name, min(1.2, getattr(known, name)), 1.0, _CEILING) for name in factors),
        Parameter("step_s", max(1e-5, added.step_s), 2.0),
        Parameter("sequence_s", max(1e-6, added.sequence_s), 1.5),
        Parameter("kernel_s", max(1e-7, added.kernel_s), 0.5),
    )


def _with_values(start: LatencyProfile, values: dict[str, float]) -> LatencyProfile:
    factors = {f.name: values[f.name] for f in fields(Efficiency) if f.name in values}
    overheads = {f.name: values[f.name] for f in fields(Overheads) if f.name in values}
    return replace(
        start,
        efficiency=replace(start.efficiency, **factors),
        overheads=replace(start.overheads, **overheads),
    )


def _errors(instance: RooflineModel, samples: EngineSamples) -> tuple[list[float], list[float]]:
    prompts = [instance.prefill_s(p.prompt_tokens) / p.ttft_s - 1 for p in samples.prompts]
    decodes = [instance.decode_step_s(d.sequences, d.mean_context_tokens) / d.step_s - 1 for d in samples.decodes]
    return prompts, decodes
