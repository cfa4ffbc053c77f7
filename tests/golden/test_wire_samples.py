"""One checked-in sample for each message and each kind of frame: this is what older and newer services will send us.

A change here changes the wire. When that is meant, write the samples anew and look at the difference:

    SERAI_WRITE_GOLDEN=1 .venv/bin/pytest tests/golden/test_wire_samples.py
"""

from __future__ import annotations

import os
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from msgspec import NODEFAULT

from golden.placement_samples import MESSAGES as PLACEMENT_MESSAGES
from serai.contracts import (
    admission,
    drain,
    inference,
    launcher,
    limits,
    placement,
    registry,
    session_record,
    status,
    usage,
)
from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAnswers,
    AdmissionAsk,
    AdmissionRequest,
    Decision,
    GateMode,
    Grant,
    GroupLease,
    HeldRequest,
    InstanceOwner,
    InstanceReport,
    InstanceState,
    Lease,
    MacroExplainRequest,
    MacroWord,
    ScaleWish,
    Spread,
    TakeInstance,
    UsedGrant,
)
from serai.contracts.codec import FRAME_HEAD_BYTES, decode, decode_frames, encode, encode_frame
from serai.contracts.drain import DrainAnswer, DrainRequest, SleepAnswer, SleepRequest
from serai.contracts.inference import (
    FailureCode,
    Frame,
    FrameKind,
    InferenceFailure,
    InferenceRequest,
    ResponseEnd,
    ResponseHead,
)
from serai.contracts.launcher import (
    ExplainRequest,
    KeptRun,
    KeptTrouble,
    LauncherState,
    LauncherWord,
    ScaleRequest,
    SlotWord,
    WakeRequest,
)
from serai.contracts.limits import BudgetAccount, BudgetLease, LimitsUse, ScopeUse
from serai.contracts.registry import (
    AllocationEnded,
    DigestAnswer,
    DigestRequest,
    Disconnected,
    HostCleared,
    Opinion,
    OpinionRequest,
    RegistryBeat,
    SnapshotPage,
    SnapshotRequest,
)
from serai.contracts.session_record import (
    Draining,
    EngineParallelism,
    Fault,
    GpuDevice,
    Lifecycle,
    SessionMetadata,
    SessionRecord,
)
from serai.contracts.status import Phase, ProbeAnswer, ProbeRequest, SessionStatus, SlackSummary
from serai.contracts.usage import Outcome, Spent, SpentAnswer, SpentRequest, UsageRecord

WIRE = Path(__file__).parent / "wire"
WRITE = os.environ.get("SERAI_WRITE_GOLDEN") == "1"

