"""From flags to the engine they describe: card, GPU, split and formats, and how it batches."""

from __future__ import annotations

from pathlib import Path

import orjson

from serai.engine_emulator.batching.settings import BadBatchSettings, BatchMode, BatchSettings
from serai.engine_emulator.model_flags import CannotModel, EngineName, ModelFlags, ModelledEngine
from serai.performance.hardware import UnknownHardware, find_gpu
from serai.performance.latency_profile import profile_for
from serai.performance.memory import BadParallelism, Parallelism, weight_bytes_per_gpu
from serai.performance.model_card import BadModelConfig, ModelCard, model_card
from serai.performance.quantisation import KvFormat, Quantisation, WeightFormat
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card

__all__ = ["CannotModel", "ModelFlags", "ModelledEngine", "modelled_engine"]


def modelled_engine(flags: ModelFlags) -> ModelledEngine:
    """The engine that `flags` describe. Raises CannotModel."""
    if flags.speed <= 0:
        raise CannotModel(f"--speed must be above 0, not {flags.speed:g}")
    if not 0 <= flags.step_noise <= 1:
        raise CannotModel(f"--step-noise must be from 0 to 1, not {flags.step_noise:g}")
    model = _model(flags)
    return ModelledEngine(model, _batch(flags, model), flags.speed, flags.step_noise)


def _model(flags: ModelFlags) -> RooflineModel:
    try:
        gpu = find_gpu(flags.gpu)
    except UnknownHardware as error:
        raise CannotModel(f"--gpu: {error}") from error
    card = _card(flags)
    profile = profile_for(gpu.name, flags.engine)
    try:
        return RooflineModel(
            card,
            gpu,
            Parallelism(flags.tp, flags.pp),
            profile=profile,
            quantisation=_formats(card.quantisation, flags),
        )
    except BadParallelism as error:
        raise CannotModel(f"--tp {flags.tp} --pp {flags.pp}: {error}") from error


def _card(flags: ModelFlags) -> ModelCard:
    if flags.card is None:
        try:
            return shipped_card(flags.model)
        except BadModelConfig as error:
            raise CannotModel(f"--model {flags.model}: {error}; say with --card which model it is") from error
    try:
        path = Path(flags.card)
        if path.suffix == ".json" or path.is_file():
            return model_card(_config(path), flags.card)
        return shipped_card(flags.card)
    except BadModelConfig as error:
        raise CannotModel(f"--card: {error}") from error


def _config(path: Path) -> dict[str, object]:
    try:
        config = orjson.loads(path.read_bytes())
    except OSError as error:
        raise CannotModel(f"--card: cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise CannotModel(f"--card: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CannotModel(f"--card: {path} must hold a JSON object, a model's config.json")
    return config


def _formats(stored: Quantisation, flags: ModelFlags) -> Quantisation:
    if flags.kv_format is not None and flags.kv_format not in list(KvFormat):
        raise CannotModel(f"--kv-format must be one of {', '.join(KvFormat)}, not {flags.kv_format}")
    if flags.weights is not None and flags.weights not in list(WeightFormat):
        raise CannotModel(f"--weights must be one of {', '.join(WeightFormat)}, not {flags.weights}")
    cache = KvFormat(flags.kv_format) if flags.kv_format else stored.kv
    if flags.weights:
        return Quantisation.uniform(WeightFormat(flags.weights), cache)
    return Quantisation(stored.attention, stored.dense, stored.experts, cache)


_FLAG_OF = {
    "kv_tokens": "--kv-tokens",
    "sequences_max": "--max-num-seqs",
    "step_tokens_max": "--max-num-batched-tokens",
    "chunk_tokens_max": "--chunk",
}
_SGLANG_CHUNK_TOKENS = 8192
"""SGLang's `--chunked-prefill-size` on GPUs of 80 GB; it bounds the whole prefill batch, too."""


def _batch(flags: ModelFlags, model: RooflineModel) -> BatchSettings:
    sglang = flags.engine is EngineName.SGLANG
    mode = flags.mode or (BatchMode.PREFILL_FIRST if sglang else BatchMode.MIXED)
    step_tokens = _SGLANG_CHUNK_TOKENS if sglang else max(model.profile.serving.chunk_tokens, flags.max_num_seqs)
    chunk = flags.chunk
    if chunk is None and sglang:
        chunk = _SGLANG_CHUNK_TOKENS
    try:
        return BatchSettings(
            kv_tokens=flags.kv_tokens if flags.kv_tokens is not None else _kv_capacity(flags, model),
            mode=mode,
            sequences_max=flags.max_num_seqs,
            step_tokens_max=step_tokens if flags.max_num_batched_tokens is None else flags.max_num_batched_tokens,
            chunk_tokens_max=chunk or None,
            prefix_cache=flags.prefix_cache,
        )
    except BadBatchSettings as error:
        text = str(error)
        for name, flag in _FLAG_OF.items():
            text = text.replace(name, flag)
        raise CannotModel(text) from error


def _kv_capacity(flags: ModelFlags, model: RooflineModel) -> int:
    capacity = model.kv_capacity_tokens()
    if not capacity:
        weights_gb = weight_bytes_per_gpu(model.card, model.parallelism, model.quantisation) / 1e9
        raise CannotModel(
            f"--tp {flags.tp} --pp {flags.pp}: {weights_gb:.0f} GB of weights on each {model.gpu.name}, which has "
            f"{model.gpu.memory_bytes / 1e9:.0f} GB, leave no room for a KV cache; use more GPUs or --weights fp8"
        )
    return capacity
