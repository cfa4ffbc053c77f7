"""The commands of the policy studies, very small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serai.bench.simulate import goodput, never_worse
from serai.cli.main import main


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json", "--jobs", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"name", "machine", "config", "figures", "raw"}
    found: dict[str, Any] = report["figures"]
    return found


def test_goodput_of_one_set_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "QUICK", replace(goodput.QUICK, shares=(0.3, 1.8), counted_s=2.0, requests_min=10))
    words = ["goodput", "--quick", "--clusters", "a800", "--models", "qwen2-72b", "--datasets", "alpaca"]
    words += ["--systems", "vllm", "padg-paper", "--cache", str(tmp_path / "kept"), "--out", str(tmp_path / "out")]
    first = figures(capsys, *words)
    assert first["a800_paper_over_vllm_p90"] > 0
    assert not any(name.startswith("l20") for name in first)
    assert (tmp_path / "out" / "goodput.csv").read_text().count("alpaca") == 2
    assert (tmp_path / "out" / "goodput-a800-p90.png").stat().st_size > 1000
    assert figures(capsys, *words) == first


def test_never_worse_on_one_cell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(never_worse, "QUICK_REQUESTS_MIN", 20)
    found = figures(capsys, "never-worse", "--quick", "--cell", "4")
    assert found["cells"] == 1
    assert -100 <= found["worst_gap_points"] <= 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["goodput", "--jobs", "0"], "--jobs: is 0; give 1 to 1024"),
        (["never-worse", "--cells", "0"], "--cells: is 0"),
        (["staleness", "--loss", "1"], "--loss: is 1"),
        (["burst", "--model", "gpt"], "--model: is `gpt`"),
        (["scaling", "--instances", "0"], "--instances: has 0"),
        (["ablation", "--cv", "0"], "--cv: is 0"),
        (["traces", "--data", "nowhere"], "nowhere: holds none of the traces"),
    ],
)
def test_flags_that_cannot_be_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["simulate", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
