"""One engine over two ranks, both on this host: stand-ins for vLLM and Ray show who is started, with what, and that all
parts end together. What the real ones do over a real network is not shown here."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.system import Process, System, free_port, wait_for

STAND_IN = (
    f"#!{sys.executable}\n"
    + '''
"""Rank 0 listens at the meeting address, the others connect and end when it does; rank 0 is an emulated engine."""
import os, socket, subprocess, sys

def value(flag):
    words = [word for given in sys.argv[1:] for word in given.split("=", 1)]
    return words[words.index(flag) + 1]

with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as calls:
    calls.write(os.path.basename(sys.argv[0]) + " " + " ".join(sys.argv[1:]) + " " + os.environ["VLLM_HOST_IP"] + "\\n")

def listen(host, port):
    server = socket.create_server((host, int(port)))
    while True:
        server.accept()[0].recv(100)

def join(host, port):
    socket.create_connection((host, int(port)), 10).recv(100)

def emulate():
    command = [sys.executable, "-m", "serai.engine_emulator", "--model", "m", "--ttft-ms", "5", "--tpot-ms", "20"]
    os.execv(sys.executable, [*command, "--host", value("--host"), "--port", value("--port")])

if os.path.basename(sys.argv[0]) == "ray":
    if "--head" in sys.argv:
        listen(value("--node-ip-address"), value("--port"))
    else:
        join(*value("--address").rsplit(":", 1))
elif "ray" in sys.argv:
    socket.create_connection(os.environ["RAY_ADDRESS"].rsplit(":", 1)).close()
    emulate()
elif "--headless" in sys.argv:
    import time
    while True:
        try:
            join(value("--master-addr"), value("--master-port"))
            sys.exit(3)
        except OSError:
            time.sleep(0.1)
else:
    if os.fork():
        emulate()
    listen(value("--master-addr"), value("--master-port"))
'''
)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}]}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with stand-ins for vllm, ray and scontrol."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("vllm", STAND_IN), ("ray", STAND_IN), ("scontrol", "#!/bin/sh\necho n0\necho n1\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return folder


@pytest.fixture
def start_rank(small_system: System, programs: Path) -> Callable[..., Process]:
    port = str(free_port())

    def start(rank: int, *engine_flags: str, agent_flags: tuple[str, ...] = ()) -> Process:
        job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NODEID": str(rank)}
        path = {"PATH": f"{programs}:{os.environ['PATH']}"}
        nodes = ["--nodes", "auto", "--nodes-address", "127.0.0.1", "--nodes-port", port, "--interface", "lo"]
        engine = [str(programs / "vllm"), "serve", "m", *engine_flags]
        limits = ["--start-timeout-s", "30", "--drain-s", "10", "--engine-stop-s", "3"]
        flags = ["--model", "m", *nodes, *limits, *agent_flags]
        return small_system.service("agent", *flags, "--", *engine, environment=job | path)

    return start


@pytest.mark.parametrize("ray", [False, True])
def test_two_ranks_are_one_session_that_drains_and_ends_as_one(
    small_system: System, programs: Path, start_rank: Callable[..., Process], ray: bool
) -> None:
    flags = ["--distributed-executor-backend", "ray"] if ray else []
    other = start_rank(1, *flags)
    zero = start_rank(0, *flags)
    small_system.wait_for_sessions(1)
    calls = (programs / "calls").read_text().splitlines()
    if ray:
        assert sorted(call.split()[0] for call in calls) == ["ray", "ray", "vllm"]
        assert sorted("--head" in call for call in calls if call.startswith("ray")) == [False, True]
    else:
        assert sorted(("--headless" in call, "--nnodes 2" in call) for call in calls) == [(False, True), (True, True)]
    assert all(call.endswith(" 127.0.0.1") for call in calls), "the address of --interface"

    def stop_both() -> None:  # As scancel does.
        zero.popen.terminate()
        other.popen.terminate()

    text = ""
    with (
        small_system.client() as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 60}) as answer,
    ):
        for number, line in enumerate(answer.iter_lines()):
            text += line
            if number == 5:
                stop_both()
    assert '"finish_reason":"length"' in text.replace(" ", "")
    assert text.endswith("data: [DONE]"), "the other rank's part ran until rank 0 had drained"
    assert zero.popen.wait(20) == 0, zero.log
    assert other.popen.wait(20) == 0, other.log


def test_a_lost_rank_ends_the_engine_and_its_return_starts_it_again(
    small_system: System, start_rank: Callable[..., Process]
) -> None:
    other, zero = start_rank(1), start_rank(0)
    small_system.wait_for_sessions(1)
    other.kill()
    wait_for(lambda: "ranks.part_ended" in zero.log, "rank 0 has noticed", 10)
    wait_for(lambda: small_system.sessions() == 0, "nobody is sent there", 10)
    start_rank(1)
    small_system.wait_for_sessions(1)
    zero.kill()
    small_system.wait_for_sessions(0)


def test_the_other_ranks_end_with_rank_zero(small_system: System, start_rank: Callable[..., Process]) -> None:
    other, zero = start_rank(1), start_rank(0)
    small_system.wait_for_sessions(1)
    zero.kill()
    assert other.popen.wait(15) == 1
    assert "rank 0 was lost while this part of the engine ran" in other.log


def test_a_rank_that_does_not_come_is_named(start_rank: Callable[..., Process]) -> None:
    zero = start_rank(0, agent_flags=("--start-timeout-s", "1"))
    assert zero.popen.wait(20) == 2, zero.log
    assert "rank 1 (n1) did not come to port" in zero.log
    assert "srun --ntasks-per-node=1" in zero.log


def test_h23_nodes_that_do_not_reach_each_other_say_so_before_the_engine_starts(
    programs: Path, start_rank: Callable[..., Process]
) -> None:
    """A rank on another network: it says where it is, and nobody gets there."""
    port = free_port()
    zero = start_rank(0, agent_flags=("--nodes-port", str(port)))
    wait_for(lambda: _answers(port), "rank 0 waits")
    with socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(b'{"type":"Hello","allocation":"77","rank":1,"host":"127.0.0.1","port":%d}\n' % free_port())
        assert b'"Try"' in other.recv(1000)
        other.sendall(b'{"type":"Tried","problem":"rank 0 at 127.0.0.1:%d: no route to host"}\n' % port)
        assert zero.popen.wait(20) == 2, zero.log
    assert "the nodes do not reach each other; name the right network with --interface" in zero.log
    assert "rank 1 (n1): rank 0 at" in zero.log
    assert "rank 0 (n0): rank 1 at" in zero.log
    assert not (programs / "calls").exists()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
