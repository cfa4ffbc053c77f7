"""`serai bench agent` with few requests and streams: the command and its figures. None of time is judged."""

from __future__ import annotations

import argparse
import json

import pytest

from serai.bench import agent


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    agent.add_arguments(parser)
    return agent.run(parser.parse_args(flags))


def test_all_figures_come_and_streams_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"_REQUESTS_QUICK": 5, "_WARMUP_REQUESTS": 2, "_IDLE_QUICK_S": 1.0, "_STREAM_QUICK_S": 1.0}
    small |= {"_CANCELLED": 10, "_CANCELLED_AT_ONCE": 5, "_SETTLE_S": 0.2, "_RAMP_S": 0.5}
    for name, value in small.items():
        monkeypatch.setattr(agent, name, value)
    assert run("--quick", "--json", "--streams", "4") == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert {"added_p50_ms", "added_beyond_echo_p50_ms", "idle_cpu_percent", "stream_cpu_share"} <= set(figures)
    assert 20 < figures["rss_mb"] < 60  # Memory is no matter of time: this is the goal itself.
    assert "rss_growth_mb_10_cancelled" in figures
    assert figures["stream_tok_s_c4"] > 4
    assert figures["stream_errors"] == 0


@pytest.mark.parametrize("streams", ["0", "4001"])
def test_numbers_of_streams_that_cannot_be_are_refused(streams: str) -> None:
    with pytest.raises(SystemExit, match="--streams"):
        run("--streams", streams)
