"""How sessions end, with real processes: no stream is cut that need not be, and whoever is is told (H04-H07, H39)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from integration.system import Process, System, children_of, soon, wait_for
from integration.test_continuation import Heard, listen, metric
from serai.contracts.codec import decode, encode
from serai.contracts.drain import DrainAnswer, DrainRequest
from serai.contracts.subjects import DRAIN
from serai.runtime.nats_bus import NatsAddress, NatsBus

CHAT = "/v1/chat/completions"
PACED = ("--ttft-ms", "5", "--tpot-ms", "20")
QUICK_STOP = ("--engine-stop-s", "1")


def start_agent(system: System, *flags: str, environment: dict[str, str] | None = None) -> Process:
    """An agent whose allocation goes by the environment it is in."""
    engine = [sys.executable, "-m", "serai.engine_emulator", "--model", "m", *PACED]
    process = system.service("agent", "--model", "m", *QUICK_STOP, *flags, "--", *engine, environment=environment)
    wait_for(lambda: "agent.serving" in process.log or process.popen.poll() is not None, "agent serves")
    assert process.popen.poll() is None, process.log
    return process


def logged_s(process: Process, event: str) -> float:
    """When it happened, by its line in the log, in seconds since 1970."""
    wait_for(lambda: event in process.log, event, 10)
    line = next(line for line in process.log.splitlines() if f'"event":"{event}"' in line)
    return datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp()


class Streams:
    """Streams that run beside the test."""

    def __init__(self, system: System, count: int, body: dict[str, Any]) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._begun = 0
        self._system = system

        def begun(heard: Heard) -> None:
            self._begun += 1

        self._running = [self._pool.submit(listen, system, CHAT, body, begun, 3) for _ in range(count)]
        wait_for(lambda: self._begun == count, "all streams have begun")

    def heard(self) -> list[Heard]:
        """All of them, when they have ended."""
        return [one.result(60) for one in self._running]


def test_h07_twenty_long_streams_survive_the_end_of_their_allocation(small_system: System) -> None:
    """Nobody sends a signal: the agent goes by its own clock."""
    whole = {"max_tokens": 800, "stream_options": {"include_usage": True}}
    ending = start_agent(small_system, "--allocation", "a", "--allocation-s", "22", "--drain-s", "3")
    started_s = time.monotonic()
    small_system.wait_for_sessions(1)
    streams = Streams(small_system, 20, whole)
    other = start_agent(small_system, "--allocation", "b")
    small_system.wait_for_sessions(2)
    heard = streams.heard()
    assert ending.popen.wait(20) == 0
    assert time.monotonic() - started_s < 22
    assert all(one.session.startswith("local-a-") for one in heard)
    assert [one.error for one in heard] == [None] * 20
    assert [one.finish_reasons for one in heard] == [["length"]] * 20
    assert [one.ends for one in heard] == [1] * 20
    assert [one.usages[0]["completion_tokens"] for one in heard] == [800] * 20
    assert len({one.text for one in heard}) == 1, "as if it had not ended"
    handed = sum(bool(one.comments) for one in heard)
    assert handed, "else nothing was tested"
    with small_system.client() as client:
        assert metric(client, 'serai_ingress_continuations_total{model="m",outcome="resumed"}') == handed
        assert metric(client, "serai_ingress_broken_streams_total") == 0
        assert metric(client, "serai_ingress_tokens_lost_total") == 0
    small_system.wait_for_sessions(1)
    assert "its allocation ends" in ending.log
    assert "agent.left" in ending.log
    assert ending.log.count("agent.hands_over") > 1, "not all at once"
    assert other.popen.poll() is None


def test_what_cannot_go_on_elsewhere_is_told_so_and_counted(small_system: System) -> None:
    agent = start_agent(small_system, "--drain-s", "1")
    small_system.wait_for_sessions(1)
    heard = listen(small_system, CHAT, {"max_tokens": 5000, "logprobs": True}, lambda _: agent.popen.terminate(), 20)
    assert heard.error is not None
    assert heard.error["code"] == "agent_left"
    assert (heard.finish_reasons, heard.ends) == ([], 1)
    assert agent.popen.wait(10) == 0
    with small_system.client() as client:
        assert metric(client, 'serai_ingress_tokens_lost_total{reason="agent_left"}') >= 40


def ask_to_drain(system: System, session: str, within_s: float, role: str = "tools") -> DrainAnswer:
    async def ask() -> DrainAnswer:
        address = NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file(role))
        bus = await NatsBus.connect(address, role)
        try:
            request = encode(DrainRequest("its successor serves", within_s))
            return decode(DrainAnswer, (await bus.request(DRAIN.of(session), request, 5.0)).data)
        finally:
            await bus.aclose()

    return asyncio.run(ask())


@pytest.mark.parametrize("role", ["tools", "launcher"])
def test_h06_a_session_that_is_asked_finishes_what_it_has_and_leaves(small_system: System, role: str) -> None:
    agent = start_agent(small_system)
    small_system.wait_for_sessions(1)
    answers: list[DrainAnswer] = []

    def ask(heard: Heard) -> None:
        wrong = ask_to_drain(small_system, heard.session, -1.0, role)
        assert (wrong.accepted, wrong.why) == (False, "within_s -1: must be a number of seconds, not below 0")
        answers.append(ask_to_drain(small_system, heard.session, 60.0, role))

    heard = listen(small_system, CHAT, {"max_tokens": 100}, ask, 5)
    assert (heard.error, heard.finish_reasons) == (None, ["length"])
    assert answers == [DrainAnswer(heard.session, True, 1)]
    assert agent.popen.wait(10) == 0
    assert "its successor serves" in agent.log


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_h04_a_signal_starts_the_drain_within_a_second_and_ends_with_code_0(
    small_system: System, number: signal.Signals
) -> None:
    def begun_after_s() -> float:
        agent = start_agent(small_system)
        small_system.wait_for_sessions(1)
        sent_s: list[float] = []

        def send(_: Heard) -> None:
            sent_s.append(time.time())
            agent.popen.send_signal(number)

        heard = listen(small_system, CHAT, {"max_tokens": 100}, send, 5)
        assert (heard.error, heard.finish_reasons, heard.ends) == (None, ["length"], 1)
        assert agent.popen.wait(10) == 0
        small_system.wait_for_sessions(0)
        return logged_s(agent, "agent.draining") - sent_s[0]

    soon(begun_after_s, 1.0)


def put_slurm(folder: Path, scontrol: str, squeue: str = "echo 2:00:00") -> dict[str, str]:
    """Stand-ins for Slurm's commands, and the environment of a job."""
    folder.mkdir()
    for name, script in {"scontrol": scontrol, "squeue": squeue}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}


