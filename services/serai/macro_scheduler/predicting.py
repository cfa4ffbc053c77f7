"""Step times of one instance: as it measures them itself, else by the cost model of its model and GPU, else a guess
that is the same for all. Pure."""

from __future__ import annotations

from functools import cache

from serai.contracts.admission import InstanceReport
from serai.contracts.session_record import SessionMetadata
from serai.macro_scheduler.instance_view import StepPredictor
from serai.performance.hardware import UnknownHardware, find_gpu
from serai.performance.latency_model import LatencyModel
from serai.performance.latency_profile import profile_for
from serai.performance.memory import BadParallelism, Parallelism
from serai.performance.model_card import BadModelConfig
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card

GUESS_BASE_S, GUESS_S_PER_TOKEN = 0.02, 0.00015
GUESS_DECODE_BASE_S, GUESS_DECODE_S_PER_SEQUENCE, GUESS_DECODE_S_PER_TOKEN = 0.02, 0.0001, 1e-7


class InstanceSteps:
    """One instance's. What its reports measure takes the place of what is predicted."""

    def __init__(self, metadata: SessionMetadata) -> None:
        self._model = _latency_model(
            metadata.engine_model or metadata.model,
            metadata.gpus[0].name if metadata.gpus else "",
            metadata.parallelism.tensor,
            metadata.parallelism.pipeline,
        )
        self._base_s = self._per_token_s = 0.0
        self.predictor = StepPredictor(self.prefill_s, self.decode_s)

    def hear(self, report: InstanceReport) -> None:
        """A report, which may tell what prefills take."""
        if report.prefill_s_per_token > 0:
            self._base_s, self._per_token_s = report.prefill_base_s, report.prefill_s_per_token

    def prefill_s(self, prompt_tokens: int) -> float:
        """Of one prefill over so many tokens."""
        if self._per_token_s > 0:
            return self._base_s + self._per_token_s * prompt_tokens
        if self._model is not None:
            return self._model.prefill_s(max(1, prompt_tokens))
        return GUESS_BASE_S + GUESS_S_PER_TOKEN * prompt_tokens

    def decode_s(self, sequences: int, context_tokens: int) -> float:
        """Of a decode step of so many sequences with so many tokens of context in all."""
        if self._model is not None and sequences > 0:
            return self._model.decode_step_s(sequences, context_tokens / sequences)
        return GUESS_DECODE_BASE_S + GUESS_DECODE_S_PER_SEQUENCE * sequences + GUESS_DECODE_S_PER_TOKEN * context_tokens


@cache
def _latency_model(model: str, gpu: str, tensor: int, pipeline: int) -> LatencyModel | None:
    """None where the cost model does not know the model or the GPU."""
    if not gpu:
        return None
    try:
        split = Parallelism(tensor=tensor, pipeline=pipeline)
        return RooflineModel(shipped_card(model), find_gpu(gpu), split, profile=profile_for(gpu))
    except (BadModelConfig, UnknownHardware, BadParallelism):
        return None
