"""The roofline: hand calculations, where time goes, and what must never happen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.performance.energy import Activity, power_w
from serai.performance.hardware import GPUS, NO_LINK_COST, find_link
from serai.performance.latency_model import BadStep, LatencyModel, PrefillChunk, Step
from serai.performance.latency_profile import PURE_ROOFLINE, Efficiency, LatencyProfile, Overheads, profile_for
from serai.performance.memory import Parallelism
from serai.performance.model_card import Experts
from serai.performance.quantisation import Quantisation, WeightFormat
from serai.performance.roofline import RooflineModel, either, experts_touched
from serai.performance.shipped_models import shipped_card, shipped_names

H100 = GPUS["h100-sxm-80"]
LLAMA = shipped_card("meta-llama/Llama-3.1-8B")


def with_overheads(**overheads: float) -> LatencyProfile:
    return replace(PURE_ROOFLINE, overheads=Overheads(**overheads))


def test_a_lone_decode_step_reads_every_weight_and_the_cache_once() -> None:
    model = RooflineModel(LLAMA, H100)
    weights = 2 * (LLAMA.parameters() - LLAMA.vocabulary * LLAMA.hidden)
    cache = 10_000 * model.kv_bytes_per_token()
    assert model.decode_step_s(1, 10_000) == pytest.approx((weights + cache) / H100.memory_bandwidth_bytes_s, rel=0.01)


def test_a_long_prompt_multiplies_every_weight_with_every_token() -> None:
    tokens = 4096
    parts = RooflineModel(LLAMA, H100).breakdown(Step([PrefillChunk(tokens)]))
    linear = 2 * (LLAMA.parameters() - 2 * LLAMA.vocabulary * LLAMA.hidden) * tokens
    attention = 4 * 32 * 128 * 32 * tokens * (tokens + 1) / 2
    expected = (linear + attention) / H100.bf16_flops_s
    assert parts.linear_s + parts.attention_s == pytest.approx(expected, rel=0.01)


def test_attention_is_divided_by_tensor_parallelism() -> None:
    step = Step([PrefillChunk(8192)])
    one, four = (RooflineModel(LLAMA, H100, Parallelism(tensor)).breakdown(step) for tensor in (1, 4))
    assert four.attention_s == pytest.approx(one.attention_s / 4)
    assert four.linear_s == pytest.approx(one.linear_s / 4, rel=0.01)
    assert one.communication_s == 0 < four.communication_s


def test_communication_depends_on_the_link_and_can_be_left_out() -> None:
    step = Step([PrefillChunk(2048)])
    split = Parallelism(4)
    fast, slow = (RooflineModel(LLAMA, H100, split, link=find_link(name)) for name in ("nvlink4", "pcie4"))
    assert slow.breakdown(step).communication_s > 10 * fast.breakdown(step).communication_s
    assert RooflineModel(LLAMA, H100, split, link=NO_LINK_COST).breakdown(step).communication_s < 1e-8


def test_large_messages_may_be_slower() -> None:
    profile = replace(PURE_ROOFLINE, efficiency=Efficiency(link_bandwidth_large=0.5))
    model = RooflineModel(LLAMA, H100, Parallelism(2), profile=profile)
    small, large = (model.breakdown(Step([PrefillChunk(n)])).communication_s / n for n in (8191, 8192))
    assert large == pytest.approx(2 * small)


@pytest.mark.parametrize("name", shipped_names())
@pytest.mark.parametrize("gpu", ["h100-sxm-80", "a100-sxm-80", "l20"])
def test_parts_add_up_to_the_step(name: str, gpu: str) -> None:
    model = RooflineModel(shipped_card(name), GPUS[gpu], profile=profile_for(gpu))
    step = Step([PrefillChunk(300, 100), PrefillChunk(20)], 17, 17 * 900)
    assert model.breakdown(step).total_s == pytest.approx(model.step_s(step))
    assert model.activity(step).total_s == pytest.approx(model.step_s(step), rel=0.1)
    assert isinstance(model, LatencyModel)


CHUNKS = st.lists(st.builds(PrefillChunk, st.integers(1, 4096), st.integers(0, 8192)), max_size=4)


@given(CHUNKS, st.integers(0, 64), st.integers(0, 4000), st.sampled_from(["vllm", "trtllm", "sglang", "vllm-2023"]))
def test_a_mixed_step_is_never_shorter_than_its_halves_nor_longer_than_both(
    chunks: list[PrefillChunk], decodes: int, context: int, engine: str
) -> None:
    model = RooflineModel(LLAMA, H100, profile=profile_for("h100", engine))
    prompts = model.step_s(Step(chunks)) if chunks else 0.0
    plain = model.step_s(Step((), decodes, decodes * context)) if decodes else 0.0
    mixed = model.step_s(Step(chunks, decodes, decodes * context))
    assert mixed >= max(prompts, plain) * (1 - 1e-9)
    assert mixed <= (prompts + plain) * (1 + 1e-9)


@given(st.integers(2, 8192), st.integers(1, 4096))
def test_chunks_cost_more_than_the_whole_prompt_and_cached_tokens_less(tokens: int, chunk: int) -> None:
    model = RooflineModel(LLAMA, H100, profile=profile_for("h100"))
    pieces = [(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk)]
    chunked = sum(model.step_s(Step([PrefillChunk(size, start)])) for start, size in pieces)
    assert chunked >= model.prefill_s(tokens) * (1 - 1e-9)
    assert model.prefill_s(tokens, cached_tokens=tokens // 2) <= model.prefill_s(tokens)


def test_overheads_are_added_where_they_belong() -> None:
    step = Step((), 8, 8000)
    plain = RooflineModel(LLAMA, H100).step_s(step)
    model = RooflineModel(LLAMA, H100, profile=with_overheads(step_s=0.01, sequence_s=0.001))
    assert model.step_s(step) == pytest.approx(plain + 0.01 + 8 * 0.001)
    assert model.with_overheads(step_s=0.02).step_s(step) == pytest.approx(plain + 0.02 + 8 * 0.001)
    per_kernel = RooflineModel(LLAMA, H100, profile=with_overheads(kernel_s=1e-6)).step_s(step)
    assert per_kernel == pytest.approx(plain + 32 * 10e-6)


def test_a_host_that_launches_slowly_is_a_floor_not_a_sum() -> None:
    model = RooflineModel(LLAMA, H100, profile=with_overheads(launch_s=1e-4))
    assert model.decode_step_s(1, 10) == pytest.approx(32 * 10 * 1e-4)
    long = RooflineModel(LLAMA, H100).prefill_s(16_384)
    assert model.prefill_s(16_384) == pytest.approx(long)


def test_nothing_to_do_takes_no_time_and_nonsense_is_refused() -> None:
    model = RooflineModel(LLAMA, H100, profile=profile_for("h100"))
    assert model.step_s(Step()) == 0
    for step in (Step((), -1, 0), Step((), 1, -1), Step([PrefillChunk(-1)]), Step([PrefillChunk(1, -1)])):
        with pytest.raises(BadStep):
            model.step_s(step)
    for prompt, cached, batch in ((0, 0, 1), (5, 5, 1), (5, -1, 1), (5, 0, 0)):
        with pytest.raises(BadStep):
            model.prefill_s(prompt, cached, batch)


def test_pipelines_save_memory_not_latency() -> None:
    card = shipped_card("meta-llama/Llama-3.1-70B")
    tensor, pipeline = (RooflineModel(card, H100, split) for split in (Parallelism(4), Parallelism(2, 2)))
    assert pipeline.kv_capacity_tokens() == pytest.approx(tensor.kv_capacity_tokens(), rel=0.1)
    assert pipeline.prefill_s(2048) > 1.5 * tensor.prefill_s(2048)


def test_narrow_formats_read_less_and_multiply_faster() -> None:
    wide, narrow = (
        RooflineModel(LLAMA, H100, quantisation=Quantisation.uniform(weights))
        for weights in (WeightFormat.BF16, WeightFormat.FP8)
    )
    assert narrow.decode_step_s(1, 1) == pytest.approx(wide.decode_step_s(1, 1) * 0.56, rel=0.05)
    assert narrow.prefill_s(2048) < 0.65 * wide.prefill_s(2048)
    ampere = GPUS["a100-sxm-80"]
    same = [
        RooflineModel(LLAMA, ampere, quantisation=Quantisation.uniform(w)).breakdown(Step([PrefillChunk(4096)]))
        for w in (WeightFormat.BF16, WeightFormat.FP8)
    ]
    assert same[0].linear_s == pytest.approx(same[1].linear_s), "A100 has no FP8 products: they stay BF16"


def test_sliding_windows_bound_attention() -> None:
    card = shipped_card("openai/gpt-oss-120b")
    full = replace(card, window=0, window_layers=0)
    step = Step((), 8, 8 * 50_000)
    windowed, whole = (RooflineModel(c, GPUS["h200-sxm-141"]).breakdown(step).attention_s for c in (card, full))
    assert windowed == pytest.approx(whole / 2, rel=0.02)


@given(st.integers(1, 400), st.integers(1, 16), st.integers(0, 5000), st.floats(0.1, 100))
def test_experts_touched_are_between_the_active_ones_and_all(
    count: int, active: int, tokens: int, evenness: float
) -> None:
    experts = Experts(count, min(active, count), 512, 0)
    touched = experts_touched(experts, tokens, evenness)
    assert experts.active <= touched <= count
    assert experts_touched(experts, tokens + 1, evenness) >= touched
    assert experts_touched(experts, tokens, evenness * 2) >= touched * (1 - 1e-9)


def test_even_routing_is_the_known_formula() -> None:
    experts = Experts(128, 8, 1536, 0)
    assert experts_touched(experts, 16, 1e6) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16), rel=0.03)


def test_whole_experts_on_each_rank_save_their_fixed_cost() -> None:
    card = shipped_card("Qwen/Qwen3-235B-A22B-FP8")
    profile = with_overheads(expert_s=1e-6)
    sliced, whole = (
        RooflineModel(card, H100, Parallelism(8, expert=expert), profile=profile).decode_step_s(64, 100)
        for expert in (False, True)
    )
    assert whole < sliced


def test_the_ridge_is_rounded_off() -> None:
    assert either(1.0, 1.0, 100) == 1.0
    assert either(1.0, 1.0, 2) == pytest.approx(2**0.5)
    assert either(1.0, 0.01, 2) == 1.0
    assert either(0.3, 0.4, 2) == either(0.4, 0.3, 2) == pytest.approx(0.5)


def test_energy_is_power_times_time_and_prompts_draw_more() -> None:
    model = RooflineModel(LLAMA, H100, profile=profile_for("h100"))
    prompt, decode = Step([PrefillChunk(8192)]), Step((), 1, 1000)
    watts = [model.energy_j(step) / model.step_s(step) for step in (prompt, decode)]
    assert H100.idle_power_w < watts[1] < watts[0] <= H100.power_w
    assert power_w(H100, Activity(0, 0, 0)) == H100.idle_power_w
    assert power_w(H100, Activity(1, 0, 0)) == H100.power_w


def test_measured_decode_power_of_a100_is_met() -> None:
    # splitwise: Llama-2-70B decoding on A100 draws 0.74, 0.60 and 0.43 of the limit at TP 2, 4 and 8.
    gpu = GPUS["a100-sxm-80"]
    step_s = {2: 0.0549, 4: 0.0445, 8: 0.0450}
    for tensor, share in ((2, 0.74), (4, 0.60), (8, 0.43)):
        reading = 138e9 / tensor / gpu.memory_bandwidth_bytes_s / 0.8
        activity = Activity(0, reading, step_s[tensor] - reading)
        assert power_w(gpu, activity) / gpu.power_w == pytest.approx(share, abs=0.05)
