"""What the emulated engine has beside plain completions, over real sockets and read by OpenAI's own library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from integration.test_engine_emulator import Emulator, emulator

TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ASK: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Emulator]:
    with emulator("--ttft-ms", "2", "--tpot-ms", "0.2", "--native", "messages,responses") as running:
        yield running


@pytest.fixture(scope="module")
def sdk(engine: Emulator) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def names_and_data(engine: Emulator, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The events of a stream whose events have names."""
    with engine.client.stream("POST", path, json=body | {"model": "m/1", "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": True},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}, "reasoning_effort": "low"},
        {"stop": ["a1"], "seed": 3},
    ],
)
def test_streams_add_up_to_the_whole_answer(sdk: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole = sdk.chat.completions.create(model="m/1", messages=ASK, **fields)
    asked = {"model": "m/1", "messages": ASK, "stream_options": {"include_usage": True}, **fields}
    with sdk.chat.completions.stream(**asked) as stream:
        summed = stream.get_final_completion()
    assert summed.usage == whole.usage
    for one, other in zip(summed.choices, whole.choices, strict=True):
        assert (one.finish_reason, one.message.content or "") == (other.finish_reason, other.message.content or "")
        assert (one.logprobs and one.logprobs.content) == (other.logprobs and other.logprobs.content)
        assert [(c.function.name, c.function.arguments) for c in one.message.tool_calls or []] == [
            (c.function.name, c.function.arguments) for c in other.message.tool_calls or []
        ]


def test_completions_with_prompts_echo_and_logprobs(sdk: openai.OpenAI) -> None:
    asked: Any = {"model": "m/1", "prompt": ["one", "two"], "echo": True, "logprobs": 2, "max_tokens": 3}
    whole = sdk.completions.create(**asked)
    texts = ["", ""]
    for chunk in sdk.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0].startswith("one ")
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    assert (logprobs.text_offset[0], len(logprobs.tokens or []), len((logprobs.top_logprobs or [])[0])) == (3, 3, 2)


def test_numbers_of_texts(engine: Emulator, sdk: openai.OpenAI) -> None:
    embedded = sdk.embeddings.create(model="m/1", input=["a", "b"], dimensions=7)
    assert [len(one.embedding) for one in embedded.data] == [7, 7]
    ranked = engine.client.post("/v1/rerank", json={"model": "m/1", "query": "q", "documents": ["a", "q"]}).json()
    assert [result["index"] for result in ranked["results"]] == [1, 0]
    scored = engine.client.post("/score", json={"model": "m/1", "text_1": "a", "text_2": "b"}).json()
    assert scored["data"][0]["object"] == "score"
    classified = engine.client.post("/classify", json={"model": "m/1", "input": "a"}).json()
    assert sum(classified["data"][0]["probs"]) == pytest.approx(1)
    tokens = engine.client.post("/tokenize", json={"model": "m/1", "prompt": "héllo wörld"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 4
    again = engine.client.post("/detokenize", json={"model": "m/1", "tokens": tokens["tokens"]}).json()
    assert again == {"prompt": "héllo wörld"}


def test_transcriptions_in_three_forms(sdk: openai.OpenAI) -> None:
    audio = ("a.wav", b"RIFF\x00\xff\r\n\r\nWAVE", "audio/wav")
    plain = sdk.audio.transcriptions.create(model="m/1", file=audio)
    text = sdk.audio.transcriptions.create(model="m/1", file=audio, response_format="text")
    verbose = sdk.audio.transcriptions.create(model="m/1", file=audio, response_format="verbose_json")
    assert plain.text == str(text).strip() == verbose.text
    assert len(plain.text.split()) == 12
    with pytest.raises(openai.BadRequestError, match="response_format"):
        sdk.audio.transcriptions.create(model="m/1", file=audio, response_format="srt")


def test_messages_are_spoken_natively(engine: Emulator) -> None:
    tools = [{"name": "weather", "input_schema": TOOL["function"]["parameters"]}]
    body = {"max_tokens": 60, "messages": ASK, "thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": tools}
    whole = engine.client.post("/v1/messages", json=body).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "tool_use"]
    assert (whole["stop_reason"], list(whole["content"][1]["input"])) == ("tool_use", ["city"])
    events = names_and_data(engine, "/v1/messages", body)
    assert [name for name, data in events] == [data["type"] for name, data in events]
    kinds = [name for name, _ in events if name != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"] * 2
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    partial = "".join(data["delta"].get("partial_json", "") for name, data in events if name == "content_block_delta")
    assert json.loads(partial) == whole["content"][1]["input"]
    assert events[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    counted = engine.client.post("/v1/messages/count_tokens", json={"messages": ASK}).json()
    assert counted["input_tokens"] == whole["usage"]["input_tokens"]
    refused = engine.client.post("/v1/messages", json={"messages": ASK})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


def test_responses_are_spoken_natively(sdk: openai.OpenAI) -> None:
    whole = sdk.responses.create(model="m/1", input="hi", max_output_tokens=5)
    assert (whole.status, len(whole.output_text.split())) == ("incomplete", 5)
    tool: Any = {"type": "function", "name": "weather", "parameters": TOOL["function"]["parameters"], "strict": True}
    with sdk.responses.stream(model="m/1", input="hi", tools=[tool], reasoning={"effort": "low"}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "function_call"]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    with pytest.raises(openai.BadRequestError, match=r"text\.format"):
        sdk.responses.create(model="m/1", input="hi", text={"format": {}})  # type: ignore[typeddict-item]
    with pytest.raises(openai.BadRequestError, match="stores nothing"):
        sdk.responses.create(model="m/1", input="hi", previous_response_id="resp_1")


def test_faults_speak_the_endpoints_dialect(engine: Emulator) -> None:
    body = {"max_tokens": 9, "messages": ASK}
    engine.fault(kind="error-event", tokens=2, count=1)
    assert names_and_data(engine, "/v1/messages", body)[-1][0] == "error"
    engine.fault(kind="error-event", tokens=2, count=1)
    name, data = names_and_data(engine, "/v1/responses", {"input": "hi"})[-1]
    assert (name, data["code"]) == ("error", "server_error")
    engine.fault(kind="status", status=503, count=1)
    assert engine.client.post("/v1/embeddings", json={"input": "x"}).status_code == 503


def test_it_tells_what_it_serves_and_has_nothing_else(engine: Emulator) -> None:
    paths = engine.client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/health"} <= set(paths)
    with emulator("--without", "/v1/embeddings,/tokenize") as plain:
        paths = plain.client.get("/openapi.json").json()["paths"]
        assert not {"/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"} & set(paths)
        for path in ("/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize", "/v1/messages/count_tokens"):
            assert plain.client.post(path, json={}).status_code == 404
