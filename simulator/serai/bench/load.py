"""The load generator: a process of its own that sends what it is told and measures what comes back.

It reads one task a line, as JSON, and answers each with one outcome a line. As light as Python allows, since it runs
on the same few cores as what it measures: connections are asyncio protocols on uvloop, answers are parsed by
httptools and never decoded. It sends to 127.0.0.1 and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import random
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import uvloop

_HOST = "127.0.0.1"
_RECONNECT_PAUSE_S = 0.05
_SAMPLES_MAX = 50_000
_SWEEP_S = 0.25
_DONE = b"[DONE]"
_DRAIN_S_MAX = 10.0
# A token is an event whose content begins with a space, as all of the emulated engine's do. Gateways that write the
# JSON anew may put a space after the colon.
_TOKEN_MARKS = (b'"content":" ', b'"content": " ')
_LONGEST_MARK = max(_TOKEN_MARKS, key=len)


@dataclass(frozen=True, slots=True)
class LoadTask:
    """What to send: POST `body` to `path` at `port`, over and over, for a bounded time.

    Closed loop (`rate` 0): `connections` connections, each sending again when it has its answer. Open loop: `rate`
    requests a second at random (Poisson) times, whatever is still unanswered.
    """

    port: int
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    connections: int = 1
    rate: float = 0.0
    warmup_s: float = 0.5
    """Time in which what happens is not counted; connections start spread over `ramp_s` of it."""
    ramp_s: float = 0.0
    duration_s: float = 2.0
    timeout_s: float = 30.0
    requests_max: int = 1_000_000
    seed: int = 0
    tokens_expected: int = 0
    """Streams: how many tokens each answer must have to count as whole."""


@dataclass(slots=True)
class LoadOutcome:
    """What came back within the measured time."""

    completed: int = 0
    measured_s: float = 0.0
    tokens: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    """Request sent to answer whole."""
    first_tokens_ms: list[float] = field(default_factory=list)
    """Request sent to first token, of streams."""
    errors: dict[str, int] = field(default_factory=dict)
    """How many requests failed, by what went wrong; from the whole run, warm-up included."""
    load_cpu_share: float = 0.0
    """How much of one core the load generator itself took: near 1, it is what was measured."""
    late_sends_ms_max: float = 0.0
    """Open loop: the longest that a request was sent after its time."""


class Run(ABC):
    """One task being carried out."""

    def __init__(self, task: LoadTask) -> None:
        self.task = task
        self.loop = asyncio.get_running_loop()
        self.stream = bool(task.body.get("stream"))
        self.outcome = LoadOutcome()
        self.errors: Counter[str] = Counter()
        self.measuring = False
        self.stopped = False
        self.sent = 0
        self.connections: set[Connection] = set()
        self.message = _request_bytes(task)

    async def carry_out(self) -> LoadOutcome:
        """Run the task and say what came of it."""
        task = self.task
        self.begin()
        sweep = self.loop.call_later(_SWEEP_S, self._sweep)
        await asyncio.sleep(task.warmup_s)
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        self.measuring = True
        await asyncio.sleep(task.duration_s)
        self.measuring = False
        self.outcome.measured_s = time.perf_counter() - began_s
        self.outcome.load_cpu_share = (time.process_time() - cpu_began_s) / self.outcome.measured_s
        await self.drain()
        self.stopped = True
        sweep.cancel()
        for connection in list(self.connections):
            connection.close()
        self.outcome.errors = dict(self.errors)
        return self.outcome

    @abstractmethod
    def begin(self) -> None:
        """Start sending."""

    @abstractmethod
    def on_free(self, connection: Connection) -> None:
        """`connection` is open and has no request."""

    @abstractmethod
    def on_gone(self, connection: Connection) -> None:
        """`connection` is closed, or never came to be."""

    @abstractmethod
    async def drain(self) -> None:
        """The measured time is over: wait for the answers that still count."""

    def may_send(self) -> bool:
        """False when the run is over or has sent all it may."""
        return not self.stopped and self.sent < self.task.requests_max

    def connect(self) -> None:
        """Open one more connection; it reports by `on_free` or `on_gone`."""
        connection = Connection(self)
        self.connections.add(connection)
        # Kept by the connection, so that the task is not lost.
        connection.opening = self.loop.create_task(self._open(connection))

    def fail(self, reason: str) -> None:
        """Count one failed request."""
        if not self.stopped:
            self.errors[reason] += 1

    async def _open(self, connection: Connection) -> None:
        try:
            await self.loop.create_connection(lambda: connection, _HOST, self.task.port)
        except OSError as error:
            self.connections.discard(connection)
            self.fail(f"connect: {type(error).__name__}")
            self.on_gone(connection)

    def _sweep(self) -> None:
        """End requests that are over their time."""
        give_up_before = time.perf_counter() - self.task.timeout_s
        for connection in list(self.connections):
            if connection.busy and connection.sent_at < give_up_before:
                connection.give_up("timeout")
        if not self.stopped:
            self.loop.call_later(_SWEEP_S, self._sweep)


class ClosedRun(Run):
    """A fixed number of connections, each with one request at a time."""

    def begin(self) -> None:
        task = self.task
        for number in range(task.connections):
            self.loop.call_later(task.ramp_s * number / task.connections, self._connect)

    def on_free(self, connection: Connection) -> None:
        if self.may_send():
            self.sent += 1
            connection.send(self.message)

    def on_gone(self, connection: Connection) -> None:
        if self.may_send():
            self.loop.call_later(_RECONNECT_PAUSE_S, self._connect)

    async def drain(self) -> None:
        """Nothing to wait for: a closed loop's figures are rates within the time."""

    def _connect(self) -> None:
        if self.may_send():
            self.connect()


