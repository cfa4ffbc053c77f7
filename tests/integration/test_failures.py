"""What a client sees when something breaks: an honest error, or nothing at all because another session took over."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable

import httpx2
import pytest

from integration.system import Process, System, wait_for

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}]}
LONG = CHAT | {"max_tokens": 100_000, "stream": True}


def read_stream(
    system: System, body: dict[str, object], after_tokens: int, then: Callable[[str], None]
) -> tuple[list[str], float]:
    """Streams `body`; calls `then(session)` after so many tokens. The data of all events, and when the last came."""
    data: list[str] = []
    with system.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                data.append(line[6:])
                if len(data) == after_tokens:
                    then(answer.headers["x-serai-session"])
    return data, time.monotonic()


def assert_honest_end(data: list[str], code: str) -> None:
    """One error event, then [DONE]; and nothing before it claims to be the end."""
    assert data[-1] == "[DONE]"
    error = json.loads(data[-2])["error"]
    assert error["code"] == code, error
    assert set(error) == {"message", "type", "param", "code"}
    for one in data[:-2]:
        assert json.loads(one)["choices"][0]["finish_reason"] is None


def chat(system: System, **changes: object) -> httpx2.Response:
    with system.client() as client:
        return client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2} | changes)


def test_a_killed_agent_ends_its_streams_with_an_error_and_the_other_takes_the_next_request_at_once(
    small_system: System,
) -> None:
    agents = {f"local-a{n}-": small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "5") for n in range(2)}
    small_system.wait_for_sessions(2)
    killed_at_s = 0.0
    next_answers: list[httpx2.Response] = []

    def kill(session: str) -> None:
        nonlocal killed_at_s
        next(agent for prefix, agent in agents.items() if session.startswith(prefix)).kill()
        killed_at_s = time.monotonic()
        next_answers.extend(chat(small_system) for _ in range(4))

    # With log probabilities, so that it cannot go on elsewhere.
    data, ended_at_s = read_stream(small_system, LONG | {"logprobs": True}, 5, kill)
    assert_honest_end(data, "agent_left")
    assert ended_at_s - killed_at_s < 4
    assert [answer.status_code for answer in next_answers] == [200] * 4


def test_a_frozen_agent_is_noticed_by_its_silence(small_system: System) -> None:
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "5")
    small_system.wait_for_sessions(1)
    try:
        data, _ = read_stream(small_system, LONG, 5, lambda _: agent.popen.send_signal(signal.SIGSTOP))
    finally:
        agent.popen.send_signal(signal.SIGCONT)
    assert_honest_end(data, "agent_silent")


def test_a_killed_engine_ends_the_stream_with_an_error_and_the_session_with_a_story(small_system: System) -> None:
    fault, once = ("--fault", "exit:tokens=5,skip=1"), ("--engine-restarts", "0")
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "5", *fault, agent_flags=once)
    small_system.wait_for_sessions(1)
    data, _ = read_stream(small_system, LONG, -1, lambda _: None)
    assert_honest_end(data, "engine_cut")
    assert agent.popen.wait(20) == 1
    assert "the engine ended with exit code" in agent.log
    assert "0 restarts an hour are the limit (--engine-restarts)" in agent.log
    wait_for(lambda: chat(small_system).status_code == 404, "the model is gone", 5)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("cut:tokens=4,skip=1", "engine_cut"),
        ("reset:tokens=4,skip=1", "engine_cut"),
        ("no-done:tokens=4,skip=1", "stream_unfinished"),
    ],
)
def test_a_stream_that_breaks_off_never_ends_as_if_it_were_whole(small_system: System, fault: str, code: str) -> None:
    small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "2", "--fault", fault)
    small_system.wait_for_sessions(1)
    data, _ = read_stream(small_system, LONG, -1, lambda _: None)
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["error"]["code"] == code


def test_a_unary_answer_that_breaks_off_is_an_error(small_system: System) -> None:
    small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "2", "--fault", "cut:tokens=4,skip=1")
    small_system.wait_for_sessions(1)
    answer = chat(small_system, max_tokens=50)
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "engine_cut"


def test_gateway_statuses_are_tried_once_elsewhere_and_others_are_passed_through(small_system: System) -> None:
    agents = [small_system.start_agent("--ttft-ms", "1", "--tpot-ms", "1") for _ in range(2)]
    small_system.wait_for_sessions(2)

    def fault(agent: Process, status: int) -> None:
        with small_system.engine(agent) as engine:
            answer = engine.post("/emulator/faults", json={"kind": "status", "status": status, "retry_after_s": 7})
            answer.raise_for_status()

    fault(agents[0], 503)
    assert [chat(small_system).status_code for _ in range(6)] == [200] * 6
    fault(agents[1], 429)
    answers = [chat(small_system) for _ in range(6)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(answer.headers["retry-after"] == "7" for answer in refused)
    assert all("error" in answer.json() for answer in refused)


def test_an_agent_that_is_told_to_stop_finishes_its_streams_first(small_system: System) -> None:
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "20")
    small_system.wait_for_sessions(1)
    codes: list[int] = []
    stopper = threading.Thread(target=lambda: codes.append(agent.terminate()))
    data, _ = read_stream(small_system, CHAT | {"max_tokens": 60, "stream": True}, 5, lambda _: stopper.start())
    stopper.join()
    assert codes == [0]
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
    assert chat(small_system).status_code == 404


def test_an_agent_whose_drain_ends_too_soon_says_so_to_its_clients(small_system: System) -> None:
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "20", agent_flags=("--drain-s", "0.5"))
    small_system.wait_for_sessions(1)
    data, _ = read_stream(small_system, LONG, 5, lambda _: agent.popen.terminate())
    assert_honest_end(data, "agent_left")
    assert agent.popen.wait(10) == 0


def test_losing_nats_breaks_streams_honestly_and_everything_comes_back(system: System) -> None:
    nats = system.processes[0]
    system.start_registry()
    system.start_ingress()
    agent = system.start_agent("--ttft-ms", "5", "--tpot-ms", "5")
    system.wait_for_sessions(1)
    data, _ = read_stream(system, LONG, 5, lambda _: nats.kill())
    assert_honest_end(data, "bus_lost")
    with system.engine(agent) as engine:
        wait_for(lambda: engine.get("/emulator/state").json()["running"] == 0, "the engine is free", 2)
    answer = chat(system)
    assert answer.status_code == 503
    assert "NATS" in answer.json()["error"]["message"]
    assert "retry-after" in answer.headers
    with system.client() as client:
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == 503
    system.start_nats()
    wait_for(lambda: chat(system).status_code == 200, "served again after NATS came back", 15)


def test_the_registry_may_die_and_come_back_without_anyone_noticing(system: System) -> None:
    registry = system.start_registry()
    system.start_ingress()
    system.start_agent("--ttft-ms", "1", "--tpot-ms", "1")
    system.wait_for_sessions(1)
    registry.kill()
    time.sleep(4)  # Longer than the silence that makes a session suspected: the registry is not who is listened to.
    assert chat(system).status_code == 200
    system.start_ingress()  # One that starts without a registry learns from the agents themselves.
    wait_for(lambda: chat(system).status_code == 200, "an ingress without a registry", 15)
    system.start_registry()
    assert "session.changed" in system.processes[-1].log or chat(system).status_code == 200
    system.start_ingress()
    assert wait_for(lambda: chat(system).status_code == 200, "a new ingress asks the registry", 5)


def test_a_request_for_a_session_that_vanished_is_tried_elsewhere_without_an_error(small_system: System) -> None:
    agents = [small_system.start_agent("--ttft-ms", "1", "--tpot-ms", "1") for _ in range(2)]
    small_system.wait_for_sessions(2)
    agents[0].kill()
    answers = [chat(small_system) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 6
