"""How far ahead of their TPOT targets running streams are (design §1: saved TPOT). Pure.

A token is an event of the stream, unless its events say their usage, as with `continuous_usage_stats`: engines that put
several tokens into one event are seen right only then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from serai.contracts.status import SlackSummary

TPOT_HEADER = "x-slo-tpot-ms"
"""Checked by the ingress; whoever else sends nonsense has no target."""
_LOW = 0.1
_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')


def tokens_said(events: int, last_data: bytes) -> int:
    """By a stream so far, from the events counted and the bytes that came last."""
    told = _USAGE.findall(last_data)
    return max(events, int(told[-1])) if told else events


def tpot_target_s(headers: Mapping[str, str]) -> float | None:
    """What the request's headers ask for, in seconds a token; None = nothing."""
    text = headers.get(TPOT_HEADER)
    if text is None:
        return None
    try:
        target_ms = float(text)
    except ValueError:
        return None
    return target_ms / 1000 if 0 < target_ms < float("inf") else None


def slack_s(tokens: int, target_s: float, since_first_token_s: float) -> float:
    """Of one stream; below 0: behind."""
    return max(0, tokens - 1) * target_s - since_first_token_s


def summary_of(slacks: Sequence[float]) -> SlackSummary | None:
    """None of none. Milliseconds are enough for anybody."""
    if not slacks:
        return None
    ordered = sorted(slacks)
    low_s = ordered[int(len(ordered) * _LOW)]
    return SlackSummary(len(ordered), round(sum(ordered) / len(ordered), 3), round(low_s, 3), round(ordered[0], 3))
