"""`serai registry …` and `serai health` as a person or an epilog calls them: real NATS, real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from integration.system import System, wait_for


def tool(system: System, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(system, *words), capture_output=True, text=True, timeout=30, check=False)


def command(system: System, *words: str) -> list[str]:
    key = str(system.nats.key_file("tools"))
    nats = ["--nats-url", f"nats://127.0.0.1:{system.nats_port}", "--nats-nkey-file", key]
    return [sys.executable, "-m", "serai.cli.main", *words, *nats]


def said(system: System, *words: str) -> Any:
    ran = tool(system, *words, "--json")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return json.loads(ran.stdout)


def test_looking_explaining_and_ending(small_system: System) -> None:
    small_system.start_agent("--ttft-ms", "1", "--tpot-ms", "1")
    other = small_system.start_agent("--ttft-ms", "1", "--tpot-ms", "1", model="other")
    small_system.wait_for_sessions(1)
    small_system.wait_for_sessions(1, "other")

    health = tool(small_system, "health", "--models-min", "2")
    assert health.returncode == 0, health.stderr
    assert "models served: 2; sessions serving: 2 of 2" in health.stdout
    assert tool(small_system, "health", "--models-min", "3").returncode == 1

    rows = said(small_system, "registry", "ls")["sessions"]
    assert {(row["model"], row["state"], row["why_not_routed"]) for row in rows} == {
        ("m", "serving", None),
        ("other", "serving", None),
    }
    assert all(row["age_s"] < 2.5 and row["in_flight"] == 0 for row in rows)
    session = next(row["session"] for row in rows if row["model"] == "other")
    table = tool(small_system, "registry", "ls", "--model", "other")
    assert session in table.stdout
    assert len(table.stdout.splitlines()) == 2

    explained = said(small_system, "registry", "explain", session[:-3])
    assert explained["here"] == "it gets requests"
    assert explained["probe"].startswith("it answers a probe in")
    assert explained["registry"].startswith("the session is alive")
    assert said(small_system, "registry", "show", session)["record"]["metadata"]["model"] == "other"
    unknown = tool(small_system, "registry", "explain", "nobody")
    assert (unknown.returncode, unknown.stdout, unknown.stderr.count("\n")) == (3, "", 1)

    # The job's node dies; the batch system says so before any silence does.
    other.popen.send_signal(signal.SIGSTOP)
    ended = tool(small_system, "registry", "ended", "a1", "--reason", "NODE_FAIL")
    assert ended.returncode == 0, ended.stderr
    rows = said(small_system, "registry", "ls", "--all")["sessions"]
    assert {row["model"]: row["state"] for row in rows} == {"m": "serving", "other": "left"}
    wait_for(lambda: small_system.sessions("other") == 0, "the ingress has heard of it", 5)
    assert "has left" in said(small_system, "registry", "explain", session)["remedy"]
    other.popen.send_signal(signal.SIGCONT)
    wait_for(lambda: other.popen.poll() is not None, "an agent whose session was ended does not go on", 15)


def test_watching_prints_changes_until_it_is_interrupted(small_system: System) -> None:
    words = command(small_system, "registry", "watch", "--json")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stdout
            assert watching.stderr
            assert "watching 0 sessions" in watching.stderr.readline()
            agent = small_system.start_agent("--ttft-ms", "1", "--tpot-ms", "1")
            states = []

            def seen(state: str) -> None:
                assert watching.stdout
                while state not in states:
                    states.append(json.loads(watching.stdout.readline())["now"]["state"])

            seen("serving")  # It looks now and then: what is over before it has looked, it never saw.
            agent.terminate()
            seen("left")
            assert states[0] == "loading"
            watching.send_signal(signal.SIGINT)
            assert watching.wait(10) == 0
            assert watching.stderr.read() == ""
        finally:
            watching.kill()


def test_what_does_not_answer_is_one_clear_line_and_an_exit_code(system: System) -> None:
    for words in (["registry", "ls"], ["registry", "show", "x"], ["registry", "ended", "a"], ["health"]):
        ran = tool(system, *words)
        assert ran.returncode == 1
        assert ran.stderr.startswith(
            f"serai {' '.join(words[: 1 + (words[0] == 'registry')])}: the registry of site 'local'"
        )
        assert ran.stderr.count("\n") == 1
    system.processes[0].kill()
    ran = tool(system, "health")
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert "cannot reach NATS" in ran.stderr
    assert tool(system, "registry", "ls", "--state", "dozing").returncode == 2
    assert tool(system, "registry", "ended", "").returncode == 2
