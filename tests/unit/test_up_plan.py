"""What `serai up` starts, by its flags."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from serai.cli import up
from serai.cli.up_pool import pool_scaling
from serai.worker_agent.engine.process import free_port


def plan(folder: Path, *words: str) -> up.Plan:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return up._plan(parser.parse_args(["--state", str(folder), "--port", str(free_port()), *words]))


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERAI_ADMISSION", "SERAI_OPEN_GATE"):
        monkeypatch.delenv(name, raising=False)


def test_under_the_papers_policies_engines_prefill_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(tmp_path, "--policy", "padg").agent_flags == []
    for admission in ("paper", "author_code"):
        assert plan(tmp_path, "--policy", "padg", "--admission", admission).agent_flags == ["--open-gate", "prefill"]
    monkeypatch.setenv("SERAI_ADMISSION", "paper")
    assert plan(tmp_path, "--policy", "padg").agent_flags == ["--open-gate", "prefill"]
    monkeypatch.setenv("SERAI_OPEN_GATE", "mixed")
    assert plan(tmp_path, "--policy", "padg").agent_flags == [], "who says it himself is obeyed"


def test_padg_with_a_pool_runs_engines_that_it_can_show_its_work_on(tmp_path: Path) -> None:
    made = plan(tmp_path, "--policy", "padg", "--pool", "3")
    assert (made.policy, made.agents) == ("macro-scheduled", 0)
    assert made.pool is not None
    assert "phase-gated" in made.pool.file.read_text()


def test_what_somebody_has_set_of_scaling_stays() -> None:
    assert pool_scaling({})["SERAI_SCALING_BY"] == "placer"
    assert "SERAI_SCALING_WINDOW_S" not in pool_scaling({"SERAI_SCALING_WINDOW_S": "3"})


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--engine-args", "'--ttft-ms 5"), '--engine-args "\'--ttft-ms 5": No closing quotation'),
        (("--policy", "fastest"), "--policy 'fastest': must be padg or one of least-loaded, "),
        (("--ready-file", "nowhere/up.json"), "--ready-file: no such folder: "),
        (("--emulated", "--", "vllm", "serve"), "give one of --emulated, --model-file and an engine's command"),
        (("--model-file", "nowhere/x.gguf"), "--model-file: no such file: nowhere/x.gguf"),
        (("--model-file", __file__), f"--model-file: {__file__} is no GGUF file"),
        (("--", "vllm", "serve"), "--model is required with an engine's command"),
    ],
)
def test_what_cannot_be_started_is_said_before_anything_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(tmp_path, *words)
    said = capsys.readouterr().err.splitlines()
    assert (ended.value.code, len(said)) == (2, 1)
    assert said[0].startswith(f"serai: {line}")
