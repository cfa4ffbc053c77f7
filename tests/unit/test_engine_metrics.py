"""What engines say of their work: each kind's own words, several ranks, nonsense, and what is not said."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.status import Phase
from serai.worker_agent.engine_metrics import (
    LOAD_METRICS,
    EngineLoad,
    EngineRates,
    load_of,
    phase_of,
    rates_between,
    samples_in,
    samples_in_loads,
)

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 3.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000",num_cpu_blocks="None"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 1200.0
vllm:generation_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 3400.0
vllm:generation_tokens_created{engine="0"} 1.7e+09
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1.0
sglang:num_used_tokens{model_name="m"} 400.0
sglang:max_total_num_tokens{model_name="m"} 1000.0
sglang:gen_throughput{model_name="m"} 812.5
sglang:prompt_tokens_total{model_name="m"} 10.0
sglang:generation_tokens_total{model_name="m"} 20.0
"""
LLAMACPP = b"""llamacpp:prompt_tokens_total 7
llamacpp:tokens_predicted_total 9
llamacpp:requests_processing 1
llamacpp:requests_deferred 0
"""


def load_in(text: bytes) -> EngineLoad:
    return load_of(samples_in(text, LOAD_METRICS))


def test_vllm_tells_its_cache_by_blocks_and_share() -> None:
    assert load_in(VLLM) == EngineLoad(3, 2, 4000, 12_000, 1200.0, 3400.0)
    assert load_in(VLLM).kv_tokens_max == 16_000


def test_vllm_of_two_ranks_is_summed() -> None:
    both = load_in(VLLM + VLLM.replace(b'engine="0"', b'engine="1"').replace(b"0.25", b"0.125"))
    assert (both.running, both.output_tokens_total, both.kv_tokens_max) == (6, 6800.0, 32_000)


def test_sglang_tells_the_same_in_metrics_and_in_loads() -> None:
    by_metrics = load_in(SGLANG)
    assert by_metrics == EngineLoad(5, 1, 400, 600, 10.0, 20.0, 812.5)
    rank = {"num_running_reqs": 5, "num_waiting_reqs": 1, "num_used_tokens": 400, "max_total_num_tokens": 1000}
    loads = orjson.dumps({"loads": [rank | {"gen_throughput": 812.5, "max_running_requests": 64}], "dp_rank_count": 1})
    by_loads = load_of(samples_in_loads(loads))
    assert by_loads == EngineLoad(5, 1, 400, 600, None, None, 812.5, sequences_max=64)
    assert rates_between(by_loads, by_loads, 1.0) == EngineRates(None, 812.5)


def test_llamacpp_tells_no_cache() -> None:
    assert load_in(LLAMACPP) == EngineLoad(1, 0, None, None, 7.0, 9.0)


def test_what_is_not_said_is_not_zero() -> None:
    assert load_in(b"process_cpu_seconds_total 12.0\n") == EngineLoad()
    assert load_in(b"vllm:num_requests_running nonsense\nvllm:num_requests_waiting NaN\n") == EngineLoad()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"loads": 3}', b'{"loads": [3]}', b'{"loads": null}', b"<html>"])
def test_loads_that_are_none_say_nothing(body: bytes) -> None:
    assert samples_in_loads(body) == {}


@given(st.binary(max_size=300))
def test_any_bytes_are_read(text: bytes) -> None:
    load_in(text)
    load_in(b"vllm:" + text)
    samples_in_loads(text)


def test_rates_are_differences_in_time() -> None:
    before, after = EngineLoad(prompt_tokens_total=100, output_tokens_total=10), load_in(VLLM)
    assert rates_between(before, after, 2.0) == EngineRates(550.0, 1695.0)
    assert rates_between(after, before, 2.0) == EngineRates(None, None)  # It was started anew.
    assert rates_between(EngineLoad(), after, 2.0) == EngineRates(None, None)


@pytest.mark.parametrize(
    ("in_flight", "running", "prefills", "decodes", "phase"),
    [
        (1, 1, True, False, Phase.PREFILL),
        (1, 1, False, True, Phase.DECODE),
        (2, 2, True, True, Phase.MIXED),
        (0, 0, False, False, Phase.IDLE),
        (0, None, False, False, Phase.IDLE),
        (0, 1, False, False, Phase.UNKNOWN),
        (1, None, False, False, Phase.UNKNOWN),
    ],
)
def test_phases(in_flight: int, running: int | None, prefills: bool, decodes: bool, phase: Phase) -> None:
    assert phase_of(in_flight, running, prefills, decodes) is phase
