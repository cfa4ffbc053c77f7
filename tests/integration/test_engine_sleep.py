"""An engine that is not needed sleeps instead of ending: by its macro-scheduler's word, and back within seconds."""

from __future__ import annotations

import asyncio

from integration.system import System, wait_for
from serai.contracts.codec import decode, encode
from serai.contracts.drain import SleepAnswer, SleepRequest
from serai.contracts.subjects import SLEEP
from serai.runtime.nats_bus import NatsAddress, NatsBus


def states(system: System) -> dict[str, int]:
    with system.client() as client:
        return dict(client.get("/v1/models/m").json()["sessions"])


def answered(system: System) -> int:
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    with system.client() as client:
        return client.post("/v1/chat/completions", json=body).status_code


def told(system: System, session: str, *, asleep: bool) -> SleepAnswer:
    async def ask() -> SleepAnswer:
        address = NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file("macro-scheduler"))
        bus = await NatsBus.connect(address, "macro-scheduler")
        try:
            message = await bus.request(SLEEP.of(session), encode(SleepRequest(asleep, 5.0, "a test")), 5.0)
            return decode(SleepAnswer, message.data)
        finally:
            await bus.aclose()

    return asyncio.run(ask())


def test_an_idle_group_puts_an_engine_to_sleep_and_it_is_back_within_seconds(system: System) -> None:
    system.start_registry()
    system.start_ingress("--policy", "macro-scheduled")
    quick = ("--sleep-s", "0.2", "--wake-s", "0.5", "--ttft-ms", "1", "--tpot-ms", "1")
    agents = [system.start_agent(*quick), system.start_agent(*quick, "--engine", "sglang")]
    system.wait_for_sessions(2)
    flags = ("--scaling", "--scaling-sleeps", "--scaling-window-s", "0.6", "--instance-start-s", "0")
    scheduler = system.service("macro-scheduler", *flags)
    wait_for(lambda: states(system) == {"serving": 1, "asleep": 1}, "one of two engines sleeps")
    assert "macro.put_to_sleep" in scheduler.log
    assert [answered(system) for _ in range(3)] == [200, 200, 200]
    scheduler.terminate()

    (sleeper,) = [agent for agent in agents if '"agent.asleep"' in agent.log]
    session = sleeper.log.split('"session":"', 1)[1].split('"', 1)[0]
    assert told(system, session, asleep=False).accepted
    wait_for(lambda: states(system) == {"serving": 2}, "it serves again")
    assert '"agent.awake"' in sleeper.log
    assert [answered(system) for _ in range(4)] == [200] * 4
