"""What an agent does with its engine: real processes that crash, hang, listen elsewhere, or are somebody else's."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration.system import Process, System, freeze, wait_for
from integration.test_hanging_engines import engine_of
from serai.cli.up import small_model
from unit.test_engine_surroundings import listening_child

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

FAKE = """
import http.server, json, os, sys, time
WHAT = json.loads(sys.argv[1])
port = int(sys.argv[2])
time.sleep(WHAT.get("late_s", 0))
if "load" in WHAT:
    with open(WHAT["load"], "rb") as weights:
        while weights.read(8 << 20):
            time.sleep(0.4)
if "exit" in WHAT:
    print("this is what the engine said", flush=True)
    sys.exit(WHAT["exit"])

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        if self.path == "/v1/models":
            return self.answer(200, {"data": [{"id": WHAT.get("model", "m")}]})
        if self.path == "/version":
            return self.answer(200, {"version": "0.25.1"})
        self.answer(404, {})
    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        print("asked", self.path, flush=True)
        self.answer(200 if self.path in WHAT.get("paths", ["/v1/completions"]) else 404, {"choices": []})

http.server.ThreadingHTTPServer.allow_reuse_port = WHAT.get("reuse_port", False)
http.server.ThreadingHTTPServer(("127.0.0.1", WHAT.get("port", port)), Handler).serve_forever()
"""


def fake_agent(system: System, *flags: str, environment: dict[str, str] | None = None, **what: object) -> Process:
    """An agent around a small engine of its own kind; `what` says how it behaves."""
    script = system.folder / "fake_engine.py"
    script.write_text(FAKE)
    engine = [sys.executable, str(script), json.dumps(what), "{port}", "--model", str(what.get("load", "m"))]
    return system.service("agent", "--model", "m", *flags, "--", *engine, environment=environment)


def plain(agent: Process) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", agent.log)


def last_word(agent: Process) -> str:
    return plain(agent)[plain(agent).rindex("serai agent: ") :]


def listed(system: System, *flags: str) -> list[dict[str, object]]:
    nats = [
        "--nats-url",
        f"nats://127.0.0.1:{system.nats_port}",
        "--nats-nkey-file",
        str(system.nats.key_file("tools")),
    ]
    command = [sys.executable, "-m", "serai.cli.main", "registry", "ls", "--json", *nats, *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    found: list[dict[str, object]] = json.loads(ran.stdout)["sessions"]
    return found


def test_an_engine_that_crashes_is_started_again_as_a_new_session(small_system: System) -> None:
    agent = small_system.start_agent()
    small_system.wait_for_sessions(1)
    os.kill(engine_of(agent), signal.SIGKILL)
    wait_for(lambda: agent.log.count("agent.serving") == 2, "it serves again")
    small_system.wait_for_sessions(1)
    with small_system.client() as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert "engine.starts_again" in agent.log
    known = {row["session"]: row for row in listed(small_system, "--all")}
    assert sorted(str(row["state"]) for row in known.values()) == ["left", "serving"]
    assert agent.terminate() == 0


def test_h43_a_start_that_fails_in_the_same_way_twice_ends_the_agent(small_system: System) -> None:
    agent = fake_agent(small_system, exit=1)
    assert agent.popen.wait(30) == 2
    assert agent.log.count("engine.starting") == 2
    assert "the engine ended with exit code 1 before it served (config: " in last_word(agent)
    assert "this is what the engine said" in last_word(agent)


def test_a_bad_flag_ends_the_agent_at_once_and_the_record_says_why(small_system: System) -> None:
    agent = fake_agent(small_system, exit=2)
    assert agent.popen.wait(30) == 2
    assert agent.log.count("engine.starting") == 1
    (row,) = listed(small_system, "--all")
    assert row["state"] == "left"
    assert row["failure"] == "exited: the engine ended with exit code 2 before it served"


def test_an_engine_at_another_port_is_told_by_that_port(small_system: System) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = fake_agent(small_system, port=port)
    assert agent.popen.wait(40) == 2
    assert f"the engine serves at port {port}, and not at" in last_word(agent)
    assert "leave the port out of its command" in last_word(agent)


def test_h21_a_port_that_a_stranger_takes_is_not_talked_to(small_system: System) -> None:
    """Its engine binds late, and somebody is quicker: it gets not one request, and the engine another port."""
    agent = fake_agent(small_system, late_s=1.5)
    port = int(wait_for(lambda: re.findall(r"\b(\d{5})\W+--model", plain(agent)), "the engine starts")[0])
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        stranger.settimeout(0.1)
        wait_for(lambda: "agent.serving" in agent.log, "it serves elsewhere")
        with pytest.raises(TimeoutError):
            stranger.accept()
    assert "another process" in agent.log
    assert agent.log.count("engine.starting") == 2
    small_system.wait_for_sessions(1)


def test_h21_engines_started_at_once_get_ports_of_their_own(small_system: System) -> None:
    agents = [small_system.start_agent("--start-delay-s", "1", wait=False) for _ in range(4)]
    small_system.wait_for_sessions(4)
    assert len({small_system.engine_port(agent) for agent in agents}) == 4


@pytest.mark.alone  # Any agent that starts meanwhile, a test's beside it too, would end what is left behind.
def test_h40_what_a_killed_agent_left_behind_is_ended_before_the_next_engine_starts(small_system: System) -> None:
    """The engine's worker is in a session of its own, so it outlives agent and engine."""
    note = small_system.folder / "worker"
    worker = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    engine = [
        sys.executable,
        "-c",
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {worker!r}], "
        "start_new_session=True); time.sleep(600)",
        "{port}",
    ]
    first = small_system.service("agent", "--model", "m", "--", *engine)
    wait_for(lambda: note.exists() and note.read_text(), "the worker runs")
    orphan = Path("/proc") / note.read_text()
    first.kill()
    time.sleep(0.2)
    assert orphan.exists()
    second = small_system.start_agent()
    assert not orphan.exists() or "\nState:\tZ" in (orphan / "status").read_text()
    assert "engine.left_over" in second.log


