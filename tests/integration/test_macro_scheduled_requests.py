"""Requests under the policy `macro-scheduled`: client, ingress, macro-scheduler, agents with phase-gated engines."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from integration.system import System, freeze, private_system, wait_for
from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAnswers,
    AdmissionRequest,
    Decision,
    GateMode,
    InstanceState,
    Lease,
    TakeInstance,
)
from serai.contracts.codec import decode, encode
from serai.contracts.subjects import ADMISSION, TAKE
from serai.runtime.bus import Message
from serai.runtime.nats_bus import NatsAddress, NatsBus

GATED = ("--gpu", "h100-sxm-80", "--card", "Qwen2.5-7B-Instruct", "--mode", "phase-gated")


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """Registry, ingress and two agents; who schedules is the test's."""
    with private_system(tmp_path) as made:
        made.start_registry()
        # Patience for a busy machine: who answers late counts as silent.
        made.start_ingress("--policy", "macro-scheduled", "--admission-patience-s", "0.5")
        first, second = (made.start_agent(*GATED, wait=False) for _ in range(2))
        for agent in (first, second):
            wait_for(lambda: "agent.serving" in agent.log, "agent serves")  # noqa: B023
        made.wait_for_sessions(2)
        yield made


def ask(client: httpx2.Client, tokens: int = 8, **headers: str) -> httpx2.Response:
    body = {"model": "m", "max_tokens": tokens, "messages": [{"role": "user", "content": "What is a serai?"}]}
    return client.post("/v1/chat/completions", json=body, headers=headers)


def admissions(system: System) -> Counter[str]:
    """What came of the ingress's asks so far."""
    with system.client() as client:
        text = client.get("/metrics").text
    found = re.findall(r'serai_ingress_admissions_total\{decision="(\w+)",model="m"\} (\S+)', text)
    return Counter({decision: int(float(count)) for decision, count in found})


def start_scheduler(system: System) -> Any:
    process = system.service("macro-scheduler", "--lease-s", "1", "--beat-s", "0.2")
    wait_for(lambda: '"macro.leads"' in process.log, "it leads")
    return process


def test_requests_get_leases_are_refused_early_and_outlive_their_scheduler(system: System) -> None:
    with system.client() as client:
        began_s = time.monotonic()
        assert ask(client).status_code == 200
        assert time.monotonic() - began_s < 5
        assert admissions(system) == {"absent": 1}

        scheduler = start_scheduler(system)
        wait_for(lambda: ask(client).status_code == 200 and admissions(system)["admit"] > 0, "a lease")
        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(lambda _: ask(client, 30), range(24)))
        assert {one.status_code for one in answers} == {200}
        assert len({one.headers["x-serai-session"] for one in answers}) == 2
        counts = admissions(system)
        assert counts["admit"] + counts["best_effort"] + counts["granted"] >= 20, counts
        assert counts["granted"] > 0, "at ease it gives places in advance"

        hopeless = ask(client, **{"x-slo-ttft-ms": "0.01", "x-slo-best-effort": "no"})
        assert hopeless.status_code == 503
        assert hopeless.json()["error"]["code"] == "target_unreachable"
        assert int(hopeless.headers["retry-after"]) >= 1

        freeze(scheduler.popen.pid)
        before = admissions(system)
        began_s = time.monotonic()
        # Stricter than what places are given in advance for, so each has to be asked for.
        assert [ask(client, **{"x-slo-ttft-ms": "4000"}).status_code for _ in range(3)] == [200] * 3
        assert time.monotonic() - began_s < 5
        assert admissions(system)["silent"] > before["silent"]
        scheduler.popen.send_signal(signal.SIGCONT)
        scheduler.kill()
        assert ask(client).status_code == 200


class Leader:
    """The test itself as the macro-scheduler: it takes all instances and promises what it likes."""

    EPOCH = 5 << 20

    def __init__(self, system: System) -> None:
        self._address = NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file("macro-scheduler"))
        self.excluded: list[list[str]] = []
        self.sessions: list[str] = []
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._lead()))

    def __enter__(self) -> Leader:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _lead(self) -> None:
        bus = await NatsBus.connect(self._address, "macro-scheduler")

        def on_session(message: Message) -> None:
            session = message.subject.partition(".")[2]
            if session not in self.sessions:
                self.sessions.append(session)

        def on_asks(message: Message) -> None:
            asks = decode(AdmissionRequest, message.data).asks
            self.excluded += [one.excluded for one in asks]
            answers = [AdmissionAnswers([self._answer(one.request_id, one.excluded)]) for one in asks]
            for answer in answers:
                bus.publish(message.reply, encode(answer))

        await bus.subscribe("status.*", on_session)
        await bus.subscribe(ADMISSION.of_model("m"), on_asks)
        while len(self.sessions) < 2:
            await asyncio.sleep(0.02)
        self.sessions.sort()
        while not self._stop.is_set():
            for session in self.sessions:
                take = TakeInstance("test", self.EPOCH, GateMode.PADG, 0.1, 1.0)
                answer = await bus.request(TAKE.of(session), encode(take), 2.0)
                assert decode(InstanceState, answer.data).accepted
            self._ready.set()
            await asyncio.sleep(0.3)
        await bus.aclose()

    def _answer(self, request_id: str, excluded: list[str]) -> AdmissionAnswer:
        """First a promise in the name of an epoch that is over, which no instance keeps."""
        session = next(one for one in self.sessions if one not in excluded)
        epoch = self.EPOCH if excluded else self.EPOCH - 1
        lease = Lease(epoch, len(self.excluded), 0.01, 100, 2.0, slo_ttft_s=5.0, slo_tpot_s=0.1, prompt_tokens=20)
        return AdmissionAnswer(request_id, Decision.ADMIT, session, lease)


def test_a_lease_that_an_instance_refuses_costs_another_ask_and_no_failure(system: System) -> None:
    with Leader(system) as leader, system.client() as client:
        answer = ask(client)
        assert answer.status_code == 200
        assert leader.excluded == [[], [leader.sessions[0]]]
        assert answer.headers["x-serai-session"] == leader.sessions[1]
        assert admissions(system) == {"admit": 2, "lease_refused": 1}
