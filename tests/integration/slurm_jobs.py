"""Jobs on the test's Slurm as a user submits them, and many clients' streams while something befalls them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.slurm_cluster import SlurmCluster
from integration.system import System, wait_for
from integration.test_continuation import Heard, listen
from serai.engine_emulator.text import answer_to, chat_prompt

TEMPLATE = Path(__file__).parents[2] / "deploy" / "slurm" / "agent.sbatch"
CHAT_PATH = "/v1/chat/completions"
PACED = ("--ttft-ms", "5", "--tpot-ms", "20")


class Submitter:
    """Submits the template as a user would: settings in the environment, the engine's command behind the script."""

    def __init__(self, cluster: SlurmCluster, system: System) -> None:
        self._cluster = cluster
        self._system = system
        self.scratch = system.folder / "scratch"
        self.scratch.mkdir()

    def __call__(
        self,
        *engine_flags: str,
        sbatch_flags: tuple[str, ...] = (),
        settings: dict[str, str] | None = None,
        engine: list[str] | None = None,
    ) -> str:
        """The job's id. `settings`: more of the environment; `engine`: a command instead of the emulated engine's."""
        environment = {
            "SERAI_MODEL": "m",
            "SERAI_EXECUTABLE": str(Path(sys.executable).parent / "serai"),
            "SERAI_SCRATCH": str(self.scratch),
            "SERAI_NATS_URL": f"nats://127.0.0.1:{self._system.nats_port}",
            "SERAI_NATS_NKEY_FILE": str(self._system.nats.key_file("agent")),
        } | (settings or {})
        command = engine or [sys.executable, "-m", "serai.engine_emulator", "--model", "m"]
        return self._cluster.sbatch(*sbatch_flags, str(TEMPLATE), *command, *engine_flags, environment=environment)

    def and_wait_until_it_serves(self, *engine_flags: str, sessions: int = 1, **how: Any) -> str:
        """Until the job is one of so many sessions that the ingress routes to."""
        job = self(*engine_flags, **how)
        self.until_it_serves(job, sessions)
        return job

    def until_it_serves(self, job: str, sessions: int = 1, runs: int = 1) -> None:
        """`runs`: how often it has served by then; a requeued job writes to the same output."""
        output = self._cluster.output
        wait_for(lambda: output(job).count("agent.serving") >= runs or self._cluster.job(job).over, f"job {job}", 60)
        assert self._cluster.job(job).state == "RUNNING", output(job)
        self._system.wait_for_sessions(sessions, timeout_s=60)


@dataclass
class Crowd:
    """Clients that stream, each one answer after the other as long as `go_on` is set."""

    system: System
    body: dict[str, Any]
    pool: ThreadPoolExecutor
    go_on: threading.Event
    heard: list[Heard]
    clients: list[Future[None]]
    begun: int = 0

    def stream(self) -> None:
        """One client's life."""
        while True:
            self.heard.append(listen(self.system, CHAT_PATH, self.body, self._note_begin, after=3))
            if not self.go_on.is_set():
                return

    def _note_begin(self, _: Heard) -> None:
        self.begun += 1

    def until_it_flows(self) -> None:
        """Until every client has had some text."""
        wait_for(lambda: self.begun >= len(self.clients) or any(one.done() for one in self.clients), "they stream", 60)

    def until_over(self) -> list[Heard]:
        """All streams there were, once the last has ended. Fails with what befell a client."""
        self.go_on.clear()
        for client in self.clients:
            client.result()
        return self.heard


@contextmanager
def crowd(system: System, clients: int, tokens: int, *, again: bool = False) -> Iterator[Crowd]:
    """So many streams of so many tokens, all of which have begun. `again`: who has an answer asks for the next."""
    with ThreadPoolExecutor(clients) as pool:
        made = Crowd(system, {"max_tokens": tokens}, pool, threading.Event(), [], [])
        if again:
            made.go_on.set()
        try:
            made.clients += [pool.submit(made.stream) for _ in range(clients)]
            made.until_it_flows()
            yield made
        finally:
            made.go_on.clear()


def cut(heard: list[Heard], text: str) -> list[str]:
    """What is wrong with streams of which none may show that anything has happened: none is cut, none has an error,
    none says anything but `text`."""
    return [f"{one.session}: {fault}" for one in heard for fault in _faults_of(one, text)]


def dishonest(heard: list[Heard], text: str) -> list[str]:
    """What is wrong with streams that may also end with one error event: none may look whole without being it."""
    return [
        f"{one.session}: {fault}"
        for one in heard
        for fault in (_faults_of(one, text) if one.error is None else _faults_of_error(one, text))
    ]


def _faults_of(one: Heard, text: str) -> list[str]:
    faults = []
    if one.error is not None:
        return [f"error {one.error}"]
    if one.ends != 1 or one.finish_reasons != ["length"]:
        faults.append(f"ends {one.ends}, finish reasons {one.finish_reasons}")
    if one.text != text:
        faults.append(f"{len(one.text)} characters of {len(text)}: …{one.text[-40:]!r}")
    return faults


def _faults_of_error(one: Heard, text: str) -> list[str]:
    faults = []
    if one.ends != 1 or one.finish_reasons:
        faults.append(f"after an error: ends {one.ends}, finish reasons {one.finish_reasons}")
    if not text.startswith(one.text):
        faults.append(f"said what it should not: …{one.text[-40:]!r}")
    return faults


def text_of(tokens: int) -> str:
    """What an undisturbed stream of so many tokens says."""
    return answer_to(chat_prompt([("user", "Tell me of caravans.")]), seed=0).text(tokens)
