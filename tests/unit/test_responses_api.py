"""OpenAI's Responses said through chat completions: requests, whole answers, streams."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress.chat_answer import ChatReader, read_answer
from serai.ingress.openai_format import DONE, ApiError
from serai.ingress.responses_api import answer as answer_module
from serai.ingress.responses_api.answer import ResponseAnswer
from serai.ingress.responses_api.request import chat_request
from unit.chat_answers import CALLS, TEXT, THOUGHT, answer, chunk, events_of, finish, usage

ASKED: dict[str, Any] = {"model": "m", "input": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def messages_of(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    translated: list[dict[str, Any]] = chat_request(ASKED | {"input": list(items)} | fields)["messages"]
    return translated


class TestRequest:
    def test_a_text_is_what_the_user_says(self) -> None:
        assert chat_request(ASKED) == CHAT
        assert chat_request(ASKED | {"instructions": "Be brief"})["messages"] == [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "hi"},
        ]

    def test_what_is_not_translated_passes_as_it_came(self) -> None:
        others = {"temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": False, "user": "u", "vllm_xargs": {"a": [1]}}

        assert chat_request(ASKED | others) == CHAT | others

    def test_plain_fields_get_their_other_names(self) -> None:
        asked = {
            "max_output_tokens": 9,
            "stream": True,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low", "format": {"type": "json_object"}},
            "store": False,
            "metadata": {"a": "b"},
            "previous_response_id": None,
            "include": ["reasoning.encrypted_content"],
        }

        assert chat_request(ASKED | asked) == CHAT | {
            "max_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "low",
            "verbosity": "low",
            "response_format": {"type": "json_object"},
        }

    def test_a_schema_for_the_answer(self) -> None:
        schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
        chat = chat_request(ASKED | {"text": {"format": {"type": "json_schema"} | schema}})

        assert chat["response_format"] == {"type": "json_schema", "json_schema": schema}

    def test_tools(self) -> None:
        function = {"name": "look", "parameters": {"type": "object"}, "strict": True}
        chosen = {"type": "function", "name": "look"}
        chat = chat_request(ASKED | {"tools": [{"type": "function"} | function], "tool_choice": chosen})

        assert chat["tools"] == [{"type": "function", "function": function}]
        assert chat["tool_choice"] == {"type": "function", "function": {"name": "look"}}
        assert chat_request(ASKED | {"tool_choice": "required"})["tool_choice"] == "required"

    def test_a_conversation_with_calls(self) -> None:
        said = messages_of(
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}", "id": "f", "status": "x"},
            {"type": "function_call", "call_id": "t2", "name": "go", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "t2", "output": [{"type": "input_text", "text": "gone"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Fine."}], "id": "m"},
            {"role": "user", "content": "thanks"},
            instructions="Be brief",
        )

        calls = [
            {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            {"id": "t2", "type": "function", "function": {"name": "go", "arguments": "{}"}},
        ]
        assert said == [
            {"role": "system", "content": "Be brief\n\nBe kind"},
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "reasoning_content": "hm",
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "t2", "content": "gone"},
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": "thanks"},
        ]

    def test_images(self) -> None:
        image = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"}

        assert messages_of({"role": "user", "content": [image, {"type": "input_text", "text": "?"}]})[0]["content"] == [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}},
            {"type": "text", "text": "?"},
        ]

    @pytest.mark.parametrize(
        ("fields", "path"),
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"store": True}, "store"),
            ({"background": True}, "background"),
            ({"conversation": "c"}, "conversation"),
            ({"prompt": {"id": "p"}}, "prompt"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tools": [{"type": "mcp", "server_url": "x"}]}, "tools[0].type"),
            ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
            ({"truncation": "auto"}, "truncation"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"include": ["message.output_text.logprobs"]}, "include"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
            ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
                "input[0].content[0].file_id",
            ),
            (
                {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "f"}]}]},
                "input[0].content[0].type",
            ),
            ({"input": 5}, "input"),
            ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ],
    )
    def test_what_cannot_be_said_is_refused_by_its_place(self, fields: dict[str, Any], path: str) -> None:
        with pytest.raises(ApiError) as caught:
            chat_request(ASKED | fields)
        assert (caught.value.status, caught.value.param) == (400, path)
        assert path in caught.value.message


def whole(**fields: Any) -> dict[str, Any]:
    return ResponseAnswer(ASKED | {"temperature": 0.5}).whole(read_answer(answer(**fields), "r1"))


_USAGE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 12,
}
_MESSAGE = {
    "type": "message",
    "id": "msg_1_0",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
}


class TestWholeAnswer:
    def test_text(self) -> None:
        response = whole(content="Hello")

        assert response["output"] == [_MESSAGE]
        assert response["usage"] == _USAGE
        assert (response["id"], response["object"], response["created_at"]) == ("resp_1", "response", 7)
        assert (response["status"], response["store"], response["temperature"]) == ("completed", False, 0.5)

    def test_thoughts_and_calls(self) -> None:
        calls = [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}]
        response = whole(reasoning="hm", tool_calls=calls, finish_reason="tool_calls")

        assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
        assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert response["output"][1] == {
            "type": "function_call",
            "id": "fc_1_1",
            "call_id": "t1",
            "name": "look",
            "arguments": '{"at": 1}',
            "status": "completed",
        }

    @pytest.mark.parametrize(
        ("reason", "told"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
    )
    def test_an_answer_that_was_cut_says_so(self, reason: str, told: str) -> None:
        response = whole(content="Hel", finish_reason=reason)

        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": told})
        assert response["output"][0]["status"] == "incomplete"

    def test_an_answer_that_is_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answer_module, "_CHARACTERS_MAX", 4)

        with pytest.raises(ApiError) as caught:
            whole(content="Hello")
        assert caught.value.status == 502


def told(*pieces: bytes) -> list[tuple[str, dict[str, Any]]]:
    reader, response = ChatReader("r1"), ResponseAnswer(ASKED)
    written = [response.events(reader.feed(piece)) for piece in pieces]
    return events_of(b"".join([*written, response.events(reader.end())]))


def golden(*pieces: bytes) -> list[str]:
    """The names of the events, and of each what it adds, in a line."""
    lines = []
    for number, (name, event) in enumerate(told(*pieces)):
        assert (event["type"], event["sequence_number"]) == (name, number)
        place = [str(event[key]) for key in ("output_index", "item_id", "content_index") if key in event]
        said = [str(event[key]) for key in ("delta", "text", "arguments") if key in event]
        lines.append(" ".join([name, *place, *said]))
    return lines


class TestStream:
    def test_text(self) -> None:
        assert golden(*TEXT) == [
            "response.created",
            "response.in_progress",
            "response.output_item.added 0",
            "response.content_part.added 0 msg_1_0 0",
            "response.output_text.delta 0 msg_1_0 0 Hel",
            "response.output_text.delta 0 msg_1_0 0 lö",
            "response.output_text.done 0 msg_1_0 0 Hellö",
            "response.content_part.done 0 msg_1_0 0",
            "response.output_item.done 0",
            "response.completed",
        ]

    def test_calls_behind_a_text(self) -> None:
        assert golden(*CALLS)[6:] == [
            "response.content_part.done 0 msg_1_0 0",
            "response.output_item.done 0",
            "response.output_item.added 1",
            'response.function_call_arguments.delta 1 fc_1_1 {"a"',
            "response.function_call_arguments.delta 1 fc_1_1 :1}",
            'response.function_call_arguments.done 1 fc_1_1 {"a":1}',
            "response.output_item.done 1",
            "response.output_item.added 2",
            "response.function_call_arguments.delta 2 fc_1_2 {}",
            "response.function_call_arguments.done 2 fc_1_2 {}",
            "response.output_item.done 2",
            "response.completed",
        ]

    def test_thoughts_before_a_text(self) -> None:
        assert golden(*THOUGHT)[2:11] == [
            "response.output_item.added 0",
            "response.content_part.added 0 rs_1_0 0",
            "response.reasoning_text.delta 0 rs_1_0 0 hm",
            "response.reasoning_text.delta 0 rs_1_0 0 .",
            "response.reasoning_text.done 0 rs_1_0 0 hm.",
            "response.content_part.done 0 rs_1_0 0",
            "response.output_item.done 0",
            "response.output_item.added 1",
            "response.content_part.added 1 msg_1_1 0",
        ]

    def test_the_last_event_is_the_whole_answer(self) -> None:
        response = told(*TEXT)[-1][1]["response"]

        assert response["output"][0]["content"][0]["text"] == "Hellö"
        assert response["usage"] == _USAGE
        assert told(*TEXT[:3], finish("length"), usage(), DONE)[-1][0] == "response.incomplete"

    def test_a_comment_stays_one(self) -> None:
        reader, response = ChatReader("r1"), ResponseAnswer(ASKED)

        assert response.events(reader.feed(b": keep-alive\n\n")) == b": keep-alive\n\n"

    @pytest.mark.parametrize(
        "broken",
        [
            b'data: {"error":{"message":"gone","type":"overloaded_error","code":"busy"}}\n\n' + DONE,
            b'data: {"id": gone\n\n' + chunk(content="more") + finish() + DONE,
            finish("abort") + DONE,
            b"",
            usage(),
        ],
    )
    def test_what_is_not_whole_never_ends_as_whole(self, broken: bytes) -> None:
        events = told(*TEXT[:3], broken)

        name, event = events[-1]
        assert name == "response.failed"
        assert event["response"]["status"] == "failed"
        assert event["response"]["output"][0]["content"][0]["text"] == "Hellö"
        assert not [name for name, _ in events if name in ("response.completed", "response.output_item.done")]

    def test_an_error_before_the_answer_begins(self) -> None:
        events = told(b'data: {"error":{"message":"gone","type":"overloaded_error","code":"busy"}}\n\n' + DONE)

        assert [name for name, _ in events] == ["error"]
        assert (events[0][1]["code"], events[0][1]["error"]["message"]) == ("busy", "gone")

    def test_a_stream_that_is_too_long_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answer_module, "_CHARACTERS_MAX", 4)

        assert told(*TEXT)[-1][0] == "response.failed"

    @given(st.sampled_from([TEXT, CALLS, THOUGHT]), st.lists(st.integers(0, 2000)))
    def test_every_way_of_cutting_says_the_same(self, pieces: list[bytes], cuts: list[int]) -> None:
        data = b"".join(pieces)
        edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})

        assert told(*(data[a:b] for a, b in itertools.pairwise(edges))) == told(*pieces)
