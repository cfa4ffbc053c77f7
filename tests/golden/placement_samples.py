"""Samples of the messages of placement; every field differs from its default."""

from __future__ import annotations

from serai.contracts.placement import (
    ActionKind,
    ApplyRequest,
    Assignment,
    Assignments,
    KeptPlan,
    Knock,
    ModelWord,
    PlacementRequest,
    PlacementWord,
    PlanAction,
    PlanRecord,
    PlanState,
    PoolReport,
    PoolRun,
    PoolWord,
    RunState,
    StartableModels,
)
from serai.contracts.session_record import GpuDevice
from serai.contracts.usage import DemandAnswer, DemandRequest, LengthQuantiles, ModelUse

_ASSIGNMENT = Assignment(
    "g12-1", "qwen2.5:7b", "vllm", 4, 2, 2, 3, "fp8", "/models/qwen", ["--max-num-seqs", "64"], "its demand has doubled"
)
_RUN = PoolRun(_ASSIGNMENT, RunState.FAILED, "alps-slurm-4711-0-c0ffee", [0, 1], 12.5, "ended with exit code 1")
_ACTION = PlanAction(ActionKind.STOP, "slurm-4711-nid1", _ASSIGNMENT, _RUN.session, "it is cold", ["g12-2"], True)
_MODEL = ModelWord("qwen2.5:7b", 2, 3, 4.5, 3.25, 0.75, ["has 2 instances"])
_PLAN = KeptPlan(12, PlanState.APPLYING, [_ACTION], [_MODEL], ["llama-8b would gain 2 %"], "proved within 0.4 s")
_POOL = PoolWord("slurm-4711-nid1", "gh200-96", 4, 2, "cscs", ["g12-1 qwen2.5:7b serving"], "it appears twice")
_USE = ModelUse(
    "qwen2.5:7b", [3, 0, 7], 2, LengthQuantiles(512.5, 300, 900, 4000), LengthQuantiles(128.5, 100, 300, 900), 0.25
)

MESSAGES: list[object] = [
    _ASSIGNMENT,
    Assignments("slurm-4711-nid1", 12, [_ASSIGNMENT], {"g11-1": "it is cold"}, 30.5),
    _RUN,
    PoolReport(
        pool="slurm-4711-nid1",
        instance="5f3a9c01",
        sequence=7,
        interval_s=1.5,
        site="alps",
        provider="cscs",
        allocation="slurm-4711",
        host="nid1",
        failure_domain="rack-7",
        gpu="NVIDIA GH200 120GB",
        gpus=[GpuDevice("GPU-1", "NVIDIA GH200 120GB", 102_000_000_000)],
        engines=["vllm"],
        generation=12,
        runs=[_RUN],
        allocation_remaining_s=3_599.5,
        storage_bytes_s=2e9,
        stopping=True,
        refused="generation 11 is older than 12",
    ),
    _ACTION,
    _MODEL,
    _PLAN,
    PlanRecord("placer-1", 42, 12, _PLAN, [60.5], {"llama-8b": ["p2"]}, {"llama-8b at p1": 30.5}),
    PlacementRequest("qwen2.5:7b", anew=True),
    ApplyRequest(12),
    StartableModels("alps", 20.0, {"qwen2.5:7b": 71.5}),
    Knock("qwen2.5:7b", 3),
    _POOL,
    PlacementWord("alps", "placer-1", True, "by hand", "no pool yet", _PLAN, [_MODEL], [_POOL], "stale"),
    DemandRequest("2026-11-01T00:00:00Z", 30.0, 120, ["qwen2.5:7b"]),
    LengthQuantiles(512.5, 300, 900, 4000),
    _USE,
    DemandAnswer([_USE], "the database is locked"),
]
