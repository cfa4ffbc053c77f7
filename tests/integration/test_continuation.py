"""Streams that go on at another session: to the client they are the stream that was not interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from integration.system import Process, System, wait_for
from serai.cli.up import small_model

TOKENS = 30
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me of caravans."}]},
    "/v1/completions": {"prompt": "The caravan"},
}
USAGE: dict[str, dict[str, Any]] = {
    "no usage": {},
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}


@dataclass
class Heard:
    """What a client has heard of one stream."""

    session: str
    events: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    ends: int = 0

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in self.choices)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"] is not None]

    @property
    def roles(self) -> int:
        return sum("role" in choice.get("delta", {}) for choice in self.choices)

    @property
    def usages(self) -> list[dict[str, int]]:
        return [event["usage"] for event in self.events if event.get("usage") and not event["choices"]]

    @property
    def heads(self) -> set[tuple[Any, ...]]:
        return {(event["id"], event["created"], event["model"]) for event in self.events}

    @property
    def error(self) -> dict[str, Any] | None:
        return self.events[-1].get("error")


def listen(
    system: System, path: str, body: dict[str, Any], then: Callable[[Heard], None] | None = None, after: int = 0
) -> Heard:
    """Streams `body`; calls `then` after so many events."""
    asked = {"model": "m", "stream": True, "temperature": 0, "max_tokens": TOKENS} | ASKED[path] | body
    with system.client(120) as client, client.stream("POST", path, json=asked) as answer:
        assert answer.status_code == 200
        heard = Heard(answer.headers["x-serai-session"])
        for line in answer.iter_lines():
            if line.startswith(":"):
                heard.comments.append(line)
            elif line == "data: [DONE]":
                heard.ends += 1
            elif line:
                heard.events.append(json.loads(line.removeprefix("data: ")))
                if then is not None and len(heard.events) == after:
                    then(heard)
    return heard


def set_fault(system: System, agent: Process, kind: str, tokens: int) -> None:
    """Hits the agent's next request, and nothing that was set before does."""
    clear_faults(system, agent)
    with system.engine(agent) as engine:
        engine.post("/emulator/faults", json={"kind": kind, "tokens": tokens, "count": 1}).raise_for_status()


def clear_faults(system: System, agent: Process) -> None:
    with system.engine(agent) as engine:
        engine.delete("/emulator/faults").raise_for_status()