def test_h36_an_engine_that_hangs_for_long_is_started_anew(small_system: System) -> None:
    flags = ("--engine-hung-s", "2", "--engine-stop-s", "0.5")
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "20", agent_flags=flags)
    small_system.wait_for_sessions(1)
    frozen = engine_of(agent)
    with small_system.client(90) as client:
        freeze(frozen)
        answer = client.post("/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 50})
        assert answer.status_code >= 500 or '"error"' in answer.text
    wait_for(lambda: agent.log.count("agent.serving") == 2, "it serves again", 60)
    assert "does not answer a canary" in agent.log
    small_system.wait_for_sessions(1)


def put_nvidia_smi(folder: Path, used_mib: int) -> dict[str, str]:
    """A stand-in that shows one GPU with so much memory used; how to find it."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "nvidia-smi"
    script.write_text(
        f"#!/bin/sh\ncase \"$*\" in\n*compute-apps*) echo 'GPU-a, 4242, {used_mib}' ;;\n"
        f"*memory.used*) echo 'GPU-a, {used_mib}' ;;\n*name*) echo 'GPU-a, NVIDIA H100, 81559 MiB' ;;\n"
        f"*) echo GPU-a ;;\nesac\n"
    )
    script.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def test_h31_a_gpu_that_a_stranger_holds_is_told_as_the_node_s_fault(small_system: System) -> None:
    environment = put_nvidia_smi(small_system.folder, 20_480)
    agent = fake_agent(small_system, "--gpu-wait-s", "1", environment=environment)
    wait_for(
        lambda: [row for row in listed(small_system) if row["state"] == "queued"] or agent.popen.poll(), "it waits"
    )
    assert agent.popen.wait(30) == 75
    assert "20.0 GiB of GPU-a are held by process 4242" in last_word(agent)
    assert "(node: this node is at fault; another may do)" in last_word(agent)
    assert "engine.starting" not in agent.log
    (row,) = listed(small_system, "--all")
    assert str(row["failure"]).startswith("node busy: ")


def test_an_engine_that_only_embeds_is_proven_by_a_vector(small_system: System) -> None:
    agent = fake_agent(small_system, paths=["/v1/embeddings"])
    wait_for(lambda: "agent.serving" in agent.log, "it serves")
    asked = re.findall(r"^asked (\S+)", agent.log, re.MULTILINE)
    assert asked[:3] == ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"]
    assert "engine.no_canary" not in agent.log


def test_what_an_engine_is_can_be_demanded(small_system: System) -> None:
    fake_agent(small_system, "--engine", "vllm", paths=["/v1/completions", "/v1/chat/completions"])
    small_system.wait_for_sessions(1)
    (row,) = listed(small_system)
    assert (row["engine"], row["engine_version"], row["quantization"]) == ("vllm", "0.25.1", "")
    with small_system.client() as client:

        def asked(demand: str) -> int:
            return client.post("/v1/chat/completions", json=CHAT, headers={"x-serai-require": demand}).status_code

        assert asked("engine=vllm>=0.25, engine_version=0.25.1") == 200
        assert asked("engine=vllm>=0.26") == 503
        assert asked("quantization=fp8") == 503  # Nobody says so; unknown does not fit.


def test_h34_a_slow_load_is_shown_with_its_share(small_system: System) -> None:
    weights = small_system.folder / "weights"
    with weights.open("wb") as file:
        file.truncate(160 << 20)
    fake_agent(small_system, load=str(weights))

    def loading() -> dict[str, object] | None:
        return next((row for row in listed(small_system) if row["loading_progress"]), None)

    row = wait_for(loading, "it loads")
    assert (row["state"], row["loading_phase"]) == ("loading", "load")
    assert 0 < row["loading_progress"] < 1
    assert re.search(r"its lifecycle is JOIN \(load \d+%\)", str(row["why_not_routed"]))
    small_system.wait_for_sessions(1, timeout_s=60)
    (row,) = listed(small_system)
    assert (row["loading_phase"], row["loading_progress"]) == ("", None)


def test_h24_a_real_engine_is_known_by_its_port_and_comes_back(small_system: System) -> None:
    engine = [sys.executable, "-m", "serai.worker_agent.engine.llamacpp_server", "--model-file", str(small_model())]
    agent = small_system.service("agent", "--model", "m", "--", *engine, "--alias", "m", "--threads", "2")
    small_system.wait_for_sessions(1, timeout_s=60)
    (row,) = listed(small_system)
    assert (row["engine"], row["quantization"]) == ("llamacpp", "q4_1")
    os.kill(engine_of(agent), signal.SIGKILL)
    wait_for(lambda: agent.log.count("agent.serving") == 2, "it serves again", 60)


def test_h21_a_stranger_beside_our_engine_on_its_own_port_is_noticed(small_system: System) -> None:
    """Both share the port (SO_REUSEPORT), and the kernel deals requests out between them."""
    agent = fake_agent(small_system, reuse_port=True)
    wait_for(lambda: "agent.serving" in agent.log, "it serves")
    port = int(re.findall(r"\b(\d{5})\W+--model", plain(agent))[0])
    with listening_child(port):
        wait_for(lambda: agent.log.count("agent.serving") == 2, "it serves at another port")
    assert "beside or instead of our engine" in agent.log
