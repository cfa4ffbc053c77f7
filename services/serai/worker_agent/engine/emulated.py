"""The emulated engine: an engine in time and protocol, without a model (`serai engine emulate`)."""

from __future__ import annotations

from collections.abc import Sequence

from serai.worker_agent.engine.base import SleepCalls
from serai.worker_agent.engine.counters import SGLANG_COUNTERS, VLLM_COUNTERS
from serai.worker_agent.engine.openai import OpenAiEngine, is_serai_engine, runs_module, with_port_flags
from serai.worker_agent.engine.sglang import SGLANG_SLEEP
from serai.worker_agent.engine.vllm import VLLM_SLEEP


class EmulatedEngine(OpenAiEngine):
    """Takes `--host` and `--port`."""

    kind = "emulated"
    # Its KV cache is also filled by requests that it then hangs with, so that gauge proves nothing.
    counters = (*VLLM_COUNTERS, *SGLANG_COUNTERS)
    # With fixed timing an answer in one piece is counted at its end.
    counter_grain_s = None
    prefill_s_per_token = 0.002
    setup_s = 0.0
    shares_port = True
    trait_paths = ("/version", "/server_info")

    def recognises(self, command: Sequence[str]) -> bool:
        return is_serai_engine(command, "emulate") or runs_module(command, "serai.engine_emulator")

    def tells_steps(self, command: Sequence[str]) -> bool:
        return any(word.endswith("phase-gated") for word in command)  # After --mode.

    def sleep_calls(self, command: Sequence[str]) -> SleepCalls | None:
        return SGLANG_SLEEP if "sglang" in command else VLLM_SLEEP

    def with_address(self, command: Sequence[str], host: str, port: int) -> list[str]:
        return with_port_flags(command, host, port)