class OpenRun(Run):
    """Requests at random times, on whatever connection is free."""

    def begin(self) -> None:
        self._random = random.Random(self.task.seed)
        self._free: list[Connection] = []
        self._owed = 0
        self._draining = False
        self._drained = asyncio.Event()
        self._next_at = time.perf_counter() + self.task.ramp_s
        for _ in range(self.task.connections):
            self.connect()
        self._plan_next()

    def on_free(self, connection: Connection) -> None:
        if self._owed and self.may_send():
            self._owed -= 1
            self._send_on(connection)
        else:
            self._free.append(connection)
        self._check_drained()

    async def drain(self) -> None:
        """Wait for the answers to all that was sent: the slow ones are those that are missing at the end."""
        self._arriving.cancel()
        self._draining = True
        self._check_drained()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), _DRAIN_S_MAX)
        for connection in list(self.connections):
            connection.give_up("unanswered at the end")

    def on_gone(self, connection: Connection) -> None:
        if connection in self._free:
            self._free.remove(connection)
        if self._owed and self.may_send():
            self.loop.call_later(_RECONNECT_PAUSE_S, self.connect)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._draining and not self._owed and not any(connection.busy for connection in self.connections):
            self._drained.set()

    def _plan_next(self) -> None:
        self._next_at += self._random.expovariate(self.task.rate)
        self._arriving = self.loop.call_later(max(0.0, self._next_at - time.perf_counter()), self._arrive)

    def _arrive(self) -> None:
        if not self.may_send():
            return
        if self.measuring:
            late_ms = (time.perf_counter() - self._next_at) * 1000
            self.outcome.late_sends_ms_max = max(self.outcome.late_sends_ms_max, late_ms)
        if self._free:
            self._send_on(self._free.pop())
        else:
            self._owed += 1
            self.connect()
        self._plan_next()

    def _send_on(self, connection: Connection) -> None:
        self.sent += 1
        connection.send(self.message)


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.opening: asyncio.Task[None] | None = None
        self.busy = False
        self.sent_at = 0.0
        self._measured = False
        self._tokens = 0
        self._mark: bytes | None = None
        self._tail = b""

    def send(self, message: bytes) -> None:
        """Send one request; the connection must be free."""
        assert self._transport is not None
        self.busy = True
        self._measured = self._run.measuring
        self._tokens = 0
        self._tail = b""
        self.sent_at = time.perf_counter()
        self._transport.write(message)

    def give_up(self, reason: str) -> None:
        """Count the request as failed and close."""
        if self.busy:
            self.busy = False
            self._run.fail(reason)
        self.close()

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._run.stopped:
            self.close()
        else:
            self._run.on_free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.connections.discard(self)
        if self.busy:
            self.busy = False
            self._run.fail("connection lost in an answer")
        self._run.on_gone(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.give_up("answer is not HTTP")

    # httptools

    def on_body(self, body: bytes) -> None:
        if not self._run.stream:
            return
        seen = self._tail + body
        if self._mark is None:
            self._mark = next((mark for mark in _TOKEN_MARKS if mark in seen), None)
        tokens = seen.count(self._mark) if self._mark is not None else 0
        # A mark may be cut by a read; one byte less than the mark, so that none is counted twice.
        self._tail = seen[1 - len(self._mark or _LONGEST_MARK) :]
        if tokens:
            if self._tokens == 0 and self._measured and self._run.measuring:
                self._run.outcome.first_tokens_ms.append((time.perf_counter() - self.sent_at) * 1000)
            self._tokens += tokens
            if self._run.measuring:
                self._run.outcome.tokens += tokens

    def on_message_complete(self) -> None:
        run = self._run
        ended_at = time.perf_counter()
        self.busy = False
        status = self._parser.get_status_code()
        if status != 200:
            run.fail(f"status {status}")
        elif run.stream and not self._is_whole():
            run.fail("stream not whole")
        else:
            run.outcome.completed += run.measuring
            if self._measured and not run.stopped:
                run.outcome.latencies_ms.append((ended_at - self.sent_at) * 1000)
        if not self._parser.should_keep_alive():
            self.close()
        elif status != 200:
            # A gateway that refuses at once must not be asked as fast as it refuses.
            run.loop.call_later(_RECONNECT_PAUSE_S, self._free_again)
        else:
            run.on_free(self)

    def _is_whole(self) -> bool:
        expected = self._run.task.tokens_expected
        return _DONE in self._tail and (not expected or self._tokens == expected)

    def _free_again(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._run.on_free(self)


def _request_bytes(task: LoadTask) -> bytes:
    body = json.dumps(task.body).encode()
    headers = {"Host": f"{_HOST}:{task.port}", "Content-Type": "application/json", **task.headers}
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"POST {task.path} HTTP/1.1\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def carry_out(task: LoadTask) -> LoadOutcome:
    """Carry out one task."""
    gc.collect()
    gc.disable()
    try:
        outcome = await (OpenRun(task) if task.rate else ClosedRun(task)).carry_out()
    finally:
        gc.enable()
    outcome.latencies_ms = _thinned(outcome.latencies_ms)
    outcome.first_tokens_ms = _thinned(outcome.first_tokens_ms)
    return outcome


def _thinned(samples: list[float]) -> list[float]:
    """Evenly fewer samples, so that an outcome stays small."""
    return samples[:: len(samples) // _SAMPLES_MAX + 1]


def main() -> None:
    """Carry out tasks from standard input until it ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Not `sys.stdout`: with PYTHONUNBUFFERED that writes once and drops what a full pipe did not take.
    out = open(sys.stdout.fileno(), "wb", closefd=False)  # noqa: SIM115
    for line in sys.stdin:
        outcome = uvloop.run(carry_out(LoadTask(**json.loads(line))))
        fields = {name: getattr(outcome, name) for name in LoadOutcome.__slots__}
        out.write(json.dumps(fields).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
