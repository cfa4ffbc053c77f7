"""Anthropic's Python library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

MODEL = os.environ["SERAI_MODEL"]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather at a place",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FIRST: Any = {"role": "user", "content": "Where do caravans rest?"}
SECOND: Any = {"role": "user", "content": [{"type": "text", "text": "And where do they go?"}]}


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(max_retries=0) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_two_turns_plain_and_streamed_say_the_same(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 12, "system": "Be brief."}
    first = client.messages.create(messages=[FIRST], **asked)
    assert (first.stop_reason, first.usage.output_tokens) == ("max_tokens", 12)
    assert first.usage.input_tokens > 0
    with client.messages.stream(messages=[FIRST], **asked) as stream:
        assert "".join(stream.text_stream) == text_of(first)
        assert stream.get_final_message().usage.output_tokens == 12
    turns = [FIRST, {"role": "assistant", "content": first.content}, SECOND]
    second = client.messages.create(messages=turns, **asked)
    assert text_of(second) != text_of(first)
    with client.messages.stream(messages=turns, **asked) as stream:
        assert stream.get_final_text() == text_of(second)


def test_tools_plain_and_streamed(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 100, "tools": [WEATHER]}
    first = client.messages.create(messages=[FIRST], **asked)
    assert first.stop_reason == "tool_use"
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (use.name, set(use.input)) == ("weather", {"city"})
    with client.messages.stream(messages=[FIRST], tool_choice={"type": "tool", "name": "weather"}, **asked) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == use.input
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "sun"}
    turns = [FIRST, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert text_of(client.messages.create(messages=turns, **asked))


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    whole = text_of(client.messages.create(model=MODEL, max_tokens=9, messages=[FIRST]))
    word = whole.split()[3]
    cut = client.messages.create(model=MODEL, max_tokens=9, messages=[FIRST], stop_sequences=[word])
    assert text_of(cut) == whole[: whole.index(word)]
    assert cut.stop_reason in ("stop_sequence", "end_turn")


def test_counting_tokens(client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model=MODEL, messages=[FIRST]).input_tokens > 3


async def test_the_asynchronous_client_streams() -> None:
    async with (
        anthropic.AsyncAnthropic(max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=9, messages=[FIRST]) as stream,
    ):
        assert len([event async for event in stream if event.type == "text"]) > 1


def test_errors_are_the_librarys_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nobody", max_tokens=9, messages=[FIRST])
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, max_tokens=9, messages=[])
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(api_key="sk-wrong", max_retries=0).messages.create(
            model=MODEL, max_tokens=9, messages=[FIRST]
        )
