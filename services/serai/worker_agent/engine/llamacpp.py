"""llama.cpp: its own `llama-server`, or the server inside the xllamacpp wheel (`serai engine llamacpp`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from serai.worker_agent.engine.counters import LLAMACPP_COUNTERS
from serai.worker_agent.engine.model_files import model_word
from serai.worker_agent.engine.openai import (
    OpenAiEngine,
    is_serai_engine,
    program,
    runs_module,
    with_port_flags,
)
from serai.worker_agent.engine.traits import Traits, traits_by_gguf


class LlamaCppEngine(OpenAiEngine):
    """Takes `--host` and `--port`; tells its context limit under `meta`; aborts when the connection closes."""

    kind = "llamacpp"
    counters = LLAMACPP_COUNTERS
    counter_grain_s = 0.0
    prefill_s_per_token = 0.02
    setup_s = 0.0
    shares_port = True
    trait_paths = ("/props",)

    def recognises(self, command: Sequence[str]) -> bool:
        return (
            program(command) == "llama-server"
            or is_serai_engine(command, "llamacpp")
            or runs_module(command, "serai.worker_agent.engine.llamacpp_server")
        )

    def with_address(self, command: Sequence[str], host: str, port: int) -> list[str]:
        return with_port_flags(command, host, port)

    def traits_in(self, body: dict[str, Any]) -> Traits:
        """Its build is called `b6789-0123abc`; weights are known by the customary names of their files."""
        build, file = body.get("build_info"), body.get("model_path")
        number = re.match(r"b?(\d+)", build) if isinstance(build, str) else None
        version = Traits(engine_version=number[1] if number else "")
        return version.completed_by(traits_by_gguf(file)) if isinstance(file, str) else version

    def traits_of(self, command: Sequence[str]) -> Traits:
        return traits_by_gguf(model_word(command))

    def context_tokens(self, entry: dict[str, Any]) -> int:
        meta = entry.get("meta")
        value = meta.get("n_ctx", meta.get("n_ctx_train")) if isinstance(meta, dict) else None
        return value if isinstance(value, int) else 0
