"""The NATS server stopped for a while under load: everybody goes on from what they know, nobody restarts."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.steady_client import Told, sessions_in
from integration.system import Process, System, children_of, wait_for
from serai.cli.embedded_nats import server_binary

OUTAGE_S = float(os.environ.get("SERAI_OUTAGE_S", "6"))
RIGHT_AGAIN_S = 5.0
QUICKLY_S = 1.0
PATIENCE_S = 60.0
"""This machine is shared, and a process may not run for a while."""
AGENTS = 3
STREAMS = 6
PER_SECOND = 10.0
TPOT_MS = 20.0
STREAM_TOKENS = int((OUTAGE_S + 8) * 1000 / TPOT_MS)
"""It would last until after the return."""
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}], "temperature": 0}
CLIENT = Path(__file__).with_name("steady_client.py")

pytestmark = pytest.mark.timeout(240 + 3 * int(OUTAGE_S))


@dataclass
class Stream:
    """What a client hears of one stream."""

    continuable: bool
    data: list[str] = field(default_factory=list)
    ended: bool = False

    def listen(self, system: System) -> None:
        body = QUESTION | {"stream": True, "max_tokens": STREAM_TOKENS}
        if not self.continuable:
            body |= {"logprobs": True}
        url = "/v1/chat/completions"
        with system.client(OUTAGE_S + PATIENCE_S) as client, client.stream("POST", url, json=body) as answer:
            self.data.extend(line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        self.ended = True

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self.data if data != "[DONE]"]

    @property
    def error(self) -> dict[str, Any] | None:
        """The error it ended with; it must be the last word but for `[DONE]`, and no stream ends without `[DONE]`."""
        assert self.data[-1] == "[DONE]"
        errors = [event["error"] for event in self.events if "error" in event]
        assert len(errors) <= 1
        assert not errors or "error" in self.events[-1]
        return errors[0] if errors else None

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(choice["delta"].get("content") or "" for choice in self.choices)

    @property
    def finished(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice.get("finish_reason")]


def pids(processes: list[Process]) -> dict[int, tuple[int, ...]]:
    """By process of ours that runs, its children: an agent's engine."""
    return {
        process.popen.pid: tuple(children_of(process.popen.pid))
        for process in processes
        if process.popen.poll() is None
    }


def whole_text(system: System) -> str:
    """The answer from beginning to end, as the engine says when nobody stops it."""
    with system.engine(next(one for one in system.processes if one.name == "agent")) as engine:
        body = QUESTION | {"max_tokens": STREAM_TOKENS}
        answer = engine.post("/v1/chat/completions", json=body, timeout=OUTAGE_S + PATIENCE_S)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


class InBackground(threading.Thread):
    """Asks for the whole text meanwhile: between engine and us there is no NATS."""

    def __init__(self, system: System) -> None:
        super().__init__(daemon=True)
        self._system = system
        self.text = ""

    def run(self) -> None:
        self.text = whole_text(self._system)


