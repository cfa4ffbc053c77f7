"""Online correction: what engines report bends the cost model, within bounds, and the remaining error is a number.

Two factors, one for steps with prompts and one for plain decoding, since they fail for different reasons. Each is
nudged on the logarithmic scale by every report, so that one slow step in a hundred moves it by little; outliers
beyond a factor of four count as a factor of four. All state is in immutable values: fold reports in, read factors out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, isfinite, log

from serai.performance.latency_model import LatencyModel, Step


@dataclass(frozen=True, slots=True)
class CorrectionLimits:
    """How far and how fast a correction may move."""

    least: float = 0.5
    most: float = 2.0
    """Bounds of each factor: beyond them the profile is wrong and should be fitted again, not bent."""
    weight: float = 0.05
    """Weight of one report, 1/20: the factor follows a change within some tens of steps."""
    outlier: float = 4.0


@dataclass(frozen=True, slots=True)
class Corrected:
    """One factor and how well it does."""

    factor: float = 1.0
    error: float = 0.0
    """Smoothed absolute relative error of predictions after correction: the number to publish as a metric."""
    reports: int = 0


@dataclass(frozen=True, slots=True)
class Correction:
    """The state of a correction: one factor for steps with prompts, one for plain decode steps."""

    prefill: Corrected = Corrected()
    decode: Corrected = Corrected()

    @property
    def error(self) -> float:
        """Error after correction over both kinds of step, weighted by their reports so far; 0 before any."""
        reports = self.prefill.reports + self.decode.reports
        if not reports:
            return 0.0
        return (self.prefill.error * self.prefill.reports + self.decode.error * self.decode.reports) / reports

    def saturated(self, limits: CorrectionLimits = CorrectionLimits()) -> bool:
        """Whether a factor is at its bound: the profile no longer describes the engine."""
        return any(not limits.least < c.factor < limits.most for c in (self.prefill, self.decode))


def corrected(
    correction: Correction,
    predicted_s: float,
    observed_s: float,
    *,
    with_prompts: bool,
    limits: CorrectionLimits = CorrectionLimits(),
) -> Correction:
    """The correction after one report: a step that the uncorrected model put at `predicted_s` took `observed_s`.

    Reports that are not positive finite numbers change nothing: an engine's clock may jump.
    """
    if not (isfinite(predicted_s) and isfinite(observed_s) and predicted_s > 0 and observed_s > 0):
        return correction
    if with_prompts:
        return replace(correction, prefill=_moved(correction.prefill, observed_s / predicted_s, limits))
    return replace(correction, decode=_moved(correction.decode, observed_s / predicted_s, limits))


def _moved(state: Corrected, ratio: float, limits: CorrectionLimits) -> Corrected:
    surprise = log(ratio) - log(state.factor)
    bounded = max(-log(limits.outlier), min(log(limits.outlier), surprise))
    # The first reports weigh more, so that a fresh correction need not creep from 1.
    weight = max(limits.weight, 1.0 / (state.reports + 2))
    factor = min(limits.most, max(limits.least, state.factor * exp(weight * bounded)))
    missed = min(abs(ratio / state.factor - 1.0), limits.outlier)
    error = missed if not state.reports else state.error + weight * (missed - state.error)
    return Corrected(factor, error, state.reports + 1)


class CorrectedModel:
    """A LatencyModel whose step times are multiplied by a correction's factors. Memory is untouched."""

    def __init__(self, model: LatencyModel, correction: Correction) -> None:
        self.model = model
        self.correction = correction

    def step_s(self, step: Step) -> float:
        """Duration of one engine step, in seconds."""
        state = self.correction.prefill if step.chunks else self.correction.decode
        return self.model.step_s(step) * state.factor

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        """Time to process `batch` prompts in one step, in seconds."""
        return self.model.prefill_s(prompt_tokens, cached_tokens, batch) * self.correction.prefill.factor

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        """Duration of a decode step, in seconds."""
        return self.model.decode_step_s(sequences, context_tokens) * self.correction.decode.factor

    def kv_capacity_tokens(self) -> int:
        """Tokens of keys and values that fit, as the model says."""
        return self.model.kv_capacity_tokens()

    def kv_bytes_per_token(self) -> float:
        """Bytes one token's keys and values take, as the model says."""
        return self.model.kv_bytes_per_token()
