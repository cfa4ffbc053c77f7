"""The cost model: sizes that are known from elsewhere, laws it must obey, and bad input in one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.performance.hardware import GPUS, UnknownHardware, find_gpu, find_link
from serai.performance.memory import BadParallelism, Parallelism, kv_bytes_per_token
from serai.performance.model_card import BadModelConfig, model_card
from serai.performance.roofline import RooflineModel, experts_touched
from serai.performance.shipped_models import shipped_card, shipped_names

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_sizes_are_those_the_model_is_known_for() -> None:
    card = model_card(CONFIG, "config.json")
    assert card.parameters() == pytest.approx(8.03e9, rel=0.005)
    assert kv_bytes_per_token(card) == 2 * 32 * 8 * 128 * 2
    assert card.weight_bytes() == pytest.approx(2 * card.parameters(), rel=0.01)
    assert shipped_card(LLAMA).parameters() == pytest.approx(card.parameters(), rel=0.001)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, "many", 1.5])
def test_a_bad_config_is_one_line_that_names_field_and_file(field: str, value: Any) -> None:
    config = {name: given for name, given in CONFIG.items() if name != field} | ({field: value} if value else {})
    with pytest.raises(BadModelConfig) as caught:
        model_card(config, "models/x/config.json")
    text = str(caught.value)
    assert field in text
    assert "models/x/config.json" in text
    assert "\n" not in text


def test_unknown_hardware_names_what_is_near() -> None:
    with pytest.raises(UnknownHardware, match="h100"):
        find_gpu("H1000")
    with pytest.raises(UnknownHardware):
        find_link("carrier-pigeon")
    assert find_gpu("NVIDIA H100 80GB HBM3").name == "h100-sxm-80"


def test_a_split_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(BadParallelism, match="num_attention_heads"):
        RooflineModel(shipped_card(LLAMA), find_gpu("h100"), Parallelism(tensor=3))


@pytest.mark.parametrize("name", sorted(GPUS))
def test_each_gpu_obeys_the_roofline(name: str) -> None:
    card, gpu = shipped_card(LLAMA), GPUS[name]
    model = RooflineModel(card, gpu)
    read_once_s = card.weight_bytes() / gpu.memory_bandwidth_bytes_s
    assert model.decode_step_s(1, 1000) >= 0.9 * read_once_s, "a step cannot be faster than reading the weights"
    assert model.prefill_s(4000) > model.prefill_s(400) > 0


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 128),
    st.integers(1, 100),
    st.floats(1, 30_000),
    st.floats(1, 10_000),
)
def test_more_work_never_takes_less_time(tensor: int, batch: int, more: int, context: float, longer: float) -> None:
    model = RooflineModel(shipped_card(LLAMA), find_gpu("h100"), Parallelism(tensor=tensor))
    step = model.decode_step_s(batch, context)
    assert model.decode_step_s(batch + more, context) >= step
    assert model.decode_step_s(batch, context + longer) >= step
    prompt = int(context) + 1
    assert model.prefill_s(prompt + more) >= model.prefill_s(prompt)
    assert model.prefill_s(prompt + more, cached_tokens=more) <= model.prefill_s(prompt + more)


@pytest.mark.parametrize("name", shipped_names())
def test_more_gpus_hold_more_and_step_faster(name: str) -> None:
    card = shipped_card(name)
    splits = (4, 8) if card.attention.heads % 8 == 0 else (1, 2)
    few, many = (RooflineModel(card, find_gpu("h200"), Parallelism(tensor=tensor)) for tensor in splits)
    assert many.kv_capacity_tokens() >= few.kv_capacity_tokens()
    assert many.prefill_s(8000) < few.prefill_s(8000)


def test_a_few_tokens_touch_few_experts_and_many_touch_all() -> None:
    experts = shipped_card("Qwen/Qwen3-30B-A3B").experts if "Qwen/Qwen3-30B-A3B" in shipped_names() else None
    experts = experts or next(card.experts for name in shipped_names() if (card := shipped_card(name)).experts)
    assert experts is not None
    one, many = experts_touched(experts, 1), experts_touched(experts, 100_000)
    assert 1 <= one < many
    assert experts_touched(experts, 10) <= experts_touched(experts, 100)
