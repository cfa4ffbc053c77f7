"""`serai up` as a developer meets it: with emulated engines here; `make smoke` runs it with the real model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2

from integration.system import wait_for
from serai.worker_agent.engine.process import free_port

UP = [sys.executable, "-m", "serai.cli.main", "up", "--emulated", "--engine-args", "--ttft-ms 1 --tpot-ms 1"]


@contextmanager
def up(state: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], dict]]:
    state.mkdir(exist_ok=True)
    ready = state / "ready.json"
    ready.unlink(missing_ok=True)
    command = [*UP, "--port", str(free_port()), "--state", str(state), "--ready-file", str(ready), *flags]
    with (state / "up.out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, "serai up is up")
        assert process.poll() is None, (state / "up.out").read_text()
        yield process, json.loads(ready.read_text())
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(40)


def ask(facts: dict) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {facts['key']}"}
    body = {"model": facts["model"], "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    return httpx2.post(f"{facts['url']}/v1/chat/completions", json=body, headers=headers, timeout=10)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_it_serves_restarts_what_fails_keeps_its_key_and_leaves_nothing_running(tmp_path: Path) -> None:
    with up(tmp_path, "--agents", "2") as (process, facts):
        assert set(facts["pids"]) == {
            "nats", "registry", "ingress", "ledger", "agent-0", "agent-1", "engine-0", "engine-1"
        }  # fmt: skip
        assert ask(facts).status_code == 200
        printed = (tmp_path / "up.out").read_text()
        assert facts["key"] in printed
        assert f"curl -N {facts['url']}/v1/chat/completions" in printed
        secrets = [tmp_path / "api-key", tmp_path / "keys.json", *(tmp_path / "nats").glob("*.nk")]
        assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
        assert facts["key"] not in (tmp_path / "keys.json").read_text()

        again = subprocess.run(
            [*UP, "--port", str(free_port()), "--state", str(tmp_path)], capture_output=True, check=False
        )
        assert again.returncode == 2
        assert b"another `serai up` uses" in again.stderr

        os.kill(facts["pids"]["agent-0"], signal.SIGKILL)
        assert ask(facts).status_code == 200
        wait_for(lambda: not alive(facts["pids"]["engine-0"]), "the engine dies with its agent", 20)
        wait_for(lambda: "agent-0 ended" in (tmp_path / "up.out").read_text(), "the failure is told", 20)
        headers = {"Authorization": f"Bearer {facts['key']}"}
        models = f"{facts['url']}/v1/models/{facts['model']}"

        def serving() -> int:
            return int(httpx2.get(models, headers=headers).json().get("sessions", {}).get("serving", 0))

        wait_for(lambda: serving() == 2, "two sessions again")
    assert process.returncode == 0
    assert not any(alive(pid) for pid in facts["pids"].values())
    with up(tmp_path) as (process, second):
        assert second["key"] == facts["key"]
        assert ask(second).status_code == 200
        wait_for(lambda: requests_in_ledger(tmp_path) == 3, "all three requests are in the ledger")


def requests_in_ledger(state: Path) -> int:
    command = [*UP[:3], "usage", "--by", "model", "--format", "json"]
    ran = subprocess.run(command, env=os.environ | {"SERAI_STATE": str(state)}, capture_output=True, check=True)
    return sum(line["requests"] for line in json.loads(ran.stdout))


def test_an_engine_that_cannot_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    flags = ["--port", str(free_port()), "--state", str(tmp_path), "--engine-args", "--fault refuse-start"]
    ran = subprocess.run([*UP, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "agent-0 ended with exit code 2 while starting; the end of" in ran.stderr
    assert "out of memory" in ran.stderr.lower()


def test_two_sites_on_one_machine_serve_each_others_models(tmp_path: Path) -> None:
    ports = free_ports(2)
    with up(tmp_path, "--sites", "2", "--port", str(ports[0])) as (process, facts):
        assert [site["site"] for site in facts["sites"]] == ["site-1", "site-2"]
        headers = {"Authorization": f"Bearer {facts['key']}"}
        for site in facts["sites"]:
            entry = httpx2.get(f"{site['url']}/v1/models/{facts['model']}", headers=headers).json()
            assert entry["sessions"] == {"serving": 2}
            assert [ask(facts | {"url": site["url"]}).status_code for _ in range(4)] == [200] * 4
            tool = ["registry", "ls", "--json", "--registry", site["site"], "--nats-url", site["nats_url"]]
            ran = subprocess.run(
                [*UP[:3], *tool, "--nats-nkey-file", site["tools_nkey_file"]], capture_output=True, check=True
            )
            assert {row["site"] for row in json.loads(ran.stdout)["sessions"]} == {"site-1", "site-2"}
        wait_for(lambda: requests_in_ledger(tmp_path) == 8, "the requests of both sites, each once")
        printed = (tmp_path / "up.out").read_text()
        assert all(f"{site['url']}/v1  ({site['site']})" in printed for site in facts["sites"])
    assert process.returncode == 0
    assert not any(alive(pid) for pid in facts["pids"].values())


def free_ports(count: int) -> list[int]:
    """Neighbours that are all free."""
    while True:
        first = free_port()
        with socket.socket() as probe:
            if first + count < 65536 and all(probe.connect_ex(("127.0.0.1", first + n)) for n in range(count)):
                return [first + n for n in range(count)]


def test_services_alone_wait_for_agents_from_elsewhere_who_outlive_them(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--agents", "0", "--nats-bind", f"0.0.0.0:{port}")
    engine = [sys.executable, "-m", "serai.engine_emulator", "--model", "m"]
    there = f"nats://{socket.gethostbyname(socket.gethostname())}:{port}"
    nats = ["--nats-url", there, "--nats-nkey-file", str(tmp_path / "nats" / "agent.nk")]
    agent: subprocess.Popen[bytes] | None = None
    try:
        for _ in range(2):
            with up(tmp_path, *flags) as (_, facts):
                assert set(facts["pids"]) == {"nats", "registry", "ingress", "ledger"}
                assert facts["sites"][0]["nats_url"] == f"nats://127.0.0.1:{port}"
                agent = agent or subprocess.Popen([*UP[:3], "agent", *nats, "--model", "m", "--", *engine])
                wait_for(lambda: ask(facts | {"model": "m"}).status_code == 200, "it answers")
                assert agent.poll() is None
    finally:
        if agent is not None:
            agent.kill()
            agent.wait(30)


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    for words, told in (
        (["--nats-bind", "4222"], "must look like 10.0.0.1:4222"),
        (["--nats-bind", "0.0.0.0:4222", "--sites", "2"], "for one site"),
        (["--agents", "65"], "between 0 and 64"),
        (["--pool", "99"], "--pool 99: must be between 1 and 32"),
        (["--pool", "2", "--agents", "1"], "--pool: excludes --agents"),
        (["--placement-file", "none.yaml"], "--placement-file: is for --pool N"),
        (["--pool", "1", "--placement-file", "none.yaml"], "none.yaml: No such file"),
        (["--admission", "paper"], "--admission: is for --policy padg and macro-scheduled"),
    ):
        done = subprocess.run([*UP, "--state", str(tmp_path), *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert told in done.stderr


def test_padg_shows_windows_that_roll(tmp_path: Path) -> None:
    """Emulated engines with phases, a macro-scheduler, and a picture of who prefills when."""
    with up(tmp_path, "--policy", "padg", "--agents", "2", "--engine-args=") as (_, facts):
        site = facts["sites"][0]
        tool = [sys.executable, "-m", "serai.cli.main", "macro", "explain", "--nats-url", site["nats_url"]]
        tool += ["--nats-nkey-file", site["tools_nkey_file"]]

        def picture() -> str:
            return subprocess.run(tool, capture_output=True, text=True, check=False).stdout

        wait_for(lambda: "2 of 2 instances obey" in picture(), "both instances obey")
        body = {"model": facts["model"], "prompt": "abc " * 1500, "max_tokens": 60}
        headers = {"Authorization": f"Bearer {facts['key']}"}

        def answer(number: int) -> str:
            time.sleep(number * 0.15)
            got = httpx2.post(f"{facts['url']}/v1/completions", json=body, headers=headers, timeout=60)
            assert got.status_code == 200, got.text
            return str(got.headers["x-serai-session"])

        with ThreadPoolExecutor(16) as threads:
            sessions = set(threads.map(answer, range(16)))
        assert len(sessions) == 2
        rows = [line for line in picture().splitlines() if any(line.startswith(one[-12:]) for one in sessions)]
        drawn = [row for row in rows if "█" in row and ("▁" in row or "▒" in row)]
        assert drawn, picture()
        metrics = httpx2.get(f"{facts['url']}/metrics").text
        assert 'serai_ingress_admissions_total{decision="admit"' in metrics
