"""llama.cpp: its own `llama-server`, or the server inside the xllamacpp wheel (`serai engine llamacpp`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serai.worker_agent.engine.counters import LLAMACPP_COUNTERS
from serai.worker_agent.engine.openai import (
    OpenAiEngine,
    is_serai_engine,
    program,
    runs_module,
    with_port_flags,
)


class LlamaCppEngine(OpenAiEngine):
    """Takes `--host` and `--port`; tells its context limit under `meta`; aborts when the connection closes."""

    kind = "llamacpp"
    counters = LLAMACPP_COUNTERS
    counter_grain_s = 0.0
    prefill_s_per_token = 0.02
    setup_s = 0.0

    def recognises(self, command: Sequence[str]) -> bool:
        return (
            program(command) == "llama-server"
            or is_serai_engine(command, "llamacpp")
            or runs_module(command, "serai.worker_agent.engine.llamacpp_server")
        )

    def with_address(self, command: Sequence[str], host: str, port: int) -> list[str]:
        return with_port_flags(command, host, port)

    def context_tokens(self, entry: dict[str, Any]) -> int:
        meta = entry.get("meta")
        value = meta.get("n_ctx", meta.get("n_ctx_train")) if isinstance(meta, dict) else None
        return value if isinstance(value, int) else 0
