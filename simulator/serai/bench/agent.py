"""`serai bench agent`: what one agent costs: added latency, memory, processor time, and how many streams it carries.

A real agent attached to an emulated engine, a real nats-server; this process plays the ingress with the ingress's own
client. Requests go, one after the other, through the agent; to the engine itself, by the agent's own HTTP client; and
as bare NATS messages of as many bytes: back to this process (`loop`), and to another one that only answers (`echo`).
Medians. `added_p50_ms` is through − direct − loop: all that there would not be without the agent, waking it included.
`added_beyond_echo_p50_ms` is through − direct − echo: what it takes beyond any process that answers on NATS. For the
streams the agent is bound to one core.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from subprocess import Popen

import uvloop

from serai.bench.echo import ECHO
from serai.bench.fleet_stand import FleetStand, fleet_stand
from serai.bench.percentiles import percentile
from serai.bench.processes import BenchFailed, cpu_s, rss_mb
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.stand import CHAT_PATH, MODEL, answers, chat_body
from serai.bench.targets import end_on_sigterm
from serai.contracts.codec import encode
from serai.contracts.inference import InferenceRequest
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.subjects import SESSION
from serai.ingress.inference_client import InferenceClient
from serai.runtime.bus import BusError, Message
from serai.runtime.http1 import HttpPool, Origin, fetch
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.runtime.refusals import Refusals
from serai.worker_agent.engine.process import free_port

_REQUESTS, _REQUESTS_QUICK = 2000, 300
_IDLE_S, _IDLE_QUICK_S = 60.0, 15.0
_STREAM_S, _STREAM_QUICK_S = 30.0, 8.0
_STREAMS = 256
_TPOT_MS = 20.0
_WARMUP_REQUESTS = 50
_RAMP_S = 3.0
_CANCELLED, _CANCELLED_AT_ONCE = 2000, 50
_SETTLE_S = 3.0
_GIVE_UP_S = 180.0
_START_TIMEOUT_S = 60.0
_WINDOW_BYTES = 256 * 1024
_TOKEN = b'"content":" '
_GOALS: Mapping[str, str] = {
    "added_p50_ms": "≤ 0.3",
    "rss_mb": "≤ 60",
    "idle_cpu_percent": "≤ 1",
    f"stream_tok_s_c{_STREAMS}": f"{_STREAMS * 1000 / _TPOT_MS:.0f} asked for",
    "stream_cpu_share": "≤ 1",
    f"rss_growth_mb_{_CANCELLED}_cancelled": "0",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench agent`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument("--streams", type=int, default=_STREAMS, help="streams open at once (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up."""
    end_on_sigterm()
    if not 1 <= arguments.streams <= 4000:
        sys.exit(f"--streams must be from 1 to 4000, not {arguments.streams}")
    requests = _REQUESTS_QUICK if arguments.quick else _REQUESTS
    idle_s = _IDLE_QUICK_S if arguments.quick else _IDLE_S
    stream_s = _STREAM_QUICK_S if arguments.quick else _STREAM_S
    try:
        with fleet_stand() as stand:
            measured = Measured(stand)
            work = _measure(stand, measured, requests, idle_s, arguments.streams, stream_s)
            figures, raw = uvloop.run(work)
    except (BenchFailed, BusError) as failure:
        say(f"serai bench agent: {failure}")
        return 1
    config = {
        "requests": requests, "idle_s": idle_s, "streams": arguments.streams, "stream_s": stream_s,
        "tpot_ms": _TPOT_MS, "agent_core": measured.core,
    }  # fmt: skip
    notes = [] if figures["stream_errors"] == 0 else ["streams failed: see stream_errors"]
    hand_out(Report("bench agent", config, figures, _table(figures), notes, raw), arguments)
    return 0


