"""Anthropic's Messages and OpenAI's Responses, of engines that have only chat completions, or have them themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from integration.system import Process, System, wait_for

TOKENS = 30
ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": "Tell me of caravans."}], "max_tokens": TOKENS},
    "/v1/responses": {"input": "Tell me of caravans.", "max_output_tokens": TOKENS},
}
LAST = {"/v1/messages": "message_stop", "/v1/responses": "response.incomplete"}
BROKEN = {"/v1/messages": "error", "/v1/responses": "response.failed"}
TOOL = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
Event = tuple[str, dict[str, Any]]


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def listen(system: System, path: str) -> list[Event]:
    asked = ASKED[path] | {"model": "m", "stream": True, "temperature": 0}
    with system.client(60) as client, client.stream("POST", path, json=asked) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events_of(answer.iter_lines()))


def text_of(events: list[Event]) -> str:
    deltas = [event["delta"] for _, event in events if "delta" in event]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)


def set_fault(system: System, agent: Process, kind: str, tokens: int) -> None:
    """Hits the agent's next request."""
    with system.engine(agent) as engine:
        engine.delete("/emulator/faults").raise_for_status()
        engine.post("/emulator/faults", json={"kind": kind, "tokens": tokens, "count": 1}).raise_for_status()


def resumed(system: System) -> float:
    """How many streams went on at another session."""
    with system.client() as client:
        lines = client.get("/metrics").text.splitlines()
    told = [line for line in lines if line.startswith("serai_ingress_continuations_total") and "resumed" in line]
    return sum(float(line.split()[1]) for line in told)


def is_idle(system: System, agent: Process) -> bool:
    with system.engine(agent) as engine, system.client() as client:
        lines = client.get("/metrics").text.splitlines()
        in_flight = [line for line in lines if line.startswith("serai_ingress_requests_in_flight ")]
        return engine.get("/emulator/state").json()["running"] == 0 and float(in_flight[0].split()[1]) == 0


@pytest.mark.parametrize("path", ASKED)
def test_an_answer_is_the_same_whole_and_streamed_and_broken_streams_go_on(small_system: System, path: str) -> None:
    agents = [small_system.start_agent("--tpot-ms", "2", wait=False) for _ in range(2)]
    small_system.wait_for_sessions(2)
    with small_system.client() as client:
        answer = client.post(path, json=ASKED[path] | {"model": "m"})
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    content = whole["content"] if path == "/v1/messages" else whole["output"][0]["content"]
    assert whole["usage"]["output_tokens"] == TOKENS

    events = listen(small_system, path)
    assert text_of(events) == content[0]["text"]
    assert events[-1][0] == LAST[path]

    for agent in agents:
        set_fault(small_system, agent, "cut", 17)
    events = listen(small_system, path)
    # Whichever was asked first cut it, and so did the other: it is told, by an event that is no whole answer's last.
    assert events[-1][0] == BROKEN[path]
    assert LAST[path] not in [name for name, _ in events]
    assert content[0]["text"].startswith(text_of(events))

    for _ in range(20):
        set_fault(small_system, agents[0], "cut", 17)
        events = listen(small_system, path)
        assert text_of(events) == content[0]["text"]
        assert events[-1][0] == LAST[path]
        if resumed(small_system):
            break
    assert resumed(small_system), "a cut stream went on, and nobody could see it"
    for agent in agents:
        wait_for(lambda agent=agent: is_idle(small_system, agent), "nothing is left", 20)


def test_a_client_that_leaves_frees_the_engine_and_one_that_waits_is_told_so(system: System) -> None:
    system.start_registry()
    system.start_ingress("--keep-alive-s", "0.5")
    agent = system.start_agent("--ttft-ms", "2000", "--tpot-ms", "20", wait=False)
    system.wait_for_sessions(1)
    asked = ASKED["/v1/messages"] | {"model": "m", "stream": True, "max_tokens": 5000}
    with system.client() as client, client.stream("POST", "/v1/messages", json=asked) as answer:
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        events = events_of(answer.iter_lines())
        assert next(events) == ("ping", {"type": "ping"})
        assert next(name for name, _ in events if name != "ping") == "message_start"
        assert not is_idle(system, agent)
    wait_for(lambda: is_idle(system, agent), "the engine is free", 10)


def test_an_engine_that_has_them_is_asked_itself(small_system: System) -> None:
    small_system.start_agent("--native", "messages,responses")
    with small_system.client() as client:
        for path, paths in {"/v1/messages": ASKED["/v1/messages"], "/v1/responses": ASKED["/v1/responses"]}.items():
            answer = client.post(path, json=paths | {"model": "m", "metadata": {"user_id": "u"}})
            assert answer.status_code == 200, answer.text
        # Chat completions would refuse it; only the engine's own endpoint says so in these words.
        asked = ASKED["/v1/messages"] | {"model": "m", "max_tokens": "many"}
        natively = client.post("/v1/messages", json=asked)
        small_system.start_agent("--native", "responses", wait=False)
        small_system.wait_for_sessions(2)
        translated = client.post("/v1/messages", json=asked)
    assert natively.status_code == translated.status_code == 400
    assert "`max_tokens`: Expected `int`, got `str`." in translated.text
    assert natively.json()["error"]["message"] != translated.json()["error"]["message"]


def test_errors_have_the_form_of_the_dialect(small_system: System) -> None:
    agent = small_system.start_agent()
    key = small_system.key
    with small_system.client() as client:
        del client.headers["authorization"]
        nobody = client.post("/v1/messages", json=ASKED["/v1/messages"] | {"model": "m"})
        client.headers["x-api-key"] = key
        unknown = client.post("/v1/messages", json=ASKED["/v1/messages"] | {"model": "other"})
        with small_system.engine(agent) as engine:
            engine.post("/emulator/faults", json={"kind": "status", "status": 400, "count": 1}).raise_for_status()
        refused = client.post("/v1/messages", json=ASKED["/v1/messages"] | {"model": "m"})
        counted = client.post("/v1/messages/count_tokens", json={"model": "m", **ASKED["/v1/messages"]})
        stateful = client.post("/v1/responses", json={"model": "m", "input": "hi", "store": True})
    assert [answer.status_code for answer in (nobody, unknown, refused, stateful)] == [401, 404, 400, 400]
    for answer, kind in ((nobody, "authentication"), (unknown, "not_found"), (refused, "invalid_request")):
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == f"{kind}_error"
    assert counted.json()["input_tokens"] > 0, counted.text
    assert stateful.json()["error"]["param"] == "store"


def test_openais_client_holds_a_conversation_with_tools(small_system: System) -> None:
    small_system.start_agent()
    client = openai.OpenAI(base_url=f"{small_system.url}/v1", api_key=small_system.key, max_retries=0)
    tools: list[Any] = [{"type": "function", "name": "look", "parameters": TOOL, "strict": True}]
    said: list[Any] = [{"role": "user", "content": "The weather in Paris?"}]
    with client.responses.stream(model="m", input=said, tools=tools, tool_choice="required") as stream:
        list(stream)
        asked = stream.get_final_response()
    call = asked.output[0]
    assert call.type == "function_call"
    assert "town" in json.loads(call.arguments)
    said += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    answer = client.responses.create(model="m", input=said, tools=tools, tool_choice="none")
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens > 0
    client.close()
