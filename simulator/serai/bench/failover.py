"""`serai bench failover`: what clients without retries see while one of two engines is killed again and again.

Two agents with an emulated engine each; every ten seconds one of them loses its engine, or is killed together with it,
by SIGKILL, and is started again. Clients ask for whole answers and for streams; an emulated engine's text is known
beforehand, so each answer is compared with the one that an uninterrupted engine would have given.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

from serai.bench.fleet_stand import FleetStand, fleet_stand
from serai.bench.peers import HOST
from serai.bench.percentiles import percentile
from serai.bench.processes import BenchFailed
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.stand import CHAT_PATH, MODEL
from serai.bench.targets import end_on_sigterm
from serai.engine_emulator.text import answer_to, chat_prompt
from serai.worker_agent.engine.process import free_port

_SECONDS, _SECONDS_QUICK = 300.0, 40.0
_KILL_EVERY_S = 10.0
_STREAM_TOKENS, _UNARY_TOKENS = 120, 20
_TPOT_MS = 20
_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 60.0
_AGENTS = ("a", "b")


@dataclass(slots=True)
class Tally:
    """What all clients have seen. One lock: they are few and slow."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    gaps_ms: list[float] = field(default_factory=list)
    """The longest silence inside each stream that went on elsewhere."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *names: str, error: str = "", gap_ms: float | None = None) -> None:
        with self.lock:
            self.counts.update(names)
            if error:
                self.errors[error] += 1
            if gap_ms is not None:
                self.gaps_ms.append(gap_ms)


@dataclass(frozen=True, slots=True)
class StreamSeen:
    """What one client has seen of one stream."""

    text: str = ""
    is_finished: bool = False
    """A finish reason came."""
    is_done: bool = False
    """`[DONE]` came."""
    is_resumed: bool = False
    error: str = ""
    """Code of the error event."""
    gap_ms: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench failover`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument("--seconds", type=float, help=f"how long ({_SECONDS:g}; quick: {_SECONDS_QUICK:g})")
    parser.add_argument("--streams", type=int, default=12, help="clients that stream (%(default)s)")
    parser.add_argument("--unary", type=int, default=6, help="clients that ask for whole answers (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes of the ingress (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up, or an agent not again."""
    end_on_sigterm()
    seconds = arguments.seconds or (_SECONDS_QUICK if arguments.quick else _SECONDS)
    if not _KILL_EVERY_S < seconds <= 86_400:
        sys.exit(f"--seconds must be above {_KILL_EVERY_S:g} and at most 86400, not {seconds:g}")
    for name in ("streams", "unary", "workers"):
        if not 1 <= getattr(arguments, name) <= 256:
            sys.exit(f"--{name} must be from 1 to 256, not {getattr(arguments, name)}")
    try:
        with fleet_stand() as stand:
            pair = Pair(stand, arguments.workers)
            tally = _measure(pair, seconds, arguments.streams, arguments.unary)
    except BenchFailed as failure:
        say(f"serai bench failover: {failure}")
        return 1
    config = {
        "seconds": seconds, "kill_every_s": _KILL_EVERY_S, "stream_clients": arguments.streams,
        "unary_clients": arguments.unary, "ingress_workers": arguments.workers,
        "stream_tokens": _STREAM_TOKENS, "unary_tokens": _UNARY_TOKENS,
        "tpot_ms": _TPOT_MS,
    }  # fmt: skip
    notes = [f"{count} × {error}" for error, count in tally.errors.most_common()]
    raw = {"gaps_ms": [round(gap, 1) for gap in tally.gaps_ms], "errors": dict(tally.errors)}
    figures = figures_of(tally)
    hand_out(Report("bench failover", config, figures, _table(figures), notes, raw), arguments)
    return 0


def figures_of(tally: Tally) -> dict[str, float]:
    """Goals: no `unary_errors`, no `streams_unmarked`, no `stream_errors`, some `streams_resumed`, no
    `resume_mismatches`."""
    names = (
        "kills", "unary_requests", "unary_errors", "unary_mismatches", "streams", "streams_unmarked", "stream_errors",
        "streams_resumed", "resume_mismatches",
    )  # fmt: skip
    figures: dict[str, float] = {name: tally.counts[name] for name in names}
    if tally.gaps_ms:
        figures["resume_gap_ms_p50"] = percentile(tally.gaps_ms, 0.5)
        figures["resume_gap_ms_p99"] = percentile(tally.gaps_ms, 0.99)
    return figures


