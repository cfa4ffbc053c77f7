"""`/metrics` and load reports, under the names that vLLM 0.20 and SGLang 0.5 give them.

With fixed timing what needs a batch scheduler (preemptions, prefix cache, steps) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from serai.engine_emulator.batching.engine import BatchEngine
from serai.engine_emulator.measures import Histogram
from serai.engine_emulator.model_flags import EngineName
from serai.engine_emulator.state import EmulatorState

Numbers = dict[str, float]


def prometheus(state: EmulatorState) -> str:
    """All metrics as Prometheus' text."""
    label = f"model_name={orjson.dumps(state.settings.model).decode()}"
    vllm = state.settings.engine is EngineName.VLLM
    return _vllm(state, label) if vllm else _sglang(state, label)


def kv_usage(state: EmulatorState) -> float:
    """Share of the KV cache in use; idle prefixes count as free."""
    return min(1.0, state.engine.kv_tokens / state.settings.kv_tokens_total)


def _vllm(state: EmulatorState, label: str) -> str:
    engine, measures, totals = state.engine, state.engine.measures, state.engine.totals
    gauges: Numbers = {
        "vllm:num_requests_running": engine.running,
        "vllm:num_requests_waiting": engine.waiting,
        "vllm:kv_cache_usage_perc": kv_usage(state),
    }
    counters: Numbers = {
        "vllm:prompt_tokens_total": totals.prompt_tokens,
        "vllm:generation_tokens_total": totals.generation_tokens,
    }
    histograms = {
        "vllm:time_to_first_token_seconds": measures.first_token_s,
        "vllm:inter_token_latency_seconds": measures.between_tokens_s,
        "vllm:request_time_per_output_token_seconds": measures.per_token_s,
        "vllm:e2e_request_latency_seconds": measures.request_s,
        "vllm:request_queue_time_seconds": measures.queue_s,
        "vllm:request_prefill_time_seconds": measures.prefill_s,
        "vllm:request_decode_time_seconds": measures.decode_s,
    }
    info = ""
    batch = engine.batch
    if batch is not None:
        counters |= {
            "vllm:num_preemptions_total": batch.preemptions_total,
            "vllm:prefix_cache_queries_total": batch.prefix_queries_tokens,
            "vllm:prefix_cache_hits_total": batch.prefix_hits_tokens,
        }
        histograms["vllm:iteration_tokens_total"] = measures.step_tokens
        info = _vllm_cache_config(batch, label)
    by_reason = {"stop": 0, "length": 0, **totals.by_finish_reason, "abort": totals.aborted}
    success = "".join(
        f'vllm:request_success_total{{finished_reason="{reason}",{label}}} {count}\n'
        for reason, count in by_reason.items()
    )
    return (
        _values("gauge", gauges, label)
        + info
        + _values("counter", counters, label)
        + f"# TYPE vllm:request_success_total counter\n{success}"
        + _histograms(histograms, label)
    )


def _vllm_cache_config(batch: BatchEngine, label: str) -> str:
    settings = batch.settings
    cache = {
        "block_size": settings.block_tokens,
        "enable_prefix_caching": settings.prefix_cache,
        "num_gpu_blocks": batch.kv_tokens_total // settings.block_tokens,
    }
    labels = ",".join(f'{name}="{value}"' for name, value in cache.items())
    return f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels},{label}}} 1.0\n"


def _sglang(state: EmulatorState, label: str) -> str:
    measures, totals, loads = state.engine.measures, state.engine.totals, load(state)
    gauges: Numbers = {
        "sglang:num_running_reqs": loads["num_running_reqs"],
        "sglang:num_queue_reqs": loads["num_waiting_reqs"],
        "sglang:num_used_tokens": loads["num_used_tokens"],
        "sglang:max_total_num_tokens": loads["max_total_num_tokens"],
        "sglang:token_usage": loads["token_usage"],
    }
    counters: Numbers = {
        "sglang:prompt_tokens_total": totals.prompt_tokens,
        "sglang:generation_tokens_total": totals.generation_tokens,
        "sglang:num_requests_total": totals.finished,
        "sglang:num_aborted_requests_total": totals.aborted,
    }
    batch = state.engine.batch
    if batch is not None:
        gauges |= {
            "sglang:kv_available_tokens": batch.kv_tokens_free - batch.kv_tokens_idle,
            "sglang:kv_evictable_tokens": batch.kv_tokens_idle,
            "sglang:gen_throughput": loads["gen_throughput"],
            "sglang:num_retracted_reqs": batch.preemptions_total,
            "sglang:new_token_ratio": batch.settings.reserve,
            "sglang:cache_hit_rate": loads["cache_hit_rate"],
        }
    histograms = {
        "sglang:time_to_first_token_seconds": measures.first_token_s,
        "sglang:inter_token_latency_seconds": measures.between_tokens_s,
        "sglang:e2e_request_latency_seconds": measures.request_s,
        "sglang:queue_time_seconds": measures.queue_s,
    }
    return _values("gauge", gauges, label) + _values("counter", counters, label) + _histograms(histograms, label)


def load(state: EmulatorState) -> dict[str, Any]:
    """One entry of SGLang's `/v1/loads`; with fixed timing only what is known without a batch scheduler."""
    engine, settings = state.engine, state.settings
    fields: dict[str, Any] = {
        "dp_rank": 0,
        "num_running_reqs": engine.running,
        "num_waiting_reqs": engine.waiting,
        "num_used_tokens": engine.kv_tokens,
        "max_total_num_tokens": settings.kv_tokens_total,
        "max_running_requests": settings.max_concurrency,
        "token_usage": round(kv_usage(state), 6),
    }
    batch = engine.batch
    if batch is None:
        return fields
    queries = batch.prefix_queries_tokens
    cache_gb = settings.kv_tokens_total * settings.modelled.model.kv_bytes_per_token() / 1e9 if settings.modelled else 0
    return fields | {
        "num_total_tokens": batch.kv_tokens_used + batch.prefill_backlog_tokens,
        "num_active_tokens": batch.kv_tokens_used,
        "num_waiting_uncached_tokens": batch.prefill_backlog_tokens,
        "max_running_requests": batch.settings.sequences_max,
        "utilization": round(batch.running / batch.settings.sequences_max, 6),
        "gen_throughput": round(engine.throughput_tokens_s, 3),
        "cache_hit_rate": round(batch.prefix_hits_tokens / queries, 6) if queries else 0.0,
        "total_prefill_uncached_tokens": batch.prefilled_tokens_total,
        "total_prefill_busy_us": round(batch.prefill_busy_s * 1e6),
        "decode_moments": {"sequences": len(batch.decoding), "context_tokens": batch.context_tokens},
        "memory": {"kv_cache_gb": round(cache_gb, 3), "token_capacity": batch.kv_tokens_total},
        "queues": {"waiting": batch.waiting, "paused": 0, "retracted": batch.preempted_waiting},
    }


def _values(kind: str, values: Mapping[str, float], label: str) -> str:
    return "".join([f"# TYPE {name} {kind}\n{name}{{{label}}} {value}\n" for name, value in values.items()])


def _histograms(histograms: Mapping[str, Histogram], label: str) -> str:
    return "".join([histogram.lines(name, label) for name, histogram in histograms.items()])
