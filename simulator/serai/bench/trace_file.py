"""Reads where a request's time went from Serai's trace file: spans as JSON lines, one trace a request."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from serai.bench.percentiles import percentile

# From the outside in; each contains the next.
SPANS = ("ingress", "inference", "engine")


def read_spans(file: Path) -> dict[str, dict[str, float]]:
    """Length in milliseconds by trace and hop. Lines that are no whole span are skipped: the writer may have
    been stopped in one."""
    lengths: dict[str, dict[str, float]] = defaultdict(dict)
    for line in file.read_text(errors="replace").splitlines():
        try:
            span = json.loads(line)
            lengths[span["trace_id"]][span["attributes"]["serai.hop"]] = _length_ms(span)
        except (ValueError, KeyError, TypeError):
            continue
    return lengths


def hops(traces: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Median milliseconds that each hop adds to the one inside it; empty when no trace holds all spans."""
    whole = [trace for trace in traces if all(name in trace for name in SPANS)]
    if not whole:
        return {}
    return {
        "hop_engine_p50_ms": percentile([trace["engine"] for trace in whole], 0.5),
        "hop_agent_p50_ms": percentile([trace["inference"] - trace["engine"] for trace in whole], 0.5),
        "hop_ingress_and_nats_p50_ms": percentile([trace["ingress"] - trace["inference"] for trace in whole], 0.5),
        "hop_ingress_whole_p50_ms": percentile([trace["ingress"] for trace in whole], 0.5),
    }


def _length_ms(span: Mapping[str, Any]) -> float:
    start, end = (span.get(f"{edge}_ns", span.get(f"{edge}_time")) for edge in ("start", "end"))
    if not isinstance(start, int | float) or not isinstance(end, int | float):
        raise ValueError("a span needs its start and end in nanoseconds")
    return (end - start) / 1e6
