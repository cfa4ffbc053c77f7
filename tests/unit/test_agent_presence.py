"""How an agent answers when asked whether it is there, and how it comes back after it was away."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from serai.contracts.codec import decode, encode
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.status import ProbeAnswer, ProbeRequest, SessionStatus
from serai.contracts.subjects import PROBE, SESSION, STATUS
from serai.runtime.bus import BusDisconnected, Message, RequestTimeout
from serai.runtime.service import ServiceFailure
from serai.runtime.telemetry import Tracing
from serai.worker_agent import presence as presence_module
from serai.worker_agent import probe_answers
from serai.worker_agent.engine.emulated import EmulatedEngine
from serai.worker_agent.probe_answers import ASKS_MAX, ProbeAnswers
from serai.worker_agent.service import NodeAgent
from serai.worker_agent.settings import AgentSettings
from unit.fakes import Clock, FakeBus

OWN = ProbeAnswer("own", lifecycle=Lifecycle.SERVING, version=3)


def ask(probes: ProbeAnswers, about: str = "", reply: str = "_INBOX_x.1") -> None:
    probes.on_probe(Message(PROBE.of("own"), encode(ProbeRequest(about)), reply))


def answers(bus: FakeBus) -> list[ProbeAnswer]:
    return [decode(ProbeAnswer, message.payload) for message in bus.take()]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_probe_is_answered_at_once() -> None:
    bus = FakeBus()
    probes = ProbeAnswers(bus, "own", lambda: OWN)
    ask(probes)
    ask(probes, about="own")
    assert [message.reply for message in bus.published] == ["", ""]
    assert answers(bus) == [OWN, OWN]
    ask(probes, reply="")
    probes.on_probe(Message(PROBE.of("own"), b"{", "_INBOX_x.1"))
    ask(probes, about="no.session >")
    assert answers(bus) == []


def test_a_probe_about_another_asks_that_one() -> None:
    async def main() -> None:
        bus = FakeBus()
        probes = ProbeAnswers(bus, "own", lambda: OWN)
        other = ProbeAnswer("other", lifecycle=Lifecycle.DOWN, version=9, stalled_s=4.0)
        bus.answers[PROBE.of("other")] = lambda _: encode(other)
        bus.answers[PROBE.of("liar")] = lambda _: encode(other)
        for about in ("other", "gone", "liar"):
            ask(probes, about)
        await settle()
        assert answers(bus) == [other, ProbeAnswer("gone", reached=False), ProbeAnswer("liar", reached=False)]

    asyncio.run(main())


class SilentBus(FakeBus):
    """Requests hang until the test lets them end with `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[asyncio.Future[Message]] = []

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message:
        assert timeout_s == probe_answers.ASK_TIMEOUT_S
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]


def test_only_a_few_are_asked_at_once_and_the_rest_get_no_evidence() -> None:
    async def main() -> None:
        bus = SilentBus()
        probes = ProbeAnswers(bus, "own", lambda: OWN)
        for number in range(ASKS_MAX + 3):
            ask(probes, f"s{number}")
        await settle()
        assert len(bus.asked) == ASKS_MAX
        bus.asked[0].set_exception(RequestTimeout("silent"))
        bus.asked[1].set_exception(BusDisconnected("we are cut off ourselves"))
        await settle()
        assert answers(bus) == [ProbeAnswer("s0", reached=False)]
        ask(probes, "later")
        await settle()
        assert len(bus.asked) == ASKS_MAX + 1
        probes.close()
        await settle()
        assert all(future.done() for future in bus.asked)

    asyncio.run(main())


def agent_on(bus: FakeBus, **said: Any) -> NodeAgent:
    settings = AgentSettings(model="m", engine_url="http://127.0.0.1:1", start_timeout_s=3600, **said)
    return NodeAgent(settings, EmulatedEngine(), [], bus, Tracing("test", None, 0.0), connection="agent-1")  # type: ignore[arg-type]


def test_h27_no_address_crosses_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears of a session reaches it by its subject; where its engine listens is nobody's business."""
    monkeypatch.setenv("HOSTNAME", "n[1-4]")

    async def main() -> None:
        bus = FakeBus()
        agent = agent_on(bus)
        said: list[bytes] = []
        bus.answers[SESSION.of(agent.record.session)] = lambda payload: said.append(payload) or b""  # type: ignore[func-returns-value]
        stop = asyncio.Event()
        running = asyncio.ensure_future(agent.run(stop))
        await asyncio.sleep(0.05)
        stop.set()
        await running
        said += [message.payload for message in bus.take()]
        assert said
        for payload in said:
            assert not any(word in payload for word in (b"127.0.0.1", b"localhost", b"http:", b"::1", b"n[1-4]"))

    asyncio.run(main())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.put_into(monkeypatch, presence_module)
    monkeypatch.setattr(presence_module, "RETURN_SPREAD_S", 0.0)
    return clock


def test_an_agent_that_was_away_for_a_moment_shows_life_and_announces_itself_at_once(clock: Clock) -> None:
    async def main() -> None:
        bus = FakeBus()
        agent = agent_on(bus)
        announced: list[SessionRecord] = []

        def acknowledge(payload: bytes) -> bytes:
            announced.append(decode(SessionRecord, payload))
            return b""

        bus.answers[SESSION.of(agent.record.session)] = acknowledge
        stop = asyncio.Event()
        running = asyncio.ensure_future(agent.run(stop))
        await asyncio.sleep(0.05)
        assert announced[-1].metadata.connection == "agent-1"
        assert PROBE.of(agent.record.session) in bus.handlers  # Before the engine serves.
        bus.lose_connection()
        clock.advance(3599)
        bus.take()
        count = len(announced)
        bus.reconnect()
        await asyncio.sleep(0.05)
        assert len(announced) == count + 1
        assert any(m.subject == STATUS.of(agent.record.session) for m in bus.take())
        stop.set()
        await running
        assert announced[-1].lifecycle is Lifecycle.LEFT

    asyncio.run(main())


def test_an_agent_that_was_away_for_too_long_ends_and_says_nothing_but_that_it_left(clock: Clock) -> None:
    async def main() -> None:
        bus = FakeBus()
        agent = agent_on(bus)
        announced: list[SessionRecord] = []
        running = asyncio.ensure_future(agent.run(asyncio.Event()))
        await asyncio.sleep(0.05)
        bus.lose_connection()
        clock.advance(3601)
        bus.take()
        bus.connected = True  # As in reality: the connection is there before the callback runs.

        def acknowledge(payload: bytes) -> bytes:
            announced.append(decode(SessionRecord, payload))
            return b""

        bus.answers[SESSION.of(agent.record.session)] = acknowledge
        agent.presence.show_life()
        agent.presence.say(Lifecycle.JOIN)
        await asyncio.sleep(0.05)
        assert (bus.take(), announced) == ([], [])
        bus.reconnect()
        with pytest.raises(ServiceFailure, match="start again as a new session"):
            await running
        assert [record.lifecycle for record in announced] == [Lifecycle.LEFT]
        assert not [m for m in bus.take() if m.subject.startswith(STATUS.hop)]

    asyncio.run(main())


def test_an_engine_that_stalls_is_said_in_status_and_probe(clock: Clock) -> None:
    async def main() -> None:
        bus = FakeBus()
        agent = agent_on(bus)

        class Stalled:
            stalled_s = 4.24

        agent.session._watchdog = Stalled()  # type: ignore[assignment]
        agent.presence.show_life()
        (status,) = [decode(SessionStatus, message.payload) for message in bus.take()]
        assert (status.stalled_s, status.allocation_remaining_s) == (4.2, None)
        assert agent.presence.probe_answer().stalled_s == 4.2

    asyncio.run(main())


def test_an_agent_whose_registry_says_that_it_left_ends(clock: Clock) -> None:
    async def main() -> None:
        bus = FakeBus()
        agent = agent_on(bus)
        known = replace(agent.record, lifecycle=Lifecycle.LEFT, version=9)
        bus.answers[SESSION.of(agent.record.session)] = lambda payload: encode(known)
        with pytest.raises(ServiceFailure, match="has left"):
            async with asyncio.timeout(5):
                await agent.run(asyncio.Event())

    asyncio.run(main())


def test_a_change_is_said_once_when_it_is_acknowledged_and_again_when_not(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_module, "ACKNOWLEDGED_WITHIN_S", 0.05)

    async def main() -> None:
        bus = FakeBus()
        agent = agent_on(bus)
        subject = SESSION.of(agent.record.session)
        asked: list[int] = []

        def acknowledge(payload: bytes) -> bytes:
            asked.append(decode(SessionRecord, payload).version)
            return b""

        bus.answers[subject] = acknowledge
        stop = asyncio.Event()
        running = asyncio.ensure_future(agent.run(stop))
        await asyncio.sleep(0.02)
        asked.clear()
        bus.take()
        agent.relabel({"a": "1"})
        (said,) = [message for message in bus.take() if message.subject == subject]
        bus.handlers[said.reply.rpartition(".")[0] + ".*"](Message(said.reply, b""))
        await asyncio.sleep(0.1)
        assert asked == []
        agent.relabel({"a": "2"})
        await asyncio.sleep(0.1)
        assert asked == [agent.record.version]
        stop.set()
        await running

    asyncio.run(main())
