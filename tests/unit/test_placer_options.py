"""Options of the placer: memory, divisibility, targets, measured rates, and reasons."""

from __future__ import annotations

import pytest

from serai.performance.hardware import GPUS
from serai.placer.bounds import total_bound, worst_share_bound
from serai.placer.capacity import PIPELINE_SHARE
from serai.placer.demand import BadDemand, LengthSpread, ModelDemand
from serai.placer.fleet import Fleet, Node
from serai.placer.options import Measured, Option, OptionSettings, make_options
from serai.placer.placement import Rules
from serai.placer.problem import make_problem
from serai.placer.relaxation import relax

LLAMA_70B, LLAMA_13B = "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-2-13b-hf"
ALL = OptionSettings(prune=False)


def _wanted(model: str = LLAMA_70B, **more: object) -> ModelDemand:
    about = LengthSpread.about
    return ModelDemand(model, 10.0, about(800), about(120), **more)  # type: ignore[arg-type]


def _nodes(gpu: str, gpus: int, count: int = 1) -> Fleet:
    return Fleet([Node(f"n{place}", gpu, gpus) for place in range(count)])


def _by_split(options: tuple[Option, ...]) -> dict[tuple[int, int], Option]:
    return {(option.tensor, option.pipeline): option for option in options}


def test_weights_that_do_not_fit_are_told_with_the_bytes() -> None:
    made = make_options([_wanted()], _nodes("a100", 8), ALL)
    reasons = {(way.tensor, way.pipeline): way.why for way in made.infeasible}
    assert reasons[1, 1].startswith("needs 133.9 GiB a GPU for weights and engine; 72.0 GiB")
    assert (2, 1) in _by_split(made.feasible)


def test_splits_that_do_not_divide_the_heads_name_the_field() -> None:
    made = make_options([_wanted(LLAMA_13B)], _nodes("a100", 16), OptionSettings(tensor=(16,), pipeline=(1,)))
    assert not made.feasible
    assert "num_attention_heads" in made.why_not(LLAMA_13B)


def test_no_option_needs_more_than_a_gpu_has() -> None:
    for gpu in ("a100", "h100", "l40s", "gh200"):
        for option in make_options([_wanted(), _wanted(LLAMA_13B)], _nodes(gpu, 8), ALL).feasible:
            assert option.memory_bytes_per_gpu <= GPUS[option.gpu].memory_bytes
            assert option.gpus_per_node <= 8


def test_a_pipeline_crosses_nodes_only_with_a_model_that_no_node_holds() -> None:
    on_small = make_options([_wanted()], _nodes("l40s", 2, 8), ALL).feasible
    assert {option.nodes for option in on_small} == {2, 4}
    on_large = make_options([_wanted()], _nodes("l40s", 8, 8), ALL).feasible
    assert {option.nodes for option in on_large} == {1}


def test_targets_cost_capacity_and_impossible_ones_are_told() -> None:
    free = _by_split(make_options([_wanted()], _nodes("h100", 8), ALL).feasible)[4, 1]
    bound = _by_split(make_options([_wanted(slo_tpot_s=0.05, slo_ttft_s=2.0)], _nodes("h100", 8), ALL).feasible)[4, 1]
    assert 0 < bound.requests_s < free.requests_s
    made = make_options([_wanted(slo_tpot_s=0.001)], _nodes("h100", 8), ALL)
    assert "even for one request at a time" in made.why_not(LLAMA_70B)


def test_bursts_and_reused_prefixes_change_what_is_served() -> None:
    def capacity(**more: object) -> float:
        made = make_options([_wanted(slo_tpot_s=0.05, slo_ttft_s=1.0, **more)], _nodes("h100", 8), ALL)
        return _by_split(made.feasible)[4, 1].requests_s

    assert capacity(burstiness_cv=4.0) < capacity() < capacity(prefix_reuse=0.8)


def test_smaller_formats_load_faster_and_hold_more() -> None:
    made = make_options([_wanted(quantisations=("bf16", "fp8"))], _nodes("h100", 4), ALL).feasible
    by_format = {option.quantisation: option for option in made if (option.tensor, option.pipeline) == (4, 1)}
    assert by_format["fp8"].load_s < by_format["bf16"].load_s
    assert by_format["fp8"].kv_tokens > by_format["bf16"].kv_tokens
    with pytest.raises(BadDemand, match="`fp7` is no format"):
        make_options([_wanted(quantisations=("fp7",))], _nodes("h100", 4))


def test_a_measured_rate_takes_the_place_of_the_predicted_one() -> None:
    measured = [Measured(LLAMA_70B, "h100", 4, 7.25)]
    made = make_options([_wanted()], _nodes("h100", 8), OptionSettings(only_measured=True), measured=measured)
    assert [(option.requests_s, option.measured) for option in made.feasible] == [(7.25, True)]


def test_load_time_comes_from_storage() -> None:
    slow = make_options([_wanted()], Fleet([Node("n", "h100", 4, storage_bytes_s=1e9)]), ALL).feasible
    fast = make_options([_wanted()], Fleet([Node("n", "h100", 4, storage_bytes_s=10e9)]), ALL).feasible
    assert _by_split(slow)[4, 1].load_s == pytest.approx(40 + 141.1, abs=1)
    assert _by_split(fast)[4, 1].load_s == pytest.approx(40 + 14.1, abs=0.2)


def test_experts_may_be_whole_on_each_rank() -> None:
    made = make_options([_wanted("Qwen/Qwen3-30B-A3B")], _nodes("h100", 8), ALL).feasible
    assert {option.expert for option in made} == {True, False}


def test_unknown_models_name_the_nearest() -> None:
    with pytest.raises(BadDemand, match=r"Llama-3\.3-70B"):
        make_options([_wanted("meta-llama/Llama-3.3-70B")], _nodes("h100", 8))


def test_a_pipeline_loses_to_its_bubbles() -> None:
    assert 0.5 < PIPELINE_SHARE < 1.0


def test_bounds_are_above_what_is_reached_and_below_the_relaxation() -> None:
    fleet = _nodes("h100", 8, 2)
    demands = [_wanted(), _wanted(LLAMA_13B)]
    options = [
        Option(LLAMA_70B, "h100-sxm-80", 4, 3.0),
        Option(LLAMA_13B, "h100-sxm-80", 1, 2.3),
    ]
    problem = make_problem(fleet, demands, options, (), Rules(), "max-min")
    relaxed = relax(problem, "worst share", 0, 0, replicas=False)
    assert relaxed is not None
    bound = worst_share_bound(problem, relaxed.prices)
    # Three of four GPUs and four of one: 0.9 and 0.92. A fraction more would do with fractions of instances.
    assert 0.9 - 1e-6 <= bound <= relaxed.bound + 1e-3
    total = relax(problem, "total", 0.9, 0, replicas=False)
    assert total is not None
    assert 9.0 + 9.2 - 1e-6 <= total_bound(problem, total.prices, 0.9) <= total.bound + 0.02
