"""`serai bench windows`: when instances prefill and when they decode, measured while a whole Serai serves.

A real `serai up --policy padg` with so many instances, requests at random times over the public API. Windows are what
the instances report of themselves; first tokens and tokens are what the client sees, so the one can be held against the
other. `--out` draws both: a row an instance, its windows shaded, first tokens as dots, tokens a second as a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from serai.bench.processes import BenchFailed, Processes
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.targets import end_on_sigterm
from serai.bench.window_times import Heard, Windows, figures_of, picture
from serai.contracts.admission import InstanceReport
from serai.contracts.codec import MalformedMessage, decode
from serai.contracts.subjects import INSTANCE
from serai.runtime.bus import Message
from serai.runtime.http1 import HttpFailure, HttpPool, Origin, request_head
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.worker_agent.engine.process import free_port

_PATH = "/v1/chat/completions"
_START_S = 1200.0
_DRAIN_S = 120.0
_WORDS = ("caravan", "desert", "inn", "road", "well", "market", "camel", "night", "star", "gate", "river", "salt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench windows`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="draw it: a .png or .svg file")
    parser.add_argument("--instances", type=int, default=4, help="how many (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for how long requests come (%(default)s)")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, on average (%(default)s)")
    parser.add_argument("--prompt-words", type=int, default=300, help="mean length of a prompt (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=120, help="mean length of an answer (%(default)s)")
    parser.add_argument("--slo-ttft-ms", type=float, default=5000.0, help="target of every request (%(default)s)")
    parser.add_argument("--slo-tpot-ms", type=float, default=100.0, help="target of every request (%(default)s)")
    parser.add_argument("--admission", default="serai", help="the macro-scheduler's policy (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of lengths and times (%(default)s)")
    parser.add_argument("--model", default="", help="with an engine's command: the name it serves")
    parser.add_argument("--model-file", type=Path, help="a GGUF file, served by llama.cpp")
    parser.add_argument("--engine-args", default="", help="further arguments of the engine, as one string")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND…", help="an engine's command")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up."""
    end_on_sigterm()
    if arguments.quick:
        arguments.seconds = min(arguments.seconds, 8.0)
    if not (0 < arguments.rate <= 100 and 0 < arguments.seconds <= 3600 and 1 <= arguments.instances <= 64):
        sys.exit("--rate must be above 0 and at most 100, --seconds at most 3600, --instances from 1 to 64")
    try:
        with TemporaryDirectory(prefix="serai-bench-") as work, Processes(Path(work)) as processes:
            facts = _start(arguments, processes, Path(work))
            windows, heard = uvloop.run(_measure(arguments, facts))
    except BenchFailed as failure:
        say(f"serai bench windows: {failure}")
        return 1
    figures = figures_of(windows, heard, arguments.slo_ttft_ms / 1000, arguments.slo_tpot_ms / 1000)
    if arguments.out is not None:
        picture(windows, heard, arguments.out, _title(arguments))
    asked = ("instances", "seconds", "rate", "prompt_words", "output_tokens", "slo_ttft_ms", "slo_tpot_ms", "admission")
    config = {name: getattr(arguments, name) for name in asked} | {"engine": _engine(arguments)}
    table = [["figure", "value"], *[[name, f"{value:.4g}"] for name, value in figures.items()]]
    raw = {"windows": windows.raw(), "requests": [one.raw() for one in heard]}
    hand_out(Report("bench windows", config, figures, table, [], raw), arguments)
    return 0


def _engine(arguments: argparse.Namespace) -> str:
    if arguments.command:
        return Path(next(word for word in arguments.command if word != "--")).name
    return f"llama.cpp {arguments.model_file.name}" if arguments.model_file else "emulated, CodeLlama-34b on two A800"


def _title(arguments: argparse.Namespace) -> str:
    return (
        f"{_engine(arguments)}: {arguments.instances} instances, {arguments.rate:g} requests/s, {arguments.admission}"
    )


# -- the stand ---------------------------------------------------------------------------------------------------------


def _start(arguments: argparse.Namespace, processes: Processes, work: Path) -> dict[str, Any]:
    """What `serai up` says of itself when all instances serve. Raises BenchFailed."""
    port, ready_file = free_port(), work / "ready.json"
    command = [
        *(sys.executable, "-m", "serai.cli.main", "up", "--policy", "padg", "--agents", str(arguments.instances)),
        *("--port", str(port), "--state", str(work / "state"), "--ready-file", str(ready_file)),
        f"--engine-args={arguments.engine_args}",
    ]
    if arguments.model:
        command += ["--model", arguments.model]
    if arguments.model_file is not None:
        command += ["--model-file", str(arguments.model_file)]
    environment = {
        "SERAI_ADMISSION": arguments.admission,
        "SERAI_SLO_TTFT_S": str(arguments.slo_ttft_ms / 1000),
        "SERAI_SLO_TPOT_S": str(arguments.slo_tpot_ms / 1000),
        # What the paper's instances are: prompts first.
        "SERAI_OPEN_GATE": "mixed" if arguments.admission == "serai" else "prefill",
    }
    child: Popen[bytes] = processes.start("up", [*command, *arguments.command], environment=environment, stop_s=30)
    say(f"{arguments.instances} instances start")
    processes.wait_until("up", child, ready_file.exists, _START_S)
    return dict(json.loads(ready_file.read_bytes()))


