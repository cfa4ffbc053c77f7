"""`serai bench detection`: from a failure until no new request is routed to the session, by the ingress's own listing.

Real agents with an emulated engine each, every one with a model of its own, so that each failure is seen by itself.
- kill: SIGKILL of an agent, where the registry may hear the NATS server's word that a connection has closed;
- kill, heartbeats only: the same without that word; the observer notices silence and asks;
- freeze, heartbeats only: SIGSTOP, so that the connection stays and nobody answers: silence is all there is;
- hang: a stream stops in the middle while engine process and agent live; from the last token the client got.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory

from serai.bench.fleet_stand import FleetStand
from serai.bench.peers import HOST
from serai.bench.percentiles import percentile
from serai.bench.processes import BenchFailed, Processes
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.stand import CHAT_PATH
from serai.bench.targets import end_on_sigterm
from serai.worker_agent.engine.process import free_port

_FAILURES, _FAILURES_QUICK = 24, 3
_AT_ONCE = 4
"""Agents that are up side by side: starting them takes the machine's time."""
_LOOK_EVERY_S = 0.004
_GIVE_UP_S = 20.0
_START_TIMEOUT_S = 60.0
_PHASE_S = 1.1
"""Failures come at a random moment within more than the time between two signs of life."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where agents join, and where it is seen who is routed to."""

    processes: Processes
    nats_flags: tuple[str, ...]
    port: int
    headers: Mapping[str, str]

    def start_agent(self, model: str, *engine_flags: str) -> Popen[bytes]:
        """An agent with an emulated engine that serves `model`."""
        command = [
            sys.executable, "-m", "serai.cli.main", "agent", *self.nats_flags, "--model", model, "--allocation", model,
            "--", sys.executable, "-m", "serai.engine_emulator", "--model", model, "--ttft-ms", "5", "--tpot-ms", "20",
            *engine_flags,
        ]  # fmt: skip
        return self.processes.start(model, command)

    def wait_until_routed(self, model: str, agent: Popen[bytes]) -> None:
        with self.observer() as is_routed:
            self.processes.wait_until(model, agent, lambda: is_routed(model), _START_TIMEOUT_S)

    @contextmanager
    def observer(self) -> Iterator[Callable[[str], bool]]:
        """A function that asks the ingress whether it would route to a model."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)

        def is_routed(model: str) -> bool:
            connection.request("GET", f"/v1/models/{model}", headers=dict(self.headers))
            answer = connection.getresponse()
            body = answer.read()
            return answer.status == 200 and json.loads(body)["sessions"].get("serving", 0) > 0

        try:
            yield is_routed
        finally:
            connection.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench detection`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument("--failures", type=int, help=f"of each kind ({_FAILURES}; quick: {_FAILURES_QUICK})")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up."""
    end_on_sigterm()
    count = arguments.failures
    if count is None:
        count = _FAILURES_QUICK if arguments.quick else _FAILURES
    if not 1 <= count <= 1000:
        sys.exit(f"--failures must be from 1 to 1000, not {count}")
    chance = random.Random(arguments.seed)
    samples: dict[str, list[float]] = {}
    try:
        with _whole_site() as site:
            samples["kill_to_unrouted"] = _signals(site, "kill", signal.SIGKILL, count, chance)
            samples["hang_to_unrouted"] = _hangs(site, count, chance)
        with _site_without_events() as site:
            samples["kill_to_unrouted_heartbeat_only"] = _signals(site, "quiet", signal.SIGKILL, count, chance)
            samples["freeze_to_unrouted_heartbeat_only"] = _signals(site, "frozen", signal.SIGSTOP, count, chance)
    except BenchFailed as failure:
        say(f"serai bench detection: {failure}")
        return 1
    config = {"failures": count, "look_every_ms": _LOOK_EVERY_S * 1000}
    hand_out(Report("bench detection", config, figures_of(samples), _table(samples), [], samples), arguments)
    return 0


