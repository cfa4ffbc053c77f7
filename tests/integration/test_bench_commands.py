"""`serai bench overhead` and `gateway` as commands, with real processes, shortened. No figure is judged here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO, Any, cast

import pytest

BENCH = [sys.executable, "-m", "serai.cli.main", "bench"]
SHORT = ["--quick", "--stretch", "0.1", "--json"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A mark that all child processes inherit, and no peers."""
    return {**os.environ, "SERAI_PEERS": str(tmp_path / "peers"), "BENCH_TEST_MARK": uuid.uuid4().hex}


def left_over(environment: dict[str, str]) -> list[str]:
    """Command lines of processes that carry the mark."""
    mark = f"BENCH_TEST_MARK={environment['BENCH_TEST_MARK']}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def bench(environment: dict[str, str], *words: str) -> dict[str, Any]:
    ended = subprocess.run([*BENCH, *words], env=environment, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert left_over(environment) == []
    return cast(dict[str, Any], json.loads(ended.stdout))


@pytest.mark.alone  # They wait for a machine with nothing else to do.
def test_gateway_compares_serai_with_the_engine_alone(environment: dict[str, str]) -> None:
    printed = bench(environment, "gateway", *SHORT)
    assert (printed["name"], printed["raw"]) == ("bench gateway", None)
    assert printed["config"]["targets"] == ["direct", "serai"]
    figures = printed["figures"]
    for figure in ("unary_rps_c32", "unary_p50_ms_c1", "stream_ttft_p50_ms_c32", "stream_tok_s_c256"):
        assert figures[f"direct_{figure}"] > 0
        assert figures[f"serai_{figure}"] > 0
    assert figures["direct_stream_tok_s_c1000"] > figures["direct_stream_tok_s_c256"] * 0.5
    assert figures["serai_rss_mb"] > 20
    assert (figures["direct_errors"], figures["serai_errors"]) == (0, 0)


@pytest.mark.alone  # They wait for a machine with nothing else to do.
def test_overhead_says_what_is_added_and_where(environment: dict[str, str], tmp_path: Path) -> None:
    printed = bench(environment, "overhead", *SHORT, "--raw", str(tmp_path / "raw"))
    figures = printed["figures"]
    for rate in (16, 64):
        assert figures[f"serai_p50_ms_{rate}rps"] > figures[f"direct_p50_ms_{rate}rps"]
        assert figures[f"added_p50_ms_{rate}rps"] > 0
    assert "added_p99_ms_16rps" in figures
    assert figures["hop_ingress_whole_p50_ms"] > figures["hop_engine_p50_ms"] > 0
    kept = json.loads(Path(printed["raw"]).read_text())
    assert Path(printed["raw"]).is_relative_to(tmp_path / "raw")
    assert any(sample["latencies_ms"] for sample in kept["samples"] if sample["target"] == "serai")


def test_a_peer_that_does_not_start_is_named_and_the_others_are_measured(
    environment: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "peers" / "vllm-router" / "bin" / "vllm-router"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho no licence found >&2\nexit 3\n")
    program.chmod(0o755)
    printed = bench(environment, "gateway", *SHORT, "--targets", "direct,vllm_router")
    assert printed["config"]["targets"] == ["direct"]
    notes = " ".join(printed["config"]["notes"])
    assert "vllm_router ended with status 3 at its start" in notes
    assert "did not take part: vllm_router" in notes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_running_when_it_is_stopped(environment: dict[str, str], number: signal.Signals) -> None:
    command = [*BENCH, "gateway", *SHORT, "--rounds", "50", "--targets", "direct,serai"]
    # A shell's background job ignores SIGINT, and so would all that it starts.
    command = ["env", "--default-signal=INT", *command]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as running:
        try:
            for line in cast(IO[str], running.stderr):
                if "round 1/50" in line:
                    break
            running.send_signal(number)
            assert running.wait(60) != 0
        finally:
            running.kill()  # Else the next test is blamed for what it left.
    give_up_at_s = time.monotonic() + 30
    while (left := left_over(environment)) and time.monotonic() < give_up_at_s:
        time.sleep(0.05)
    assert left == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gateway", "--targets", "nobody"], "--targets: no nobody here"),
        (["gateway", "--rounds", "0"], "--rounds must be from 1 to 100"),
        (["overhead", "--stretch", "0"], "--stretch must be from 0.05 to 100"),
    ],
)
def test_wrong_flags_are_one_line(environment: dict[str, str], words: list[str], message: str) -> None:
    ended = subprocess.run([*BENCH, *words], env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert ended.stderr.startswith(message)
    assert len(ended.stderr.splitlines()) == 1
