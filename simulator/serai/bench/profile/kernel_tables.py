"""Whole passes put together from measured kernel times: LLMServingSim's layer tables and vidur's.

A pass of T tokens is all layers at T plus one head for one sequence, without communication and without an engine.
Prompt passes hold attention where the table has it; decode passes never do, since no table here measured reading a
long cache on both GPUs of a pair. Fitted at token counts of three times a power of two; judged at powers of two, and
on Llama-3.1-70B at TP 4, which no fit saw.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median

from serai.bench.profile.served_fit import profile_from
from serai.bench.report import rounded
from serai.performance.fitting import Block, Parameter, fit
from serai.performance.hardware import GPUS
from serai.performance.latency_model import PrefillChunk, Step
from serai.performance.latency_profile import PURE_ROOFLINE, LatencyProfile, Provenance
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card

ENGINE = "kernels"
LAYERS = "profiles/llmservingsim/v0"
VIDUR = "profiles/vidur"
TABLES = (
    # folder, GPU, model, TP
    ("H100/meta-llama/Llama-3.1-8B/tp1", "h100-sxm-80", "meta-llama/Llama-3.1-8B", 1),
    ("H100/meta-llama/Llama-3.1-70B/tp4", "h100-sxm-80", "meta-llama/Llama-3.1-70B", 4),
    ("RTX3090/meta-llama/Llama-3.1-8B/tp1", "rtx-3090", "meta-llama/Llama-3.1-8B", 1),
)
VIDUR_GPUS = {"a100": "a100-sxm-80", "a40": "a40"}
"""vidur's H100 table is left to the LLMServingSim one, which has attention too."""
VIDUR_HELD_OUT_TENSOR = (2, 4)

PARAMETERS = (
    Parameter("linear_compute", 0.8, 0.6, 1.0),
    Parameter("linear_memory", 0.8, 0.6, 1.0),
    Parameter("attention_compute", 0.4, 0.8, 1.0),
    Parameter("elementwise_memory", 0.2, 0.8, 1.0),
    Parameter("ridge_sharpness", 3.0, 0.3),
    Parameter("kernel_s", 5e-6, 0.7),
)

Times = dict[tuple[str, int], float]
"""Seconds by layer name and token count."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the whole model, measured kernel by kernel and added up."""

    gpu: str
    model: str
    tensor: int
    tokens: int
    prompt: bool
    """A prompt of `tokens` (with attention) or a decode batch of `tokens` sequences (without)."""
    seconds: float
    held_out: bool
    instance: RooflineModel


def load_layer_tables(data: Path) -> dict[tuple[str, str], Times]:
    """LLMServingSim's layer times, by GPU and model. Raises OSError when a file is absent."""
    found: dict[tuple[str, str], Times] = {}
    for folder, gpu, model, _ in TABLES:
        with (data / LAYERS / folder / "layers.csv").open(newline="") as lines:
            found[gpu, model] = {
                (row["layer_name"], int(row["input"])): float(row["latency(ns)"]) / 1e9
                for row in csv.DictReader(lines)
                if row["kv_cache"] == "0"
            }
    return found


_ENDS = {"embedding", "final_layernorm", "lm_head"}


def pass_s(times: Times, layers: int, tokens: int, *, attention: bool, sequences: int = 1) -> float:
    """Seconds of one pass of `tokens` tokens; the head runs for `sequences` of them."""
    names = {name for name, count in times if count == tokens} - _ENDS - (set() if attention else {"attn"})
    per_layer = sum(times[name, tokens] for name in names)
    ends = times["embedding", tokens] + times["final_layernorm", tokens] + times["lm_head", sequences]
    return layers * per_layer + ends


