"""`serai bench failover` in its shortest form: one kill."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serai.cli.main", "bench", "failover", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.alone  # Its streams must have come far enough when the engine is killed.
@pytest.mark.timeout(200)
def test_one_kill_is_seen_by_no_client() -> None:
    done = bench("--seconds", "14", "--streams", "6", "--unary", "2", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["kills"] == 1
    assert figures["streams_resumed"] > 0
    for name in ("unary_errors", "unary_mismatches", "streams_unmarked", "stream_errors", "resume_mismatches"):
        assert figures[name] == 0, done.stdout


@pytest.mark.parametrize("flags", [("--seconds", "5"), ("--streams", "0"), ("--unary", "1000")])
def test_flags_that_cannot_be_are_refused_in_one_line(flags: tuple[str, str]) -> None:
    done = bench(*flags)
    assert done.returncode == 1
    assert done.stderr.startswith(flags[0])
    assert done.stderr.count("\n") == 1
