"""Model cards: published sizes, every architecture that is claimed, and configs that are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from serai.performance.hardware import GPUS
from serai.performance.memory import (
    BadParallelism,
    MemoryBudget,
    Parallelism,
    checked_parallelism,
    kv_bytes_per_token,
    kv_bytes_per_token_per_gpu,
    kv_capacity_tokens,
    weight_bytes_per_gpu,
)
from serai.performance.model_card import BadModelConfig, LatentAttention, model_card
from serai.performance.quantisation import KvFormat, Quantisation, WeightFormat
from serai.performance.shipped_models import shipped_card

PUBLISHED_BILLIONS = {
    "meta-llama/Llama-2-7b-hf": 6.74,
    "meta-llama/Llama-2-13b-hf": 13.02,
    "meta-llama/Llama-2-70b-hf": 68.98,
    "huggyllama/llama-30b": 32.53,
    "codellama/CodeLlama-34b-hf": 33.74,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.55,
    "meta-llama/Llama-3.1-405B": 405.85,
    "mistralai/Mixtral-8x7B-v0.1": 46.70,
    "Qwen/Qwen2-72B": 72.71,
    "Qwen/Qwen3-32B": 32.76,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "Qwen/Qwen3-235B-A22B": 235.09,
    "openai/gpt-oss-120b": 116.83,
    "deepseek-ai/DeepSeek-R1": 671.03,
    "bigscience/bloom": 176.25,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_parameters_are_those_published(name: str, billions: float) -> None:
    assert shipped_card(name).parameters() / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("huggyllama/llama-30b", 1_597_440),
        ("codellama/CodeLlama-34b-hf", 196_608),
        ("Qwen/Qwen2-72B", 327_680),
        ("deepseek-ai/DeepSeek-R1", 61 * (512 + 64) * 2),
    ],
)
def test_kv_bytes_per_token_are_those_published(name: str, size: int) -> None:
    assert kv_bytes_per_token(shipped_card(name)) == size


def test_names_are_found_without_organisation_and_in_any_case() -> None:
    assert shipped_card("llama-3.1-8b") == shipped_card("meta-llama/Llama-3.1-8B")
    with pytest.raises(BadModelConfig, match="Qwen3-32B"):
        shipped_card("Qwen3-33B")


def test_checkpoint_formats_are_read_from_the_config() -> None:
    assert shipped_card("openai/gpt-oss-120b").quantisation.experts is WeightFormat.MXFP4
    assert shipped_card("openai/gpt-oss-120b").quantisation.attention is WeightFormat.BF16
    kimi = shipped_card("moonshotai/Kimi-K2.5").quantisation
    assert (kimi.attention, kimi.dense, kimi.experts) == (WeightFormat.BF16, WeightFormat.BF16, WeightFormat.INT4)
    assert shipped_card("Qwen/Qwen3-235B-A22B-FP8").weight_bytes() == pytest.approx(236e9, rel=0.01)


DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}
EXPERTS = DENSE | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ({"quant_method": "fp8"}, WeightFormat.FP8),
        ({"quant_method": "awq", "bits": 4}, WeightFormat.INT4),
        ({"quant_method": "gptq", "bits": 8}, WeightFormat.INT8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, WeightFormat.INT4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, WeightFormat.NVFP4),
    ],
)
def test_quantisation_methods(method: dict[str, Any], found: WeightFormat) -> None:
    assert model_card(DENSE | {"quantization_config": method}, "c").quantisation.dense is found


def test_a_multimodal_wrapper_is_followed_to_its_text_model() -> None:
    card = model_card({"model_type": "vlm", "vision_config": {"hidden_size": 9}, "text_config": DENSE}, "c")
    assert card.hidden == 1024


def test_older_names_of_fields_are_known() -> None:
    card = model_card({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, "c")
    assert (card.hidden, card.layers, card.intermediate, card.gated) == (768, 12, 3072, False)


def test_dense_layers_among_experts_and_shared_experts_are_counted() -> None:
    card = model_card(EXPERTS | {"first_k_dense_replace": 1, "n_shared_experts": 2}, "c")
    assert (card.dense_layers, card.moe_layers) == (1, 3)
    assert card.experts is not None
    assert card.experts.shared_intermediate == 1024
    assert model_card(EXPERTS | {"decoder_sparse_step": 2}, "c").dense_layers == 2


def test_sliding_windows_are_counted_by_layer() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    card = model_card(DENSE | {"sliding_window": 128, "layer_types": kinds}, "c")
    assert (card.window, card.window_layers, card.full_layers) == (128, 2, 2)
    assert model_card(DENSE | {"sliding_window": 128, "use_sliding_window": False}, "c").window_layers == 0


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({k: v for k, v in DENSE.items() if k != "intermediate_size"}, "intermediate_size"),
        (DENSE | {"hidden_size": math.nan}, "hidden_size"),
        (DENSE | {"hidden_size": True}, "hidden_size"),
        (DENSE | {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        (DENSE | {"num_key_value_heads": 5}, "num_key_value_heads"),
        (DENSE | {"num_attention_heads": 15, "num_key_value_heads": 3}, "num_attention_heads"),
        (EXPERTS | {"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ({k: v for k, v in EXPERTS.items() if k != "num_experts_per_tok"}, "num_experts_per_tok"),
        (EXPERTS | {"first_k_dense_replace": 4}, "first_k_dense_replace"),
        (DENSE | {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        (DENSE | {"index_topk": 2048}, "index_topk"),
        (DENSE | {"kv_lora_rank": 512}, "qk_nope_head_dim"),
        (DENSE | {"quantization_config": {"quant_method": "magic"}}, "quantization_config"),
        (DENSE | {"quantization_config": "fp8"}, "quantization_config"),
        ({"text_config": "no"}, "text_config"),
    ],
)
def test_a_config_without_sense_is_one_line_with_field_and_file(config: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelConfig) as caught:
        model_card(config, "dir/config.json")
    text = str(caught.value)
    assert f"`{named}`" in text
    assert text.startswith("dir/config.json: ")
    assert "\n" not in text


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(BadModelConfig, match=r"dir/config\.json: not a JSON object"):
        model_card([], "dir/config.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "split", "named"),
    [
        ("meta-llama/Llama-3.1-8B", Parallelism(tensor=5), "num_attention_heads"),
        ("huggyllama/llama-30b", Parallelism(tensor=8), "num_attention_heads"),
        ("Qwen/Qwen2.5-7B-Instruct", Parallelism(tensor=14), "num_key_value_heads"),
        ("meta-llama/Llama-3.1-8B", Parallelism(pipeline=33), "num_hidden_layers"),
        ("meta-llama/Llama-3.1-8B", Parallelism(tensor=0), "tensor"),
    ],
)
def test_a_split_that_does_not_divide_is_one_line_with_field_and_file(
    name: str, split: Parallelism, named: str
) -> None:
    with pytest.raises(BadParallelism) as caught:
        checked_parallelism(shipped_card(name), split)
    text = str(caught.value)
    assert named in text
    assert "model_configs.json" in text
    assert "\n" not in text


def test_heads_are_split_repeated_and_latents_held_by_every_rank() -> None:
    llama, latent = shipped_card("meta-llama/Llama-3.1-70B"), shipped_card("deepseek-ai/DeepSeek-R1")
    formats = Quantisation()
    whole = kv_bytes_per_token_per_gpu(llama, Parallelism(), formats)
    assert kv_bytes_per_token_per_gpu(llama, Parallelism(tensor=8), formats) == whole / 8
    assert kv_bytes_per_token_per_gpu(llama, Parallelism(tensor=16), formats) == whole / 8
    assert isinstance(latent.attention, LatentAttention)
    single = kv_bytes_per_token_per_gpu(latent, Parallelism(), formats)
    assert kv_bytes_per_token_per_gpu(latent, Parallelism(tensor=8), formats) == single


def test_capacity_is_what_weights_and_reserve_leave() -> None:
    card, gpu, split = shipped_card("meta-llama/Llama-3.1-8B"), GPUS["h100-sxm-80"], Parallelism()
    budget = MemoryBudget(utilisation=0.5, reserve_bytes=1e9)
    formats = Quantisation.uniform(WeightFormat.FP8, KvFormat.FP8)
    free = gpu.memory_bytes * 0.5 - 1e9 - weight_bytes_per_gpu(card, split, formats)
    tokens = kv_capacity_tokens(card, gpu, split, formats, budget)
    assert tokens % 16 == 0
    assert 0 <= free / kv_bytes_per_token(card, formats) - tokens < 16
    assert kv_capacity_tokens(shipped_card("meta-llama/Llama-3.1-70B"), gpu, split, Quantisation()) == 0
