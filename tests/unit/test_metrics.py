"""Our counters and histograms look to Prometheus like prometheus-client's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from serai.runtime.metrics import Counts, Histograms

BOUNDS = (0.1, 1, 2.5)


def shown(registry: CollectorRegistry) -> set[str]:
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\\', "c\n"]), st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5, 9.0]))))
def test_they_show_what_prometheus_client_would_show(events: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count, times = Counts("n", "Help.", ["model"], ours), Histograms("t_seconds", "Help.", ["model"], BOUNDS, ours)
    counter = Counter("n", "Help.", ["model"], registry=theirs)
    histogram = Histogram("t_seconds", "Help.", ["model"], buckets=BOUNDS, registry=theirs)
    for model, value in events:
        count.of(model).add(value)
        counter.labels(model).inc(value)
        times.of(model).observe(value)
        histogram.labels(model).observe(value)
    assert shown(ours) == shown(theirs)


def test_bounds_must_rise() -> None:
    with pytest.raises(ValueError, match="t: bounds must rise"):
        Histograms("t", "", [], (1, 1), None)
