"""`serai bench memory` with few streams and requests: the command and its figures. None is judged but the counter."""

from __future__ import annotations

import argparse
import json

import pytest

from serai.bench import memory


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    return memory.run(parser.parse_args(flags))


def test_all_figures_come_and_nothing_stays_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "_REQUESTS", 50)
    monkeypatch.setattr(memory, "_WARMUP_REQUESTS", 20)
    monkeypatch.setattr(memory, "_STREAM_TOKENS_QUICK", 40)
    monkeypatch.setattr(memory, "_SETTLE_S", 0.1)
    assert run("--quick", "--json", "--streams", "8") == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert {"ingress_rss_mb_8_streams", "rss_growth_mb_50_requests", "rss_growth_mb_8_streams_again"} <= set(figures)
    assert figures["ingress_rss_mb_8_streams"] > 20
    assert figures["open_streams_max"] == 8
    assert figures["open_streams_after"] == 0


@pytest.mark.parametrize("flags", [("--streams", "0"), ("--rounds", "101")])
def test_flags_that_cannot_be_are_refused(flags: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match=flags[0]):
        run(*flags)
