"""Settings of the emulated engine, all from flags."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from serai.engine_emulator.faults import Fault
from serai.engine_emulator.model_flags import EngineName, ModelledEngine
from serai.engine_emulator.timing import FixedTiming

FIXED_KV_TOKENS = 1_048_576


class Native(StrEnum):
    """Dialects beside chat completions that an engine may speak itself."""

    MESSAGES = "messages"
    RESPONSES = "responses"


class BadSettings(ValueError):
    """Settings that cannot be; the text names the flag."""


@dataclass(frozen=True, slots=True)
class EmulatorSettings:
    """What is emulated, and where it listens. Relations are checked here, once."""

    model: str
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free port; it is named in the first line on standard error."""
    ttft_ms: float = 50.0
    tpot_ms: float = 20.0
    step_ms: float = 1.0
    """Tokens come out in steps of this length, all streams that are due together."""
    max_concurrency: int = 256
    """Requests that run at once; others wait."""
    seed: int = 0
    answer_tokens: int = 32
    """Length of an answer when the request sets no `max_tokens`."""
    context_tokens: int = 16_777_216
    kv_tokens: int | None = None
    """Size of the KV cache; None: what fits beside the weights, or with fixed timing `FIXED_KV_TOKENS`."""
    engine: EngineName = EngineName.VLLM
    """Whose metric names and endpoints it has."""
    modelled: ModelledEngine | None = None
    """The engine to run in steps on the cost model; None: fixed timing."""
    native: tuple[Native, ...] = ()
    """Dialects that it speaks itself."""
    without: tuple[str, ...] = ()
    """Paths that it has not."""
    body_limit_mb: float = 64.0
    start_delay_s: float = 0.0
    sleep_s: float = 1.0
    """What it takes to fall asleep."""
    wake_s: float = 2.0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise BadSettings("--model must not be empty")
        if not 0 <= self.port <= 65535:
            raise BadSettings(f"--port must be from 0 to 65535, not {self.port}")
        for name in ("ttft_ms", "tpot_ms", "start_delay_s", "sleep_s", "wake_s"):
            if getattr(self, name) < 0:
                raise BadSettings(f"--{name.replace('_', '-')} must be at least 0, not {getattr(self, name)}")
        for name in ("step_ms", "max_concurrency", "answer_tokens", "context_tokens", "kv_tokens", "body_limit_mb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise BadSettings(f"--{name.replace('_', '-')} must be above 0, not {value}")

    @property
    def timing(self) -> FixedTiming:
        """How long prefill and decode take."""
        return FixedTiming(self.ttft_ms / 1000, self.tpot_ms / 1000)

    @property
    def kv_tokens_total(self) -> int:
        """Size of the KV cache, in tokens."""
        if self.modelled is not None:
            return self.modelled.batch.kv_tokens
        return self.kv_tokens or FIXED_KV_TOKENS

    @property
    def context_tokens_max(self) -> int:
        """The longest prompt and answer: as allowed, and as fits into the KV cache."""
        return self.context_tokens if self.modelled is None else min(self.context_tokens, self.kv_tokens_total)

    @property
    def body_limit_bytes(self) -> int:
        """The largest request body that is read."""
        return int(self.body_limit_mb * 1024 * 1024)
