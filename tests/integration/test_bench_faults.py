"""`serai bench faults` as a command: Serai keeps the rule of every quick row, with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = [sys.executable, "-m", "serai.cli.main", "bench", "faults"]


@pytest.mark.timeout(420)
def test_serai_keeps_the_rule_of_every_row(tmp_path: Path) -> None:
    environment = os.environ | {"SERAI_PEERS": str(tmp_path / "none")}
    words = ["--quick", "--json", "--raw", str(tmp_path / "raw"), "--markdown", str(tmp_path / "table.md")]
    ended = subprocess.run([*BENCH, *words], env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr
    printed = json.loads(ended.stdout)
    figures = printed["figures"]
    samples = json.loads(Path(printed["raw"]).read_text())["samples"]
    failed = {name: row["serai"]["text"] for name, row in samples.items() if not row["serai"]["holds"]}
    assert (figures["serai_failed"], failed) == (0, {}), ended.stderr[-3000:]
    assert figures["cases"] == len(samples) >= 60
    assert figures["rows_where_a_peer_does_better"] == 0
    assert samples["malformed_json"]["serai"]["evidence"][0]["status"] == 400
    table = (tmp_path / "table.md").read_text().splitlines()
    assert table[0] == "| | what must be seen | serai |"
    assert len(table) == len(samples) + 2


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--cases", "none_such"], "--cases: no none_such; there are"), (["--targets", "x"], "--targets: no x here")],
)
def test_wrong_flags_are_one_line(words: list[str], message: str) -> None:
    ended = subprocess.run([*BENCH, *words], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(message)
    assert len(ended.stderr.splitlines()) == 1
