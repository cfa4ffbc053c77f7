"""Real agents that are asked whether they are there, and that come back after NATS was away."""

from __future__ import annotations

import asyncio
import time

from integration.system import Process, System, wait_for
from serai.contracts.codec import decode, encode
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.status import ProbeAnswer, ProbeRequest
from serai.contracts.subjects import PROBE, SESSION
from serai.runtime.bus import Message
from serai.runtime.nats_bus import NatsAddress, NatsBus


def session_of(agent: Process) -> str:
    """As the agent's log tells."""
    line = next(line for line in agent.log.splitlines() if "agent.serving" in line)
    return str(line.split('"session":"')[1].split('"')[0])


async def registry_bus(system: System) -> NatsBus:
    """A connection that may ask what registries may ask."""
    return await NatsBus.connect(
        NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file("registry")), "registry"
    )


def test_agents_answer_for_themselves_and_ask_each_other(small_system: System) -> None:
    one, two = (small_system.start_agent(agent_flags=("--label", "rack=7", "--worker-group", "g")) for _ in range(2))

    async def main() -> None:
        bus = await registry_bus(small_system)
        heard: dict[str, SessionRecord] = {}

        def hear(message: Message) -> None:
            record = decode(SessionRecord, message.data)
            heard[record.session] = record

        await bus.subscribe(SESSION.every, hear)

        async def ask(whom: Process, about: str = "") -> ProbeAnswer:
            answer = await bus.request(PROBE.of(session_of(whom)), encode(ProbeRequest(about)), 2)
            return decode(ProbeAnswer, answer.data)

        own = await ask(one)
        assert (own.session, own.reached, own.lifecycle) == (session_of(one), True, Lifecycle.SERVING)
        assert await ask(two, about=session_of(one)) == own
        gone = session_of(one)
        one.kill()
        assert await ask(two, about=gone) == ProbeAnswer(gone, reached=False)
        async with asyncio.timeout(15):
            while session_of(two) not in heard:
                await asyncio.sleep(0.05)
        metadata = heard[session_of(two)].metadata
        assert (metadata.labels, metadata.worker_group) == ({"rack": "7"}, "g")
        assert metadata.connection.startswith("agent-")
        await bus.aclose()

    asyncio.run(main())


def test_an_agent_that_was_away_too_long_ends_and_is_known_to_have_left(system: System) -> None:
    nats = system.processes[0]
    system.start_registry()
    system.start_ingress()
    patient = system.start_agent(model="patient")
    agent = system.start_agent(agent_flags=("--rejoin-after-s", "1.5"))
    system.wait_for_sessions(1)
    system.wait_for_sessions(1, model="patient")
    nats.kill()
    wait_for(lambda: "bus.disconnected" in agent.log, "the agent notices")
    time.sleep(1.6)
    system.start_nats()
    assert agent.popen.wait(20) == 1
    assert "start again as a new session" in agent.log
    wait_for(lambda: system.sessions("patient") == 1, "the other one is there again", 15)
    assert patient.popen.poll() is None
    wait_for(lambda: system.sessions("m") == 0, "all know that it has left", 5)
