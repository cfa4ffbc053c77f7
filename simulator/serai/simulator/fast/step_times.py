"""A latency model with what an older engine adds to every step on top."""

from __future__ import annotations

from serai.performance.latency_model import LatencyModel, Step


class SlowerSteps:
    """`model`, but every step takes `step_s` longer, and one that mixes prompts with decoding `mixed_s` on top.

    vLLM V0 (0.7 and before) spent 15 to 20 ms a step on scheduling and input preparation, more where prompt chunks
    shared a step with decoding."""

    def __init__(self, model: LatencyModel, *, step_s: float = 0.0, mixed_s: float = 0.0) -> None:
        if step_s < 0 or mixed_s < 0:
            raise ValueError(f"added step time must be at least 0, not {min(step_s, mixed_s)}")
        self._model = model
        self._step_s = step_s
        self._mixed_s = mixed_s

    def step_s(self, step: Step) -> float:
        """Duration of one engine step, in seconds."""
        added = self._step_s
        if step.chunks and step.decode_sequences:
            added += self._mixed_s
        return self._model.step_s(step) + added

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        """Time to process `batch` prompts in one step."""
        return self._model.prefill_s(prompt_tokens, cached_tokens, batch) + self._step_s

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        """Duration of a step that adds one token to each of `sequences`."""
        return self._model.decode_step_s(sequences, context_tokens) + self._step_s

    def kv_capacity_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights."""
        return self._model.kv_capacity_tokens()

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values one token leaves in the whole instance."""
        return self._model.kv_bytes_per_token()
