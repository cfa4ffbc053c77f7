"""An ingress of several processes, with real signals: what clients see while workers come and go, and what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx2

from integration.system import Process, System, children_of, port_answers, wait_for
from serai.worker_agent.engine.process import free_port

CHAT = "/v1/chat/completions"


def asked(tokens: int, *, stream: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": "Tell me of caravans."}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "stream": stream}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # Before it was opened, or between that and reading.
        return False


def with_workers(system: System, *flags: str) -> Process:
    """Two workers, both ready, before one agent."""
    system.start_registry()
    ingress = system.start_ingress("--workers", "2", *flags)
    system.start_agent("--ttft-ms", "5", "--tpot-ms", "10")
    system.wait_for_sessions(1)
    wait_for(lambda: ingress.log.count("ingress.ready") == 2, "both workers ready")
    return ingress


def counted(text: str, name: str) -> float:
    """The sum of all samples of a metric."""
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


class Clients:
    """Clients that ask again and again, without a second try, each on a kept connection of its own."""

    def __init__(self, system: System, unary: int, streams: int) -> None:
        self._system = system
        self._kinds = [False] * unary + [True] * streams
        self.failures: list[str] = []
        self.unary = self.streams = 0
        self._stop = asyncio.Event()

    async def run(self, during: Callable[[], None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for is_stream in self._kinds:
                tasks.create_task(self._ask_on(is_stream))
            await asyncio.to_thread(during)
            self._stop.set()

    async def _ask_on(self, is_stream: bool) -> None:
        headers = {"Authorization": f"Bearer {self._system.key}"}
        async with httpx2.AsyncClient(base_url=self._system.url, headers=headers, timeout=60) as client:
            while not self._stop.is_set():
                try:
                    answer = await client.post(CHAT, json=asked(60 if is_stream else 2, stream=is_stream))
                except httpx2.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                is_whole = answer.text.rstrip().endswith("data: [DONE]") and '"error"' not in answer.text
                if answer.status_code != 200 or (is_stream and not is_whole):
                    self.failures.append(f"{answer.status_code} {answer.text[-300:]}")
                self.streams += is_stream
                self.unary += not is_stream


def test_a_rolling_restart_fails_no_request_and_cuts_no_stream(system: System) -> None:
    ingress = with_workers(system)
    seen: set[int] = set()

    def replace_all_twice() -> None:
        for time_ in (1, 2):
            before = children_of(ingress.popen.pid)
            seen.update(before)
            ingress.popen.send_signal(signal.SIGHUP)
            wait_for(lambda: ingress.log.count("ingress.ready") == 2 + 2 * time_, "two new workers")  # noqa: B023
            wait_for(lambda: not any(map(lives, before)), "the old ones end")  # noqa: B023
        seen.update(children_of(ingress.popen.pid))

    clients = Clients(system, unary=6, streams=4)
    asyncio.run(clients.run(replace_all_twice))
    assert clients.failures == []
    assert clients.unary > 50
    assert clients.streams > 8
    assert len(seen) == 6
    with system.client() as client:
        metrics = client.get("/metrics").text
    # What the workers that are gone had counted is counted still.
    assert counted(metrics, "serai_ingress_requests_total") == clients.unary + clients.streams
    assert ingress.terminate() == 0


def test_a_worker_that_is_killed_is_replaced_and_counts_do_not_fall(system: System) -> None:
    ingress = with_workers(system, "--metrics-port", str(metrics_port := free_port()))

    def answered() -> float:
        return counted(httpx2.get(f"http://127.0.0.1:{metrics_port}/metrics").text, "serai_ingress_requests_total")

    for _ in range(8):
        with system.client() as client:
            assert client.post(CHAT, json=asked(1, stream=False)).status_code == 200
    assert answered() == 8
    victim = min(children_of(ingress.popen.pid))
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: ingress.log.count("ingress.ready") == 3, "a third worker")
    assert "ended with exit code 137; another is started now" in ingress.log
    for _ in range(8):
        with system.client() as client:
            assert client.post(CHAT, json=asked(1, stream=False)).status_code == 200
    assert answered() == 16
    assert len(children_of(ingress.popen.pid)) == 2


def test_connections_of_a_dead_worker_wait_for_the_next_one(system: System) -> None:
    ingress = with_workers(system)
    for pid in children_of(ingress.popen.pid):
        os.kill(pid, signal.SIGKILL)
    # Nobody is there to answer; nobody is refused either.
    with system.client() as client:
        assert client.post(CHAT, json=asked(1, stream=False)).status_code in (200, 404, 503)
        system.wait_for_sessions(1)
        assert client.post(CHAT, json=asked(1, stream=False)).status_code == 200


def test_no_worker_outlives_a_parent_that_is_killed(system: System) -> None:
    ingress = with_workers(system)
    workers = children_of(ingress.popen.pid)
    environment = dict(
        word.split("=", 1) for word in Path(f"/proc/{min(workers)}/environ").read_text().split("\0") if "=" in word
    )
    folder = Path(json.loads(environment["SERAI_INGRESS_PLACE"])["folder"])
    assert folder.exists()
    ingress.kill()
    wait_for(lambda: not any(map(lives, workers)), "the workers end", 10)
    wait_for(lambda: not folder.exists(), "the last of them has removed their folder", 5)


def test_stopping_lets_load_balancers_notice_first(system: System) -> None:
    ingress = with_workers(system, "--drain-delay-s", "4", "--shutdown-s", "20")
    workers = children_of(ingress.popen.pid)
    with system.client() as early, system.client() as idle:
        assert idle.get("/health/ready").status_code == 200
        with early.stream("POST", CHAT, json=asked(700, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            stopped_s = time.monotonic()
            ingress.popen.terminate()
            wait_for(lambda: ready(system) == 503, "not ready any more", 3.5)
            with system.client() as late:  # A new connection, and a whole answer.
                assert late.post(CHAT, json=asked(1, stream=False)).status_code == 200
            assert time.monotonic() - stopped_s < 4
            wait_for(lambda: not port_answers(int(system.url.rpartition(":")[2])), "nobody listens", 10)
            assert any(map(lives, workers))
            assert "data: [DONE]" in [*lines]
    assert ingress.popen.wait(20) == 0


def ready(system: System) -> int:
    with system.client() as client:
        return client.get("/health/ready").status_code


def test_what_is_cut_at_the_end_is_told_so(system: System) -> None:
    ingress = with_workers(system, "--shutdown-s", "0.5")
    with system.client() as client, client.stream("POST", CHAT, json=asked(100_000, stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        ingress.popen.terminate()
        said = [line for line in lines if line]
    assert said[-1] == "data: [DONE]"
    assert json.loads(said[-2].removeprefix("data: "))["error"]["code"] == "stopped"
    assert ingress.popen.wait(20) == 0


def test_what_is_wrong_at_the_start_is_said_once_with_its_exit_code(system: System) -> None:
    nats = ["--nats-url", f"nats://127.0.0.1:{system.nats_port}"]
    key = ["--nats-nkey-file", str(system.nats.key_file("ingress"))]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = ended(*nats, *key, "--port", str(port))
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        f"serai ingress: cannot listen on 127.0.0.1:{port} (Address already in use); is another server there? "
        "choose another --port"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = ended(*nats, *key, "--port", str(free_port()), "--metrics-port", str(port))
    assert (refused.returncode, refused.stderr.count("choose another --metrics-port")) == (2, 1)
    wrong_key = ["--nats-nkey-file", str(system.nats.key_file("agent"))]
    refused = ended(*nats, *wrong_key, "--port", str(free_port()))
    assert refused.returncode not in (0, 2)
    assert refused.stderr.count("serai ingress:") == 1, refused.stderr


def ended(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serai.cli.main", "ingress", "--anonymous", "--workers", "2", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
