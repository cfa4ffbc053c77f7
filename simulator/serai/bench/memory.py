"""`serai bench memory`: what one ingress process keeps in memory, with many streams open and after many requests.

One ingress before one agent with an emulated engine, a registry and a ledger, all of them real processes. After a
thousand requests to warm up, ten thousand more, a fifth of them streams: what the process has grown by then is what it
has kept. Then a thousand slow streams are open at once, twice; most are left by their clients. Resident memory as Linux
counts it (VmRSS), of the ingress's process alone.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from serai.bench.fleet_stand import FleetStand, fleet_stand
from serai.bench.load import LoadTask
from serai.bench.processes import BenchFailed, rss_mb
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.stand import CHAT_PATH, MODEL, LoadGenerator, answers, chat_body, get
from serai.bench.targets import end_on_sigterm
from serai.worker_agent.engine.process import free_port

_STREAMS = 1000
_REQUESTS = 10_000
_WARMUP_REQUESTS = 1000
_STREAM_SHARE = 0.2
_CONNECTIONS = 32
_TPOT_MS = 100
_STREAM_TOKENS, _STREAM_TOKENS_QUICK = 300, 120
_SHORT_TOKENS = 4
_SETTLE_S = 2.0
_LOOK_EVERY_S = 0.25
_START_TIMEOUT_S = 60.0
_ROUNDS = 3
_GIVE_UP_S = 300.0
_IN_FLIGHT = "serai_ingress_requests_in_flight"
_ANSWERED = "serai_ingress_requests_total"


@dataclass(frozen=True, slots=True)
class Look:
    """The ingress at one moment of the phase with many streams."""

    at_s: float
    rss_mb: float
    open_streams: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench memory`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument("--streams", type=int, default=_STREAMS, help="streams open at once (%(default)s)")
    parser.add_argument("--rounds", type=int, help=f"how often {_REQUESTS} requests ({_ROUNDS}; quick: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up."""
    end_on_sigterm()
    rounds = arguments.rounds or (1 if arguments.quick else _ROUNDS)
    if not 1 <= rounds <= 100:
        sys.exit(f"--rounds must be from 1 to 100, not {rounds}")
    if not 1 <= arguments.streams <= 8000:
        sys.exit(f"--streams must be from 1 to 8000, not {arguments.streams}")
    tokens = _STREAM_TOKENS_QUICK if arguments.quick else _STREAM_TOKENS
    try:
        with fleet_stand() as stand:
            measured = Ingress(stand)
            figures, after_rounds_mb = _requests(measured, rounds)
            looks, stream_figures = _streams(measured, arguments.streams, tokens)
    except BenchFailed as failure:
        say(f"serai bench memory: {failure}")
        return 1
    figures |= stream_figures
    config = {
        "rounds": rounds, "requests_a_round": _REQUESTS, "stream_share": _STREAM_SHARE, "connections": _CONNECTIONS,
        "streams": arguments.streams, "stream_tokens": tokens, "tpot_ms": _TPOT_MS,
    }  # fmt: skip
    raw = {
        "rss_mb_after_rounds": [round(value, 3) for value in after_rounds_mb],
        "with_streams": [[round(look.at_s, 2), round(look.rss_mb, 2), look.open_streams] for look in looks],
    }
    notes = [] if figures["open_streams_max"] >= arguments.streams else ["not all streams were open at once"]
    hand_out(Report("bench memory", config, figures, _table(figures), notes, raw), arguments)
    return 0


