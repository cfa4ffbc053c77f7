"""Each gateway before two engines of its own, and what a case may do there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from serai.bench.faults.raw_client import WHOLE, Answer, Connection, request
from serai.bench.faults.scripted_engine import MARK, STEADY, Call, Script, ScriptedEngine, good, words
from serai.bench.fleet_stand import FleetStand
from serai.bench.peers import Peer
from serai.bench.processes import BenchFailed, Processes, last_lines
from serai.bench.report import say
from serai.bench.stand import CHAT_PATH, MODEL
from serai.worker_agent.engine.process import free_port

START_S = 90.0
_STEADY_GAP_MAX_S = 5.0
"""A silence of the stream beside that is longer counts as harm: the machine is small and busy."""
_STEADY_FIRST_WORDS = 2
_EVIDENCE_MAX = 4


def body_of(stream: bool = False, **more: object) -> dict[str, Any]:
    """A chat request that a script applies to."""
    messages = [{"role": "user", "content": f"{MARK}: what does the caravan carry?"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 64, "temperature": 0, "stream": stream, **more}


class Gateway(ABC):
    """A gateway's processes: started, started anew, ended."""

    settle_s = 3.0
    """How long it may take to use both engines again after a case; then it is started anew."""

    def __init__(self, name: str, port: int, headers: Mapping[str, str]) -> None:
        self.name = name
        self.port = port
        self.headers = dict(headers)

    @abstractmethod
    async def start(self) -> None:
        """Until it listens. Raises BenchFailed."""

    @abstractmethod
    async def restart(self) -> None:
        """With nothing left of what it knew."""


class SeraiGateway(Gateway):
    """NATS, registry, ingress, and an agent for each engine."""

    settle_s = 0.0  # One look: its ingress is started anew sooner than it would come round.

    def __init__(self, stand: FleetStand, engines: Sequence[ScriptedEngine]) -> None:
        super().__init__("serai", free_port(), {})
        self._stand = stand
        self._engines = engines

    async def start(self) -> None:
        for number, engine in enumerate(self._engines):
            # Called vLLM because it answers as vLLM does; broken streams then go on elsewhere.
            flags = ["--model", MODEL, "--engine", "vllm", "--allocation", f"a{number}"]
            flags += ["--engine-url", f"http://127.0.0.1:{engine.port}"]
            await asyncio.to_thread(self._stand.start_service, "agent", "agent.serving", *flags, name=f"agent-{number}")
        await self._start_ingress()

    async def restart(self) -> None:
        self._stand.processes.end("ingress")
        await self._start_ingress()

    async def _start_ingress(self) -> None:
        flags = ("--anonymous", "--port", str(self.port))
        await asyncio.to_thread(self._stand.start_service, "ingress", "ingress.ready", *flags)


class PeerGateway(Gateway):
    """One process, given the engines' addresses."""

    def __init__(self, peer: Peer, processes: Processes, work: Path, engines: Sequence[ScriptedEngine]) -> None:
        port = free_port()
        ports = [engine.port for engine in engines]
        self._how = peer.command(
            port=port,
            metrics_port=free_port(),
            engine_port=ports[0],
            more_engine_ports=ports[1:],
            model=MODEL,
            work=work,
        )
        self._processes = processes
        super().__init__(peer.name, port, self._how.headers)

    async def start(self) -> None:
        self._processes.start(self.name, self._how.command, environment=self._how.environment, stop_s=2)

    async def restart(self) -> None:
        await asyncio.to_thread(self._processes.end, self.name)
        await self.start()

    def log_end(self) -> str:
        return last_lines([self._processes.log_of(self.name)])


