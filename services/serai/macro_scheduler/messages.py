"""Whether what comes from ingresses and instances can be true. Pure: a text that says what is wrong, or none."""

from __future__ import annotations

from math import isfinite

from serai.contracts.admission import AdmissionAsk, InstanceReport

TOKENS_MAX = 100_000_000
SECONDS_MAX = 1e10
EPOCH_MAX = 1 << 53


def ask_problem(ask: AdmissionAsk) -> str:
    """Empty = it can be decided."""
    if not ask.request_id or len(ask.request_id) > 512:
        return "request_id: must have 1 to 512 characters"
    for name, tokens in (("prompt_tokens", ask.prompt_tokens), ("output_tokens_max", ask.output_tokens_max)):
        if not 0 <= tokens <= TOKENS_MAX:
            return f"{name}: {tokens} is not from 0 to {TOKENS_MAX}"
    for name, target_s in (("slo_ttft_s", ask.slo_ttft_s), ("slo_tpot_s", ask.slo_tpot_s)):
        if target_s is not None and not 0 < target_s <= SECONDS_MAX:
            return f"{name}: {target_s} is not above 0"
    if not 0 <= ask.waited_s <= SECONDS_MAX:
        return f"waited_s: {ask.waited_s} is not 0 or more"
    return ""


def report_problem(report: InstanceReport) -> str:
    """Empty = it can be used."""
    counts = (
        ("sequence", report.sequence),
        ("epoch", report.epoch),
        ("applied", report.applied),
        ("waiting", report.waiting),
        ("decoding.count", report.decoding.count),
        ("kv_tokens_free", report.kv_tokens_free),
        ("kv_tokens_total", report.kv_tokens_total),
        ("kv_tokens_promised", report.kv_tokens_promised),
        ("refused_total", report.refused_total),
        ("granted_total", report.granted_total),
    )
    for name, count in counts:
        if not 0 <= count <= EPOCH_MAX:
            return f"{name}: {count} is not a count"
    if abs(report.slots_free or 0) > EPOCH_MAX:
        return f"slots_free: {report.slots_free} is not a number of slots"
    durations = (
        ("window_s", report.window_s),
        ("waiting_prefill_s", report.waiting_prefill_s),
        ("step_s", report.step_s),
        ("prefill_base_s", report.prefill_base_s),
        ("prefill_s_per_token", report.prefill_s_per_token),
        ("slot_every_s", report.slot_every_s),
    )
    for name, seconds in durations:
        if not 0 <= seconds <= SECONDS_MAX:
            return f"{name}: {seconds} is not a duration"
    spread = report.decoding
    if not all(isfinite(one) for one in (spread.mean_s, spread.least_s, spread.low_s, spread.most_s, report.laxity_s)):
        return "decoding, laxity_s: not finite"
    return ""