# Every field differs from its default, so that none can change its name unseen.
_REQUEST = InferenceRequest(
    request_id="6d1f0c5a9e3b4f27",
    path="/v1/chat/completions",
    body_bytes=1_048_600,
    body_frames=3,
    window_bytes=262_144,
    deadline_s=599.75,
    method="PUT",
    headers={"content-type": "application/json", "x-request-id": "6d1f0c5a9e3b4f27"},
    stream=True,
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    operation="chat",
    lease=Lease(3, 17, 0.125, 1536, 0.75, 2.5, 0.05, True, 1024, 4, 0.125),
)
_ASK = AdmissionAsk(
    request_id="6d1f0c5a9e3b4f27",
    prompt_tokens=1_024,
    output_tokens_max=512,
    slo_ttft_s=2.5,
    slo_tpot_s=0.05,
    waited_s=0.125,
    project="climate",
    best_effort=False,
    excluded=["alps-slurm-4711-1-c0ffee123456"],
    affinity="f0e1d2c3",
)
_USED = UsedGrant(_ASK, "alps-slurm-4711-1-c0ffee123456")
_GRANT = Grant("alps-slurm-4711-1-c0ffee123456", 3, 2_048, 0.25, 5.0, 0.1, 3.0)
_ANSWER = AdmissionAnswer(
    request_id="6d1f0c5a9e3b4f27",
    decision=Decision.BEST_EFFORT,
    session="alps-slurm-4711-1-c0ffee123456",
    lease=_REQUEST.lease,
    retry_after_s=1.5,
    reason="its first token cannot come within 2.5 s: 3.1 s of prefill wait before it",
)
_SPREAD = Spread(14, 1.25, -0.25, 0.5, 2.75)
_REPORT = InstanceReport(
    session="alps-slurm-4711-1-c0ffee123456",
    sequence=42,
    epoch=3,
    applied=17,
    mode=GateMode.PADG,
    prefilling=True,
    window_s=0.75,
    decoding=_SPREAD,
    waiting=5,
    waiting_prefill_s=0.625,
    laxity_s=0.375,
    kv_tokens_free=400_832,
    kv_tokens_total=524_288,
    kv_tokens_promised=1_536,
    low_share=0.01,
    step_s=0.031,
    prefill_base_s=0.012,
    prefill_s_per_token=0.00015,
    refused_total=2,
    stalled_ratio_max=3.5,
    window=4,
    older=_SPREAD,
    context_tokens=9_100,
    first_tokens_total=812,
    slow_first_tokens_total=9,
    ttft_s_total=530.5,
    granted_total=6,
    lets_go=True,
    ending=1.5,
    slots_free=-3,
    slot_every_s=0.0625,
)
_HELD = HeldRequest("6d1f0c5a9e3b4f27", _REQUEST.lease, 0.75, 12, 0.375)
_HEAD = ResponseHead(200, {"content-type": "text/event-stream"})
_END = ResponseEnd(1234)
_FAILURE = InferenceFailure(FailureCode.BUSY, "1024 requests are running here already", True, 1.5)
_METADATA = SessionMetadata(
    model="qwen2.5:7b",
    engine_model="Qwen/Qwen2.5-7B-Instruct",
    engine="vllm",
    site="alps",
    provider="cscs",
    allocation="slurm-4711",
    host="nid001234",
    fingerprint="9f86d081884c7d65",
    context_tokens_max=32_768,
    concurrency_max=256,
    loading_progress=0.75,
    loading_phase="weights",
    draining=Draining("wall time", 120.5),
    asleep=True,
    agent_version="0.1.0",
    labels={"gpu": "GH200"},
    allocation_ends_at="2026-11-30T18:00:00Z",
    connection="agent-c0ffee123456",
    worker_group="night-run",
    gpus=[GpuDevice("GPU-1b2c3d4e", "NVIDIA GH200 120GB", 102_625_181_696)],
    parallelism=EngineParallelism(4, 2, 3),
    kv_tokens_max=524_288,
    endpoints=["/v1/chat/completions"],
    restart_count=1,
    faults=[Fault("Xid 79: fallen off the bus", "2026-11-30T17:00:00Z", "GPU-1b2c3d4e")],
    quantization="fp8",
    dtype="bfloat16",
    engine_version="0.25.1",
    failure="exited: the engine was killed by signal 9 while it served",
)
_RECORD = SessionRecord("alps-slurm-4711-1-c0ffee123456", Lifecycle.SERVING, 5, _METADATA)
_STATUS = SessionStatus(
    _RECORD.session,
    42,
    Lifecycle.SERVING,
    5,
    1.0,
    in_flight=17,
    requests_total=3_021,
    output_bytes_total=98_765_432,
    queued=3,
    stalled_s=2.5,
    allocation_remaining_s=3_599.5,
    running=14,
    kv_tokens_used=123_456,
    kv_tokens_free=400_832,
    prefill_tokens_per_s=5_120.5,
    decode_tokens_per_s=712.0,
    phase=Phase.MIXED,
    slack=SlackSummary(14, 1.25, 0.5, -0.25),
    gpu_power_w=2_410.0,
    gpu_energy_j=8_675_309.0,
    gpu_celsius=71.0,
    gpu_throttled=True,
)
_USAGE = UsageRecord(
    id="6d1f0c5a9e3b4f270000000001",
    started="2026-11-30T17:59:58.123Z",
    outcome=Outcome.TRUNCATED,
    status=200,
    endpoint="/v1/chat/completions",
    model="qwen2.5:7b",
    model_asked="small",
    request_id="6d1f0c5a9e3b4f27",
    project="climate",
    key="alice-laptop",
    tracked=False,
    error_code="agent_left",
    stream=True,
    queued_s=0.25,
    ttft_s=0.5,
    duration_s=12.75,
    attempts=2,
    resumed=1,
    sessions=["alps-slurm-4711-1-c0ffee123456"],
    provider="cscs",
    site="alps",
    engine="vllm",
    gpu="NVIDIA GH200 120GB",
    gpus=4,
    gpu_seconds=3.125,
    energy_j=812.5,
    prompt_tokens=1_024,
    cached_tokens=512,
    output_tokens=300,
    tokens_estimated=True,
)
_LEASE = BudgetLease(250_000, 1_796_061_600.5)
_SPENT = Spent("project:climate", "qwen2.5:7b", 17, 1_024, 512, 300, 3.125)
_KEPT_RUN = KeptRun("serai.qwen2.5_7b.0a1b2c3ds1g7xc0ffee12", "4711", "alps", True, 28_800.5)
_KEPT_TROUBLE = KeptTrouble("chat/1", "quota", "QOSMaxSubmitJobPerUserLimit", 2, 899.5, "9f86d081884c7d65")
_SLOT_WORD = SlotWord("chat/1", "stopped", "too many jobs", True, ["4711 running"], {"time_left_s": 3_599.5})