def metric(client: httpx2.Client, name: str) -> float:
    """The sum over all labels."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def assert_nothing_left(system: System, *agents: Process) -> None:
    for agent in agents:
        with system.engine(agent) as engine:
            wait_for(lambda: engine.get("/emulator/state").json()["running"] == 0, "the engine is free", 10)
    with system.client() as client:
        wait_for(lambda: metric(client, "serai_ingress_requests_in_flight") == 0, "nothing in flight", 10)


@pytest.fixture
def agents(small_system: System) -> list[Process]:
    flags = ("--ttft-ms", "2", "--tpot-ms", "2")
    started = [small_system.start_agent(*flags, wait=False) for _ in range(3)]
    small_system.wait_for_sessions(3)
    return started


def test_a_cut_stream_is_heard_as_if_it_had_not_been_cut(small_system: System, agents: list[Process]) -> None:
    resumed = 0
    for path in ASKED:
        for usage in USAGE.values():
            whole = listen(small_system, path, usage)
            for number, tokens in enumerate((1, 2, 7, 8, 9, 10, 11, 17, 25, TOKENS - 1)):
                # Two of three, each time others: one that always fails would soon be asked no more.
                clear_faults(small_system, agents[number % 3])
                for other in (1, 2):
                    set_fault(small_system, agents[(number + other) % 3], "cut" if tokens % 2 else "no-done", tokens)
                heard = listen(small_system, path, usage)
                assert heard.text == whole.text, tokens
                assert heard.finish_reasons == whole.finish_reasons == ["length"]
                assert heard.roles == whole.roles
                assert heard.usages == whole.usages
                assert [event.get("usage") for event in heard.events] == [event.get("usage") for event in whole.events]
                assert len(heard.heads) == 1
                assert heard.ends == 1
                resumed += bool(heard.comments)
    assert resumed >= 20
    with small_system.client() as client:
        assert metric(client, 'serai_ingress_continuations_total{model="m",outcome="resumed"}') == resumed
        assert metric(client, "serai_ingress_continuations_total") == resumed
        assert metric(client, "serai_ingress_broken_streams_total") == 0
    assert_nothing_left(small_system, *agents)


def test_a_stream_survives_two_breaks_and_not_a_third(small_system: System, agents: list[Process]) -> None:
    path = "/v1/chat/completions"
    whole = listen(small_system, path, USAGE["usage"])
    for agent in agents[:2]:
        set_fault(small_system, agent, "reset", 12)
    heard = listen(small_system, path, USAGE["usage"])
    while "a2-" in heard.session:
        heard = listen(small_system, path, USAGE["usage"])
    assert (heard.text, heard.usages, heard.ends) == (whole.text, whole.usages, 1)
    for agent in agents:
        set_fault(small_system, agent, "reset", 12)
    heard = listen(small_system, path, USAGE["continuous usage"])
    assert heard.error is not None
    assert heard.error["code"] == "engine_cut"
    assert heard.finish_reasons == []
    assert heard.ends == 1
    assert whole.text.startswith(heard.text)
    said = len(heard.text.split())
    assert heard.usages[0]["completion_tokens"] == said
    assert_nothing_left(small_system, *agents)


def test_a_killed_agents_streams_go_on(small_system: System, agents: list[Process]) -> None:
    path = "/v1/chat/completions"
    long = {"max_tokens": 600, **USAGE["usage"]}
    whole = listen(small_system, path, long)

    def kill(heard: Heard) -> None:
        agents[int(heard.session.removeprefix("local-a")[0])].kill()

    heard = listen(small_system, path, long, kill, 100)
    assert (heard.text, heard.finish_reasons, heard.usages) == (whole.text, whole.finish_reasons, whole.usages)
    assert len(heard.comments) == 1
    assert_nothing_left(small_system, *[agent for agent in agents if agent.popen.poll() is None])


def test_a_client_that_leaves_after_a_hand_over_stops_the_session_that_went_on(
    small_system: System, agents: list[Process]
) -> None:
    for agent in agents[:2]:
        set_fault(small_system, agent, "cut", 20)
    asked = {"model": "m", "stream": True, "temperature": 0, "max_tokens": 100_000} | ASKED["/v1/completions"]
    with small_system.client() as client:
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json=asked) as answer:
                seen = 0
                for line in answer.iter_lines():
                    seen += line.startswith("data: {")
                    if seen == 200:
                        break
        assert metric(client, "serai_ingress_continuations_total") == 0, "they had not ended"
    assert_nothing_left(small_system, *agents)


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        {"logprobs": True, "top_logprobs": 1},
        {"n": None, "new": 1},
    ],
)
def test_what_cannot_be_continued_ends_with_an_error(
    small_system: System, agents: list[Process], asked: dict[str, Any]
) -> None:
    for agent in agents:
        set_fault(small_system, agent, "cut", 5)
    heard = listen(small_system, "/v1/chat/completions", asked)
    assert heard.error is not None
    assert heard.error["code"] == "engine_cut"
    assert (heard.finish_reasons, heard.ends, heard.comments) == ([], 1, [])


def test_a_real_models_greedy_answer_goes_on_word_for_word_when_its_agent_is_killed(small_system: System) -> None:
    server = [sys.executable, "-m", "serai.worker_agent.engine.llamacpp_server", "--model-file", str(small_model())]
    engine = [*server, "--alias", "m", "--threads", "1"]
    started = {
        f"local-a{number}-": small_system.service("agent", "--model", "m", "--allocation", f"a{number}", "--", *engine)
        for number in range(2)
    }
    small_system.wait_for_sessions(2, timeout_s=120)
    path, long = "/v1/chat/completions", {"max_tokens": 48, **USAGE["usage"]}
    whole = listen(small_system, path, long)
    assert len(whole.text) > 100

    def kill(heard: Heard) -> None:
        next(agent for prefix, agent in started.items() if heard.session.startswith(prefix)).kill()

    heard = listen(small_system, path, long, kill, 20)
    assert heard.comments
    assert heard.text == whole.text
    assert (heard.finish_reasons, heard.roles, heard.ends) == (whole.finish_reasons, 1, 1)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert heard.usages[0][name] == whole.usages[0][name]