class Measured:
    """The agent, its engine, and a process that answers on NATS."""

    def __init__(self, stand: FleetStand) -> None:
        self.engine_port = free_port()
        engine = [
            sys.executable, "-m", "serai.engine_emulator", "--model", MODEL, "--port", str(self.engine_port),
            "--ttft-ms", "0", "--tpot-ms", f"{_TPOT_MS:g}", "--max-concurrency", "8192",
        ]  # fmt: skip
        child = stand.processes.start("engine", engine)
        stand.processes.wait_until("engine", child, lambda: answers(self.engine_port, {}), _START_TIMEOUT_S)
        self._start(stand, "echo", "echo.ready", [sys.executable, "-m", "serai.bench.echo", stand.nats_url])
        agent = [
            sys.executable, "-m", "serai.cli.main", "agent", "--nats-url", stand.nats_url, "--model", MODEL,
            "--allocation", "a", "--engine", "emulated", "--engine-url", f"http://127.0.0.1:{self.engine_port}",
        ]  # fmt: skip
        self.pid = self._start(stand, "agent", "agent.serving", agent).pid
        self.core = max(os.sched_getaffinity(0))

    def bind(self) -> None:
        """The agent to one core, all its threads."""
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            os.sched_setaffinity(int(thread), {self.core})

    @property
    def cpu_s(self) -> float:
        return cpu_s([self.pid])

    @property
    def rss_mb(self) -> float:
        return rss_mb([self.pid])

    @staticmethod
    def _start(stand: FleetStand, name: str, ready: str, command: list[str]) -> Popen[bytes]:
        child = stand.processes.start(name, command)
        log = stand.processes.log_of(name)
        stand.processes.wait_until(name, child, lambda: ready in log.read_text(errors="replace"), _START_TIMEOUT_S)
        return child


class Client:
    """An ingress's end of the wire."""

    def __init__(self, bus: NatsBus, session: str, engine_port: int) -> None:
        self._bus = bus
        self._session = session
        self._pool = HttpPool(Origin("127.0.0.1", engine_port))
        self._client = InferenceClient(
            bus, accept_timeout_s=30.0, silence_timeout_s=30.0, on_unreachable=lambda _: None
        )
        self._body = encode(chat_body(tokens=1))
        self._bytes = encode(_request(self._body, stream=False)) + self._body
        self._came: asyncio.Future[None] | None = None
        self.tokens = 0
        self.errors = 0

    async def start(self) -> None:
        """Listens; the first request may follow."""
        await self._client.start()
        await self._bus.subscribe(f"{self._bus.inbox_prefix}.loop", self._on_loop)
        await self._bus.barrier()

    async def aclose(self) -> None:
        """Closes what leads to the engine."""
        await self._pool.aclose()

    async def through_agent(self) -> None:
        """One request with one token, whole."""
        with self._client.stream(self._session, 1, _request(self._body, stream=False), self._body) as stream:
            await stream.head()
            while await stream.data() is not None:
                pass

    async def direct(self) -> None:
        """The same to the engine."""
        headers = {"content-type": "application/json"}
        await fetch(self._pool, "POST", CHAT_PATH, body=self._body, headers=headers, timeout_s=30)

    async def echo(self) -> None:
        """As many bytes to another process and back."""
        await self._bus.request(ECHO, self._bytes, 30)

    async def loop(self) -> None:
        """As many bytes to the server and back."""
        self._came = asyncio.get_running_loop().create_future()
        self._bus.publish(f"{self._bus.inbox_prefix}.loop", self._bytes, at_once=True)
        await self._came

    async def stream(self, tokens: int, after_s: float) -> None:
        """One stream, counted as it comes; it ends when it is cancelled."""
        await asyncio.sleep(after_s)
        body = encode(chat_body(tokens=tokens, stream=True))
        try:
            with self._client.stream(self._session, 1, _request(body, stream=True), body) as stream:
                await stream.head()
                while (data := await stream.data(self._count)) is not None:
                    self._count(data)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.errors += 1
            say(f"a stream failed: {error}")

    def _on_loop(self, _: Message) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    def _count(self, data: bytes) -> bool:
        self.tokens += data.count(_TOKEN)
        return True


async def _measure(
    stand: FleetStand, measured: Measured, requests: int, idle_s: float, streams: int, stream_s: float
) -> tuple[dict[str, float], dict[str, list[float]]]:
    bus = await NatsBus.connect(NatsAddress(stand.nats_url), "ingress")
    limit_s = _GIVE_UP_S + idle_s + stream_s
    try:
        async with asyncio.timeout(limit_s):
            return await _measured(bus, measured, requests, idle_s, streams, stream_s)
    except TimeoutError as error:
        raise BenchFailed(f"it was not over within {limit_s:.0f} s") from error
    finally:
        await bus.aclose()


