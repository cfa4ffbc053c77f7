"""The placer alive: `serai up --pool`, pool agents, emulated engines, real NATS and ledger, and load all the time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml

from integration.system import Process, System, wait_for
from serai.worker_agent.engine.process import free_port

SERAI = [sys.executable, "-m", "serai.cli.main"]


def placement(**rules: Any) -> dict[str, Any]:
    """Two models whose engines are said to serve a request a second each."""
    model = {
        "engine": "emulated",
        "min_replicas": 1,
        "arguments": ["--ttft-ms", "5", "--tpot-ms", "20"],
        "demand": {"prompt_tokens": 100, "output_tokens": 40},
        "instances": [{"gpu": "h100", "requests_s": 1, "load_s": 1}],
    }
    usual = {
        "mode": "automatic",
        "horizon_s": 60,
        "cool_down_s": 3,
        "cold_after_s": "never",
        "drain_s": 20,
        "demand_window_s": 4,
        "moves_per_hour": 1000,
        "gpu_share_per_change": 1.0,
    }
    return {"models": {"a": model, "b": model}, "rules": usual | rules}


@dataclass
class Laptop:
    """A running `serai up --pool N`."""

    facts: dict[str, Any]
    state: Path
    process: subprocess.Popen[bytes]

    def place(self, *words: str) -> subprocess.CompletedProcess[str]:
        site = self.facts["sites"][0]
        nats = ["--nats-url", site["nats_url"], "--nats-nkey-file", site["tools_nkey_file"]]
        command = [*SERAI, "place", words[0], *nats, *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def serving(self, model: str) -> int:
        headers = {"Authorization": f"Bearer {self.facts['key']}"}
        answer = httpx2.get(f"{self.facts['url']}/v1/models/{model}", headers=headers, timeout=10)
        return int(answer.json()["sessions"].get("serving", 0)) if answer.status_code == 200 else 0

    def log(self, name: str) -> str:
        return (self.state / "logs" / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        os.kill(self.facts["pids"][name], signal.SIGKILL)


@contextmanager
def laptop(
    folder: Path, pools: int, file: dict[str, Any], *more_flags: str, environment: dict[str, str] | None = None
) -> Iterator[Laptop]:
    ready, given = folder / "ready.json", folder / "placement.yaml"
    given.write_text(yaml.safe_dump(file))
    flags = ["--pool", str(pools), "--placement-file", str(given), "--port", str(free_port()), *more_flags]
    with (folder / "up.out").open("wb") as out:
        command = [*SERAI, "up", *flags, "--state", str(folder / "state"), "--ready-file", str(ready)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | (environment or {}))
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, "serai up --pool is up", 60)
        assert process.poll() is None, (folder / "up.out").read_text()
        yield Laptop(json.loads(ready.read_text()), folder / "state", process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(40)


@dataclass
class Load:
    """Streams at a rate that the test changes; what was wrong with any of them."""

    laptop: Laptop
    rates: dict[str, float]
    faults: list[str] = field(default_factory=list)
    whole: int = 0
    _client: httpx2.Client = field(default_factory=lambda: httpx2.Client(timeout=30))
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for model in self.rates:
            self._spawn(self._pace, model)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _spawn(self, target: Any, model: str) -> None:
        thread = threading.Thread(target=target, args=(model,))
        self._threads.append(thread)
        thread.start()

    def _pace(self, model: str) -> None:
        while not self._stop.wait(1 / self.rates[model]):
            self._spawn(self._ask, model)

    def _ask(self, model: str) -> None:
        facts = self.laptop.facts
        body = {"model": model, "stream": True, "max_tokens": 40, "messages": [{"role": "user", "content": "Tell me."}]}
        headers = {"Authorization": f"Bearer {facts['key']}"}
        url = f"{facts['url']}/v1/chat/completions"
        try:
            with self._client.stream("POST", url, json=body, headers=headers) as answer:
                told = list(answer.iter_lines())
        except Exception as error:
            self.faults.append(repr(error))
            return
        lines = [line[6:] for line in told if line.startswith("data: ")]
        finished = any('"finish_reason":"length"' in line.replace(" ", "") for line in lines)
        if answer.status_code != 200 or not lines or lines[-1] != "[DONE]" or not finished:
            self.faults.append(f"{answer.status_code}: {told[-4:]}")
        else:
            self.whole += 1


def test_demand_shifts_and_engines_move_by_themselves_without_a_failed_request(tmp_path: Path) -> None:
    with laptop(tmp_path, 4, placement()) as here, Load(here, {"a": 3.0, "b": 0.25}) as load:
        wait_for(lambda: here.serving("a") == 3, "model a has three engines", 40)
        assert here.serving("b") == 1
        # The placer hears of the third from its pool, a moment after everybody else.
        told = lambda: "a: 3 of 3 engines" in here.place("explain", "a").stdout  # noqa: E731
        wait_for(told, "the placer knows of all three", 20)
        load.rates |= {"a": 0.25, "b": 3.0}
        least = {"a": 9, "b": 9}
        give_up_at_s = time.monotonic() + 45

        while (now := {model: here.serving(model) for model in "ab"}) != {"a": 1, "b": 3}:
            least = {model: min(least[model], now[model]) for model in "ab"}
            assert time.monotonic() < give_up_at_s, here.place("plan").stdout + here.log("placer")[-4000:]
            time.sleep(0.1)
        assert min(least.values()) >= 1, "no model falls below its minimum"
        here.kill("placer")
        time.sleep(1)
        assert (here.serving("a"), here.serving("b")) == (1, 3), "a placer that is gone takes nothing with it"
    assert load.faults == []
    assert load.whole > 30


def test_a_cold_model_comes_when_it_is_asked_for_and_goes_when_nobody_asks(tmp_path: Path) -> None:
    file = placement(cold_after_s=4, cool_down_s=2)
    a = file["models"]["a"]
    slow = a | {"instances": [{"gpu": "h100", "requests_s": 1, "load_s": 500}]}
    file["models"] |= {"b": a | {"min_replicas": 0}, "slow": slow | {"min_replicas": 0, "priority": 0.5}}
    with laptop(tmp_path, 2, file) as here:
        headers = {"Authorization": f"Bearer {here.facts['key']}"}

        def asked(model: str) -> httpx2.Response:
            body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
            return httpx2.post(f"{here.facts['url']}/v1/chat/completions", json=body, headers=headers, timeout=30)

        def listed() -> dict[str, str]:
            models = httpx2.get(f"{here.facts['url']}/v1/models", headers=headers, timeout=10).json()["data"]
            return {model["id"]: model["state"] for model in models}

        wait_for(lambda: listed() == {"a": "serving", "b": "cold", "slow": "cold"}, "what is cold is listed", 20)
        assert asked("b").status_code == 200, "the request waits until b is there"
        assert asked("nobody").status_code == 404
        late = asked("slow")
        assert (late.status_code, late.json()["error"]["code"]) == (503, "model_starting"), late.text
        assert 400 <= int(late.headers["retry-after"]) <= 600
        file["models"].pop("slow")
        (tmp_path / "placement.yaml").write_text(yaml.safe_dump(file))
        wait_for(lambda: here.serving("b") == 0, "b is let go because nobody asks", 40)
        assert here.serving("a") == 1
        assert "Nobody asks for it now" in here.place("explain", "b").stdout


@dataclass
class ByHand:
    """A placer and pool agents of one said GPU each, without `serai up`."""

    system: System

    def write(self, requests_s: float = 0.0, **rules: Any) -> Path:
        model = {
            "engine": "emulated",
            "min_replicas": 1,
            "demand": {"requests_s": requests_s},
            "instances": [{"gpu": "h100", "requests_s": 2, "load_s": 1}],
        }
        path = self.system.folder / "placement.yaml"
        fresh = path.with_suffix(".fresh")
        fresh.write_text(yaml.safe_dump({"models": {"m": model}, "rules": {"mode": "by-hand"} | rules}))
        fresh.replace(path)
        return path

    def start_placer(self) -> Process:
        flags = [
            "--plan-every-s",
            "1",
            "--demand-every-s",
            "1",
            "--settle-s",
            "0.5",
            "--solve-s",
            "0",
            "--lease-s",
            "3",
        ]
        return self.system.service("placer", "--placement-file", str(self.write()), *flags)

    def start_pool(self, name: str) -> Process:
        flags = ["--pool", "--pool-gpus", "H100:1", "--pool-name", name, "--pool-report-s", "1", "--engine-stop-s", "2"]
        return self.system.service("agent", *flags)

    def place(self, *words: str) -> subprocess.CompletedProcess[str]:
        nats = ["--nats-url", f"nats://127.0.0.1:{self.system.nats_port}"]
        key = ["--nats-nkey-file", str(self.system.nats.key_file("tools"))]
        command = [*SERAI, "place", words[0], *nats, *key, *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_by_hand_nothing_moves_without_a_yes_and_nothing_that_runs_needs_the_placer(small_system: System) -> None:
    here = ByHand(small_system)
    pool = here.start_pool("one")
    placer = here.start_placer()
    wait_for(lambda: "placer.plan" in placer.log, "a plan is proposed")
    shown = here.place("diff")
    assert shown.returncode == 4, shown.stderr
    assert "plan 1, proposed" in shown.stdout
    assert "+ m on one, 1 GPU: m has fewer engines than its minimum of 1" in shown.stdout
    stale, unknown = here.place("apply", "99"), here.place("explain", "nobody")
    assert (stale.returncode, unknown.returncode) == (3, 3)
    assert "plan 99 is stale: the last one is 1" in stale.stderr
    assert "there is no model 'nobody' in the placement file (there is m)" in unknown.stderr
    assert small_system.sessions() == 0

    assert here.place("apply").returncode == 0
    small_system.wait_for_sessions(1)
    here.write(requests_s=-5)
    wait_for(lambda: "placer.file_refused" in placer.log, "the file is refused")
    assert "demand of `m`, requests_s: is -5.0; give 0 to 1e+06" in here.place("plan").stderr
    assert small_system.sessions() == 1, "what runs is untouched"

    placer.kill()
    pool.kill()
    small_system.wait_for_sessions(0)
    again = here.start_pool("one")
    small_system.wait_for_sessions(1)
    assert "pool.start" in again.log, "it runs again what lies in KV, as a new session, without a placer"
    assert again.terminate() == 0