# -- the stand -------------------------------------------------------------------------------------------------------


class Pair:
    """An ingress and two agents, each with an engine of its own."""

    def __init__(self, stand: FleetStand, workers: int = 1) -> None:
        self._stand = stand
        self.port = free_port()
        flags = ["--anonymous", "--port", str(self.port), "--workers", str(workers)]
        stand.start_service("ingress", "ingress.ready", *flags)
        self._agents = {name: self._start(name) for name in _AGENTS}
        self.wait_until_both_serve()

    def kill(self, name: str, *, agent_too: bool) -> None:
        """SIGKILL to an engine, which its agent starts again; or to the agent, with which its engine goes."""
        agent = self._agents[name]
        for pid in [agent.pid] if agent_too else _engines(agent.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if agent_too:
            agent.wait(_START_TIMEOUT_S)
            self._stand.processes.end(f"agent-{name}")
            self._agents[name] = self._start(name)

    def wait_until_both_serve(self) -> None:
        """Raises BenchFailed."""
        for name, agent in self._agents.items():
            self._stand.processes.wait_until(
                f"agent-{name}", agent, lambda: self._serving() == len(_AGENTS), _START_TIMEOUT_S
            )

    def _start(self, name: str) -> Popen[bytes]:
        engine = [sys.executable, "-m", "serai.engine_emulator", "--model", MODEL, "--ttft-ms", "20"]
        command = [
            sys.executable, "-m", "serai.cli.main", "agent", "--nats-url", self._stand.nats_url, "--model", MODEL,
            "--allocation", name, "--engine-restarts", "1000", "--", *engine, "--tpot-ms", str(_TPOT_MS),
        ]  # fmt: skip
        return self._stand.processes.start(f"agent-{name}", command)

    def _serving(self) -> int:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", f"/v1/models/{MODEL}")
            answer = connection.getresponse()
            body = answer.read()
            return int(json.loads(body)["sessions"].get("serving", 0)) if answer.status == 200 else 0
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


def _engines(agent: int) -> list[int]:
    """Of an agent's children those that serve a model: its engine."""
    children = [int(child) for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    return [child for child in children if b"serai.engine_emulator" in Path(f"/proc/{child}/cmdline").read_bytes()]


# -- the load --------------------------------------------------------------------------------------------------------


def _measure(pair: Pair, seconds: float, streams: int, unary: int) -> Tally:
    tally, stop = Tally(), threading.Event()
    clients = [
        *[_client(_stream_once, pair.port, number, tally, stop) for number in range(streams)],
        *[_client(_ask_once, pair.port, number, tally, stop) for number in range(unary)],
    ]
    began_s = time.monotonic()
    say(f"{streams} streams and {unary} whole answers at a time for {seconds:g} s")
    try:
        for kill in range(int(seconds // _KILL_EVERY_S)):
            stop.wait(max(0.0, began_s + (kill + 1) * _KILL_EVERY_S - time.monotonic()))
            if time.monotonic() > began_s + seconds:
                break
            # Never the last one: what is to be seen is one engine's end, not an outage.
            pair.wait_until_both_serve()
            pair.kill(_AGENTS[kill % 2], agent_too=kill % 4 >= 2)
            tally.count("kills")
            say(f"kill {kill + 1}: {dict(tally.counts)}")
        stop.wait(max(0.0, began_s + seconds - time.monotonic()))
    finally:
        stop.set()
        for client in clients:
            client.join(_TIMEOUT_S)
    return tally


Once = Callable[[int, str, Tally], None]


def _client(once: Once, port: int, number: int, tally: Tally, stop: threading.Event) -> threading.Thread:
    def ask_again_and_again() -> None:
        turn = 0
        while not stop.is_set():
            once(port, f"Client {number} asks for the {turn}th time: what does the caravan carry?", tally)
            turn += 1

    thread = threading.Thread(target=ask_again_and_again, daemon=True)
    thread.start()
    return thread


def _ask_once(port: int, question: str, tally: Tally) -> None:
    """One whole answer, on a connection of its own and without a second try."""
    try:
        answer = _post(port, question, _UNARY_TOKENS, stream=False)
        body = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        tally.count("unary_requests", "unary_errors", error=f"whole answer: {error!r}")
        return
    if answer.status != 200:
        code = body.get("error", {}).get("code")
        tally.count("unary_requests", "unary_errors", error=f"whole answer: {answer.status} {code}")
        return
    text = body["choices"][0]["message"]["content"]
    wrong = [] if text == expected(question, _UNARY_TOKENS) else ["unary_mismatches"]
    tally.count("unary_requests", *wrong)


def _stream_once(port: int, question: str, tally: Tally) -> None:
    seen = StreamSeen()
    lines: list[tuple[float, bytes]] = []
    try:
        answer = _post(port, question, _STREAM_TOKENS, stream=True)
        if answer.status != 200:
            tally.count("streams", "stream_errors", error=f"stream: {answer.status} {answer.read()[:200]!r}")
            return
        # Kept as they come: what was heard before a connection breaks counts.
        lines.extend((time.monotonic(), line.rstrip(b"\r\n")) for line in answer)
        seen = stream_seen(lines)
    except (OSError, http.client.HTTPException, ValueError) as error:
        seen = stream_seen(lines)
        tally.count(error=f"stream: {error!r}")
    count_stream(tally, seen, expected(question, _STREAM_TOKENS))


def stream_seen(lines: Sequence[tuple[float, bytes]]) -> StreamSeen:
    """What the lines of a stream, each with the time it came, amount to. Raises ValueError."""
    text, error = "", ""
    is_finished = is_done = is_resumed = False
    last_s, gap_s = lines[0][0] if lines else 0.0, 0.0
    for at_s, line in lines:
        if line.startswith(b": serai continued"):
            is_resumed = True
        elif line == b"data: [DONE]":
            is_done = True
        elif line.startswith(b"data: "):
            gap_s, last_s = max(gap_s, at_s - last_s), at_s
            event = json.loads(line[6:])
            error = str(event["error"].get("code")) if "error" in event else error
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
                is_finished |= choice["finish_reason"] is not None
    return StreamSeen(text, is_finished, is_done, is_resumed, error, gap_s * 1000)


def count_stream(tally: Tally, seen: StreamSeen, text: str) -> None:
    """One stream, whose uninterrupted text is `text`."""
    names = ["streams"]
    is_marked = seen.is_done and (seen.is_finished or bool(seen.error))
    if not is_marked:
        names.append("streams_unmarked")
    if seen.error:
        names.append("stream_errors")
    if seen.is_resumed:
        names.append("streams_resumed")
    if is_marked and not seen.error and seen.text != text:
        names.append("resume_mismatches")
    tally.count(
        *names,
        error=f"stream: event {seen.error}" if seen.error else "",
        gap_ms=seen.gap_ms if seen.is_resumed else None,
    )


def expected(question: str, tokens: int) -> str:
    """What an uninterrupted engine says."""
    return answer_to(chat_prompt([("user", question)]), 0).text(tokens)


def _post(port: int, question: str, tokens: int, *, stream: bool) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(HOST, port, timeout=_TIMEOUT_S)
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0,
        "stream": stream,
    }  # fmt: skip
    connection.request("POST", CHAT_PATH, json.dumps(body), {"Content-Type": "application/json", "Connection": "close"})
    return connection.getresponse()


_GOALS: Mapping[str, str] = {
    "unary_errors": "0",
    "unary_mismatches": "0",
    "streams_unmarked": "0",
    "stream_errors": "0",
    "streams_resumed": "> 0",
    "resume_mismatches": "0",
}


def _table(figures: Mapping[str, float]) -> list[list[str]]:
    rows = [[name.replace("_", " "), f"{value:.0f}", _GOALS.get(name, "")] for name, value in figures.items()]
    return [["", "seen", "goal"], *rows]