async def _measured(
    bus: NatsBus, measured: Measured, requests: int, idle_s: float, streams: int, stream_s: float
) -> tuple[dict[str, float], dict[str, list[float]]]:
    client = Client(bus, await _session(bus), measured.engine_port)
    await client.start()
    await asyncio.sleep(_SETTLE_S)
    figures = {"rss_mb": measured.rss_mb}
    figures["idle_cpu_percent"] = 100 * await _share_of_core(measured, idle_s)
    say(f"idle: {figures['idle_cpu_percent']:.2f} % of a core, {figures['rss_mb']:.1f} MB")
    latencies = await _latencies(client, requests)
    for way, samples in latencies.items():
        figures[f"{way}_p50_ms"] = percentile(samples, 0.5)
    beyond_engine_ms = figures["through_p50_ms"] - figures["direct_p50_ms"]
    figures["added_p50_ms"] = beyond_engine_ms - figures["loop_p50_ms"]
    figures["added_beyond_echo_p50_ms"] = beyond_engine_ms - figures["echo_p50_ms"]
    say(f"added: {figures['added_p50_ms']:.3f} ms")
    for _ in range(2):  # The first time fills pools and caches.
        before_mb = measured.rss_mb
        await _cancelled_streams(client)
        await asyncio.sleep(_SETTLE_S)
    figures[f"rss_growth_mb_{_CANCELLED}_cancelled"] = measured.rss_mb - before_mb
    measured.bind()
    figures |= await _streams(measured, client, streams, stream_s)
    await asyncio.sleep(_SETTLE_S)
    figures["rss_mb_after_streams"] = measured.rss_mb
    await client.aclose()
    return figures, latencies


async def _session(bus: NatsBus) -> str:
    """The agent's, as it announces itself every ten seconds."""
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    refusals = Refusals()

    def on_record(message: Message) -> None:
        record: SessionRecord | None = refusals.record_in(message)
        if record is not None and record.lifecycle is Lifecycle.SERVING and not found.done():
            found.set_result(record.session)

    subscription = await bus.subscribe(SESSION.every, on_record)
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            return await found
    except TimeoutError as error:
        raise BenchFailed("the agent did not announce itself") from error
    finally:
        await subscription.unsubscribe()


async def _share_of_core(measured: Measured, seconds: float) -> float:
    before_s, began_s = measured.cpu_s, time.monotonic()
    await asyncio.sleep(seconds)
    return (measured.cpu_s - before_s) / (time.monotonic() - began_s)


async def _latencies(client: Client, requests: int) -> dict[str, list[float]]:
    """In milliseconds; the ways take turns, so that what disturbs the machine disturbs them alike."""
    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "through": client.through_agent,
        "direct": client.direct,
        "loop": client.loop,
        "echo": client.echo,
    }
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(_WARMUP_REQUESTS + requests):
        for way, ask in ways.items():
            began_s = time.perf_counter()
            await ask()
            if number >= _WARMUP_REQUESTS:
                samples[way].append((time.perf_counter() - began_s) * 1000)
    return samples


async def _cancelled_streams(client: Client) -> None:
    """Each is given up when its first tokens have come."""
    for _ in range(_CANCELLED // _CANCELLED_AT_ONCE):
        running = [asyncio.ensure_future(client.stream(1000, 0.0)) for _ in range(_CANCELLED_AT_ONCE)]
        await asyncio.sleep(5 * _TPOT_MS / 1000)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _streams(measured: Measured, client: Client, streams: int, seconds: float) -> dict[str, float]:
    """All open for `seconds`, begun within `_RAMP_S` before."""
    tokens = round((seconds + 4 * _RAMP_S) * 1000 / _TPOT_MS)
    running = [asyncio.ensure_future(client.stream(tokens, _RAMP_S * number / streams)) for number in range(streams)]
    await asyncio.sleep(_RAMP_S * 1.5)
    before, own_cpu_s, began_s = client.tokens, time.process_time(), time.monotonic()
    cpu_share = await _share_of_core(measured, seconds)
    passed_s = time.monotonic() - began_s
    figures = {
        f"stream_tok_s_c{streams}": (client.tokens - before) / passed_s,
        "stream_cpu_share": cpu_share,
        "client_cpu_share": (time.process_time() - own_cpu_s) / passed_s,
        "stream_errors": float(client.errors),
    }
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    say(f"{streams} streams: {figures[f'stream_tok_s_c{streams}']:.0f} tokens/s, {cpu_share:.2f} of a core")
    return figures


def _request(body: bytes, *, stream: bool) -> InferenceRequest:
    return InferenceRequest(
        request_id="bench",
        path=CHAT_PATH,
        body_bytes=len(body),
        body_frames=1,
        window_bytes=_WINDOW_BYTES,
        deadline_s=600.0,
        headers={"content-type": "application/json"},
        stream=stream,
    )


def _table(figures: Mapping[str, float]) -> list[list[str]]:
    rows = [[name.replace("_", " "), f"{value:.3f}", _GOALS.get(name, "")] for name, value in figures.items()]
    return [["", "seen", "goal"], *rows]
