"""The phase gate's shell: what the gate hears, and that what it says is done. The gate itself is a stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from serai.contracts.admission import GateMode, InstanceReport, InstanceState, Lease, Spread, TakeInstance
from serai.contracts.codec import decode, encode, encode_frames
from serai.contracts.inference import FailureCode, Frame, FrameKind, InferenceFailure, InferenceRequest
from serai.contracts.subjects import INSTANCE, TAKE
from serai.runtime.bus import Message
from serai.runtime.telemetry import Tracing
from serai.worker_agent import desk as desk_module
from serai.worker_agent import exchange as exchange_module
from serai.worker_agent import phase_gate_shell as shell_module
from serai.worker_agent.desk import Desk, DeskLimits
from serai.worker_agent.engine.phase_socket import PhaseSocket, step_in
from serai.worker_agent.engine_metrics import EngineLoad
from serai.worker_agent.engine_pulse import EnginePulse, EngineStep
from serai.worker_agent.outbox import Outbox
from serai.worker_agent.phase_gate import (
    Ended,
    EngineSays,
    GateEffect,
    GateSettings,
    Offered,
    Position,
    RefuseLease,
    Release,
    Stepped,
    Taken,
    Tick,
    Turn,
    WakeAt,
)
from serai.worker_agent.phase_gate_shell import GateShell
from unit.fakes import Clock, FakeBus, FakePool

LEASE = Lease(epoch=1, sequence=1, prefill_s=0.1, kv_tokens=100, start_within_s=1.0, prompt_tokens=70)


class Gate:
    """Holds everything, and answers each event with what the test has put into `next`."""

    def __init__(self, settings: GateSettings, predict_prefill_s: Any) -> None:
        self.settings = settings
        self.predict_s = predict_prefill_s
        self.heard: list[Any] = []
        self.next: dict[type, Sequence[GateEffect]] = {}
        self.mode = GateMode.PADG
        self.relearnt = False

    def relearn(self) -> None:
        self.relearnt = True

    def handle(self, event: Any, now_s: float) -> Sequence[GateEffect]:
        self.heard.append(event)
        return self.next.get(type(event), ())

    def report(self, now_s: float) -> InstanceReport:
        return InstanceReport("s1", len(self.heard), 1, 0, self.mode, False, 0.0, Spread(0), 0, 0.0, 0.0, 0, 0)

    def state(self, now_s: float, accepted: bool) -> InstanceState:
        return InstanceState(self.report(now_s), [], accepted)

    def heard_of(self, kind: type) -> list[Any]:
        return [event for event in self.heard if isinstance(event, kind)]


class Agent:
    """A desk and its gate's shell on a bus without anybody, and a pool without engine."""

    def __init__(self, phases: PhaseSocket | None = None) -> None:
        self.bus, self.pool = FakeBus(), FakePool()
        self.desk = Desk(self.pool, Outbox(self.bus), DeskLimits(), Tracing("test", None, 0.0), {})  # type: ignore[arg-type]
        self.reports: Any = SimpleNamespace(load=EngineLoad(), at_s=0.0)
        self.shell = GateShell(
            self.bus, "s1", self.desk, self.reports,
            load_every_s=None, phases=phases, prefill_s_per_token=0.001, kv_tokens_total=1000,
        )  # fmt: skip

    @property
    def gate(self) -> Gate:
        gate: Any = self.shell._gate
        assert isinstance(gate, Gate)
        return gate

    def take(self, owner: str = "m1", epoch: int = 1, beat_s: float = 1.0, **more: Any) -> InstanceState | None:
        message = TakeInstance(owner, epoch, GateMode.PADG, more.get("low_share", 0.1), beat_s)
        self.shell.on_take(Message(TAKE.of("s1"), encode(message), "_INBOX_macro.1"))
        answers = [one for one in self.bus.take() if one.subject == "_INBOX_macro.1"]
        return decode(InstanceState, answers[-1].payload) if answers else None

    def request(
        self, name: str = "r1", *, stream: bool = True, lease: Lease | None = LEASE, body: bytes = b"{}"
    ) -> None:
        head = InferenceRequest(
            name, "/v1/completions", len(body), 1, 65536, 600.0, stream=stream, lease=lease
        )  # fmt: skip
        number = int(name[1:])
        frames = [
            Frame(FrameKind.REQUEST, number, 1, 0, encode(head)),
            Frame(FrameKind.BODY, number, 1, 0, body),
        ]
        self.desk.on_inference(Message("inference.s1", encode_frames(frames), f"_INBOX_i.stream.{number}"))

    def cancel(self, number: int = 1) -> None:
        frame = Frame(FrameKind.CANCEL, number, 1, 0)
        self.desk.on_cancel(Message("cancel.s1", encode_frames([frame]), f"_INBOX_i.stream.{number}"))

    async def failures(self) -> list[InferenceFailure]:
        await asyncio.sleep(0)
        frames = [frame for frame in self.bus.take_frames() if frame.kind == FrameKind.ERROR]
        return [decode(InferenceFailure, frame.payload) for frame in frames]

    def reported(self) -> list[InstanceReport]:
        subject = INSTANCE.of("s1")
        return [decode(InstanceReport, one.payload) for one in self.bus.take() if one.subject == subject]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module, "PhaseGate", Gate)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.put_into(monkeypatch, desk_module, exchange_module, shell_module)
    return clock


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_without_an_owner_requests_go_straight_to_the_engine(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        agent.request()
        assert len(agent.pool.posted) == 1
        assert agent.desk.gate is None
        assert agent.desk.held == 0

    loop.run(main())


def test_the_gate_holds_and_releases(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        state = agent.take()
        assert state is not None
        assert state.accepted
        agent.request("r1")
        agent.request("r2", lease=None, body=b"x" * 400)
        assert agent.gate.heard_of(Offered) == [Offered("r1", 70, LEASE), Offered("r2", 100, None)]
        assert not agent.pool.posted
        assert (agent.desk.in_flight, agent.desk.held) == (2, 2)
        agent.gate.next[Stepped] = [Release("r1"), Release("r1"), Release("nobody")]
        agent.shell.look()
        assert len(agent.pool.posted) == 1
        assert agent.desk.held == 1

    loop.run(main())


def test_a_refused_lease_is_told_and_may_be_tried_elsewhere(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take()
        agent.gate.next[Offered] = [RefuseLease("r1", "too late")]
        agent.request()
        failure = (await agent.failures())[0]
        assert (failure.code, failure.message, failure.retry_safe) == (FailureCode.LEASE_REFUSED, "too late", True)
        assert agent.desk.in_flight == 0
        assert not agent.gate.heard_of(Ended), "the gate has forgotten it already"

    loop.run(main())


def test_a_held_request_is_cancelled_is_kept_alive_and_has_a_deadline(loop: asyncio.Runner, clock: Clock) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take(beat_s=60)
        agent.request("r1")
        agent.request("r2")
        agent.cancel(1)
        assert agent.gate.heard_of(Ended) == [Ended("r1")]
        assert agent.desk.held == 1
        clock.advance(599)
        agent.bus.take()
        agent.desk.watch()
        await asyncio.sleep(0)
        assert [frame.kind for frame in agent.bus.take_frames()] == [FrameKind.ALIVE]
        clock.advance(2)
        agent.desk.watch()
        assert [failure.code for failure in await agent.failures()] == [FailureCode.DEADLINE]
        assert agent.gate.heard_of(Ended)[-1] == Ended("r2")
        assert (agent.desk.in_flight, agent.desk.held) == (0, 0)

    loop.run(main())


def test_the_engines_silence_is_no_fault_while_a_request_is_held(loop: asyncio.Runner, clock: Clock) -> None:
    async def main() -> None:
        agent = Agent()
        agent.desk._limits = DeskLimits(engine_silence_s=10)
        agent.take(beat_s=60)
        agent.request()
        clock.advance(30)
        agent.desk.watch()
        assert agent.desk.in_flight == 1

    loop.run(main())


def test_progress_is_told_when_it_is_looked_at_never_once_a_token(loop: asyncio.Runner, clock: Clock) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take(beat_s=60)
        agent.shell.look()
        agent.gate.heard.clear()
        agent.gate.next[Offered] = [Release("r1")]
        agent.request()
        posted = agent.pool.posted[0]
        posted.lend()
        posted.head()
        clock.advance(0.25)
        for _ in range(5):
            posted.data(b'data: {"choices":[{"text":"a"}]}\n\n')
        steps = agent.gate.heard_of(Stepped)
        assert [(step.first, step.prompt_tokens, step.duration_s) for step in steps] == [(("r1",), 70, 0.25)]
        agent.shell.look()
        assert agent.gate.relearnt, "0.25 s for 70 tokens is not what was thought"
        assert len(agent.gate.heard_of(Stepped)) == 1 + 4, "four tokens after the first"
        agent.shell.look()
        assert len(agent.gate.heard_of(Stepped)) == 1 + 4, "nothing new"
        posted.data(b'data: {"choices":[],"usage":{"completion_tokens": 12}}\n\n')
        agent.shell.look()
        assert len(agent.gate.heard_of(Stepped)) == 1 + 11
        posted.complete()
        assert agent.gate.heard_of(Ended) == [Ended("r1")]

    loop.run(main())


def test_an_error_is_no_first_token(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take()
        agent.gate.next[Offered] = [Release("r1")]
        agent.request()
        posted = agent.pool.posted[0]
        posted.lend()
        posted.head(400)
        posted.data(b'{"error": {}}')
        posted.complete()
        assert agent.gate.heard_of(Ended)
        # That its prompt is no work any more, and nothing else.
        assert agent.gate.heard_of(Stepped) == [Stepped(0.0, False)]

    loop.run(main())


def test_an_answer_in_one_piece_that_is_quick_leaves_no_work_behind(loop: asyncio.Runner) -> None:
    """Between two looks it came and went, and nothing more comes: an idle instance must not say that prompts wait."""

    async def main() -> None:
        agent = Agent()
        agent.take()
        agent.gate.next[Offered] = [Release("r1")]
        agent.request(stream=False)
        posted = agent.pool.posted[0]
        posted.lend()
        posted.head(200)
        posted.data(b'{"choices": []}')
        posted.complete()
        assert [type(one) for one in agent.gate.heard][-2:] == [Ended, Stepped]
        assert agent.gate.heard_of(Stepped)[-1].backlog_tokens == 0

    loop.run(main())


def test_of_an_answer_in_one_piece_the_first_token_is_predicted(loop: asyncio.Runner, clock: Clock) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take(beat_s=60)
        agent.gate.next[Offered] = [Release("r1"), Release("r2")]
        agent.request("r1", stream=False)
        agent.request("r2", stream=False)

        def first() -> list[str]:
            return [key for step in agent.gate.heard_of(Stepped) for key in step.first]

        agent.shell.look()
        assert not first()
        clock.advance(0.08)  # 70 tokens at 1 ms
        agent.shell.look()
        assert first() == ["r1"]
        clock.advance(0.07)  # Its turn came after the other's.
        agent.shell.look()
        assert first() == ["r1", "r2"]

    loop.run(main())


def test_who_was_here_before_the_take_is_told_and_not_posted_again(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        agent.request("r1")
        posted = agent.pool.posted[0]
        posted.lend()
        posted.head()
        posted.data(b"data: {}\n\n")
        agent.request("r2")
        agent.take()
        heard = agent.gate.heard
        assert (heard[0], heard[1].first, heard[2]) == (Offered("r1", 70), ("r1",), Offered("r2", 70))
        assert isinstance(heard[3], Taken)
        assert heard[1].backlog_tokens == 0
        agent.request("r3")
        agent.gate.next[Stepped] = [Release("r1"), Release("r2")]
        agent.shell.look()
        assert len(agent.pool.posted) == 2

    loop.run(main())


def test_only_the_present_owner_is_obeyed(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        takes = [("a", 2), ("b", 1), ("b", 2), ("a", 2), ("b", 3)]
        accepted = [state.accepted for take in takes if (state := agent.take(*take)) is not None]
        assert accepted == [True, False, False, True, True]
        assert [event.epoch for event in agent.gate.heard_of(Taken)] == [2, 2, 3]
        assert agent.take("c", 0) is None
        assert agent.take("c", 9, beat_s=0.0) is None
        assert agent.take("c", 9, low_share=1.0) is None
        agent.shell.on_take(Message(TAKE.of("s1"), b"nonsense", "_INBOX_macro.1"))
        assert len(agent.gate.heard_of(Taken)) == 3

    loop.run(main())


def test_reports_come_while_taken_and_end_when_the_owner_is_silent(loop: asyncio.Runner, clock: Clock) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take(beat_s=1.0)
        agent.shell.look()
        assert len(agent.reported()) == 1
        agent.gate.heard.clear()
        clock.advance(0.5)
        agent.shell._changed.clear()
        # A tick changes nothing that others need to know, but the stand-in cannot tell.
        agent.shell.look()
        clock.advance(1.6)
        agent.gate.mode = GateMode.PADG
        agent.bus.take()
        agent.shell.look()
        assert agent.gate.heard_of(Taken)[-1].mode is GateMode.ORDINARY
        assert len(agent.reported()) == 1
        assert not agent.shell._taken.is_set()
        assert agent.take() is not None, "it may come back"
        assert agent.shell._taken.is_set()

    loop.run(main())


def test_a_drain_sends_who_waits_elsewhere_unless_it_came_without_a_lease(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take()
        agent.request("r1")
        agent.request("r2", lease=None)
        agent.desk.refuse_new()
        failures = await agent.failures()
        assert [(failure.code, failure.retry_safe) for failure in failures] == [(FailureCode.DRAINING, True)]
        assert len(agent.pool.posted) == 1
        assert agent.desk.in_flight == 1
        assert agent.take(epoch=2) is None, "nobody takes what drains"

    loop.run(main())


def test_wishes_to_be_woken_are_fulfilled(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take()
        loop_now_s = shell_module.time.monotonic()
        agent.gate.next[Offered] = [WakeAt(loop_now_s + 30), WakeAt(loop_now_s + 0.01)]
        agent.request()
        for _ in range(200):
            if agent.gate.heard_of(Tick):
                break
            await asyncio.sleep(0.005)
        assert len(agent.gate.heard_of(Tick)) == 1

    loop.run(main())


def test_what_the_engine_says_of_its_cache_is_passed_on_once(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take()
        agent.reports.load = EngineLoad(kv_tokens_used=100, kv_tokens_free=900)
        agent.shell.look()
        agent.shell.look()
        assert agent.gate.heard_of(EngineSays) == [EngineSays(900, 1000)]

    loop.run(main())


def test_an_engine_that_tells_its_steps_is_told_its_phase(loop: asyncio.Runner) -> None:
    async def main() -> None:
        name = f"@serai-shell-test-{os.getpid()}"
        phases = PhaseSocket(name)
        agent = Agent(phases)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine:
            starting = asyncio.ensure_future(agent.shell.start())
            await asyncio.sleep(0)
            engine.connect("\0" + name[1:])
            engine.settimeout(5)
            await starting
            agent.take()
            assert agent.gate.settings.tells_steps
            agent.gate.next[Offered] = [Turn(Position.PREFILL, 512), Release("r1")]
            agent.request()
            words = [json.loads(engine.recv(4096)) for _ in range(2)]
            assert words[-1] == {"phase": "prefill", "prompt_tokens_max": 512}
            step = {"step_s": 0.25, "prefill_tokens": 70, "decodes": 0, "backlog_tokens": 5, "context_tokens": 9,
                    "kv_tokens_free": 30, "kv_tokens_total": 100, "sequences_max": 7}  # fmt: skip
            engine.send(b"nonsense")
            engine.send(json.dumps(step).encode())
            while not agent.gate.heard_of(Stepped):
                await asyncio.sleep(0.005)
            told = agent.gate.heard_of(Stepped)[0]
            assert (told.duration_s, told.decoded, told.prompt_tokens) == (0.25, False, 70)
            # The engine may not have seen yet what was posted a moment ago.
            assert told.backlog_tokens == 75
            assert (told.kv_tokens_free, told.context_tokens) == (30, 9)
            assert agent.gate.heard_of(EngineSays) == [EngineSays(30, 100, 7)]
            assert agent.gate.predict_s(70) == pytest.approx(0.25)
            assert not agent.gate.heard_of(Tick)
        agent.shell.close()

    loop.run(main())


def test_when_nothing_follows_the_last_prefill_its_window_is_closed(loop: asyncio.Runner, clock: Clock) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take(beat_s=60)
        agent.shell._pulse = EnginePulse(agent.shell._rate, told=True)
        agent.gate.next[Offered] = [Release("r1")]
        agent.request()
        agent.shell._stepped(EngineStep(0.1, 10, 0, 0, 50, 30, 100))
        agent.shell.look()
        assert len(agent.gate.heard_of(Stepped)) == 1, "it still works"
        agent.cancel()
        agent.shell.look()
        agent.shell.look()
        assert [step.prompt_tokens for step in agent.gate.heard_of(Stepped)] == [10, 0]

    loop.run(main())


def test_a_step_whose_word_was_lost_does_not_stop_the_gate(loop: asyncio.Runner, clock: Clock) -> None:
    async def main() -> None:
        agent = Agent()
        agent.take(beat_s=60)
        agent.shell._pulse = EnginePulse(agent.shell._rate, told=True)
        agent.gate.next[Offered] = [Release("r1")]
        agent.request("r1")
        agent.request("r2")
        agent.shell._stepped(EngineStep(0.1, 10, 3, 0, 50, 30, 100))
        assert len(agent.gate.heard_of(Stepped)) == 1
        clock.advance(0.5)
        agent.shell.look()
        assert len(agent.gate.heard_of(Stepped)) == 1
        clock.advance(0.6)
        agent.shell.look()
        assert not agent.gate.heard_of(Stepped)[-1].decoded
        assert len(agent.gate.heard_of(Stepped)) == 2

    loop.run(main())


@pytest.mark.parametrize(
    "wrong", [{"decodes": -1}, {"decodes": "3"}, {"step_s": None}, {"step_s": 1e9}, {"decodes": None}]
)
def test_nonsense_from_an_engine_is_no_step(wrong: dict[str, Any]) -> None:
    step = {"step_s": 0.25, "prefill_tokens": 70, "decodes": 0, "backlog_tokens": 5, "context_tokens": 9,
            "kv_tokens_free": 30, "kv_tokens_total": 100}  # fmt: skip
    assert step_in(json.dumps(step).encode()) is not None
    assert step_in(json.dumps(step | wrong).encode()) is None
    assert step_in(json.dumps(step | {"sequences_max": -1}).encode()) is None
    assert step_in(b"[]") is None
    assert step_in(b"{}") is None


def test_an_engine_whose_load_is_cheap_to_ask_is_asked_while_it_works(loop: asyncio.Runner) -> None:
    async def main() -> None:
        agent = Agent()
        asked = 0

        async def ask_load() -> EngineLoad | None:
            nonlocal asked
            asked += 1
            return EngineLoad(kv_tokens_used=100 * asked, kv_tokens_free=1000 - 100 * asked) if asked < 3 else None

        agent.reports.ask_load = ask_load
        agent.shell._load_every_s = 0.01
        watching = asyncio.ensure_future(agent.shell.watching())
        await asyncio.sleep(0.05)
        assert asked == 0, "nobody has taken it"
        agent.take(beat_s=60)
        await asyncio.sleep(0.05)
        assert asked == 0, "it is idle"
        agent.request()
        while asked < 4:
            await asyncio.sleep(0.005)
        assert agent.gate.heard_of(EngineSays) == [EngineSays(900, 1000), EngineSays(800, 1000)]
        watching.cancel()

    loop.run(main())
