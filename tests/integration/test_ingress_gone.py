"""An ingress that is killed cannot cancel: the agent must notice by itself, with a real server and real permissions."""

from __future__ import annotations

import contextlib
import threading

import httpx2

from integration.system import System, wait_for


def test_engines_are_freed_when_their_ingress_is_killed(system: System) -> None:
    system.start_registry()
    ingress = system.start_ingress()
    agent = system.start_agent()
    system.wait_for_sessions(1)
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 100_000, "stream": True}
    first = threading.Event()

    def read() -> None:
        with (
            system.client() as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
            contextlib.suppress(httpx2.HTTPError),  # Cut, for the client too.
        ):
            for _ in answer.iter_lines():
                first.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(20)
    with system.engine(agent) as engine:
        assert engine.get("/emulator/state").json()["running"] == 1
        ingress.kill()
        wait_for(lambda: engine.get("/emulator/state").json()["running"] == 0, "the engine is free", 10)
    reader.join(20)
    assert "agent.reader_gone" in agent.log
