"""GPU-to-GPU speed-up on OpenTela's three shapes: H100 over RTX 3090 (paper Fig. 8: below 6 %).

The paper's raw times are unpublished. Here the truth is the same three shapes (tokens in, tokens out, batch) for
Llama-3.1-8B, added up from LLMServingSim's measured kernel times of both GPUs: prompts in chunks of 2,048 tokens,
then one decode pass a token. Reading the cache while decoding was not measured on the RTX 3090 and is left out on
both sides, measured and predicted; at the longest shape it is an eighth of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serai.bench.profile.kernel_tables import ENGINE, Times, pass_s
from serai.performance.hardware import GPUS
from serai.performance.latency_model import PrefillChunk, Step
from serai.performance.latency_profile import LatencyProfile
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card

SHAPES = ((128, 64, 1), (512, 256, 4), (2048, 1024, 8))
MODEL = "meta-llama/Llama-3.1-8B"
FAST, SLOW = "h100-sxm-80", "rtx-3090"
CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """One shape's speed-up, measured and predicted, and each GPU's own error."""

    shape: tuple[int, int, int]
    measured: float
    predicted: float
    fast_error: float
    slow_error: float

    @property
    def error(self) -> float:
        """Relative error of the predicted speed-up."""
        return abs(self.predicted / self.measured - 1)


def speed_ups(
    tables: Mapping[tuple[str, str], Times], profiles: Mapping[tuple[str, str], LatencyProfile]
) -> list[SpeedUp]:
    """The three shapes, with the kernel profiles of both GPUs."""
    found = []
    for shape in SHAPES:
        measured = {gpu: _measured_s(tables[gpu, MODEL], shape) for gpu in (FAST, SLOW)}
        predicted = {gpu: _predicted_s(gpu, profiles[gpu, ENGINE], shape) for gpu in (FAST, SLOW)}
        found.append(
            SpeedUp(
                shape,
                measured[SLOW] / measured[FAST],
                predicted[SLOW] / predicted[FAST],
                abs(predicted[FAST] / measured[FAST] - 1),
                abs(predicted[SLOW] / measured[SLOW] - 1),
            )
        )
    return found


def _chunks(prompt: int, batch: int) -> tuple[int, int, int]:
    """Prompts that share a step of at most CHUNK_TOKENS, tokens of each, and the number of such steps."""
    together = max(1, min(batch, CHUNK_TOKENS // prompt))
    return together, prompt, batch // together


def _measured_s(times: Times, shape: tuple[int, int, int]) -> float:
    prompt, output, batch = shape
    layers = shipped_card(MODEL).layers
    together, each, steps = _chunks(prompt, batch)
    step = pass_s(times, layers, together * each, attention=False) + layers * together * times["attn", each]
    return steps * step + output * pass_s(times, layers, batch, attention=False, sequences=batch)


def _predicted_s(gpu: str, profile: LatencyProfile, shape: tuple[int, int, int]) -> float:
    prompt, output, batch = shape
    instance = RooflineModel(shipped_card(MODEL), GPUS[gpu], profile=profile)
    together, each, steps = _chunks(prompt, batch)
    step = instance.step_s(Step([PrefillChunk(each)] * together))
    return steps * step + output * instance.step_s(Step(decode_sequences=batch))