class Stage:
    """One gateway, its two engines, and what was seen of the case that is played."""

    def __init__(self, gateway: Gateway, engines: Sequence[ScriptedEngine]) -> None:
        self.gateway = gateway
        self.engines = engines
        self.evidence: list[dict[str, object]] = []
        self.restarts = 0

    @property
    def name(self) -> str:
        return self.gateway.name

    @property
    def port(self) -> int:
        return self.gateway.port

    @property
    def calls(self) -> list[Call]:
        """What reached the engines, in order."""
        return sorted([call for engine in self.engines for call in engine.calls], key=lambda call: call.came_at_s)

    def play(self, *scripts: Script) -> None:
        """With one script both engines obey it; with several, each next request that reaches any engine gets the next
        of them, and the last for all that follow."""
        came = 0

        async def by_turn(call: Call) -> None:
            nonlocal came
            came += 1
            await scripts[min(came, len(scripts)) - 1](call)

        for engine in self.engines:
            engine.script = by_turn
            engine.calls.clear()

    async def wait_for_call(self, count: int = 1, timeout_s: float = 5.0) -> Call | None:
        """The `count`th request that reaches an engine; None when none does in time."""
        give_up_at_s = time.monotonic() + timeout_s
        while len(self.calls) < count:
            if time.monotonic() > give_up_at_s:
                return None
            await asyncio.sleep(0.01)
        return self.calls[count - 1]

    # -- asking --------------------------------------------------------------------------------------------------

    def bytes_of(
        self, body: object, *, path: str = CHAT_PATH, method: str = "POST", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """A request with what this gateway wants to see."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return request(method, path, raw, self.gateway.headers | dict(headers or {}))

    async def ask(
        self,
        body: object = b"",
        *,
        path: str = CHAT_PATH,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> Answer:
        """One request on a connection of its own."""
        async with Connection(self.port) as connection:
            await connection.send(self.bytes_of(body, path=path, method=method, headers=headers))
            is_bodiless = (lambda seen: bool(seen.status)) if method == "HEAD" else None
            return self.note(await connection.answer(timeout_s, is_bodiless))

    def note(self, answer: Answer) -> Answer:
        """Keep what was seen as evidence: the first and the last."""
        if len(self.evidence) >= _EVIDENCE_MAX:
            del self.evidence[_EVIDENCE_MAX // 2]
        self.evidence.append(answer.evidence())
        return answer

    async def is_well(self, *, both: bool = True) -> bool:
        """Requests are answered, and `both` engines are used."""
        before = [engine.asked for engine in self.engines]
        for _ in range(12):
            async with Connection(self.port) as connection:
                await connection.send(self.bytes_of({**body_of(), "messages": [{"role": "user", "content": "well?"}]}))
                if (await connection.answer(5)).status != 200:
                    return False
            if not both or all(engine.asked > was for engine, was in zip(self.engines, before, strict=True)):
                return True
        return False

    # -- between cases -------------------------------------------------------------------------------------------

    async def settle(self, *, both: bool) -> None:
        """Engines answer the next case, `both` of them; a gateway that does not come round is started anew."""
        for engine in self.engines:
            engine.script = good
            engine.hung = False
        give_up_at_s = time.monotonic() + self.gateway.settle_s
        while not await self.is_well(both=both):
            if time.monotonic() >= give_up_at_s:
                break
            await asyncio.sleep(0.3)
        else:
            return
        self.restarts += 1
        await self.gateway.restart()
        await self.until_well()

    async def until_well(self) -> None:
        """Raises BenchFailed."""
        give_up_at_s = time.monotonic() + START_S
        while not await self.is_well():
            if time.monotonic() > give_up_at_s:
                raise BenchFailed(f"{self.name} does not answer through both engines within {START_S:g} s")
            await asyncio.sleep(0.2)

    @asynccontextmanager
    async def steady_stream(self) -> AsyncIterator[SteadyStream]:
        """A stream that runs beside, until the block ends."""
        for engine in self.engines:
            engine.steady_may_end.clear()
        beside = SteadyStream(self)
        reading = asyncio.ensure_future(beside.read())
        begun = asyncio.ensure_future(beside.begun.wait())
        try:
            await asyncio.wait({reading, begun}, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            yield beside
        finally:
            for engine in self.engines:
                engine.steady_may_end.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reading, 5)


class SteadyStream:
    """The stream of somebody who has nothing to do with the case."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.begun = asyncio.Event()
        self._answer = Answer()
        self._gap_s = 0.0

    async def read(self) -> None:
        body = {**body_of(stream=True), "messages": [{"role": "user", "content": STEADY}], "max_tokens": 100_000}
        async with Connection(self._stage.port) as connection:
            await connection.send(self._stage.bytes_of(body))
            last_s, size = time.monotonic(), 0

            def look(answer: Answer) -> bool:
                nonlocal last_s, size
                now = time.monotonic()
                if len(answer.body) > size:
                    if self.begun.is_set():
                        self._gap_s = max(self._gap_s, now - last_s)
                    last_s, size = now, len(answer.body)
                    if size > 200 * _STEADY_FIRST_WORDS:
                        self.begun.set()
                return False

            self._answer = await connection.answer(240, look)

    def harm(self) -> str:
        """What happened to it; empty = nothing."""
        answer = self._answer
        if not answer.is_done or answer.has_error_event:
            return f"the stream beside ended {answer.end} ({answer.status})"
        if answer.text != "".join(words(answer.text.count("w"))):
            return "the stream beside lost words"
        if self._gap_s > _STEADY_GAP_MAX_S:
            return f"the stream beside was silent for {self._gap_s:.1f} s"
        return ""


def whole_and_told(answer: Answer) -> bool:
    """A stream of which the client can know that it failed: an error event, then the end marker, then a clean end."""
    return answer.end == WHOLE and answer.has_error_event and answer.is_done


async def start(stage: Stage) -> bool:
    """Whether the gateway came up."""
    for engine in stage.engines:
        await engine.start()
    try:
        await stage.gateway.start()
        await stage.until_well()
    except BenchFailed as failure:
        more = stage.gateway.log_end() if isinstance(stage.gateway, PeerGateway) else ""
        say(f"{failure}\n{more}")
        return False
    return True
