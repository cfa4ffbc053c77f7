"""A second LatencyModel: NVIDIA's measured kernel tables, through the optional package `aiconfigurator-core`.

Install the extra `serai[aiconfigurator]` (0.12; 0.13 was withdrawn under this name). The tables cover A100 and H100
SXM, H200, L40S, Blackwell and a few more, for vLLM, SGLang and TensorRT-LLM; GPUs without tables are refused. The
package is imported when an instance is made and not before, so nothing else depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from serai.performance import memory
from serai.performance.hardware import Gpu
from serai.performance.latency_model import BadStep, PrefillChunk, Step
from serai.performance.memory import MemoryBudget, Parallelism, checked_parallelism
from serai.performance.model_card import ModelCard
from serai.performance.quantisation import KvFormat, Quantisation, WeightFormat

SYSTEMS = {
    "a100-sxm-80": "a100_sxm",
    "a100-sxm-40": "a100_sxm",
    "a800-sxm-80": "a100_sxm",
    "h100-sxm-80": "h100_sxm",
    "h200-sxm-141": "h200_sxm",
    "l40s": "l40s",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
"""Catalogue names to the package's systems. A800 is an A100 with slower NVLink: its prefill matched within 5 %."""

_WEIGHTS = {
    WeightFormat.BF16: "bfloat16",
    WeightFormat.FP8: "fp8",
    WeightFormat.INT8: "sq",
    WeightFormat.INT4: "int4_wo",
    WeightFormat.NVFP4: "nvfp4",
}
_EXPERTS = {**_WEIGHTS, WeightFormat.MXFP4: "w4a16_mxfp4"}


class AiconfiguratorUnavailable(RuntimeError):
    """The package is not installed, or has no tables for what was asked; one line that says which."""


class StepTables(Protocol):
    """What this module uses of the package's engine handle; times in milliseconds."""

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int = 0
    ) -> tuple[float, float, float, float]:
        """Total, everything but attention, prompt attention, decode attention."""
        ...


class AiconfiguratorModel:
    """A model on GPUs under an engine, timed from measured kernel tables.

    `step_overhead_s` is added to each step: the tables hold kernels, not the engine's host time (1 to 5 ms in current
    engines, 15 to 40 in those of 2023).
    """

    def __init__(
        self,
        tables: StepTables,
        card: ModelCard,
        gpu: Gpu,
        parallelism: Parallelism | None = None,
        *,
        quantisation: Quantisation | None = None,
        step_overhead_s: float = 0.0,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.card = card
        self.gpu = gpu
        self.parallelism = checked_parallelism(card, parallelism or Parallelism())
        self.quantisation = quantisation or card.quantisation
        self.step_overhead_s = step_overhead_s
        self.budget = budget or MemoryBudget()
        self._tables = tables

    def step_s(self, step: Step) -> float:
        """Duration of one engine step, in seconds. Raises BadStep for negative counts."""
        new = sum(chunk.new_tokens for chunk in step.chunks)
        decodes, context = step.decode_sequences, step.decode_context_tokens
        if decodes < 0 or context < 0 or any(c.new_tokens < 0 or c.cached_tokens < 0 for c in step.chunks):
            raise BadStep(f"negative count in {step}")
        if not new and not decodes:
            return 0.0
        near = max(1, round(context / decodes)) if decodes else 1
        shared = self._tables.mixed_step_breakdown(new, decodes, new or near, 2)[1]
        prompt = self._prompt_attention_ms(step.chunks)
        decode = self._tables.mixed_step_breakdown(0, decodes, near, 2)[3] if decodes else 0.0
        return (shared + prompt + decode) / 1e3 + self.step_overhead_s

    def _prompt_attention_ms(self, chunks: Sequence[PrefillChunk]) -> float:
        total = 0.0
        for chunk in chunks:
            if chunk.new_tokens:
                end = chunk.cached_tokens + chunk.new_tokens
                total += self._tables.mixed_step_breakdown(chunk.new_tokens, 0, end, 2, chunk.cached_tokens)[2]
        return total

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        """Time to process `batch` prompts in one step. `cached_tokens` of each are in the cache already."""
        new = prompt_tokens - cached_tokens
        if new < 1 or cached_tokens < 0 or batch < 1:
            raise BadStep(f"cannot prefill {batch} × {prompt_tokens} tokens of which {cached_tokens} are cached")
        return self.step_s(Step(chunks=[PrefillChunk(new, cached_tokens)] * batch))

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        """Duration of a step that adds one token to each of `sequences`, whose mean context is `context_tokens`."""
        return self.step_s(Step(decode_sequences=sequences, decode_context_tokens=round(sequences * context_tokens)))

    def kv_capacity_tokens(self) -> int:
        """Tokens of keys and values that fit beside the weights; 0 when the weights alone do not fit."""
        return memory.kv_capacity_tokens(self.card, self.gpu, self.parallelism, self.quantisation, self.budget)

    def kv_bytes_per_token(self) -> float:
        """Bytes one token's keys and values take, held once."""
        return memory.kv_bytes_per_token(self.card, self.quantisation)


def compile_tables(
    config_folder: Path,
    card: ModelCard,
    gpu: Gpu,
    parallelism: Parallelism | None = None,
    *,
    engine: str = "vllm",
    quantisation: Quantisation | None = None,
) -> StepTables:
    """The package's handle for the model whose `config.json` lies in `config_folder`; takes some seconds.

    Raises AiconfiguratorUnavailable when the package, the GPU's tables or a format's are missing.
    """
    split = parallelism or Parallelism()
    formats = quantisation or card.quantisation
    system = SYSTEMS.get(gpu.name)
    if system is None:
        raise AiconfiguratorUnavailable(
            f"aiconfigurator has no tables for GPU {gpu.name!r}; it knows {sorted(SYSTEMS)}"
        )
    try:
        package = import_module("aiconfigurator_core.sdk.engine")
    except ImportError as error:
        raise AiconfiguratorUnavailable(
            "aiconfigurator-core is not installed: pip install serai[aiconfigurator]"
        ) from error
    try:
        handle = package.EngineHandle.compile(
            str(config_folder),
            system,
            engine,
            tp_size=split.tensor,
            pp_size=split.pipeline,
            moe_tp_size=1 if split.expert else split.tensor,
            moe_ep_size=split.tensor if split.expert else 1,
            gemm_quant_mode=_WEIGHTS[formats.dense],
            moe_quant_mode=_EXPERTS[formats.experts] if card.experts is not None else None,
            kvcache_quant_mode="fp8" if formats.kv is KvFormat.FP8 else "bfloat16",
        )
    except KeyError as error:
        raise AiconfiguratorUnavailable(f"aiconfigurator has no tables for weights in {error}") from error
    except (ValueError, RuntimeError) as error:
        raise AiconfiguratorUnavailable(f"aiconfigurator: {str(error).splitlines()[0]}") from error
    return cast(StepTables, handle)
