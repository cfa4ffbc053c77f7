"""The picture of rolling windows, and what of a message cannot be true."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serai.contracts.admission import AdmissionAsk, GateMode, InstanceReport, Spread
from serai.contracts.session_record import EngineParallelism, GpuDevice, SessionMetadata
from serai.macro_scheduler.messages import ask_problem, report_problem
from serai.macro_scheduler.predicting import GUESS_BASE_S, InstanceSteps
from serai.macro_scheduler.windows import Windows

REPORT = InstanceReport("s1", 1, 1, 0, GateMode.PADG, False, 0.0, Spread(1), 0, 0.0, 1.0, 10, 10)


def report(session: str = "s1", **changes: Any) -> InstanceReport:
    return msgspec.structs.replace(REPORT, session=session, **changes)


def test_windows_roll_from_right_to_left_and_a_short_prefill_is_seen() -> None:
    windows = Windows()
    for at_s in range(10):
        windows.note(report(prefilling=at_s % 5 == 2), at_s + 0.1)
        windows.note(report("s2", waiting=1, prefilling=True), at_s + 0.2)
        windows.note(report("s2"), at_s + 0.3)
    picture = windows.picture(10.0, {"s1": "one", "s2": "two", "s3": "three"}, span_s=10, columns=10)
    assert picture[:3] == ["one   ▁▁█▁▁▁▁█▁▁", "two   ██████████", "three ··········"]
    assert windows.picture(12.0, {"s1": "one"}, span_s=4, columns=4)[0] == "one ▁▁▁▁"


def test_what_an_instance_does_between_is_told_apart() -> None:
    windows = Windows()
    windows.note(report(decoding=Spread(0)), 0.5)
    windows.note(report(mode=GateMode.ORDINARY), 1.5)
    assert windows.picture(2.0, {"s1": "a"}, span_s=2, columns=2)[0] == "a  ▒"
    windows.forget("s1")
    assert windows.picture(2.0, {"s1": "a"}, span_s=2, columns=2)[0] == "a ··"


ASK = AdmissionAsk("r", 10)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"output_tokens_max": 1 << 60}, "output_tokens_max"),
        ({"slo_ttft_s": 0.0}, "slo_ttft_s"),
        ({"slo_tpot_s": -0.1}, "slo_tpot_s"),
        ({"waited_s": -1.0}, "waited_s"),
        ({"waited_s": float("nan")}, "waited_s"),
    ],
)
def test_an_ask_that_cannot_be_is_told_which_field_is_wrong(change: dict[str, Any], field: str) -> None:
    assert ask_problem(ASK) == ""
    assert ask_problem(msgspec.structs.replace(ASK, **change)).startswith(f"{field}:")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sequence": -1}, "sequence"),
        ({"epoch": 1 << 60}, "epoch"),
        ({"window_s": -0.5}, "window_s"),
        ({"step_s": float("nan")}, "step_s"),
        ({"decoding": Spread(1, low_s=float("inf"))}, "decoding"),
        ({"decoding": Spread(-1)}, "decoding.count"),
    ],
)
def test_a_report_that_cannot_be_is_told_which_field_is_wrong(change: dict[str, Any], field: str) -> None:
    assert report_problem(REPORT) == ""
    assert report_problem(msgspec.structs.replace(REPORT, decoding=Spread(3, -0.5, -2.0, -1.0, 1.0))) == ""
    assert report_problem(report(**change)).startswith(field)


def test_step_times_are_measured_else_modelled_else_guessed() -> None:
    def steps(**metadata: Any) -> InstanceSteps:
        return InstanceSteps(SessionMetadata(**({"model": "m", "engine_model": "x", "engine": "vllm"} | metadata)))

    guessed = steps()
    assert guessed.prefill_s(0) == GUESS_BASE_S
    modelled = steps(
        engine_model="Qwen/Qwen2.5-7B-Instruct",
        gpus=[GpuDevice("GPU-1", "NVIDIA H100 80GB HBM3", 80 << 30)],
        parallelism=EngineParallelism(1, 1, 1),
    )
    assert 0.0 < modelled.prefill_s(1024) < modelled.prefill_s(8192) < 5.0
    assert 0.0 < modelled.decode_s(1, 100) <= modelled.decode_s(64, 64_000)
    modelled.hear(report(prefill_base_s=0.5, prefill_s_per_token=0.001))
    assert modelled.prefill_s(1000) == 1.5