def figures_of(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median, 99th percentile and maximum of each kind, in milliseconds."""
    figures = {}
    for kind, after_ms in samples.items():
        figures[f"{kind}_ms_p50"] = percentile(after_ms, 0.5)
        figures[f"{kind}_ms_p99"] = percentile(after_ms, 0.99)
        figures[f"{kind}_ms_max"] = max(after_ms)
    return figures


# -- kinds of failure ------------------------------------------------------------------------------------------------


def _signals(site: Site, name: str, number: signal.Signals, count: int, chance: random.Random) -> list[float]:
    """Milliseconds from a signal to an agent until it is not routed to, one after the other."""
    after_ms: list[float] = []
    for first in range(0, count, _AT_ONCE):
        agents = {f"{name}-{n}": site.start_agent(f"{name}-{n}") for n in range(first, min(count, first + _AT_ONCE))}
        for model, agent in agents.items():
            site.wait_until_routed(model, agent)
        for model, agent in agents.items():
            time.sleep(chance.uniform(0, _PHASE_S))
            with site.observer() as is_routed:
                is_routed(model)  # Connects.
                began_s = time.monotonic()
                os.kill(agent.pid, number)
                after_ms.append(_ms_until_unrouted(is_routed, model, began_s))
            site.processes.end(model)
        say(f"{name}: {', '.join(f'{ms:.0f}' for ms in after_ms[first:])} ms")
    return after_ms


def _hangs(site: Site, count: int, chance: random.Random) -> list[float]:
    """Milliseconds from a stream's last token until its session is not routed to; some side by side."""
    after_ms: list[float] = []
    for first in range(0, count, _AT_ONCE):
        agents = {}
        for number in range(first, min(count, first + _AT_ONCE)):
            fault = f"hang:tokens={chance.randint(20, 80)},skip=1"
            agents[f"hang-{number}"] = site.start_agent(f"hang-{number}", "--fault", fault)
        for model, agent in agents.items():
            site.wait_until_routed(model, agent)
        watched = [_Hang(site, model) for model in agents]
        for hang in watched:
            hang.start()
        for hang in watched:
            hang.join()
            if hang.failure is not None:
                raise hang.failure
            after_ms.append(hang.after_ms)
        for model in agents:
            site.processes.end(model)
        say(f"hang: {', '.join(f'{ms:.0f}' for ms in after_ms[first:])} ms")
    return after_ms


class _Hang(threading.Thread):
    """Reads one stream until it hangs, and looks beside it until the session is not routed to."""

    def __init__(self, site: Site, model: str) -> None:
        super().__init__(daemon=True)
        self._site = site
        self._model = model
        self.after_ms = float("nan")
        self.failure: BenchFailed | None = None

    def run(self) -> None:
        last_s = [0.0]
        connection = http.client.HTTPConnection(HOST, self._site.port)
        body = {"model": self._model, "messages": [{"role": "user", "content": "On and on."}], "stream": True}
        headers = {"Content-Type": "application/json", **self._site.headers}
        connection.request("POST", CHAT_PATH, json.dumps(body | {"max_tokens": 100_000}), headers)

        def read() -> None:
            with suppress(OSError, http.client.HTTPException):
                for line in connection.getresponse():
                    if line.startswith(b"data: {"):
                        last_s[0] = time.monotonic()

        threading.Thread(target=read, daemon=True).start()
        try:
            with self._site.observer() as is_routed:
                ended_s = _unrouted_at_s(is_routed, self._model, time.monotonic())
            self.after_ms = (ended_s - last_s[0]) * 1000
        except BenchFailed as failure:
            self.failure = failure


def _ms_until_unrouted(is_routed: Callable[[str], bool], model: str, began_s: float) -> float:
    return (_unrouted_at_s(is_routed, model, began_s) - began_s) * 1000


def _unrouted_at_s(is_routed: Callable[[str], bool], model: str, began_s: float) -> float:
    """When the ingress first says that it would not route to `model`."""
    while is_routed(model):
        if time.monotonic() - began_s > _GIVE_UP_S:
            raise BenchFailed(f"{model} is still routed to {_GIVE_UP_S:g} s after its failure")
        time.sleep(_LOOK_EVERY_S)
    return time.monotonic()


# -- stands ----------------------------------------------------------------------------------------------------------


@contextmanager
def _whole_site() -> Iterator[Site]:
    """`serai up`: with credentials, and a registry that hears of closed connections."""
    with TemporaryDirectory(prefix="serai-bench-") as work, Processes(Path(work)) as processes:
        port, ready_file, state = free_port(), Path(work) / "ready.json", Path(work) / "state"
        command = [
            sys.executable, "-m", "serai.cli.main", "up", "--emulated", "--agents", "1", "--port", str(port),
            "--state", str(state), "--ready-file", str(ready_file),
        ]  # fmt: skip
        child = processes.start("up", command, stop_s=30)
        processes.wait_until("serai up", child, ready_file.exists, _START_TIMEOUT_S)
        ready = json.loads(ready_file.read_text())
        processes.also_end(ready["pids"].values())
        nats = ("--nats-url", ready["sites"][0]["nats_url"], "--nats-nkey-file", str(state / "nats" / "agent.nk"))
        yield Site(processes, nats, port, {"Authorization": f"Bearer {ready['key']}"})


@contextmanager
def _site_without_events() -> Iterator[Site]:
    """Registry and ingress on a NATS server that grants nobody its own account."""
    with TemporaryDirectory(prefix="serai-bench-") as work, Processes(Path(work)) as processes:
        stand = FleetStand(processes, Path(work))
        port = free_port()
        stand.start_service("ingress", "ingress.ready", "--anonymous", "--port", str(port))
        yield Site(processes, ("--nats-url", stand.nats_url), port, {})


def _table(samples: Mapping[str, Sequence[float]]) -> list[list[str]]:
    rows = [
        [kind.replace("_", " "), *[f"{value:.0f}" for value in (percentile(ms, 0.5), percentile(ms, 0.99), max(ms))]]
        for kind, ms in samples.items()
    ]
    return [["milliseconds", "p50", "p99", "max"], *rows]
