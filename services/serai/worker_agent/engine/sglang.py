"""SGLang: `python -m sglang.launch_server …` or `sglang serve …`."""

from __future__ import annotations

from collections.abc import Sequence

from serai.worker_agent.engine.base import SleepCalls
from serai.worker_agent.engine.counters import SGLANG_COUNTERS, SGLANG_GAUGES
from serai.worker_agent.engine.openai import OpenAiEngine, program, runs_module, with_port_flags

SGLANG_SLEEP = SleepCalls("/release_memory_occupation", "/resume_memory_occupation")


class SglangEngine(OpenAiEngine):
    """Takes `--host` and `--port`; lists `max_model_len`; aborts a request when its connection closes."""

    kind = "sglang"
    counters = (*SGLANG_COUNTERS, *SGLANG_GAUGES)
    # It reports every 40 to 50 decode steps.
    counter_grain_s = 6.0
    prefill_s_per_token = 0.002
    setup_s = 0.0
    shares_port = True
    # Cheap to answer: a snapshot that its scheduler keeps.
    load_every_s = 0.25
    trait_paths = ("/server_info", "/get_server_info")

    def recognises(self, command: Sequence[str]) -> bool:
        return (program(command) == "sglang" and "serve" in command) or runs_module(command, "sglang.launch_server")

    def sleep_calls(self, command: Sequence[str]) -> SleepCalls | None:
        return SGLANG_SLEEP if "--enable-memory-saver" in command else None

    def with_address(self, command: Sequence[str], host: str, port: int) -> list[str]:
        return with_port_flags(command, host, port)
