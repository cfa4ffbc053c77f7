"""Settings of the emulated engine, all from flags."""

from __future__ import annotations

from dataclasses import dataclass

from serai.engine_emulator.faults import Fault
from serai.engine_emulator.timing import FixedTiming


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
    kv_tokens: int = 1_048_576
    """Size of the KV cache that `vllm:kv_cache_usage_perc` refers to."""
    body_limit_mb: float = 64.0
    start_delay_s: float = 0.0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise BadSettings("--model must not be empty")
        if not 0 <= self.port <= 65535:
            raise BadSettings(f"--port must be from 0 to 65535, not {self.port}")
        for name in ("ttft_ms", "tpot_ms", "start_delay_s"):
            if getattr(self, name) < 0:
                raise BadSettings(f"--{name.replace('_', '-')} must be at least 0, not {getattr(self, name)}")
        for name in ("step_ms", "max_concurrency", "answer_tokens", "context_tokens", "kv_tokens", "body_limit_mb"):
            if getattr(self, name) <= 0:
                raise BadSettings(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name)}")

    @property
    def timing(self) -> FixedTiming:
        """How long prefill and decode take."""
        return FixedTiming(self.ttft_ms / 1000, self.tpot_ms / 1000)

    @property
    def body_limit_bytes(self) -> int:
        """The largest request body that is read."""
        return int(self.body_limit_mb * 1024 * 1024)
