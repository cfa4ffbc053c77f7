"""`serai launcher` with a real NATS and real agents; Slurm's commands are stand-ins whose jobs live for seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.system import Process, System, wait_for

STAND_IN = Path(__file__).parent / "stand_in_slurm.py"
SOON = ("--lead-margin-s", "3", "--birth-spacing-s", "1", "--stop-margin-s", "4", "--settle-s", "1", "--lease-s", "6")


@dataclass
class Site:
    """A site whose Slurm is the stand-in."""

    system: System
    folder: Path

    def configure(self, **settings: Any) -> None:
        fresh = self.folder / "fresh"
        fresh.write_text(json.dumps(settings))
        fresh.replace(self.folder / "settings.json")

    def write(self, **deployment: Any) -> Path:
        engine = [sys.executable, "-m", "serai.engine_emulator", "--model", "m", "--ttft-ms", "5", "--tpot-ms", "20"]
        profile = {"engine": engine, "time": "1:00", "drain_s": 5, "environment": {"SERAI_ENGINE_STOP_S": "2"}}
        content = {
            "site": "local",
            "serai": str(Path(sys.executable).parent / "serai"),
            "scratch": str(self.folder),
            "nats": {
                "url": f"nats://127.0.0.1:{self.system.nats_port}",
                "nkey_file": str(self.system.nats.key_file("agent")),
            },
            "slurm": {"prefix": [sys.executable, str(STAND_IN), str(self.folder)], "query_every_s": 5, "timeout_s": 4},
            "models": {"m": profile},
            "deployments": {"chat": {"model": "m", "queue_wait_s": 1, "load_s": 6, "leaves_s": 25} | deployment},
        }
        path = self.system.folder / "site.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    def launch(self, *flags: str, **deployment: Any) -> Process:
        return self.system.service("launcher", "--site-file", str(self.write(**deployment)), *SOON, *flags)

    def tool(self, *words: str) -> subprocess.CompletedProcess[str]:
        nats = ["--nats-url", f"nats://127.0.0.1:{self.system.nats_port}"]
        key = ["--nats-nkey-file", str(self.system.nats.key_file("tools"))]
        command = [sys.executable, "-m", "serai.cli.main", "launcher", words[0], *nats, *key, *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    @property
    def jobs(self) -> list[dict[str, Any]]:
        paths = sorted(path for path in self.folder.glob("*.json") if path.stem != "settings")
        return [json.loads(path.read_text()) for path in paths]

    def in_state(self, *states: str) -> list[dict[str, Any]]:
        return [job for job in self.jobs if job["state"] in states]

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.out")))

    def stop(self) -> None:
        for job in self.in_state("PENDING", "RUNNING"):
            if "runner" in job:
                os.kill(job["runner"], signal.SIGTERM)
        wait_for(lambda: not self.in_state("PENDING", "RUNNING"), "all jobs are over", 30)


@pytest.fixture
def site(small_system: System) -> Iterator[Site]:
    folder = small_system.folder / "slurm"
    folder.mkdir()
    made = Site(small_system, folder)
    made.configure()
    yield made
    made.stop()


@dataclass
class Traffic:
    """Streams, one after the other, in several threads; what was wrong with any."""

    system: System
    faults: list[str] = field(default_factory=list)
    whole: int = 0
    sessions: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, threads: int) -> None:
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        body = {"model": "m", "stream": True, "max_tokens": 100, "messages": [{"role": "user", "content": "Tell me."}]}
        while not self._stop.is_set():
            try:
                with (
                    self.system.client() as client,
                    client.stream("POST", "/v1/chat/completions", json=body) as answer,
                ):
                    told = list(answer.iter_lines())
                    lines = [line[6:] for line in told if line.startswith("data: ")]
                    status, session = answer.status_code, answer.headers.get("x-serai-session", "")
            except Exception as error:
                self.faults.append(repr(error))
                continue
            finished = any('"finish_reason":"length"' in line.replace(" ", "") for line in lines)
            if status != 200 or not lines or lines[-1] != "[DONE]" or not finished or '"error"' in "".join(lines):
                self.faults.append(f"{status} at {session}: {told[-4:]}")
            else:
                self.whole += 1
                self.sessions.add(session)


@pytest.mark.timeout(300)
def test_h06_h08_a_service_outlives_its_jobs(site: Site) -> None:
    """Jobs of fifty seconds, and streams all the time: none is cut, and no job is cancelled."""
    site.configure(wait_s=0.5, limit_s=50, warn_s=9)
    launcher = site.launch()
    site.system.wait_for_sessions(1, timeout_s=45)
    traffic = Traffic(site.system)
    traffic.start(3)
    try:
        wait_for(
            lambda: len(site.in_state("COMPLETED", "TIMEOUT", "FAILED", "CANCELLED")) >= 2 and site.system.sessions(),
            "two jobs are over and another serves",
            200,
        )
        explained = site.tool("explain", "chat")
    finally:
        traffic.stop()
    assert traffic.faults == [], launcher.log + site.output()
    assert traffic.whole > 10
    assert len(traffic.sessions) >= 3
    assert [job["state"] for job in site.jobs[:2]] == ["COMPLETED", "COMPLETED"], site.output()
    assert explained.returncode == 0, explained.stderr
    assert "chat/0: " in explained.stdout
    assert "launcher.cancel" not in launcher.log
    assert launcher.terminate() == 0


def wait_for_verdict(site: Site, verdict: str, text: str = "") -> str:
    """What `explain` says, once it says that of the slot."""

    def explained() -> str:
        said = site.tool("explain", "chat/0")
        there = said.returncode == 0 and f"chat/0: {verdict}" in said.stdout and text in said.stdout
        return said.stdout if there else ""

    return str(wait_for(explained, f"the slot {verdict} {text}", 45))


def test_h01_h14_nothing_is_done_on_half_a_picture_and_a_killed_launcher_is_succeeded(site: Site) -> None:
    site.configure(limit_s=600)
    launcher = site.launch()
    site.system.wait_for_sessions(1, timeout_s=45)
    wait_for_verdict(site, "holds")
    site.configure(limit_s=600, squeue="fail")
    wait_for_verdict(site, "blind", "Unable to contact slurm controller")
    launcher.kill()
    assert site.tool("explain").returncode == 1
    site.configure(limit_s=600, squeue="empty")
    again = site.launch()
    # It has no answer but empty ones, and a session that lives: that is no empty slot.
    wait_for_verdict(site, "holds", "missing from 2 answer(s), serving")
    site.configure(limit_s=600)
    wait_for_verdict(site, "holds", "101 running, serving (generation 1)")
    rehearsed = site.launch("--dry-run")
    assert rehearsed.popen.wait(60) == 0, rehearsed.log
    assert "chat/0: holds" in rehearsed.log
    assert len(site.jobs) == 1
    assert site.tool("explain", "nobody").returncode == 3
    assert site.tool("wake", "chat").returncode == 0
    assert again.terminate() == 0


def test_a_deployment_that_cannot_be_is_refused_with_its_place(site: Site) -> None:
    refused = site.launch(count=-1)
    assert refused.popen.wait(30) == 2
    assert "deployments.chat.count" in refused.log
    refused = site.launch("--count", "nobody=1")
    assert refused.popen.wait(30) == 2
    assert "--count nobody: is no deployment and no model of the site file; it has chat, m" in refused.log
