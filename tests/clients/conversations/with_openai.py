"""OpenAI's Python library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

MODEL = os.environ["SERAI_MODEL"]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
            "required": ["city", "days"],
        },
    },
}
FIRST: Any = {"role": "user", "content": "Where do caravans rest?"}
SECOND: Any = {"role": "user", "content": "And where do they go?"}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(max_retries=0) as made:
        yield made


def plain(client: openai.OpenAI, messages: list[Any]) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    return answer.choices[0].message.content or ""


def streamed(client: openai.OpenAI, messages: list[Any]) -> str:
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, stream=True))
    assert all(chunk.usage is None for chunk in chunks), "usage comes only when it is asked for"
    assert chunks[-1].choices[0].finish_reason == "length"
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_two_turns_plain_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    said = plain(client, [FIRST])
    assert said
    assert streamed(client, [FIRST]) == said
    turns = [FIRST, {"role": "assistant", "content": said}, SECOND]
    again = plain(client, turns)
    assert again != said
    assert streamed(client, turns) == again


def test_usage_of_a_stream_when_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=MODEL, messages=[FIRST], stream=True, stream_options=options))
    assert chunks[-1].usage is not None
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 32)


def test_tools_plain(client: openai.OpenAI) -> None:
    asked = client.chat.completions.create(model=MODEL, messages=[FIRST], tools=[WEATHER])
    assert asked.choices[0].finish_reason == "tool_calls"
    (call,) = asked.choices[0].message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, set(arguments)) == ("weather", {"city", "days"})
    assert 1 <= arguments["days"] <= 5
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    turns: Any = [FIRST, asked.choices[0].message.to_dict(), result]
    spoken = client.chat.completions.create(model=MODEL, messages=turns, tools=[WEATHER])
    assert spoken.choices[0].finish_reason == "stop"
    assert spoken.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_streamed(client: openai.OpenAI, choice: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=[FIRST], tools=[WEATHER], tool_choice=choice) as stream:
        kinds = {event.type for event in stream}
        summed = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = summed.tool_calls or []
    assert set(json.loads(call.function.arguments)) == {"city", "days"}


def test_structured_outputs(client: openai.OpenAI) -> None:
    class Stop(BaseModel):
        name: str
        wells: list[int]

    answer = client.chat.completions.parse(model=MODEL, messages=[FIRST], response_format=Stop)
    assert isinstance(answer.choices[0].message.parsed, Stop)
    with client.chat.completions.stream(model=MODEL, messages=[FIRST], response_format=Stop) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_choices_logprobs_and_reasoning_pass(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[FIRST], n=2, logprobs=True, top_logprobs=2, reasoning_effort="low"
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert len((logprobs.content or [])[0].top_logprobs) == 2
    assert (answer.choices[0].message.model_extra or {})["reasoning_content"]


def test_completions(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 5}
    said = client.completions.create(**asked).choices[0].text
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == said
    assert len(said.split()) == 5


def test_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model=MODEL, input=["one", "two"], dimensions=8)  # base64 underneath
    floats = client.embeddings.create(model=MODEL, input=["one", "two"], dimensions=8, encoding_format="float")
    assert [one.embedding for one in packed.data] == [one.embedding for one in floats.data]
    assert packed.usage.prompt_tokens == 2


def test_models(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def test_transcription(client: openai.OpenAI) -> None:
    said = client.audio.transcriptions.create(model=MODEL, file=("a.wav", b"RIFF\x00\xff", "audio/wav"))
    assert len(said.text.split()) == 12


def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Where do caravans rest?")
    assert (first.status, bool(first.output_text)) == ("completed", True)
    with client.responses.stream(model=MODEL, input="Where do caravans rest?") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == first.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    turns: Any = [FIRST, {"role": "assistant", "content": first.output_text}, SECOND]
    second = client.responses.create(model=MODEL, input=turns, max_output_tokens=20)
    assert second.output_text != first.output_text
    assert second.usage is not None
    assert second.usage.output_tokens == 20


def test_responses_with_tools(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    asked = client.responses.create(model=MODEL, input=[FIRST], tools=[tool])
    (call,) = [item for item in asked.output if item.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"city", "days"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    turns: Any = [FIRST, *[item.to_dict() for item in asked.output], result]
    assert client.responses.create(model=MODEL, input=turns, tools=[tool]).output_text
    with client.responses.stream(model=MODEL, input=[FIRST], tools=[tool]) as stream:
        kinds = {event.type for event in stream}
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds


def test_responses_follow_a_schema(client: openai.OpenAI) -> None:
    class Stop(BaseModel):
        name: str

    assert isinstance(client.responses.parse(model=MODEL, input="x", text_format=Stop).output_parsed, Stop)


def test_headers_say_what_answered(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[FIRST], extra_headers={"x-request-id": "my-own-id"}
    )
    assert raw.headers["x-request-id"] == "my-own-id"
    assert raw.headers["x-serai-session"]
    assert raw.parse().choices


async def test_the_asynchronous_client_streams() -> None:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=[FIRST], stream=True)
        assert len([chunk async for chunk in stream]) > 30


def test_errors_are_the_librarys_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=[FIRST])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=[FIRST], n=1000)
    assert wrong.value.param == "n"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(api_key="sk-wrong", max_retries=0).models.list()
