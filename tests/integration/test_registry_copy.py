"""The ingress's copy of the registry, with real servers and processes: each source of knowledge taken away in turn."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from integration.system import Process, System, wait_for
from serai.contracts.subjects import SESSIONS_BUCKET
from serai.runtime.nats_bus import NatsAddress, NatsBus

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}]}
LONG = CHAT | {"max_tokens": 100_000, "stream": True, "logprobs": True}
"""With log probabilities, so that it is not continued elsewhere."""
RIGHT_AGAIN_S = 5.0
HEARTBEATS_ALONE_S = 3.5
DISCONNECTS_TOLD_S = 0.3
SLACK_S = 1.0
"""This machine is shared, and a process may not run for a while."""


def models(system: System, query: str = "") -> dict[str, Any]:
    with system.client() as client:
        answer = client.get(f"/v1/models{query}")
    assert answer.status_code == 200
    return {entry["id"]: entry for entry in answer.json()["data"]}


def chat(system: System) -> httpx2.Response:
    with system.client() as client:
        return client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2})


def ready(system: System) -> dict[str, Any]:
    with system.client() as client:
        found: dict[str, Any] = client.get("/health/ready").json()
    return found


@contextmanager
def streaming(system: System, session_of: dict[str, Process]) -> Iterator[tuple[Process, list[str]]]:
    """A long stream that has begun; the agent that answers it, and the data of its events once the block ends."""
    data: list[str] = []
    begun: list[str] = []

    def read() -> None:
        with system.client() as client, client.stream("POST", "/v1/chat/completions", json=LONG) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data.append(line[6:])
                    if not begun:
                        begun.append(answer.headers["x-serai-session"])

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: begun, "a stream")
    yield next(agent for prefix, agent in session_of.items() if begun[0].startswith(prefix)), data
    reader.join(20)
    assert not reader.is_alive(), "the stream never ended"


def assert_everybody_lives(processes: list[Process]) -> None:
    assert [process.name for process in processes if process.popen.poll() is not None] == []


def test_a_killed_agent_gets_no_requests_after_three_and_a_half_seconds_and_its_streams_an_error(
    small_system: System,
) -> None:
    """By heartbeats alone: the registry has no credentials of the system account here."""
    agents = {f"local-a{n}-": small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "5") for n in range(2)}
    small_system.wait_for_sessions(2)
    with streaming(small_system, agents) as (agent, data):
        agent.kill()
        killed_at_s = time.monotonic()
        wait_for(lambda: small_system.sessions() == 1, "one session", HEARTBEATS_ALONE_S + SLACK_S)
        took_s = time.monotonic() - killed_at_s
    print(f"unrouted {took_s:.2f} s after kill -9")
    assert json.loads(data[-2])["error"]["code"] == "agent_left"
    assert data[-1] == "[DONE]"
    entry = models(small_system)["m"]
    assert entry["sessions"] == {"serving": 1, "suspected": 1}
    assert [chat(small_system).status_code for _ in range(4)] == [200] * 4


def test_a_killed_agent_gets_no_requests_after_300_ms_where_the_server_tells(system: System) -> None:
    system.start_registry("--nats-system-nkey-file", str(system.nats.key_file("system")))
    system.start_ingress()
    system.start_agent("--ttft-ms", "1", "--tpot-ms", "1")
    took_s = []
    for _ in range(3):
        agent = system.start_agent("--ttft-ms", "1", "--tpot-ms", "1")
        system.wait_for_sessions(2)
        with system.client() as client:
            agent.kill()
            killed_at_s = time.monotonic()
            while client.get("/v1/models/m").json()["sessions"].get("serving") != 1:
                assert time.monotonic() - killed_at_s < HEARTBEATS_ALONE_S
        took_s.append(time.monotonic() - killed_at_s)
    print(f"unrouted {sorted(took_s)} s after kill -9")
    assert min(took_s) < DISCONNECTS_TOLD_S  # Not the longest: others use this machine.


def test_models_are_listed_with_what_becomes_of_them(small_system: System) -> None:
    small_system.start_agent(model="soon", agent_flags=("--label", "x=1"), wait=False)
    wait_for(lambda: "soon" in models(small_system), "the model is listed")
    wait_for(lambda: models(small_system)["soon"]["state"] == "serving", "it serves")
    agent = small_system.processes[-1]
    assert models(small_system)["soon"]["age_s"] < 3
    agent.terminate()
    wait_for(lambda: models(small_system) == {}, "it is not listed", 3)
    assert models(small_system, "?all=true")["soon"]["state"] == "offline"
    with small_system.client() as client:
        assert client.get("/v1/models/soon").status_code == 404
        assert client.get("/v1/models/soon?all=true").json()["sessions"] == {}
        assert client.get("/v1/models?all=maybe").json()["error"]["param"] == "all"


def test_a_killed_registry_is_not_missed_and_is_right_again_soon_after_its_return(system: System) -> None:
    registry = system.start_registry()
    system.start_ingress()
    first = system.start_agent("--ttft-ms", "1", "--tpot-ms", "1")
    system.wait_for_sessions(1)
    registry.kill()
    second = system.start_agent("--ttft-ms", "1", "--tpot-ms", "1", wait=False)  # It goes on announcing itself.
    time.sleep(4.5)  # Longer than any silence that is taken for one.
    assert [chat(system).status_code for _ in range(4)] == [200] * 4
    assert ready(system)["registry"]["age_s"] > 3
    system.start_registry()
    system.wait_for_sessions(2, timeout_s=RIGHT_AGAIN_S + 10)  # The second had to be acknowledged first.
    wait_for(lambda: ready(system)["registry"]["age_s"] < 3, "the registry is heard again", RIGHT_AGAIN_S)
    assert_everybody_lives([first, second, system.processes[2]])


def test_a_new_ingress_routes_at_once(small_system: System) -> None:
    small_system.start_agent("--ttft-ms", "1", "--tpot-ms", "1", agent_flags=("--status-interval-s", "20"))
    small_system.wait_for_sessions(1)
    for _ in range(3):
        small_system.start_ingress()
        assert chat(small_system).status_code == 200  # No status comes within the next seconds.


async def delete_bucket(system: System) -> None:
    address = NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file("registry"))
    bus = await NatsBus.connect(address, "registry")
    answer = await bus.request(f"$JS.API.STREAM.DELETE.KV_{SESSIONS_BUCKET}", b"", 5)
    assert json.loads(answer.data)["success"]
    await bus.aclose()


@pytest.mark.parametrize("gone", ["bucket", "store", "nothing"])
def test_a_lost_bucket_changes_nothing_that_is_seen(system: System, gone: str) -> None:
    """The bucket deleted under the registry's hands; the whole store lost by a restart, as with a memory bucket; and a
    restart that loses nothing."""
    registry = system.start_registry()
    system.start_ingress()
    agents = [system.start_agent("--ttft-ms", "1", "--tpot-ms", "1") for _ in range(2)]
    system.wait_for_sessions(2)
    if gone == "bucket":
        asyncio.run(delete_bucket(system))
        assert [chat(system).status_code for _ in range(4)] == [200] * 4
    else:
        system.processes[0].terminate()
        if gone == "store":
            (system.nats.folder / "jetstream").rename(system.folder / "lost")
        system.start_nats()
    back_at_s = time.monotonic()
    wait_for(lambda: chat(system).status_code == 200, "served again", RIGHT_AGAIN_S + SLACK_S)
    system.wait_for_sessions(2, timeout_s=RIGHT_AGAIN_S + SLACK_S)
    print(f"{gone}: right again after {time.monotonic() - back_at_s:.2f} s")
    assert_everybody_lives([registry, *agents])
    # A registry that starts now finds in the bucket what the one before wrote again.
    time.sleep(6)
    registry.kill()
    again = system.start_registry()
    ready_line = next(line for line in again.log.splitlines() if "registry.ready" in line)
    assert json.loads(ready_line)["sessions"] == 2, ready_line
    system.start_ingress()
    system.wait_for_sessions(2, timeout_s=RIGHT_AGAIN_S)


def test_nats_down_for_seconds_and_back(system: System) -> None:
    nats = system.processes[0]
    registry = system.start_registry()
    ingress = system.start_ingress()
    agents = [system.start_agent("--ttft-ms", "1", "--tpot-ms", "1") for _ in range(3)]
    system.wait_for_sessions(3)
    nats.kill()
    time.sleep(6)
    assert models(system)["m"]["sessions"] == {"serving": 3}, "the copy stays what it was"
    assert chat(system).status_code == 503
    assert ready(system)["registry"]["age_s"] > 4
    system.start_nats()
    back_at_s = time.monotonic()
    wait_for(lambda: [chat(system).status_code for _ in range(3)] == [200] * 3, "served", RIGHT_AGAIN_S + SLACK_S)
    wait_for(lambda: ready(system)["registry"]["age_s"] < 2.5, "registry heard", RIGHT_AGAIN_S + SLACK_S)
    system.wait_for_sessions(3, timeout_s=RIGHT_AGAIN_S + SLACK_S)
    print(f"right again after {time.monotonic() - back_at_s:.2f} s")
    assert_everybody_lives([registry, ingress, *agents])
