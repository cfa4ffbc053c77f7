"""Usage records from the ingress to SQL: what they say, and that none of an answered request is lost or counted twice
when the ingress, the ledger or NATS is killed."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

from integration.system import Process, System, wait_for
from serai.worker_agent.engine.process import free_port

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "How far to the inn?"}], "max_tokens": 8}


class Site:
    """A system with a ledger, whose parts are killed and started again where they were."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.database = system.folder / "usage.sqlite"
        self.port = free_port()
        self.parts: dict[str, Process] = {}

    def start(self, *names: str) -> None:
        for name in names:
            self.parts[name] = getattr(self, f"_start_{name}")()

    def _start_registry(self) -> Process:
        return self.system.start_registry()

    def _start_nats(self) -> Process:
        return self.system.start_nats()

    def _start_ledger(self) -> Process:
        process = self.system.service("ledger", "--ledger", self.url)
        wait_for(lambda: "ledger.ready" in process.log, "ledger ready")
        return process

    def _start_ingress(self) -> Process:
        keys = ["--keys-file", str(self.system.folder / "keys.json"), "--port", str(self.port)]
        process = self.system.service("ingress", *keys, "--usage-spool", str(self.system.folder / "spool"))
        self.system.url = f"http://127.0.0.1:{self.port}"
        wait_for(lambda: "ingress.ready" in process.log, "ingress ready")
        return process

    @property
    def url(self) -> str:
        return f"sqlite:///{self.database}"

    def rows(self, columns: str = "*", where: str = "1 = 1") -> list[dict[str, Any]]:
        """What the ledger has committed."""
        if not self.database.exists():
            return []
        connection = sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)
        try:
            cursor = connection.execute(f"SELECT {columns} FROM usage_records WHERE {where} ORDER BY started")
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, found, strict=True)) for found in cursor.fetchall()]
        finally:
            connection.close()

    def row(self, request_id: str) -> dict[str, Any]:
        (row,) = wait_for(lambda: self.rows(where=f"request_id = '{request_id}'"), f"a record of {request_id}")
        return dict(row)


@pytest.fixture
def site(system: System) -> Site:
    made = Site(system)
    made.parts["nats"] = system.processes[-1]
    made.start("registry", "ledger", "ingress")
    system.start_agent("--tpot-ms", "2", "--ttft-ms", "5")
    system.wait_for_sessions(1)
    return made


def test_one_record_for_each_request_whatever_happened_to_it(site: Site) -> None:
    with site.system.client() as client:
        plain = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "plain"})
        streamed = client.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers={"x-request-id": "stream"})
        client.post("/v1/chat/completions", json=CHAT | {"model": "nowhere"}, headers={"x-request-id": "unknown"})
        with client.stream(
            "POST",
            "/v1/chat/completions",
            json=CHAT | {"stream": True, "max_tokens": 5000},
            headers={"x-request-id": "left"},
        ) as answer:
            next(answer.iter_lines())
    assert plain.status_code == 200
    assert "usage" not in streamed.text, "who has not asked for it does not see it"
    told = plain.json()["usage"]

    row = site.row("plain")
    assert (row["outcome"], row["status"], row["attempts"], row["tracked"]) == ("complete", 200, 1, 1)
    assert (row["prompt_tokens"], row["output_tokens"]) == (told["prompt_tokens"], told["completion_tokens"])
    assert (row["model"], row["engine"], row["key"], row["endpoint"]) == (
        "m",
        "emulated",
        "test",
        "/v1/chat/completions",
    )
    assert row["sessions"] == plain.headers["x-serai-session"]
    row = site.row("stream")
    assert (row["outcome"], row["tokens_estimated"]) == ("complete", 0)
    assert (row["prompt_tokens"], row["output_tokens"]) == (told["prompt_tokens"], told["completion_tokens"])
    assert 0 < row["ttft_s"] < row["duration_s"]
    row = site.row("unknown")
    assert (row["outcome"], row["status"], row["model"], row["model_asked"]) == ("refused", 404, "", "nowhere")
    row = site.row("left")
    assert (row["outcome"], row["status"], row["tokens_estimated"]) == ("cancelled", 499, 1)
    assert 0 < row["output_tokens"] < 5000

    command = [
        sys.executable,
        "-m",
        "serai.cli.main",
        "usage",
        "--by",
        "model",
        "--format",
        "json",
        "--ledger",
        site.url,
    ]
    done = subprocess.run(command, check=True, capture_output=True)
    (of_m,) = [line for line in json.loads(done.stdout) if line["model"] == "m"]
    assert (of_m["requests"], of_m["complete"], of_m["cancelled"]) == (3, 2, 1)


class Load:
    """Requests one after the other from several clients; whose answers came whole."""

    def __init__(self, system: System, clients: int = 4) -> None:
        self._system = system
        self._stop = threading.Event()
        self.answered: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, client_number: int) -> None:
        for number in range(100_000):
            if self._stop.is_set():
                return
            name, streamed = f"c{client_number}-{number}", number % 2 == 0
            try:
                with self._system.client(10) as client:
                    answer = client.post(
                        "/v1/chat/completions", json=CHAT | {"stream": streamed}, headers={"x-request-id": name}
                    )
            except httpx2.HTTPError:
                time.sleep(0.02)  # Killed just now; its client does not know whether it was answered.
                continue
            if answer.status_code == 200 and (not streamed or answer.text.endswith("data: [DONE]\n\n")):
                self.answered.append(name)

    def more(self, count: int) -> None:
        """Until so many more were answered."""
        wanted = len(self.answered) + count
        wait_for(lambda: len(self.answered) >= wanted, f"{count} more answers", 60)


@pytest.mark.parametrize("victim", ["ingress", "ledger", "nats"])
def test_nothing_answered_is_lost_and_nothing_counts_twice_when_it_is_killed(site: Site, victim: str) -> None:
    with Load(site.system) as load:
        for _ in range(3):
            load.more(30)
            site.parts[victim].kill()
            site.start(victim)
        load.more(30)
    answered = set(load.answered)

    def missing() -> set[str]:
        return answered - {row["request_id"] for row in site.rows("request_id", "status = 200")}

    wait_for(lambda: not missing(), f"a record of each of {len(answered)} answered requests", 60)
    times = Counter(row["request_id"] for row in site.rows("request_id", "request_id <> ''"))
    assert not [name for name, count in times.items() if count > 1]


def test_records_wait_for_a_ledger_and_survive_the_ingress(system: System) -> None:
    """Nobody keeps records; the ingress that made some is killed; the next one sends them."""
    site = Site(system)
    site.start("registry", "ingress")
    system.start_agent()
    system.wait_for_sessions(1)
    with system.client() as client:
        client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "early"})
    site.parts["ingress"].kill()
    site.start("ingress", "ledger")
    assert site.row("early")["outcome"] == "complete"
    wait_for(lambda: sum(path.stat().st_size for path in spooled(system)) == 0 or len(spooled(system)) == 1, "sent")


def spooled(system: System) -> list[Path]:
    return list((system.folder / "spool").glob("*.usage"))
