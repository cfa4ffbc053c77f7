"""Names, in engines' metrics, of counters of work: that they move proves that the engine does. Pure."""

from __future__ import annotations

VLLM_COUNTERS = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:iteration_tokens_total_count",
)
# Shares of the KV cache move with each piece of a long prompt, when no counter does.
VLLM_GAUGES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
SGLANG_COUNTERS = ("sglang:generation_tokens_total", "sglang:prompt_tokens_total")
SGLANG_GAUGES = ("sglang:num_used_tokens",)
LLAMACPP_COUNTERS = (
    "llamacpp:tokens_predicted_total",
    "llamacpp:prompt_tokens_total",
    "llamacpp:n_decode_total",
)
