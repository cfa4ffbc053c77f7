"""Figures of the registry's benchmarks, from samples made by hand."""

from __future__ import annotations

import argparse

import pytest

from serai.bench import convergence, detection, idle_traffic
from serai.bench.convergence import Write
from serai.bench.idle_traffic import Traffic


def test_convergence_has_figures_by_size_and_the_largest_without() -> None:
    small = [Write(agent=0, after_ms=[1.0, 3.0], missed=0)]
    large = [Write(agent=1, after_ms=[2.0, 4.0, 6.0], missed=1), Write(agent=2, after_ms=[8.0], missed=0)]
    figures = convergence.figures_of({128: large, 8: small})
    assert (figures["p50_ms_8"], figures["max_ms_8"], figures["missed_8"]) == (2.0, 3.0, 0)
    assert (figures["p50_ms"], figures["max_ms"], figures["missed"]) == (5.0, 8.0, 1)
    assert figures["p99_ms"] == figures["p99_ms_128"] == pytest.approx(7.94)


@pytest.mark.parametrize("text", ["", "0", "x", "8,,16", "2000"])
def test_convergence_refuses_sizes_that_cannot_be(text: str) -> None:
    parser = argparse.ArgumentParser()
    convergence.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--sessions", text])


def test_idle_traffic_sums_both_ways_and_says_how_flat_it_is() -> None:
    idle = {agents: Traffic(agents, 100.0 + agents, 50.0) for agents in (2, 10, 50, 128)}
    figures = idle_traffic.figures_of(idle, Traffic(10, 500.0, 400.0))
    assert figures["bytes_per_s_per_agent_10"] == 160.0
    assert figures["churn_bytes_per_s_per_agent"] == 900.0
    assert figures["ratio_128_to_10"] == pytest.approx(278 / 160)


def test_detection_has_median_tail_and_maximum_of_each_kind() -> None:
    figures = detection.figures_of({"kill_to_unrouted": [1.0, 2.0, 3.0], "hang_to_unrouted": [7.0]})
    assert figures["kill_to_unrouted_ms_p50"] == 2.0
    assert figures["kill_to_unrouted_ms_p99"] == pytest.approx(2.98)
    assert figures["kill_to_unrouted_ms_max"] == 3.0
    assert figures["hang_to_unrouted_ms_p99"] == 7.0