MESSAGES: list[object] = [
    _KEPT_RUN,
    _KEPT_TROUBLE,
    LauncherState(
        "login1-c0ffee12",
        42,
        [_KEPT_RUN],
        [_KEPT_TROUBLE],
        {"chat/1": 7},
        ["night"],
        {"chat": [61.5]},
        {"chat": [242.5]},
        {"pool-h100": 3},
    ),
    ExplainRequest("chat/1"),
    _SLOT_WORD,
    LauncherWord("alps", "login1-c0ffee12", True, "squeue: no answer", [_SLOT_WORD], "there is no slot 'chat/9'"),
    WakeRequest("night"),
    ScaleRequest("pool-h100", 3, "llama-8b lacks 2.5 requests/s"),
    _REQUEST.lease,
    _ASK,
    AdmissionRequest([_ASK], ["6d1f0c5a9e3b4f26"], [_USED]),
    _USED,
    _GRANT,
    _ANSWER,
    AdmissionAnswers([_ANSWER], [_GRANT]),
    _SPREAD,
    _REPORT,
    _HELD,
    InstanceState(_REPORT, [_HELD], False),
    TakeInstance("macro-2", 3, GateMode.PADG, 0.01, 0.5),
    InstanceOwner(_REPORT.session, "macro-2", 3, 17),
    GroupLease("login1-c0ffee12", 4, 42, 3),
    MacroExplainRequest("6d1f0c5a9e3b4f27", "qwen2.5:7b"),
    ScaleWish("qwen2.5:7b", 3, "placer", 4, 30.0, "p90 TTFT > 4 s: 12% of first tokens took longer"),
    MacroWord(["admitted at alps-slurm-4711-1-c0ffee123456"]),
    LimitsUse("5f3a9c01d2e4b687", 3_600.5, {"project:climate": ScopeUse(1_024, 524_288, 17)}),
    BudgetAccount("2026-11", 1_500_000, {"5f3a9c01d2e4b687": _LEASE}),
    ScopeUse(1_024, 524_288, 17),
    _LEASE,
    _REQUEST,
    _HEAD,
    _END,
    _FAILURE,
    _RECORD,
    _METADATA,
    _METADATA.draining,
    _STATUS,
    SlackSummary(14, 1.25, 0.5, -0.25),
    _METADATA.gpus[0],
    _METADATA.parallelism,
    _METADATA.faults[0],
    ProbeRequest("alps-slurm-4711-1-c0ffee123456"),
    ProbeAnswer("alps-slurm-4711-1-c0ffee123456", False, Lifecycle.SERVING, 5, 2.5),
    DrainRequest("its successor serves", 1_800.5),
    SleepRequest(True, 60.5, "its macro-scheduler needs it no more"),
    SleepAnswer(_RECORD.session, False, "its engine cannot sleep, or was not started so that it can"),
    DrainAnswer(_RECORD.session, False, 17, "within_s must not be negative"),
    RegistryBeat("alps", "5f3a9c01", 7, 2.0, {"alps": 1_234_567_890_123_456_789, "lugano": 17}, 128),
    DigestRequest("alps"),
    HostCleared("alps", "nid001234", 2),
    DigestAnswer("alps", [0, 18_446_744_073_709_551_615]),
    SnapshotRequest("alps-slurm-4711-1-c0ffee123456", "alps", [7, 255]),
    SnapshotPage([_RECORD], more=True, silent_s=[0.5], complete_since_s=3_600.0),
    OpinionRequest("alps-slurm-4711-1-c0ffee123456"),
    Opinion("alps-slurm-4711-1-c0ffee123456", False, 2.5, "it did not answer a probe"),
    Disconnected(["alps-slurm-4711-1-c0ffee123456"]),
    AllocationEnded("alps", "slurm-4711", "job completed", 1),
    _USAGE,
    SpentRequest(["project:climate", "key:alice-laptop"], "2026-11-01T00:00:00Z"),
    _SPENT,
    SpentAnswer([_SPENT], "the database is locked"),
    *PLACEMENT_MESSAGES,
]