def restart_nats(system: System) -> float:
    """When it listens again."""
    binary = server_binary()
    assert binary
    process = system.start("nats", [binary, "-c", str(system.nats.config_file)])
    wait_for(lambda: "Server is ready" in process.log, "nats-server listens", PATIENCE_S)
    return time.monotonic()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_server_that_is_away_under_load_costs_its_requests_and_nothing_else(
    system: System, how: signal.Signals
) -> None:
    nats = system.processes[0]
    ours = [system.start_registry("--nats-system-nkey-file", str(system.nats.key_file("system")))]
    ours.append(system.start_ingress())
    timing = ("--ttft-ms", "10", "--tpot-ms", str(TPOT_MS))
    ours += [system.start_agent(*timing, wait=False) for _ in range(AGENTS)]
    system.wait_for_sessions(AGENTS, timeout_s=PATIENCE_S)
    running = pids(ours)

    client = system.start("client", [sys.executable, str(CLIENT), system.url, system.key, "m", str(PER_SECOND)])
    told = Told(client.log_file)
    streams = [Stream(continuable=number % 2 == 0) for number in range(STREAMS)]
    whole = InBackground(system)
    threads = [whole, *(threading.Thread(target=stream.listen, args=(system,), daemon=True) for stream in streams)]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(len(stream.data) > 10 for stream in streams), "streams run", PATIENCE_S)
    wait_for(lambda: len({one["session"] for one in told.read().answers}) == AGENTS, "all are routed to", PATIENCE_S)
    before = {one["session"] for one in told.answers}
    assert told.failed == []

    nats.popen.send_signal(how)
    nats.popen.wait(PATIENCE_S)
    stopped_at_s = time.monotonic()
    time.sleep(OUTAGE_S)
    back_at_s = restart_nats(system)

    def answered_since(since_s: float) -> set[str]:
        return {one["session"] for one in told.read().answers if one["status"] == 200 and one["began_s"] > since_s}

    wait_for(lambda: answered_since(back_at_s) >= before, "every session is routed to again", PATIENCE_S)
    for thread in threads:
        thread.join(OUTAGE_S + PATIENCE_S)
    assert client.terminate(PATIENCE_S) == 0, client.log
    told.read()
    assert pids(ours) == running, "nobody has restarted, and no engine"
    assert answered_since(stopped_at_s) == before, "by nobody else"

    answered = [one for one in told.answers if one["status"] == 200 and one["began_s"] >= stopped_at_s]
    again_s = min(one["began_s"] + one["took_s"] for one in answered) - back_at_s
    last_failed_s = max((one["began_s"] + one["took_s"] for one in told.failed), default=back_at_s) - back_at_s
    ends = [(stream.error or {}).get("code", "whole") for stream in streams]
    slowest_s = max(one["took_s"] for one in told.failed)
    print(
        f"{how.name}: away for {back_at_s - stopped_at_s:.1f} s; answered again after {again_s:.2f} s, "
        f"the last failure {last_failed_s:.2f} s after the return; "
        f"{len(told.failed)} of {len(told.answers)} requests failed, "
        f"the slowest after {slowest_s:.3f} s; streams ended: {ends}"
    )
    assert again_s <= RIGHT_AGAIN_S
    assert last_failed_s <= RIGHT_AGAIN_S, "after which none fails"
    honest_refusals(told, stopped_at_s, back_at_s)
    looked_at_the_copy(told, stopped_at_s, back_at_s)
    honest_ends(streams, whole.text)


def honest_refusals(told: Told, stopped_at_s: float, back_at_s: float) -> None:
    during = [one for one in told.answers if stopped_at_s + 0.5 < one["began_s"] < back_at_s]
    assert len(during) > OUTAGE_S * PER_SECOND / 2, "the load was steady"
    for one in told.failed:
        assert (one["status"], bool(one["retry_after"])) == (503, True), one
        assert "error" in json.loads(one["text"]), one
    assert {one["status"] for one in during} == {503}
    took_s = sorted(one["took_s"] for one in during)
    assert took_s[len(took_s) * 9 // 10] < QUICKLY_S, "the longest are this machine's"


def looked_at_the_copy(told: Told, stopped_at_s: float, back_at_s: float) -> None:
    """The list of models goes on being answered, as it was, and tells its age."""
    during = [look for look in told.looks if stopped_at_s + 0.5 < look["at_s"] < back_at_s]
    assert len(during) > OUTAGE_S
    assert {look["status"] for look in told.looks} == {200}
    assert all(sessions_in(look, "m") == {"serving": AGENTS} for look in during)
    for look in during:
        away_s = look["at_s"] - stopped_at_s
        assert away_s - 1 < look["models"]["m"]["age_s"] < away_s + 3, (away_s, look)
    assert sessions_in(told.looks[-1], "m") == {"serving": AGENTS}


def honest_ends(streams: list[Stream], whole: str) -> None:
    assert whole
    for stream in streams:
        assert stream.ended, "it never ended"
        if stream.error is None:
            assert stream.continuable, "with log probabilities it cannot go on elsewhere"
            assert (stream.text, stream.finished) == (whole, ["length"])
        else:
            assert stream.error["code"] == "bus_lost"
            assert stream.finished == []
            assert whole.startswith(stream.text)
            assert len(stream.text) < len(whole)