def load_passes(data: Path) -> list[Pass]:
    """All passes of LLMServingSim's tables and vidur's. Raises OSError when a file is absent."""
    found: list[Pass] = []
    for (gpu, model), times in load_layer_tables(data).items():
        tensor = next(t for _, g, m, t in TABLES if (g, m) == (gpu, model))
        card = shipped_card(model)
        instance = RooflineModel(card, GPUS[gpu], Parallelism(tensor), profile=PURE_ROOFLINE)
        for tokens in _sizes(2048):
            held = model.endswith("70B") or not _fitted_size(tokens)
            prompt = pass_s(times, card.layers, tokens, attention=True)
            found.append(Pass(gpu, model, tensor, tokens, True, prompt, held, instance))
            if tokens <= 256:
                decode = pass_s(times, card.layers, tokens, attention=False, sequences=tokens)
                found.append(Pass(gpu, model, tensor, tokens, False, decode, held, instance))
    return found + _vidur_passes(data)


def _sizes(most: int) -> list[int]:
    powers = [2**i for i in range(12)]
    return [n for n in sorted({*powers, *(3 * p for p in powers)}) if n <= most]


def _fitted_size(tokens: int) -> bool:
    return tokens % 3 == 0


_VIDUR_OPERATORS = (
    *("input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add"),
)


def _vidur_passes(data: Path) -> list[Pass]:
    model = "meta-llama/Llama-2-70b-hf"
    card = shipped_card(model)
    found: list[Pass] = []
    for folder, gpu in VIDUR_GPUS.items():
        per_layer = _vidur_layer_times(data / VIDUR / folder / "Llama-2-70b-mlp.csv")
        for (tensor, tokens), seconds in sorted(per_layer.items()):
            if tokens not in _vidur_sizes():
                continue
            instance = RooflineModel(card, GPUS[gpu], Parallelism(tensor), profile=PURE_ROOFLINE)
            held = tensor in VIDUR_HELD_OUT_TENSOR
            found.append(Pass(gpu, model, tensor, tokens, False, card.layers * seconds, held, instance))
    return found


def _vidur_sizes() -> set[int]:
    return {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096}


def _vidur_layer_times(path: Path) -> dict[tuple[int, int], float]:
    """Seconds of one layer without attention and communication, by TP and tokens."""
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            total = sum(float(row[f"time_stats.{name}.median"]) for name in _VIDUR_OPERATORS)
            groups[int(row["num_tensor_parallel_workers"]), int(row["num_tokens"])].append(total / 1e3)
    return {key: median(values) for key, values in groups.items()}


def predicted_pass_s(row: Pass, profile: LatencyProfile) -> float:
    """Predicted seconds of the same kernels: no communication, no attention in decode passes, no head in vidur's."""
    instance = row.instance.with_profile(profile)
    if row.prompt:
        parts = instance.breakdown(Step([PrefillChunk(row.tokens)]))
    else:
        parts = instance.breakdown(Step(decode_sequences=row.tokens))
    total = parts.total_s - parts.communication_s
    return total - instance.head_s(row.tokens) if row.gpu in VIDUR_GPUS.values() else total


def fit_passes(rows: Sequence[Pass], gpu: str) -> LatencyProfile:
    """The profile of one GPU's kernels, fitted to `rows` of that GPU, every one of them."""
    own = [row for row in rows if row.gpu == gpu]
    measured = [log(row.seconds) for row in own]

    def values(position: Sequence[float]) -> Mapping[str, float]:
        return {p.name: p.value(x) for p, x in zip(PARAMETERS, position, strict=True)}

    def residuals(position: Sequence[float]) -> list[float]:
        profile = profile_from(dict(values(position)), ENGINE, gpu)
        return [log(predicted_pass_s(row, profile)) - known for row, known in zip(own, measured, strict=True)]

    start, spreads = [p.start for p in PARAMETERS], [p.spread for p in PARAMETERS]
    position = fit(start, spreads, [Block(residuals, range(len(PARAMETERS)))])
    fitted = profile_from({name: rounded(value) for name, value in values(position).items()}, ENGINE, gpu)
    error = sum(abs(predicted_pass_s(r, fitted) / r.seconds - 1) for r in own) / len(own)
    source = VIDUR if gpu in VIDUR_GPUS.values() else LAYERS
    provenance = Provenance([f"{source}: kernel times of {gpu}"], len(own), rounded(error), "kernels only: no engine")
    return LatencyProfile(gpu, ENGINE, fitted.efficiency, fitted.overheads, fitted.serving, provenance)