async def _measure(arguments: argparse.Namespace, facts: Mapping[str, Any]) -> tuple[Windows, list[Heard]]:
    site = facts["sites"][0]
    key_file = Path(site["tools_nkey_file"])
    key_file = key_file.with_name(key_file.name.replace("tools", "macro-scheduler"))
    bus = await NatsBus.connect(NatsAddress(site["nats_url"], key_file), "macro-scheduler", name="bench-windows")
    windows = Windows()

    def on_report(message: Message) -> None:
        try:
            windows.heard(decode(InstanceReport, message.data), time.monotonic())
        except MalformedMessage:
            pass

    await bus.subscribe(INSTANCE.every, on_report)
    pool = HttpPool(Origin.parse(facts["url"]), idle_max=512)
    try:
        await _first_words(pool, facts, arguments)
        windows.began_s = time.monotonic()
        heard = await _load(pool, facts, arguments, windows.began_s)
        windows.ended_s = time.monotonic()
    finally:
        await pool.aclose()
        await bus.aclose()
    return windows, heard


async def _first_words(pool: HttpPool, facts: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Some answers before it counts: engines get warm, instances learn what prefills take. Raises BenchFailed."""
    draw = random.Random(0)
    streams = [_send(pool, facts, arguments, draw, time.monotonic()) for _ in range(2 * arguments.instances)]
    done, _ = await asyncio.wait([stream.done for stream in streams], timeout=_START_S)
    failed = [stream.heard.failure for stream in streams if stream.heard.failure]
    if len(done) < len(streams) or failed:
        raise BenchFailed(f"the first requests were not answered: {failed[:1] or 'nothing came'}")
    await asyncio.sleep(1.0)


async def _load(pool: HttpPool, facts: Mapping[str, Any], arguments: argparse.Namespace, began_s: float) -> list[Heard]:
    """All requests, each sent when it is due."""
    draw = random.Random(arguments.seed)
    streams: list[_Stream] = []
    due_s = 0.0
    while (due_s := due_s + draw.expovariate(arguments.rate)) < arguments.seconds:
        await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
        streams.append(_send(pool, facts, arguments, draw, began_s))
    say(f"{len(streams)} requests sent")
    if streams:
        await asyncio.wait([stream.done for stream in streams], timeout=_DRAIN_S)
    return [stream.heard for stream in streams]


def _send(
    pool: HttpPool, facts: Mapping[str, Any], arguments: argparse.Namespace, draw: random.Random, began_s: float
) -> _Stream:
    words = max(1, round(arguments.prompt_words * draw.lognormvariate(-0.125, 0.5)))
    tokens = max(2, round(arguments.output_tokens * draw.lognormvariate(-0.125, 0.5)))
    prompt = f"{draw.random():.12f} " + " ".join(draw.choices(_WORDS, k=words))
    body = json.dumps(
        {
            "model": facts["model"],
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    headers = {
        "authorization": f"Bearer {facts['key']}",
        "content-type": "application/json",
        "x-slo-ttft-ms": f"{arguments.slo_ttft_ms:g}",
        "x-slo-tpot-ms": f"{arguments.slo_tpot_ms:g}",
    }
    stream = _Stream(Heard(time.monotonic() - began_s, words, began_s=began_s))
    head = request_head(pool.origin, "POST", _PATH, headers, len(body))
    pool.start((head, body), stream, lambda connection: None)
    return stream


class _Stream:
    """One answer, as it comes: a `ResponseHandler`."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.heard.status = status
        self.heard.session = headers.get("x-serai-session", "")
        if status != 200:
            self.heard.failure = f"status {status}"

    def on_data(self, data: bytes) -> None:
        self.heard.add(data.count(b'"content":"') + data.count(b'"content": "'), time.monotonic())

    def on_complete(self) -> None:
        self._end()

    def on_failure(self, failure: HttpFailure) -> None:
        self.heard.failure = str(failure)
        self._end()

    def _end(self) -> None:
        self.heard.whole = not self.heard.failure
        if not self.done.done():
            self.done.set_result(None)