class Ingress:
    """One ingress before one emulated engine, and load on it."""

    def __init__(self, stand: FleetStand) -> None:
        self.port = free_port()
        # Without a ledger records of usage would wait in the ingress's memory, 2 MB at most.
        stand.start_service("ledger", "ledger.ready", "--ledger", f"sqlite:///{stand.work}/usage.sqlite")
        child = stand.start_service("ingress", "ingress.ready", "--anonymous", "--port", str(self.port))
        self.pid = child.pid
        engine = [
            sys.executable, "-m", "serai.engine_emulator", "--model", MODEL, "--ttft-ms", "0",
            "--tpot-ms", str(_TPOT_MS), "--max-concurrency", "8192",
        ]  # fmt: skip
        command = [
            sys.executable, "-m", "serai.cli.main", "agent", "--nats-url", stand.nats_url, "--model", MODEL,
            "--allocation", "a", "--", *engine,
        ]  # fmt: skip
        agent = stand.processes.start("agent", command)
        stand.processes.wait_until("agent", agent, lambda: answers(self.port, {}), _START_TIMEOUT_S)
        self._load = LoadGenerator(stand.processes)

    @property
    def rss_mb(self) -> float:
        """Resident memory now."""
        return rss_mb([self.pid])

    def settled_mb(self) -> float:
        """Resident memory once nothing runs any more."""
        give_up_at_s = time.monotonic() + _GIVE_UP_S
        while self.metric(_IN_FLIGHT) and time.monotonic() < give_up_at_s:
            time.sleep(_LOOK_EVERY_S)
        time.sleep(_SETTLE_S)
        return self.rss_mb

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = get(self.port, "/metrics").decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def ask(self, requests: int) -> None:
        """So many requests, each answered. Raises BenchFailed."""
        streams = round(requests * _STREAM_SHARE)
        self._ask(requests - streams, chat_body(tokens=1))
        self._ask(streams, chat_body(tokens=_SHORT_TOKENS, stream=True))

    def _ask(self, requests: int, body: dict[str, Any]) -> None:
        target = self.metric(_ANSWERED) + requests
        give_up_at_s = time.monotonic() + _GIVE_UP_S
        while (left := round(target - self.metric(_ANSWERED))) > 0:
            if time.monotonic() > give_up_at_s:
                raise BenchFailed(f"{left} of {requests} requests had no answer within {_GIVE_UP_S:g} s")
            task = LoadTask(
                self.port, CHAT_PATH, body, connections=_CONNECTIONS, warmup_s=0, duration_s=2.0, requests_max=left
            )  # fmt: skip
            self._load.carry_out(task)

    def open_streams(self, streams: int, tokens: int) -> None:
        """So many streams side by side, begun within a few seconds; returns when most of their time is over."""
        seconds = tokens * _TPOT_MS / 1000
        body = chat_body(tokens=tokens, stream=True)
        ramp_s = seconds / 4
        task = LoadTask(
            self.port, CHAT_PATH, body, connections=streams, warmup_s=ramp_s, ramp_s=ramp_s, duration_s=seconds * 0.7,
            timeout_s=seconds * 4,
        )  # fmt: skip
        self._load.carry_out(task)


def _requests(ingress: Ingress, rounds: int) -> tuple[dict[str, float], list[float]]:
    ingress.ask(_WARMUP_REQUESTS)
    rss = [ingress.settled_mb()]
    for number in range(rounds):
        ingress.ask(_REQUESTS)
        rss.append(ingress.settled_mb())
        say(f"round {number + 1}/{rounds}: {rss[-1]:.1f} MB, {rss[-1] - rss[-2]:+.2f}")
    figures = {"ingress_rss_mb_start": rss[0], f"rss_growth_mb_{_REQUESTS}_requests": rss[1] - rss[0]}
    if rounds > 1:
        figures["rss_growth_mb_last_round"] = rss[-1] - rss[-2]
    return figures, rss


def _streams(ingress: Ingress, streams: int, tokens: int) -> tuple[list[Look], dict[str, float]]:
    looks: list[Look] = []
    over = threading.Event()
    began_s = time.monotonic()

    def look() -> None:
        open_now = 0.0
        while not over.wait(_LOOK_EVERY_S):
            looks.append(Look(time.monotonic() - began_s, ingress.rss_mb, open_now))
            with suppress(OSError):  # A machine that is too busy to answer in time.
                open_now = ingress.metric(_IN_FLIGHT)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        ingress.open_streams(streams, tokens)
    finally:
        over.set()
        looking.join()
    after_mb = ingress.settled_mb()
    ingress.open_streams(streams, tokens)
    figures = {
        f"ingress_rss_mb_{streams}_streams": max(look.rss_mb for look in looks),
        "open_streams_max": max(look.open_streams for look in looks),
        "ingress_rss_mb_after_streams": after_mb,
        f"rss_growth_mb_{streams}_streams_again": ingress.settled_mb() - after_mb,
        "open_streams_after": ingress.metric(_IN_FLIGHT),
    }
    return looks, figures


_GOALS: Mapping[str, str] = {
    f"ingress_rss_mb_{_STREAMS}_streams": "≤ 150",
    f"rss_growth_mb_{_REQUESTS}_requests": "≤ 5",
    f"rss_growth_mb_{_STREAMS}_streams_again": "≤ 5",
    "open_streams_after": "0",
}


def _table(figures: Mapping[str, float]) -> list[list[str]]:
    rows = [[name.replace("_", " "), f"{value:.2f}", _GOALS.get(name, "")] for name, value in figures.items()]
    return [["", "seen", "goal"], *rows]
