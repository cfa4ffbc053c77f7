"""vLLM: `vllm serve …`, or its API server as a module."""

from __future__ import annotations

from collections.abc import Sequence

from serai.worker_agent.engine.base import SleepCalls
from serai.worker_agent.engine.counters import VLLM_COUNTERS, VLLM_GAUGES
from serai.worker_agent.engine.openai import OpenAiEngine, program, runs_module, with_port_flags

# Level 1: weights go to main memory, the KV cache is dropped. The calls are among those of development only.
VLLM_SLEEP = SleepCalls("/sleep?level=1", "/wake_up", "/is_sleeping", {"VLLM_SERVER_DEV_MODE": "1"})


class VllmEngine(OpenAiEngine):
    """Takes `--host` and `--port`; lists `max_model_len`; aborts a request when its connection closes."""

    kind = "vllm"
    counters = (*VLLM_COUNTERS, *VLLM_GAUGES)
    counter_grain_s = 0.0
    prefill_s_per_token = 0.002
    setup_s = 0.0
    shares_port = True
    trait_paths = ("/version",)

    def recognises(self, command: Sequence[str]) -> bool:
        return (program(command) == "vllm" and "serve" in command) or runs_module(command, "vllm.entrypoints")

    def tells_steps(self, command: Sequence[str]) -> bool:
        return any("serai_vllm." in word for word in command)  # After --scheduler-cls.

    def sleep_calls(self, command: Sequence[str]) -> SleepCalls | None:
        return VLLM_SLEEP if "--enable-sleep-mode" in command else None

    def with_address(self, command: Sequence[str], host: str, port: int) -> list[str]:
        return with_port_flags(command, host, port)

    def environment(self) -> dict[str, str]:
        # Usage reporting would dial out of the allocation; the engine serves without it.
        return {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
