"""LangChain, with its package for OpenAI's API."""

from __future__ import annotations

import os

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

MODEL = os.environ["SERAI_MODEL"]
FIRST, SECOND = HumanMessage("Where do caravans rest?"), HumanMessage("And where do they go?")
# Beside OpenAI's own service it asks for usage in streams only when it is told to.
chat = ChatOpenAI(model=MODEL, max_tokens=50, max_retries=0, stream_usage=True)


@tool
def weather(city: str) -> str:
    """The weather at a place."""
    return f"sun in {city}"


def test_two_turns_plain_and_streamed_say_the_same() -> None:
    first = chat.invoke([FIRST])
    assert first.usage_metadata is not None
    assert first.usage_metadata["output_tokens"] == 50
    assert "".join(str(chunk.content) for chunk in chat.stream([FIRST])) == first.content
    turns = [FIRST, first, SECOND]
    second = chat.invoke(turns)
    assert second.content != first.content
    chunks = list(chat.stream(turns))
    assert "".join(str(chunk.content) for chunk in chunks) == second.content
    assert any(chunk.usage_metadata for chunk in chunks)


def test_tools_plain_and_streamed() -> None:
    able = chat.bind_tools([weather])
    asked = able.invoke([FIRST])
    (call,) = asked.tool_calls
    assert call["name"] == "weather"
    summed = None
    for chunk in able.stream([FIRST]):
        summed = chunk if summed is None else summed + chunk
    assert summed is not None
    assert summed.tool_calls[0]["args"] == call["args"]
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert able.invoke([FIRST, asked, result]).content


def test_structured_output() -> None:
    class Stop(BaseModel):
        name: str
        wells: int

    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Stop, method=method).invoke([FIRST]), Stop)


async def test_asynchronous_streaming() -> None:
    assert len([chunk async for chunk in chat.astream([FIRST])]) > 10
    assert isinstance(await chat.ainvoke([FIRST]), AIMessage)


def test_embeddings() -> None:
    # Without this switch it cuts texts with OpenAI's tokenizer, which it would first download.
    embeddings = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False)
    one, two = embeddings.embed_documents(["one", "two"])
    assert (len(one), one != two, embeddings.embed_query("one")) == (64, True, one)