_PAYLOADS: dict[FrameKind, tuple[int, bytes]] = {
    FrameKind.REQUEST: (0, encode(_REQUEST)),
    FrameKind.BODY: (2, b'{"model": "qwen2.5:7b", '),
    FrameKind.CREDIT: (128, b""),
    FrameKind.CANCEL: (0, b""),
    FrameKind.ALIVE: (0, b""),
    FrameKind.BODY_CREDIT: (9, b""),
    FrameKind.HEAD: (0, encode(_HEAD)),
    FrameKind.DATA: (1, 'data: {"text": "grüezi"}\n\n'.encode()),
    FrameKind.END: (0x01020304, encode(_END)),
    FrameKind.ERROR: (7, encode(_FAILURE)),
}
FRAMES = [Frame(kind, 0x1122334455667788, 2, sequence, payload) for kind, (sequence, payload) in _PAYLOADS.items()]


def as_text(frame: Frame) -> str:
    """The head, field by field, and the payload below it, both as hexadecimal digits."""
    data = encode_frame(frame)
    head, payload = data[:FRAME_HEAD_BYTES], data[FRAME_HEAD_BYTES:]
    lines = [f"# {frame!r}", "# kind attempt reserved sequence stream length"]
    cuts = (0, 1, 2, 4, 8, 16, FRAME_HEAD_BYTES)
    lines.append(" ".join(head[a:b].hex() for a, b in pairwise(cuts)))
    lines += [payload[at : at + 32].hex() for at in range(0, len(payload), 32)]
    return "\n".join(lines) + "\n"


def as_bytes(text: str) -> bytes:
    return b"".join(bytes.fromhex(line) for line in text.splitlines() if not line.startswith("#"))


def sample(name: str, made: bytes) -> bytes:
    path = WIRE / name
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(made)
    return path.read_bytes()


def message_name(message: object) -> str:
    return type(message).__name__


@pytest.mark.parametrize("message", MESSAGES, ids=message_name)
def test_a_message_is_written_and_read_as_in_its_sample(message: object) -> None:
    stored = sample(f"{message_name(message)}.json", encode(message) + b"\n")
    assert encode(message) + b"\n" == stored
    assert decode(type(message), stored) == message


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: FrameKind(frame.kind).name)
def test_a_frame_is_written_and_read_as_in_its_sample(frame: Frame) -> None:
    stored = sample(f"{FrameKind(frame.kind).name}.hex", as_text(frame).encode()).decode()
    assert as_text(frame) == stored
    assert decode_frames(as_bytes(stored)) == [frame]


def test_every_message_and_frame_kind_has_a_sample_and_every_sample_is_of_one() -> None:
    kinds = {
        name
        for module in (
            admission,
            drain,
            inference,
            launcher,
            limits,
            placement,
            registry,
            session_record,
            status,
            usage,
        )
        for name in messages_of(module)
    }
    assert {message_name(message) for message in MESSAGES} == kinds
    assert {frame.kind for frame in FRAMES} == set(FrameKind)
    expected = {f"{name}.json" for name in kinds} | {f"{kind.name}.hex" for kind in FrameKind}
    assert {path.name for path in WIRE.iterdir()} == expected


def messages_of(module: ModuleType) -> set[str]:
    """Names of the message types that `module` defines, dataclasses and structs."""
    return {
        name
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))
        and kind.__module__ == module.__name__
    }


@pytest.mark.parametrize("message", MESSAGES, ids=message_name)
def test_no_field_of_a_sample_has_its_default_value(message: object) -> None:
    described = msgspec.inspect.type_info(type(message))
    assert isinstance(described, msgspec.inspect.DataclassType | msgspec.inspect.StructType)
    for item in described.fields:
        default = item.default_factory() if item.default_factory is not NODEFAULT else item.default
        assert getattr(message, item.name) != default, item.name


def test_the_numbers_of_closed_sets_are_never_used_again() -> None:
    """Old peers read numbers and words, so these lists may grow; nothing in them may change."""
    assert {kind.name: int(kind) for kind in FrameKind} == {
        "REQUEST": 1,
        "BODY": 2,
        "CREDIT": 3,
        "CANCEL": 4,
        "ALIVE": 16,
        "BODY_CREDIT": 17,
        "HEAD": 18,
        "DATA": 19,
        "END": 20,
        "ERROR": 21,
    }
    assert {rank.name: int(rank) for rank in Lifecycle} == {"JOIN": 0, "SERVING": 1, "DOWN": 2, "LEFT": 3}
    assert [str(outcome) for outcome in Outcome] == ["complete", "refused", "failed", "truncated", "cancelled"]
    assert [str(code) for code in FailureCode] == [
        "unknown_session",
        "draining",
        "busy",
        "body_too_large",
        "bad_request_frame",
        "engine_unreachable",
        "engine_cut",
        "engine_protocol",
        "engine_silent",
        "deadline",
        "credit_starved",
        "cancelled",
        "agent_left",
        "lease_refused",
        "no_responders",
        "agent_silent",
        "frame_gap",
        "bus_lost",
        "stopped",
    ]
