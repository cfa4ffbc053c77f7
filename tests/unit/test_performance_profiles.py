"""Profiles, the fit that makes them, the online correction, and the closed loop that uses them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.performance.correction import Corrected, CorrectedModel, Correction, CorrectionLimits, corrected
from serai.performance.fitting import Block, FitFailed, Parameter, fit, solve
from serai.performance.hardware import GPUS, UnknownHardware
from serai.performance.latency_model import LatencyModel, PrefillChunk, Step
from serai.performance.latency_profile import (
    PURE_ROOFLINE,
    BadProfile,
    Efficiency,
    LatencyProfile,
    ServingHabits,
    decode_profile,
    encode_profile,
    profile_for,
    shipped_profiles,
)
from serai.performance.roofline import RooflineModel
from serai.performance.serving import Load, closed_loop, least_loop_s
from serai.performance.shipped_models import shipped_card

MODEL = RooflineModel(shipped_card("meta-llama/Llama-3.1-8B"), GPUS["h100-sxm-80"], profile=profile_for("h100"))


def test_profiles_come_back_from_their_bytes() -> None:
    for profile in shipped_profiles().values():
        assert decode_profile(encode_profile(profile), "f") == profile


def test_every_shipped_profile_says_where_its_numbers_come_from() -> None:
    assert {("h100-sxm-80", "vllm"), ("h200-sxm-141", "vllm"), ("a100-sxm-80", "vllm")} <= set(shipped_profiles())
    for profile in shipped_profiles().values():
        assert profile.provenance.sources
        assert profile.provenance.rows_fitted > 0


@pytest.mark.parametrize("gpu", sorted(GPUS))
@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_every_gpu_has_a_profile_and_a_stand_in_says_so(gpu: str, engine: str) -> None:
    profile = profile_for(gpu, engine)
    assert (profile.gpu, profile.engine) == (gpu, engine)
    if (gpu, engine) not in shipped_profiles():
        assert profile.provenance.note.startswith(f"not measured on {gpu} under {engine}")
        assert "under kernels" not in profile.provenance.note
    else:
        assert profile == shipped_profiles()[gpu, engine]


def test_a_geforce_card_reaches_the_share_of_its_halved_peak_that_another_one_does() -> None:
    profile, professional = profile_for("rtx-4090"), profile_for("rtx-pro-6000")
    geforce = profile_for("rtx-3090", "kernels").efficiency
    assert profile.efficiency == replace(professional.efficiency, linear_compute=geforce.linear_compute)
    assert profile.overheads == professional.overheads
    assert "not measured" in profile.provenance.note


def test_the_nearest_family_stands_in() -> None:
    assert "h200-sxm-141 under vllm" in profile_for("gh200-144").provenance.note
    assert "h100-sxm-80 under vllm" in profile_for("gh200-96").provenance.note
    assert "a100-sxm-80 under vllm" in profile_for("a800-sxm-80").provenance.note
    with pytest.raises(UnknownHardware):
        profile_for("abacus")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"{", "my.json"),
        (b'{"gpu": "x"}', "engine"),
        (b'{"gpu": "x", "engine": "e", "efficiency": {"linear_memory": 0}}', "efficiency.linear_memory"),
        (b'{"gpu": "x", "engine": "e", "efficiency": {"linear_compute": 3}}', "efficiency.linear_compute"),
        (b'{"gpu": "x", "engine": "e", "overheads": {"step_s": -1}}', "overheads.step_s"),
        (b'{"gpu": "x", "engine": "e", "overheads": {"step_s": "long"}}', "step_s"),
    ],
)
def test_a_profile_file_without_sense_is_one_line(text: bytes, named: str) -> None:
    with pytest.raises(BadProfile) as caught:
        decode_profile(text, "my.json")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


# The fit


def line(slope: Parameter, offset: Parameter, rows: list[tuple[float, float]]) -> list[float]:
    """Slope and offset fitted to rows of x and y."""

    def residuals(position: object) -> list[float]:
        a, b = (p.value(x) for p, x in zip((slope, offset), position, strict=True))  # type: ignore[call-overload]
        return [math.log((a * x + b) / y) for x, y in rows]

    found = fit([slope.start, offset.start], [slope.spread, offset.spread], [Block(residuals, (0, 1))])
    return [p.value(x) for p, x in zip((slope, offset), found, strict=True)]


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_fit_finds_what_made_the_rows(slope: float, offset: float) -> None:
    rows = [(x, slope * x + offset) for x in (0.1, 0.5, 1, 2, 5, 10, 50)]
    found = line(Parameter("a", 1, 10), Parameter("b", 1, 10), rows)
    assert found == pytest.approx([slope, offset], rel=0.02)


def test_rows_count_by_the_weight_of_their_block() -> None:
    level = Parameter("a", 1, 10)

    def block(value: float, rows: int, weight: float) -> Block:
        return Block(lambda position: [math.log(level.value(position[0]) / value)] * rows, (0,), weight)

    even = fit([level.start], [level.spread], [block(1.0, 1, 30.0), block(1.02, 30, 1.0)])
    heavy = fit([level.start], [level.spread], [block(1.0, 1, 1.0), block(1.02, 30, 1.0)])
    assert level.value(even[0]) == pytest.approx(1.01, abs=1e-3)
    assert level.value(heavy[0]) > 1.018


def test_a_load_that_came_in_one_wave_stands_in_for_nothing_else() -> None:
    assert "under vllm" in profile_for("h100", "llamacpp").provenance.note
    assert "h200-sxm-141 under sglang" in profile_for("h100", "sglang").provenance.note
    assert profile_for("h100", "sglang-0.5.1").serving.delay_share == 0.5


def test_mislabelled_rows_do_not_bend_a_fit() -> None:
    rows = [(x, 2 * x + 3) for x in range(1, 40)] + [(x, 20.0 * x) for x in (5, 15, 25, 35)]
    assert line(Parameter("a", 1, 10), Parameter("b", 1, 10), rows) == pytest.approx([2, 3], rel=0.05)


def test_a_ceiling_holds_and_without_rows_there_is_no_fit() -> None:
    rows = [(float(x), 3.0 * x) for x in range(1, 20)]
    slope, _ = line(Parameter("a", 0.5, 10, ceiling=1.0), Parameter("b", 0.01, 1), rows)
    assert slope < 1.0
    with pytest.raises(FitFailed, match="no rows"):
        fit([0.0], [1.0], [])


def test_linear_equations_are_solved_with_row_exchange_and_singular_ones_refused() -> None:
    assert solve([[0, 2], [1, 1]], [4, 5]) == pytest.approx([3, 2])
    with pytest.raises(FitFailed):
        solve([[1, 2], [2, 4]], [1, 2])


# The correction


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.booleans()), max_size=60))
def test_a_correction_never_leaves_its_bounds(reports: list[tuple[float, float, bool]]) -> None:
    limits, state = CorrectionLimits(), Correction()
    for predicted, observed, prompts in reports:
        state = corrected(state, predicted, observed, with_prompts=prompts)
        for part in (state.prefill, state.decode):
            assert limits.least <= part.factor <= limits.most
            assert 0 <= part.error <= limits.outlier
    assert state.prefill.reports + state.decode.reports == len(reports)


def test_a_correction_converges_and_its_error_vanishes() -> None:
    state = Correction()
    for _ in range(200):
        state = corrected(state, 0.010, 0.013, with_prompts=False)
    assert state.decode.factor == pytest.approx(1.3, rel=0.01)
    assert state.prefill == Corrected()
    assert state.error < 0.01
    assert not state.saturated()


def test_one_outlier_moves_a_settled_correction_by_little() -> None:
    state = Correction()
    for _ in range(100):
        state = corrected(state, 0.010, 0.010, with_prompts=True)
    state = corrected(state, 0.010, 10.0, with_prompts=True)
    assert state.prefill.factor < 1.1


def test_a_wrong_profile_saturates_and_nonsense_is_ignored() -> None:
    state = Correction()
    for _ in range(100):
        state = corrected(state, 0.010, 0.1, with_prompts=False)
    assert state.saturated()
    assert state.decode.factor == CorrectionLimits().most
    assert state.error > 1
    for predicted, observed in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf), (-1.0, 1.0)):
        assert corrected(state, predicted, observed, with_prompts=False) == state


def test_a_corrected_model_scales_times_and_leaves_memory() -> None:
    model = CorrectedModel(MODEL, Correction(Corrected(1.5), Corrected(0.8)))
    assert isinstance(model, LatencyModel)
    assert model.prefill_s(512) == pytest.approx(1.5 * MODEL.prefill_s(512))
    assert model.decode_step_s(8, 512) == pytest.approx(0.8 * MODEL.decode_step_s(8, 512))
    mixed = Step([PrefillChunk(64)], 8, 800)
    assert model.step_s(mixed) == pytest.approx(1.5 * MODEL.step_s(mixed))
    assert model.kv_capacity_tokens() == MODEL.kv_capacity_tokens()
    assert model.kv_bytes_per_token() == MODEL.kv_bytes_per_token()


# The closed loop


def test_a_lone_request_is_delayed_by_nobody() -> None:
    loop = closed_loop(MODEL, ServingHabits(), Load(1, 1024, 128))
    assert loop.tpot_s == loop.decode_step_s == MODEL.decode_step_s(1, 1088)


def test_prompts_of_others_delay_each_token() -> None:
    load = Load(64, 1024, 128)
    mixed = closed_loop(MODEL, ServingHabits(), load)
    assert mixed.tpot_s == pytest.approx(mixed.decode_step_s + 63 * mixed.prompt_s / 128)
    assert mixed.prompt_s < MODEL.prefill_s(1024)
    first = closed_loop(MODEL, ServingHabits(delay_share=0.5, mixed_steps=False), load)
    assert first.prompt_s == MODEL.prefill_s(1024)
    assert first.tpot_s == pytest.approx(first.decode_step_s + 0.5 * 63 * first.prompt_s / 128)
    smaller = closed_loop(MODEL, ServingHabits(chunk_tokens=256), load)
    assert smaller.prompt_s < mixed.prompt_s, "small chunks ride in steps that are made anyway"


@given(st.integers(1, 256), st.integers(1, 8192), st.integers(1, 4096))
def test_no_loop_is_faster_than_the_hardware(concurrency: int, prompt: int, output: int) -> None:
    load = Load(concurrency, prompt, output)
    ideal = MODEL.with_profile(PURE_ROOFLINE)
    slower = MODEL.with_profile(LatencyProfile("g", "e", Efficiency(linear_compute=0.7, linear_memory=0.8)))
    assert least_loop_s(ideal, load) <= least_loop_s(slower, load) * (1 + 1e-9)
    assert least_loop_s(ideal, load) >= output * ideal.decode_step_s(concurrency, prompt + output / 2)


def test_profiles_of_newer_engines_have_smaller_steps() -> None:
    new, old = profile_for("h100", "vllm"), profile_for("h100", "vllm-2023")
    card = shipped_card("meta-llama/Llama-2-70b-hf")
    steps = [RooflineModel(card, GPUS["h100-sxm-80"], profile=replace(p)).decode_step_s(1, 600) for p in (new, old)]
    assert steps[1] > steps[0]
