"""The engine that is emulated when its GPU is named: what is said of it, and what it is. Words only, quickly imported;
`modelled` makes one from the other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from serai.engine_emulator.batching.settings import BatchMode, BatchSettings

if TYPE_CHECKING:
    # Most emulated engines have fixed timing, and start in half the time without the cost model.
    from serai.performance.roofline import RooflineModel


class EngineName(StrEnum):
    """Whose metric names, endpoints and habits are shown."""

    VLLM = "vllm"
    SGLANG = "sglang"


class CannotModel(ValueError):
    """No such engine can be; one line that names the flag and what to do."""


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """What is said on the command line about the engine to be modelled. None: the engine's own habit."""

    model: str
    gpu: str
    card: str | None = None
    tp: int = 1
    pp: int = 1
    weights: str | None = None
    kv_format: str | None = None
    engine: EngineName = EngineName.VLLM
    mode: BatchMode | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    chunk: int | None = None
    """0: whole prompts."""
    prefix_cache: bool = True
    kv_tokens: int | None = None
    speed: float = 1.0
    step_noise: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelledEngine:
    """A model on GPUs under an engine, ready to run."""

    model: RooflineModel
    batch: BatchSettings
    speed: float
    """Steps take their time divided by this."""
    step_noise: float
    """Standard deviation of the factor, of mean 1, that each step's duration gets."""
