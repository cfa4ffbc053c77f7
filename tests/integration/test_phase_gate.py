"""The phase gate at a real agent before an emulated engine that tells its steps. The test is the ingress, and it is the
macro-scheduler that takes the instance."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from integration.system import Process, System, private_system, wait_for
from serai.contracts.admission import GateMode, InstanceReport, InstanceState, Lease, TakeInstance
from serai.contracts.codec import decode, encode
from serai.contracts.drain import DrainRequest
from serai.contracts.inference import FailureCode, InferenceRequest
from serai.contracts.subjects import DRAIN, INSTANCE, TAKE
from serai.ingress.inference_client import InferenceClient, StreamFailed
from serai.runtime.bus import Message
from serai.runtime.nats_bus import NatsAddress, NatsBus

pytestmark = pytest.mark.alone  # Targets are set by what a decode step was seen to take.
ENGINE = ("--gpu", "h100-sxm-80", "--card", "Qwen2.5-7B-Instruct", "--no-prefix-cache", "--speed", "0.1")
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with private_system(tmp_path_factory.mktemp("gate")) as made:
        made.start_registry()
        yield made


class Instance:
    """One agent with its engine; this process talks to it as ingress and as macro-scheduler."""

    def __init__(self, agent: Process, ingress: NatsBus, macro: NatsBus, engine: httpx2.AsyncClient) -> None:
        self.agent, self.ingress, self.macro, self.engine = agent, ingress, macro, engine
        self.session = ""
        self.reports: list[tuple[float, InstanceReport]] = []
        self.leases = 0
        self.client = InferenceClient(
            ingress, accept_timeout_s=5, silence_timeout_s=5, on_unreachable=lambda session: None
        )

    async def start(self) -> None:
        line = next(line for line in self.agent.log.splitlines() if "agent.serving" in line)
        self.session = json.loads(line)["session"]
        await self.client.start()
        await self.macro.subscribe(INSTANCE.of(self.session), self._on_report)
        await self.ingress.barrier()
        await self.macro.barrier()

    def _on_report(self, message: Message) -> None:
        self.reports.append((time.monotonic(), decode(InstanceReport, message.data)))

    @property
    def last(self) -> InstanceReport:
        return self.reports[-1][1]

    async def take(self, epoch: int = 1, *, owner: str = "m1", beat_s: float = 30.0) -> InstanceState:
        take = TakeInstance(owner, epoch, GateMode.PADG, 0.1, beat_s)
        answer = await self.macro.request(TAKE.of(self.session), encode(take), 5)
        return decode(InstanceState, answer.data)

    def lease(self, *, epoch: int = 1, ttft_s: float = 60.0, tpot_s: float = 1.0, tokens: int = 20) -> Lease:
        self.leases += 1
        return Lease(
            epoch, self.leases, 0.01, 100, ttft_s, slo_ttft_s=ttft_s, slo_tpot_s=tpot_s, prompt_tokens=tokens
        )  # fmt: skip

    async def ask(self, name: str, lease: Lease | None, *, words: int = 20, tokens: int = 4) -> int:
        """A streamed answer; how many events it had. Raises StreamFailed."""
        body = json.dumps({"prompt": "word " * words, "max_tokens": tokens, "stream": True}).encode()
        headers = {"content-type": "application/json"}
        request = InferenceRequest(name, PATH, len(body), 1, 65536, 60.0, headers=headers, stream=True, lease=lease)
        events = 0
        with self.client.stream(self.session, 1, request, body) as stream:
            await stream.head()
            while (data := await stream.data()) is not None:
                events += data.count(b"data:")
        return events

    async def beside(self, tokens: int) -> asyncio.Task[int]:
        """A stream whose target is less than what a decode step takes: before long nothing may hold it up, and not so
        far behind that it is given up as lost (ten targets)."""
        await self.ask("warm", self.lease(), tokens=8)
        await until(lambda: self.reports and self.last.step_s > 0, "steps were measured")
        tpot_s = 0.9 * self.last.step_s
        lease = self.lease(tpot_s=tpot_s)
        streaming = asyncio.ensure_future(self.ask("beside", lease, tokens=tokens))
        await until(lambda: self.last.decoding.count and self.last.decoding.least_s < -2 * tpot_s, "it falls behind")
        return streaming

    async def state(self) -> dict[str, Any]:
        return dict((await self.engine.get("/emulator/state")).json())

    async def hold(self, name: str = "held") -> asyncio.Task[int]:
        """A long prompt that the gate holds back, because a stream beside it has no slack to spare."""
        asking = asyncio.ensure_future(self.ask(name, self.lease(tokens=4000), words=3200))
        await until(lambda: self.last.waiting > 0, "it waits")
        await asyncio.sleep(0.4)
        assert self.last.waiting > 0
        state = await self.state()
        assert (state["running"], state["waiting"]) == (1, 0), "it is not at the engine"
        assert not asking.done()
        return asking


async def until(there: Callable[[], Any], what: str, timeout_s: float = 30.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not there():
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"not within {timeout_s:g} s: {what}")


@asynccontextmanager
async def instance(system: System, mode: str) -> AsyncIterator[Instance]:
    agent = system.start_agent(*ENGINE, "--mode", mode, wait=False)
    wait_for(lambda: "agent.serving" in agent.log, "agent serves")
    url = f"nats://127.0.0.1:{system.nats_port}"
    buses = [
        await NatsBus.connect(NatsAddress(url, system.nats.key_file(role)), role)
        for role in ("ingress", "macro-scheduler")
    ]
    engine = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{system.engine_port(agent)}", timeout=10)
    made = Instance(agent, *buses, engine)
    try:
        await made.start()
        yield made
    finally:
        for bus in buses:
            await bus.aclose()
        await engine.aclose()
        agent.kill()


def with_instance(system: System, play: Callable[[Instance], Awaitable[None]], mode: str = "phase-gated") -> None:
    async def main() -> None:
        async with instance(system, mode) as made:
            await play(made)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["phase-gated", "mixed"])
def test_the_gate_holds_a_prompt_and_releases_it_and_refuses_what_it_cannot_keep(system: System, mode: str) -> None:
    """Before an engine that tells its steps and obeys, and before one that knows nothing of phases."""
    told = mode == "phase-gated"

    async def play(one: Instance) -> None:
        assert await one.ask("before", None) == 6, "nobody has taken it: as ever"
        await asyncio.sleep(0.1)
        assert not one.reports
        assert (await one.state())["phase"] == ("mixed" if told else None)

        assert (await one.take()).accepted
        assert not (await one.take(owner="m2")).accepted, "of one epoch only the first"
        assert await one.ask("with a lease", one.lease()) == 6
        await until(lambda: one.reports and one.last.applied == 1, "the lease was applied")
        assert not told or (await one.state())["phase"] != "mixed", "the engine was told"

        beside = await one.beside(120)
        held = await one.hold()
        state = await one.take(2, owner="m2")  # A new owner is told all.
        assert {request.request_id for request in state.requests} == {"beside", "held"}
        with pytest.raises(StreamFailed) as refused:
            await one.ask("late", one.lease(epoch=7))
        assert refused.value.failure.code == FailureCode.LEASE_REFUSED
        assert refused.value.failure.retry_safe
        beside.cancel()
        assert await held == 6
        gaps = [later - earlier for (earlier, _), (later, _) in zip(one.reports, one.reports[1:], strict=False)]
        assert sorted(gaps)[len(gaps) // 2] >= 0.02, "at most one each 20 ms"
        sequences = [report.sequence for _, report in one.reports]
        assert sequences == sorted(set(sequences))

    with_instance(system, play, mode)


def test_a_held_request_can_be_cancelled_and_an_owner_that_is_silent_is_forgotten(system: System) -> None:
    async def play(one: Instance) -> None:
        assert (await one.take()).accepted
        beside = await one.beside(120)
        before = (await one.state())["requests_total"]
        held = await one.hold()
        held.cancel()
        await until(lambda: one.last.waiting == 0, "it is gone")
        state = await one.state()
        assert (state["running"], state["requests_total"]) == (1, before), "the engine never had it"
        again = await one.hold("again")
        await one.take(beat_s=0.2)
        await until(lambda: one.last.mode is GateMode.ORDINARY, "two beats without its owner")
        assert await again == 6, "then nothing is held back"
        beside.cancel()
        silent = len(one.reports)
        await asyncio.sleep(0.3)
        assert len(one.reports) == silent
        assert (await one.state())["phase"] == "mixed"
        assert (await one.take(2)).accepted

    with_instance(system, play)


def test_a_drain_sends_held_requests_elsewhere_and_lets_the_others_finish(system: System) -> None:
    async def play(one: Instance) -> None:
        assert (await one.take()).accepted
        beside = await one.beside(60)
        held = await one.hold()
        tools = NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file("tools"))
        bus = await NatsBus.connect(tools, "tools")
        await bus.request(DRAIN.of(one.session), encode(DrainRequest("a test", 30.0)), 5)
        await bus.aclose()
        with pytest.raises(StreamFailed) as handed_over:
            await held
        assert handed_over.value.failure.code == FailureCode.DRAINING
        assert handed_over.value.failure.retry_safe
        assert await beside == 62

    with_instance(system, play)
