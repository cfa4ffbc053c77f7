"""An engine's own counters of work, from its Prometheus text: that they move proves that it does. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def counters_in(text: bytes, names: Sequence[str]) -> tuple[float, ...] | None:
    """The sums of these metrics over all their labels; None when all are absent or 0: an engine that has answered our
    canary and counted nothing does not count."""
    alternatives = "|".join(re.escape(name) for name in names)
    sums = dict.fromkeys(names, 0.0)
    for name, value in re.findall(rf"^({alternatives})(?:\{{.*\}})? (\S+)".encode(), text, re.MULTILINE):
        try:
            sums[name.decode()] += float(value)
        except ValueError:
            continue
    return tuple(sums.values()) if any(sums.values()) else None
