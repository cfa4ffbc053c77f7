"""How much of each model was asked for: which records count, and how seconds become spans. Pure.

A request counts under the model that it was routed to; where it could not be, under the client's own word: a model that
nobody serves has demand, too. What was refused for the client's own fault, or by a limit that somebody has set, does
not count. Neither do records that say only the hour, of callers who asked for anonymity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from serai.contracts.usage import DemandRequest, ModelUse

ASKED_MODEL = "CASE model WHEN '' THEN model_asked ELSE model END"
COARSE_S = 600.0
"""Spans of so long need no seconds: minutes do, and a week of them is little."""
QUANTILES = ("prompt_tokens", "output_tokens")
BUCKETS_MAX = 2_000
MODELS_MAX = 2_000
_CLIENTS_FAULT = (400, 401, 402, 403, 405, 413, 415, 422, 429)


def why_not(request: DemandRequest) -> str:
    """What is wrong with the question; empty = nothing."""
    if not _moment(request.since):
        return f"since: {request.since[:40]!r} is no moment in ISO 8601"
    if not 1 <= request.bucket_s <= 86_400:
        return f"bucket_s: {request.bucket_s:g} is not within 1 and 86400"
    if not 1 <= request.buckets <= BUCKETS_MAX:
        return f"buckets: {request.buckets} is not within 1 and {BUCKETS_MAX}"
    return f"models: {len(request.models)}; at most {MODELS_MAX}" if len(request.models) > MODELS_MAX else ""


def moment_column(request: DemandRequest) -> str:
    """To the second, or to the minute where that is enough."""
    return f"substr(started, 1, {16 if request.bucket_s >= COARSE_S else 19})"


def demand_conditions(request: DemandRequest, mark: str) -> tuple[str, tuple[object, ...]]:
    """The WHERE clause and its values; `mark` stands for a value."""
    faults = ", ".join(str(status) for status in _CLIENTS_FAULT)
    where = [
        f"started >= {mark}",
        "length(started) >= 19",
        f"NOT (outcome = 'refused' AND status IN ({faults}))",
        f"{ASKED_MODEL} <> ''",
    ]
    since = _moment(request.since)
    assert since is not None
    # As records write it: they are compared as text.
    values: list[object] = [since.isoformat(timespec="milliseconds").replace("+00:00", "Z")]
    if request.models:
        where.append(f"{ASKED_MODEL} IN ({', '.join([mark] * len(request.models))})")
        values += request.models
    return " AND ".join(where), tuple(values)


def counted(rows: Iterable[tuple[Any, ...]], request: DemandRequest) -> list[ModelUse]:
    """From rows of model, second, requests, refused ones, prompt tokens and cached ones."""
    since = _moment(request.since)
    assert since is not None
    sums: dict[str, list[Any]] = {}
    for model, second, requests, refused, prompt, cached in rows:
        place = math.floor((_seconds(second) - since.timestamp()) / request.bucket_s)
        arrivals, *rest = sums.setdefault(model, [[0] * request.buckets, 0, 0, 0])
        if 0 <= place < request.buckets:
            arrivals[place] += int(requests)
        sums[model] = [arrivals, rest[0] + int(refused), rest[1] + int(prompt), rest[2] + int(cached)]
    return [
        ModelUse(model, arrivals, refused, cached_share=cached / prompt if prompt else 0.0)
        for model, (arrivals, refused, prompt, cached) in sorted(sums.items())
    ]


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def _moment(text: str) -> datetime | None:
    """In UTC; None for what is none, or lies before the first year or behind the last there."""
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None
