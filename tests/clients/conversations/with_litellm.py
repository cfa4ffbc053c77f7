"""LiteLLM as a client library."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm
import pytest

MODEL = f"openai/{os.environ['SERAI_MODEL']}"
TO: Any = {"model": MODEL, "api_base": os.environ["OPENAI_BASE_URL"], "num_retries": 0}
FIRST, SECOND = {"role": "user", "content": "Where do caravans rest?"}, {"role": "user", "content": "And then?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_two_turns_plain_and_streamed_say_the_same() -> None:
    first = litellm.completion(messages=[FIRST], max_tokens=12, **TO)
    said = first.choices[0].message.content
    assert first.usage.completion_tokens == 12
    assert text_of(litellm.completion(messages=[FIRST], max_tokens=12, stream=True, **TO)) == said
    turns = [FIRST, {"role": "assistant", "content": said}, SECOND]
    again = litellm.completion(messages=turns, max_tokens=12, **TO).choices[0].message.content
    assert again != said
    assert text_of(litellm.completion(messages=turns, max_tokens=12, stream=True, **TO)) == again


def test_tools_plain_and_streamed() -> None:
    message = litellm.completion(messages=[FIRST], tools=[WEATHER], **TO).choices[0].message
    (call,) = message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}
    chunks = list(litellm.completion(messages=[FIRST], tools=[WEATHER], stream=True, **TO))
    summed = litellm.stream_chunk_builder(chunks).choices[0].message
    assert summed.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    assert litellm.completion(messages=[FIRST, message, result], tools=[WEATHER], **TO).choices[0].message.content


def test_embeddings() -> None:
    assert len(litellm.embedding(input=["one", "two"], encoding_format="float", **TO).data) == 2


def test_anthropics_dialect() -> None:
    model = MODEL.replace("openai/", "anthropic/")
    base = os.environ["ANTHROPIC_BASE_URL"]
    answer = litellm.completion(model=model, api_base=base, messages=[FIRST], max_tokens=12)
    assert answer.usage.completion_tokens == 12


def test_an_unknown_model_is_the_librarys_own_error() -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=[FIRST], **{**TO, "model": "openai/nobody"})
