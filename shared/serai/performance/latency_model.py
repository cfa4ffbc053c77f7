"""The seam: what every cost model answers, and the words its questions are put in.

Two implementations: `roofline.RooflineModel` (formulas with fitted efficiency) and
`aiconfigurator_model.AiconfiguratorModel` (measured kernel tables). All times are seconds, all sizes tokens or bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class BadStep(ValueError):
    """A step, length or batch that no engine could run; the text names the number."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Part of a prompt processed in one step: `new_tokens` after `cached_tokens` already in the KV cache.

    Chunked prefill sends a prompt as several chunks; a prefix-cache hit is a chunk whose `cached_tokens` were never
    computed here.
    """

    new_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the engine: any number of prompt chunks, and decoding sequences that add one token each."""

    chunks: Sequence[PrefillChunk] = ()
    decode_sequences: int = 0
    decode_context_tokens: int = 0
    """Sum over the decoding sequences of the tokens each has in the KV cache."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where a step's time goes, in seconds per operator class."""

    linear_s: float
    experts_s: float
    attention_s: float
    elementwise_s: float
    communication_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        """The step's duration: operators run one after the other."""
        device = self.linear_s + self.experts_s + self.attention_s + self.elementwise_s
        return device + self.communication_s + self.overhead_s


@runtime_checkable
class LatencyModel(Protocol):
    """Predicts one engine instance: a model on its GPUs."""

    def step_s(self, step: Step) -> float:
        """Duration of one engine step, in seconds. Raises BadStep for negative counts."""
        ...

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        """Time to process `batch` prompts of `prompt_tokens` each, of which `cached_tokens` are in the cache."""
        ...

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        """Duration of a step that adds one token to each of `sequences`, whose mean context is `context_tokens`."""
        ...

    def kv_capacity_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights; 0 when the weights alone do not fit."""
        ...

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values one token leaves in the whole instance."""
        ...
