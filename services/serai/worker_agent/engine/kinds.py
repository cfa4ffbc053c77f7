"""All engine kinds, by name."""

from __future__ import annotations

from collections.abc import Sequence

from serai.worker_agent.engine.base import Engine
from serai.worker_agent.engine.emulated import EmulatedEngine
from serai.worker_agent.engine.llamacpp import LlamaCppEngine
from serai.worker_agent.engine.openai import OpenAiEngine
from serai.worker_agent.engine.sglang import SglangEngine
from serai.worker_agent.engine.vllm import VllmEngine

ENGINES: dict[str, Engine] = {
    engine.kind: engine for engine in (VllmEngine(), SglangEngine(), LlamaCppEngine(), EmulatedEngine(), OpenAiEngine())
}


def engine_of(kind: str, command: Sequence[str]) -> Engine:
    """The engine named `kind`; with `auto`, the first that recognises `command`. Raises ValueError."""
    if kind == "auto":
        return next(engine for engine in ENGINES.values() if engine.recognises(command))
    try:
        return ENGINES[kind]
    except KeyError:
        raise ValueError(f"--engine {kind!r}: must be auto or one of {', '.join(ENGINES)}") from None