PREEMPTED = """\
[ "$2" = config ] && echo "KillWait                = 30 sec" && exit
end=$(date -d "+{grace_s} seconds" +%Y-%m-%dT%H:%M:%S)
echo "JobId=77 JobName=x JobState=RUNNING Reason=None EndTime=$end PreemptTime=$(date +%Y-%m-%dT%H:%M:%S)"
"""


def test_h05_a_preempted_job_uses_its_grace_and_hands_the_rest_over_before_the_kill(
    small_system: System, tmp_path: Path
) -> None:
    """SIGTERM, SIGKILL after a grace of 9 s, and five streams of which two fit into it."""
    environment = put_slurm(tmp_path / "slurm", PREEMPTED.replace("{grace_s}", "9"))
    soon(lambda: _preempted(small_system, environment), 9)


def _preempted(small_system: System, environment: dict[str, str]) -> float:
    """How long after SIGTERM the agent has ended, in seconds: before the kill, it is hoped."""
    agent = start_agent(small_system, "--drain-s", "60", environment=environment)
    small_system.wait_for_sessions(1)
    lengths = [40, 150, 2000, 3000, 4000]
    with ThreadPoolExecutor(5) as pool:
        begun: list[int] = []
        running = [
            pool.submit(
                listen, small_system, CHAT, {"max_tokens": length, "logprobs": True}, lambda _: begun.append(1), 3
            )
            for length in lengths
        ]
        wait_for(lambda: len(begun) == 5, "all streams have begun")
        told_at_s, told_s = time.time(), time.monotonic()
        agent.popen.terminate()
        assert logged_s(agent, "agent.draining") - told_at_s < 1.0
        with small_system.client() as client:
            wait_for(lambda: small_system.sessions() == 0, "it gets no new requests", 4)
            refused = client.post(CHAT, json={"model": "m", "messages": [{"role": "user", "content": "x"}]})
            assert refused.status_code in (404, 503)
        heard = [one.result(30) for one in running]
        over_s = time.monotonic() - told_s
    assert agent.popen.wait(30) == 0
    ended_after_s = time.monotonic() - told_s
    assert [one.finish_reasons for one in heard] == [["length"], ["length"], [], [], []]
    assert [(one.error or {}).get("code") for one in heard] == [None, None, *["agent_left"] * 3]
    assert over_s > 4, "the time that there was has been used"
    assert '"reason":"preempted"' in agent.log
    assert "agent.left" in agent.log
    return ended_after_s


def test_h15_a_scontrol_that_hangs_delays_nothing(small_system: System, tmp_path: Path) -> None:
    environment = put_slurm(tmp_path / "slurm", "trap '' TERM; sleep 600", "sleep 600")

    def cut_after_s() -> float:
        agent = start_agent(small_system, "--drain-s", "1", environment=environment)
        small_system.wait_for_sessions(1)
        told_s: list[float] = []

        def stop(_: Heard) -> None:
            agent.popen.terminate()
            told_s.append(time.monotonic())

        heard = listen(small_system, CHAT, {"max_tokens": 5000}, stop, 5)
        took_s = time.monotonic() - told_s[0]
        assert heard.error is not None
        assert agent.popen.wait(10) == 0
        return took_s

    soon(cut_after_s, 4)


def test_h39_a_sigterm_to_the_engine_of_a_job_cuts_nothing(small_system: System, tmp_path: Path) -> None:
    """Some Slurms send it to all processes of a job at once. The agent ends the engine all the same, and quickly."""
    environment = put_slurm(tmp_path / "slurm", PREEMPTED.replace("{grace_s}", "60"))
    agent = start_agent(small_system, "--engine-stop-s", "20", environment=environment)
    small_system.wait_for_sessions(1)

    def stop(_: Heard) -> None:
        os.kill(engine_pid(small_system, agent), signal.SIGTERM)
        agent.popen.terminate()

    heard = listen(small_system, CHAT, {"max_tokens": 100}, stop, 5)
    assert (heard.error, heard.finish_reasons, heard.ends) == (None, ["length"], 1)
    ended_s = time.monotonic()
    assert agent.popen.wait(30) == 0
    assert time.monotonic() - ended_s < 10
    assert "engine.killed" not in agent.log


def engine_pid(system: System, agent: Process) -> int:
    """The child of the agent that listens on its engine's port."""
    wanted = f"\0{system.engine_port(agent)}\0".encode()
    return next(pid for pid, line in children_of(agent.popen.pid).items() if wanted in line)
