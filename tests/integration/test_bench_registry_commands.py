"""The registry's benchmarks as commands, with real processes, shortened. No figure is judged for its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.test_bench_commands import bench, environment

__all__ = ["environment"]


def test_convergence_reaches_every_copy(environment: dict[str, str]) -> None:
    figures = bench(environment, "convergence", "--sessions", "6", "--quick", "--json")["figures"]
    assert figures["missed"] == figures["missed_6"] == 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]


def test_idle_traffic_counts_every_connection(environment: dict[str, str], tmp_path: Path) -> None:
    printed = bench(environment, "idle-traffic", "--window-s", "2", "--json", "--raw", str(tmp_path))
    figures = printed["figures"]
    for agents in (2, 10, 50, 128):
        # Two signs of life at least, and no more than a few announcements.
        assert 100 < figures[f"bytes_per_s_per_agent_{agents}"] < 2000
    assert figures["churn_bytes_per_s_per_agent"] > figures["bytes_per_s_per_agent_10"]
    assert Path(printed["raw"]).exists()


def test_detection_sees_each_kind_of_failure(environment: dict[str, str]) -> None:
    figures = bench(environment, "detection", "--failures", "1", "--json")["figures"]
    assert figures["kill_to_unrouted_ms_p99"] < figures["freeze_to_unrouted_heartbeat_only_ms_p99"]
    assert figures["hang_to_unrouted_ms_p99"] > 1000


@pytest.mark.parametrize(
    "words",
    [
        ["convergence", "--sessions", "0"],
        ["idle-traffic", "--window-s", "0"],
        ["convergence", "--rounds", "0"],
        ["detection", "--failures", "0"],
    ],
)
def test_flags_that_cannot_be_are_named(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(AssertionError, match=words[1]):
        bench(environment, *words)
