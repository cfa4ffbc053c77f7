"""`serai agent --engines 2`: two engines on one host, with real processes and a stand-in for nvidia-smi."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from integration.system import Process, System, children_of, wait_for

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
ENGINE = """
import os, sys
print("this engine sees", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
os.execv(sys.executable, [sys.executable, "-m", "serai.engine_emulator", *sys.argv[1:]])
"""


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with four that nobody uses, and more of the variables of a job than it has."""
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    lines = {
        "memory.total": [f"{gpu}, NVIDIA H100, 81559 MiB" for gpu in GPUS],
        "memory.used": [f"{gpu}, 4" for gpu in GPUS],
    }
    cases = "".join(f"*{what}*) printf '%s\\n' {' '.join(map(repr, told))} ;;\n" for what, told in lines.items())
    script.write_text(f'#!/bin/sh\ncase "$*" in\n*compute-apps*) ;;\n{cases}*) exit 6 ;;\nesac\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def start_agent(system: System, *flags: str) -> Process:
    script = system.folder / "engine.py"
    script.write_text(ENGINE)
    engine = [sys.executable, str(script), "--model", "m", "--tpot-ms", "20", "--host", "{host}", "--port", "{port}"]
    return system.service("agent", "--model", "m", "--engine", "emulated", *flags, "--", *engine)


def engines_of(agent: Process) -> set[int]:
    """Its children that serve."""
    return {pid for pid, line in children_of(agent.popen.pid).items() if b"serai.engine_emulator" in line}


def test_two_engines_are_two_sessions_with_half_of_the_gpus_each_and_fail_and_drain_on_their_own(
    small_system: System, four_gpus: None
) -> None:
    agent = start_agent(small_system, "--engines", "2")
    small_system.wait_for_sessions(2)
    assert sorted(re.findall(r"this engine sees (\S+)", agent.log)) == ["GPU-a,GPU-b", "GPU-c,GPU-d"]
    engines = engines_of(agent)
    assert len(engines) == 2

    os.kill(engines.pop(), signal.SIGKILL)
    with small_system.client() as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert [client.post("/v1/chat/completions", json=body).status_code for _ in range(3)] == [200] * 3
    wait_for(lambda: agent.log.count("agent.serving") == 3, "the one that was killed serves again")
    small_system.wait_for_sessions(2)
    assert engines <= engines_of(agent), "the other one was left alone"
    sees = re.findall(r"this engine sees (\S+)", agent.log)
    assert (len(sees), set(sees)) == (3, {"GPU-a,GPU-b", "GPU-c,GPU-d"})

    answers: list[str] = []
    streams = [threading.Thread(target=lambda: answers.append(streamed(small_system))) for _ in range(4)]
    for stream in streams:
        stream.start()
    wait_for(lambda: in_flight(small_system) == 4, "four streams run")
    assert agent.terminate() == 0
    for stream in streams:
        stream.join(20)
    assert len(answers) == 4
    assert all(answer.rstrip().endswith("[DONE]") and '"error"' not in answer for answer in answers)
    assert agent.log.count("agent.draining") == 2


def streamed(system: System) -> str:
    body = {"model": "m", "stream": True, "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
    with system.client() as client:
        return client.post("/v1/chat/completions", json=body).text


def in_flight(system: System) -> float:
    with system.client() as client:
        text = client.get("/metrics").text
    return sum(float(found) for found in re.findall(r"^serai_ingress_requests_in_flight\S* (\S+)$", text, re.MULTILINE))


def test_more_engines_than_gpus_and_engines_that_cannot_run_are_told_in_a_line(system: System, four_gpus: None) -> None:
    system.start_registry()
    agent = start_agent(system, "--engines", "3")
    assert agent.popen.wait(20) == 2
    assert "--engines 3: 4 GPUs cannot be shared out evenly; give 1 or 2 or 4" in agent.log
    agent = system.service("agent", "--model", "m", "--engines", "2", "--", "no-such-engine")
    assert agent.popen.wait(20) == 2
    assert "each of 2 engines: " in agent.log
