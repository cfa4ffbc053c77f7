"""Step times of older engines, and energy of steps without asking for every one."""

from __future__ import annotations

from collections.abc import Callable

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


class StepEnergy:
    """Energy of steps, `energy_j` asked once for all decode steps that are alike: as many sequences, and the same
    context within 1,024 tokens. At the middle of that range it is within 0.2 % of each, and right on average."""

    _CONTEXT_TOKENS = 1024

    def __init__(self, energy_j: Callable[[Step], float]) -> None:
        self._energy_j = energy_j
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, step: Step) -> float:
        """Energy of one step, in joules."""
        if step.chunks:
            return self._energy_j(step)
        place = int(step.decode_context_tokens) // self._CONTEXT_TOKENS
        key = (step.decode_sequences, place)
        found = self._known.get(key)
        if found is None:
            middle = place * self._CONTEXT_TOKENS + self._CONTEXT_TOKENS // 2
            found = self._known[key] = self._energy_j(Step((), step.decode_sequences, middle))
        return found
