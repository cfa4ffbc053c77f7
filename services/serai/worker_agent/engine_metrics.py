"""What an engine says of its own work, in one vocabulary: vLLM's and SGLang's `/metrics`, SGLang's `/v1/loads`,
llama.cpp's `/metrics`. Pure.

An answer becomes samples (a metric's name → its sum over all labels: one engine may have several ranks), and samples
become an `EngineLoad`, or counters for the watchdog. What an engine does not say is None, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from serai.contracts.status import Phase

Samples = Mapping[str, float]

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_PROMPT_TOKENS = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "llamacpp:prompt_tokens_total")
_OUTPUT_TOKENS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total")
# SGLang's own rate, where it has counters switched off.
_OUTPUT_RATE = ("sglang:gen_throughput",)
_KV_USED = ("sglang:num_used_tokens", "llamacpp:kv_cache_tokens")
_KV_SIZE = ("sglang:max_total_num_tokens",)
_SLOTS = ("sglang:max_running_requests",)
_KV_SHARE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "llamacpp:kv_cache_usage_ratio")
_VLLM_KV_SIZE = "vllm:cache_config_info tokens"
"""Not a metric: the product of two of its labels."""

LOAD_METRICS = frozenset(
    (*_RUNNING, *_WAITING, *_PROMPT_TOKENS, *_OUTPUT_TOKENS, *_OUTPUT_RATE, *_KV_USED, *_KV_SIZE, *_KV_SHARE, *_SLOTS)
)

_LOADS = {
    "num_running_reqs": "sglang:num_running_reqs",
    "num_waiting_reqs": "sglang:num_queue_reqs",
    "num_used_tokens": "sglang:num_used_tokens",
    "max_total_num_tokens": "sglang:max_total_num_tokens",
    "max_running_requests": "sglang:max_running_requests",
    "gen_throughput": "sglang:gen_throughput",
    "total_prefill_uncached_tokens": "sglang:prompt_tokens_total",
}
"""Fields of `/v1/loads`, by the metric that says the same, or nearly: it counts no prompt tokens that were cached."""

_LINE = re.compile(rb"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +(\S+)", re.MULTILINE)
_BLOCKS = re.compile(rb'num_gpu_blocks="(\d+)"')
_BLOCK_TOKENS = re.compile(rb'block_size="(\d+)"')
_SHARED_PREFIX = (b"vllm:", b"sglang:", b"llamacpp:")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's work at one moment."""

    running: int | None = None
    waiting: int | None = None
    kv_tokens_used: int | None = None
    kv_tokens_free: int | None = None
    prompt_tokens_total: float | None = None
    output_tokens_total: float | None = None
    output_tokens_per_s: float | None = None
    """Where the engine tells a rate instead of a total."""
    sequences_max: int | None = None
    """Requests that it runs at once."""

    @property
    def kv_tokens_max(self) -> int | None:
        if self.kv_tokens_used is None or self.kv_tokens_free is None:
            return None
        return self.kv_tokens_used + self.kv_tokens_free


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Between two loads, in tokens a second."""

    prefill: float | None = None
    decode: float | None = None


def samples_in(text: bytes, names: Iterable[str]) -> dict[str, float]:
    """Those metrics of a Prometheus text, each summed over its labels (shares: the highest); what is no number is left
    out."""
    wanted = {name.encode(): name for name in names}
    found: dict[str, float] = {}
    if not any(prefix in text for prefix in _SHARED_PREFIX):
        return found
    for key, labels, value in _LINE.findall(text):
        name = wanted.get(key)
        if name is None:
            if key == b"vllm:cache_config_info":
                blocks, size = _BLOCKS.search(labels), _BLOCK_TOKENS.search(labels)
                if blocks and size:
                    found[_VLLM_KV_SIZE] = found.get(_VLLM_KV_SIZE, 0.0) + int(blocks[1]) * int(size[1])
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if number != number:
            continue
        found[name] = max(found.get(name, 0.0), number) if name in _KV_SHARE else found.get(name, 0.0) + number
    return found


def samples_in_loads(body: bytes) -> dict[str, float]:
    """Of SGLang's `/v1/loads`, summed over its ranks, under the names of its metrics; empty when it is none."""
    try:
        fields = orjson.loads(body)
        loads = fields["loads"]
        found: dict[str, float] = {}
        for load in loads:
            for field, name in _LOADS.items():
                value = load.get(field)
                if isinstance(value, int | float):
                    found[name] = found.get(name, 0.0) + value
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return {}
    return found


def load_of(samples: Samples) -> EngineLoad:
    """What the samples say of the engine's work."""
    used, size = _first(samples, _KV_USED), _first(samples, (*_KV_SIZE, _VLLM_KV_SIZE))
    share = _first(samples, _KV_SHARE)
    if used is None and share is not None and size is not None:
        used = share * size
    return EngineLoad(
        running=_whole(_first(samples, _RUNNING)),
        waiting=_whole(_first(samples, _WAITING)),
        kv_tokens_used=_whole(used),
        kv_tokens_free=None if used is None or size is None else max(0, round(size - used)),
        prompt_tokens_total=_first(samples, _PROMPT_TOKENS),
        output_tokens_total=_first(samples, _OUTPUT_TOKENS),
        output_tokens_per_s=_first(samples, _OUTPUT_RATE),
        sequences_max=_whole(_first(samples, _SLOTS)),
    )


def counters_of(samples: Samples, names: Iterable[str]) -> tuple[float, ...] | None:
    """Those of the samples, in this order; None when all are absent or 0: an engine that has answered our canary and
    counted nothing does not count."""
    values = tuple(samples.get(name, 0.0) for name in names)
    return values if any(values) else None


def rates_between(before: EngineLoad, after: EngineLoad, seconds: float) -> EngineRates:
    """None where there is no total in both, or it went back: the engine was started anew."""
    return EngineRates(
        _rate(before.prompt_tokens_total, after.prompt_tokens_total, seconds),
        after.output_tokens_per_s
        if after.output_tokens_total is None
        else _rate(before.output_tokens_total, after.output_tokens_total, seconds),
    )


def phase_of(in_flight: int, running: int | None, prefills: bool, decodes: bool) -> Phase:
    """`prefills` and `decodes`: prompt tokens, or output tokens, have come through since the last look."""
    match prefills, decodes:
        case True, True:
            return Phase.MIXED
        case True, False:
            return Phase.PREFILL
        case False, True:
            return Phase.DECODE
    return Phase.IDLE if not in_flight and not running else Phase.UNKNOWN


def _first(samples: Samples, names: Iterable[str]) -> float | None:
    return next((samples[name] for name in names if name in samples), None)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    if before is None or after is None or after < before or seconds <= 0:
        return None
    return (after - before) / seconds
