"""How an engine batches: limits, order of prefill and decode, KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BadBatchSettings(ValueError):
    """Settings that no engine could run with; the text names the field and its number."""


class BatchMode(StrEnum):
    """What may share a step, and what comes first."""

    MIXED = "mixed"
    """vLLM V1: running first (decodes, then unfinished prompts), then waiting, one token budget a step."""
    PREFILL_FIRST = "prefill-first"
    """SGLang's default loop: a prefill batch when one waits and fits, else one decode step for all."""
    PHASE_GATED = "phase-gated"
    """What the phase says that it is told (`Phase`)."""


class Phase(StrEnum):
    """What a phase-gated engine does with its next steps. Never an empty step: with nothing to prefill it decodes."""

    PREFILL = "prefill"
    """Prompts first, in steps of their own."""
    DECODE = "decode"
    """No prompts."""
    MIXED = "mixed"
    """Prompts and decodes share steps, decodes first."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Limits of one engine. Relations are checked here, once."""

    kv_tokens: int
    """Capacity of the KV cache; what does not fill a block is not used."""
    mode: BatchMode = BatchMode.MIXED
    block_tokens: int = 16
    sequences_max: int = 256
    """Requests that hold a slot at once (vLLM `--max-num-seqs`, SGLang `--max-running-requests`)."""
    step_tokens_max: int = 2048
    """MIXED: tokens of one step (vLLM `--max-num-batched-tokens`); else tokens of one prefill batch."""
    chunk_tokens_max: int | None = None
    """The longest piece of one prompt in a step. None: whole prompts (MIXED: what the budget leaves). Outside MIXED a
    prompt is also cut at the end of the batch's budget once this is set, as SGLang does."""
    prefix_cache: bool = True
    decode_reserve: float | None = None
    """Share of the tokens that running requests will still say for which a new one must leave room. None is the
    engine's habit: 0 for MIXED (vLLM has no reserve), else 0.7 (SGLang's first `new_token_ratio`)."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "sequences_max", "step_tokens_max", "chunk_tokens_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadBatchSettings(f"{name} must be at least 1, not {value}")
        if self.kv_tokens < self.block_tokens:
            raise BadBatchSettings(f"kv_tokens must hold one block of {self.block_tokens}, not {self.kv_tokens}")
        if self.mode in (BatchMode.MIXED, BatchMode.PHASE_GATED) and self.step_tokens_max < self.sequences_max:
            raise BadBatchSettings(
                f"step_tokens_max must be at least sequences_max ({self.sequences_max}), so that every running "
                f"request can decode in a mixed step, not {self.step_tokens_max}"
            )
        if self.decode_reserve is not None and self.decode_reserve < 0:
            raise BadBatchSettings(f"decode_reserve must be at least 0, not {self.decode_reserve}")

    @property
    def reserve(self) -> float:
        """`decode_reserve`, or the mode's habit."""
        if self.decode_reserve is not None:
            return self.decode_reserve
        return 0.0 if self.mode is BatchMode.MIXED else 0.7
