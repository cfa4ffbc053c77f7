"""`serai bench idle-traffic`: bytes a second on an agent's own NATS connection, both ways, while it has nothing to do.

Real agents, several in a process, attached to one emulated engine; their connections pass a relay that counts every
byte, protocol and all. Per fleet size: records announced, signs of life, answers. Churn: ten agents that register anew
every 3 s each.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from subprocess import Popen

from serai.bench.fleet_stand import FleetStand, Member, fleet_stand
from serai.bench.processes import BenchFailed
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.targets import end_on_sigterm
from serai.worker_agent.engine.process import free_port

_SIZES = (2, 10, 50, 128)
_CHURNING, _CHURN_EVERY_S = 10, 3.0
_WINDOW_S, _WINDOW_QUICK_S = 40.0, 7.0
"""Records are announced anew every ten seconds: the full window holds four of these, the quick one may miss some."""
_AGENTS_PER_PROCESS = 64
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What passed in one window, per agent and second."""

    agents: int
    to_server_bytes: float
    from_server_bytes: float

    @property
    def both_bytes(self) -> float:
        return self.to_server_bytes + self.from_server_bytes


class ByteCounter:
    """The relay's process."""

    def __init__(self, stand: FleetStand) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "serai.bench.byte_counter", str(self.port), str(stand.nats_port)]
        self._child: Popen[bytes] = stand.processes.start("byte-counter", command, pipes=True)
        self.counts()  # It listens when it answers.

    def counts(self) -> list[list[int]]:
        """Per connection: bytes to the server and from it, so far."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(b"\n")
        self._child.stdin.flush()
        if not select.select([self._child.stdout], [], [], 30)[0]:
            raise BenchFailed("the byte counter gave no answer in 30 s")
        counted: list[list[int]] = json.loads(self._child.stdout.readline())
        return counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench idle-traffic`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument(
        "--window-s", type=float, help=f"how long is counted ({_WINDOW_S:g}; quick: {_WINDOW_QUICK_S:g})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up."""
    end_on_sigterm()
    window_s = arguments.window_s
    if window_s is None:
        window_s = _WINDOW_QUICK_S if arguments.quick else _WINDOW_S
    if not 1 <= window_s <= 3600:
        sys.exit(f"--window-s must be from 1 to 3600, not {window_s:g}")
    try:
        with fleet_stand() as stand:
            fleets = _Fleets(stand, window_s)
            idle = {agents: fleets.measure(agents) for agents in _SIZES}
            churn = fleets.measure(_CHURNING, churn_every_s=_CHURN_EVERY_S)
    except BenchFailed as failure:
        say(f"serai bench idle-traffic: {failure}")
        return 1
    figures = figures_of(idle, churn)
    config = {
        "window_s": window_s,
        "agents_per_process": _AGENTS_PER_PROCESS,
        "churning_agents": _CHURNING,
        "churn_every_s": _CHURN_EVERY_S,
    }
    raw = {
        name: {"to_server": t.to_server_bytes, "from_server": t.from_server_bytes}
        for name, t in [*[(str(agents), t) for agents, t in idle.items()], ("churn", churn)]
    }
    notes = ["several agents share a process; each has its own connection and runs all of an agent's code"]
    hand_out(Report("bench idle-traffic", config, figures, _table(idle, churn), notes, raw), arguments)
    return 0


def figures_of(idle: Mapping[int, Traffic], churn: Traffic) -> dict[str, float]:
    """Figures by fleet size, and how flat they are."""
    figures = {f"bytes_per_s_per_agent_{agents}": traffic.both_bytes for agents, traffic in idle.items()}
    figures["churn_bytes_per_s_per_agent"] = churn.both_bytes
    figures["ratio_128_to_10"] = idle[128].both_bytes / idle[10].both_bytes
    return figures


class _Fleets:
    """One fleet after the other on the same stand."""

    def __init__(self, stand: FleetStand, window_s: float) -> None:
        self._stand = stand
        self._window_s = window_s
        self._engine_url = stand.start_engine()
        self._counter = ByteCounter(stand)
        self._started = 0

    def measure(self, agents: int, churn_every_s: float | None = None) -> Traffic:
        """Starts so many agents, counts for a window, and lets them leave."""
        members = self._start(agents)
        if churn_every_s is not None:
            members[0].ask("churn", every_s=churn_every_s)
        time.sleep(_SETTLE_S)
        before, began_s = self._counter.counts(), time.monotonic()
        time.sleep(self._window_s)
        after, seconds = self._counter.counts(), time.monotonic() - began_s
        for member in members:
            member.ask("leave")
        if len(before) != self._started or len(after) != self._started:
            raise BenchFailed(f"{len(after)} connections of {self._started} agents so far: some were made anew")
        to_server, from_server = (sum(row[way] for row in after) - sum(row[way] for row in before) for way in (0, 1))
        traffic = Traffic(agents, to_server / seconds / agents, from_server / seconds / agents)
        what = "churning agents" if churn_every_s else "agents"
        say(f"{agents} {what}: {traffic.both_bytes:.0f} bytes/s each")
        return traffic

    def _start(self, agents: int) -> list[Member]:
        members = []
        for first in range(0, agents, _AGENTS_PER_PROCESS):
            share = min(_AGENTS_PER_PROCESS, agents - first)
            name = f"member-{self._started}"
            flags = ["--engine-url", self._engine_url, "--name", name, "--agents", str(share)]
            url = f"nats://127.0.0.1:{self._counter.port}"
            members.append(self._stand.start_member(name, *flags, nats_url=url))
            self._started += share
        for member in members:
            member.ask("ready")
        return members


def _table(idle: Mapping[int, Traffic], churn: Traffic) -> list[list[str]]:
    rows = [(f"{agents} idle", traffic) for agents, traffic in idle.items()] + [(f"{churn.agents} churning", churn)]
    return [
        ["bytes/s per agent", "to server", "from server", "both"],
        *[[name, f"{t.to_server_bytes:.0f}", f"{t.from_server_bytes:.0f}", f"{t.both_bytes:.0f}"] for name, t in rows],
    ]
