"""What an agent finds out of where it runs: GPUs, the allocation's end, the engine's parallelism, its labels."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from serai.contracts.session_record import EngineParallelism, GpuDevice
from serai.runtime.bounded_command import output_of
from serai.runtime.settings import add_settings, read_settings
from serai.runtime.slurm_time import duration_s
from serai.worker_agent import allocation
from serai.worker_agent.allocation import (
    AllocationEnd,
    kill_wait_s_in,
    pbs_remaining_s_in,
    remaining_s_in,
    slurm_ending_in,
)
from serai.worker_agent.command_line import parallelism_of
from serai.worker_agent.drain import Reason
from serai.worker_agent.engine.kinds import engine_of
from serai.worker_agent.gpus import chosen, devices_in, visible_gpus
from serai.worker_agent.settings import AgentSettings

MIB = 1024 * 1024
A, B, C = (GpuDevice(f"GPU-{letter}1", "NVIDIA H100", MIB) for letter in "abc")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("5:00", 300),
        ("0:30", 30),
        ("1:00:00", 3600),
        ("23:59:59\n", 86_399),
        ("1-00:00:00", 86_400),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
        ("-5", None),
        ("1:2:3:4", None),
        ("slurm_load_jobs error", None),
    ],
)
def test_slurm_durations(text: str, seconds: int | None) -> None:
    assert duration_s(text) == seconds


def test_the_end_by_the_environment() -> None:
    assert remaining_s_in({"SLURM_JOB_END_TIME": "1100"}, 1000.0) == 100
    assert remaining_s_in({"SLURM_JOB_END_TIME": "900"}, 1000.0) == 0
    assert remaining_s_in({"SLURM_JOB_END_TIME": ""}, 1000.0) is None
    assert remaining_s_in({}, 1000.0) is None


def put_command(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_squeue_tells_the_end_and_its_silence_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(tmp_path, "squeue", 'echo "$@" > "$0.said"; cat "$0.out"', monkeypatch)

    def answers(text: str) -> None:
        (tmp_path / "squeue.out").write_text(text)

    async def follow() -> None:
        end = AllocationEnd({"SLURM_JOB_ID": "77"})
        answers("")
        assert (await end.ask(), end.remaining_s(), end.ends_at()) == (False, None, "")
        answers("10:00\n")
        assert await end.ask()
        assert end.remaining_s() == pytest.approx(600, abs=2)
        assert end.ends_at()[:4].isdigit()
        assert end.ends_at().endswith("Z")
        assert not await end.ask()
        answers("slurm_load_jobs error: Unable to contact slurm controller")
        assert not await end.ask()
        assert end.remaining_s() == pytest.approx(600, abs=2)
        answers("20:00")
        assert await end.ask()

    asyncio.run(follow())
    assert (tmp_path / "squeue.said").read_text().split() == ["-h", "-j", "77", "-o", "%L"]


def test_a_squeue_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(tmp_path, "squeue", "trap '' TERM; sleep 600", monkeypatch)
    monkeypatch.setattr(allocation, "ASK_TIMEOUT_S", 0.2)
    began_s = time.monotonic()
    end = AllocationEnd({"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": str(int(time.time()) + 300)})
    assert asyncio.run(end.ask())
    assert end.remaining_s() == pytest.approx(300, abs=3)
    assert time.monotonic() - began_s < 5


def test_a_command_that_fails_or_is_missing_has_no_output() -> None:
    assert asyncio.run(output_of(["false"], 5)) is None
    assert asyncio.run(output_of(["no-such-command-anywhere"], 5)) is None
    assert asyncio.run(output_of(["echo", "x"], 5)) == "x\n"


def test_nvidia_smi_is_read_line_by_line() -> None:
    text = "GPU-a1, NVIDIA H100, 1 MiB\nGPU-b1, NVIDIA GH200, odd name, [N/A]\nNo devices were found\n\n"
    assert devices_in(text) == [A, GpuDevice("GPU-b1", "NVIDIA GH200,odd name", 0)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [A, B, C]),
        ("all", [A, B, C]),
        ("", []),
        ("-1", []),
        ("2,0", [C, A]),
        ("GPU-b1", [B]),
        ("GPU-c,0", [C, A]),
        ("0,7,1", [A]),
        ("MIG-x", [GpuDevice("MIG-x")]),
        ("GPU-", []),
    ],
)
def test_visible_devices_choose_as_cuda_does(visible: str | None, expected: list[GpuDevice]) -> None:
    assert chosen([A, B, C], visible) == expected


def test_gpus_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(
        tmp_path, "nvidia-smi", "echo 'GPU-a1, NVIDIA H100, 1 MiB'; echo 'GPU-b1, NVIDIA H100, 1 MiB'", monkeypatch
    )
    assert asyncio.run(visible_gpus({"CUDA_VISIBLE_DEVICES": "1"})) == [B]
    put_command(tmp_path, "nvidia-smi", "exit 9", monkeypatch)
    assert asyncio.run(visible_gpus({})) == []


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve m", EngineParallelism()),
        ("vllm serve m --tensor-parallel-size 4", EngineParallelism(tensor=4)),
        ("vllm serve m -tp=2 -pp 3 --data-parallel-size=8", EngineParallelism(2, 3, 8)),
        ("vllm serve m --tensor_parallel_size 4", EngineParallelism(tensor=4)),
        ("python -m sglang.launch_server --tp-size 2 --dp 2", EngineParallelism(tensor=2, data=2)),
        ("vllm serve m --tensor-parallel-size", EngineParallelism()),
        ("vllm serve m -tp two", EngineParallelism()),
        ("", EngineParallelism()),
    ],
)
def test_parallelism_by_the_command_line(command: str, expected: EngineParallelism) -> None:
    assert parallelism_of(command.split()) == expected


def agent_settings(*words: str, **environment: str) -> AgentSettings:
    parser = argparse.ArgumentParser()
    add_settings(parser, AgentSettings)
    return read_settings(AgentSettings, parser.parse_args(["--model", "m", *words]), environment)


def test_labels_by_flags_and_by_variable() -> None:
    assert agent_settings().label_values == {}
    assert agent_settings("--label", "a=1", "--label", "b=x=y").label_values == {"a": "1", "b": "x=y"}
    assert agent_settings(SERAI_LABELS="a=1, b=").label_values == {"a": "1", "b": ""}


@pytest.mark.parametrize("words", [["--label", "a"], ["--label", "=x"], ["--label", "a=" + "x" * 600]])
def test_bad_labels_are_refused_by_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        agent_settings(*words)
    assert "--label" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("python -m sglang.launch_server --model-path m", "sglang"),
        ("sglang serve m", "sglang"),
        ("/opt/env/bin/vllm serve m", "vllm"),
        ("llama-server -m m.gguf", "llamacpp"),
        ("my-server --port {port}", "openai"),
    ],
)
def test_engines_are_recognised_by_their_command(command: str, kind: str) -> None:
    engine = engine_of("auto", command.split())
    assert engine.kind == kind
    assert "4000" in " ".join(engine.with_address(command.split(), "127.0.0.1", 4000))


# What Slurm 22.05 has said, one line each, cut to what is read.
RUNS = "JobId=7 JobState=RUNNING Reason=None Dependency=(null) EndTime=2026-11-30T14:47:44"
AT_14_47_15 = datetime.fromisoformat("2026-11-30T14:47:15").timestamp()


@pytest.mark.parametrize(
    ("text", "reason", "left_s"),
    [
        (f"{RUNS} PreemptTime=2026-11-30T14:47:14", Reason.PREEMPTED, 29.0),
        # H26: our clock is ahead or behind by more than the grace of 30 s.
        (f"{RUNS} PreemptTime=2026-11-30T14:47:14".replace("T14", "T13"), Reason.PREEMPTED, 30.0),
        (f"{RUNS} PreemptTime=2026-11-30T14:47:14".replace("T14", "T15"), Reason.PREEMPTED, 30.0),
        (f"{RUNS} PreemptTime=None", Reason.ALLOCATION_END, 29.0),
        (RUNS, Reason.ALLOCATION_END, 29.0),
        (f"{RUNS} PreemptTime=None".replace("14:47:44", "14:40:00"), Reason.ALLOCATION_END, 0.0),
        ("JobState=COMPLETING Reason=None EndTime=2026-11-30T14:47:14 PreemptTime=None", Reason.STOPPING, 30.0),
        ("JobState=COMPLETING Reason=TimeLimit EndTime=2026-11-30T14:47:14", Reason.ALLOCATION_END, 30.0),
        ("JobState=COMPLETING Reason=None PreemptTime=2026-11-30T14:46:00", Reason.PREEMPTED, 30.0),
    ],
)
def test_slurm_tells_what_a_signal_was_for(text: str, reason: Reason, left_s: float) -> None:
    ending = slurm_ending_in(text, 30.0, AT_14_47_15)
    assert ending is not None
    assert (ending.reason, ending.left_s) == (reason, left_s)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "slurm_load_jobs error: Unable to contact slurm controller",
        "JobState=RUNNING",
        "JobState=RUNNING EndTime=Unknown",
    ],
)
def test_an_answer_of_no_use_tells_nothing(text: str) -> None:
    assert slurm_ending_in(text, 30.0, AT_14_47_15) is None


def test_kill_wait_is_read_from_the_configuration() -> None:
    assert kill_wait_s_in("KeepAliveTime           = SYSTEM_DEFAULT\nKillWait                = 45 sec\n") == 45.0
    assert kill_wait_s_in("error") is None


@pytest.mark.parametrize(
    ("text", "remaining_s"),
    [
        ("    Resource_List.walltime = 24:00:00\n    resources_used.walltime = 23:30:00\n", 1800.0),
        ("    Resource_List.walltime = 01:00:00\n", 3600.0),
        ("    Resource_List.walltime = 3600\n    resources_used.walltime = 00:10:00\n", 3000.0),
        ("    Resource_List.walltime = 00:10:00\n    resources_used.walltime = 00:10:07\n", 0.0),
        ("    Resource_List.walltime = 24:00:00\n    Walltime.Remaining = 77\n", 77.0),
        ("    Resource_List.walltime = ::\n", None),
        ("qstat: Unknown Job Id 7.server\n", None),
        ("", None),
    ],
)
def test_pbs_tells_what_is_left(text: str, remaining_s: float | None) -> None:
    assert pbs_remaining_s_in(text) == remaining_s


def test_a_pbs_job_knows_its_end_and_its_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(tmp_path, "qstat", "echo '  Resource_List.walltime = 00:10:00'", monkeypatch)

    async def ask() -> None:
        end = AllocationEnd({"PBS_JOBID": "7.server"})
        assert await end.ask()
        assert end.remaining_s() == pytest.approx(600, abs=2)
        assert end.grace_s() == allocation.PBS_KILL_DELAY_S
        assert await end.ending() is None

    asyncio.run(ask())


def test_torque_tells_the_wall_time_when_qstat_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(tmp_path, "qstat", "exit 1", monkeypatch)

    async def ask() -> None:
        end = AllocationEnd({"PBS_JOBID": "7.server", "PBS_WALLTIME": "900"})
        assert await end.ask()
        assert not await end.ask(), "counted from the start, once"
        assert end.remaining_s() == pytest.approx(900, abs=2)

    asyncio.run(ask())


def test_who_has_no_batch_system_may_be_told_its_end() -> None:
    async def ask() -> None:
        told, open_ended = AllocationEnd({}, 60.0), AllocationEnd({})
        assert await told.ask()
        assert not await told.ask()
        assert told.remaining_s() == pytest.approx(60, abs=1)
        assert not await open_ended.ask()
        assert (open_ended.remaining_s(), open_ended.grace_s()) == (None, None)
        assert AllocationEnd({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).grace_s() == allocation.KUBERNETES_GRACE_S

    asyncio.run(ask())
