"""Any server with an OpenAI-compatible API; the other kinds differ from it in little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from serai.worker_agent.engine.base import EngineMisconfigured, NotServing, ServedModel, SleepCalls
from serai.worker_agent.engine.counters import (
    LLAMACPP_COUNTERS,
    SGLANG_COUNTERS,
    SGLANG_GAUGES,
    VLLM_COUNTERS,
    VLLM_GAUGES,
)
from serai.worker_agent.engine.traits import Traits, dtype_named, traits_by_flags


class OpenAiEngine:
    """An engine of which nothing is known but its API: the command must say where the port goes, as `{port}`."""

    kind = "openai"
    counters: Sequence[str] = (*VLLM_COUNTERS, *VLLM_GAUGES, *SGLANG_COUNTERS, *SGLANG_GAUGES, *LLAMACPP_COUNTERS)
    counter_grain_s: float | None = None
    prefill_s_per_token = 0.02
    setup_s = 10.0
    shares_port = False
    load_every_s: float | None = None
    trait_paths: Sequence[str] = ()

    def recognises(self, command: Sequence[str]) -> bool:
        return True

    def tells_steps(self, command: Sequence[str]) -> bool:
        return False

    def sleep_calls(self, command: Sequence[str]) -> SleepCalls | None:
        return None

    def with_address(self, command: Sequence[str], host: str, port: int) -> list[str]:
        filled = fill_placeholders(command, host, port)
        if filled is None:
            raise EngineMisconfigured(
                f"cannot tell `{command[0]}` its port: write {{port}} where it belongs in the command, "
                f"or name the engine's kind with --engine"
            )
        return filled

    def environment(self) -> dict[str, str]:
        return {}

    def served(self, models: dict[str, Any], wanted: str) -> ServedModel:
        entries = models.get("data")
        if not isinstance(entries, list) or not entries:
            raise NotServing("/v1/models lists nothing yet")
        by_name = {entry["id"]: entry for entry in entries if isinstance(entry, dict) and "id" in entry}
        for name, entry in by_name.items():
            if name == wanted or wanted in (entry.get("aliases") or ()):
                return ServedModel(wanted, self.context_tokens(entry), entry)
        if len(by_name) == 1:
            name, entry = next(iter(by_name.items()))
            return ServedModel(name, self.context_tokens(entry), entry)
        raise EngineMisconfigured(
            f"the engine serves {', '.join(sorted(by_name))}, none of which is {wanted!r}; "
            f"start it with that name, or say which one with --engine-model"
        )

    def traits_in(self, body: dict[str, Any]) -> Traits:
        """vLLM's `/version` has one of these words, SGLang's `/server_info` all."""
        words = {name: value for name, value in body.items() if isinstance(value, str)}
        return Traits(
            words.get("quantization", "").lower(), dtype_named(words.get("dtype", "")), words.get("version", "")
        )

    def traits_of(self, command: Sequence[str]) -> Traits:
        return traits_by_flags(command)

    def context_tokens(self, entry: dict[str, Any]) -> int:
        """Context limit from the model's entry, 0 when it has none."""
        value = entry.get("max_model_len")
        return value if isinstance(value, int) else 0


def fill_placeholders(command: Sequence[str], host: str, port: int) -> list[str] | None:
    """`{port}` and `{host}` filled in; None when there is no `{port}`."""
    if not any("{port}" in word for word in command):
        return None
    return [word.replace("{port}", str(port)).replace("{host}", host) for word in command]


def with_port_flags(command: Sequence[str], host: str, port: int) -> list[str]:
    """Adds `--host` and `--port`, unless `{port}` says where they go. Raises when a port is given already."""
    filled = fill_placeholders(command, host, port)
    if filled is not None:
        return filled
    if any(word == "--port" or word.startswith("--port=") for word in command):
        raise EngineMisconfigured("leave --port out of the engine's command: the agent chooses a free one")
    return [*command, "--host", host, "--port", str(port)]


def program(command: Sequence[str]) -> str:
    """The name of the program that `command` runs, without its folder."""
    return PurePath(command[0]).name if command else ""


def runs_module(command: Sequence[str], module: str) -> bool:
    """Whether `command` is `python -m module …`."""
    return any(a == "-m" and b.startswith(module) for a, b in pairwise(command))


def is_serai_engine(command: Sequence[str], kind: str) -> bool:
    """Whether `command` is `serai engine KIND …`."""
    return program(command) == "serai" and tuple(command[1:3]) == ("engine", kind)
