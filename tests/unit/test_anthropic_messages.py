"""Anthropic's Messages said through chat completions: requests, whole answers, streams."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress.anthropic_messages.answer import MessageAnswer
from serai.ingress.anthropic_messages.errors import error_body
from serai.ingress.anthropic_messages.request import chat_request
from serai.ingress.chat_answer import Broke, ChatReader, Ended, read_answer
from serai.ingress.openai_format import DONE, ApiError
from serai.ingress.responses_api.answer import ResponseAnswer
from unit.chat_answers import CALLS, TEXT, THOUGHT, answer, chunk, events_of, finish, usage

ASKED: dict[str, Any] = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def messages_of(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    translated: list[dict[str, Any]] = chat_request(ASKED | {"messages": list(messages)} | fields)["messages"]
    return translated


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat_request(ASKED | fields)
    assert caught.value.status == 400
    return caught.value


class TestRequest:
    def test_what_is_not_translated_passes_as_it_came(self) -> None:
        asked = ASKED | {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "vllm_xargs": {"a": [1]}}

        assert chat_request(asked) == asked

    def test_plain_fields_get_their_other_names(self) -> None:
        asked = {"stop_sequences": ["\n"], "metadata": {"user_id": "u"}, "stream": True, "service_tier": "auto"}

        assert chat_request(ASKED | asked) == ASKED | {
            "stop": ["\n"],
            "user": "u",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def test_a_system_prompt_in_blocks_is_one_message(self) -> None:
        blocks = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief", "cache_control": {"type": "x"}}]

        assert messages_of(system=blocks)[0] == {"role": "system", "content": "Be\n\nbrief"}
        assert messages_of(system="Be brief")[0] == {"role": "system", "content": "Be brief"}

    def test_a_billing_line_is_not_part_of_the_prompt(self) -> None:
        blocks = [{"type": "text", "text": "x-anthropic-billing-header: cc=1"}, {"type": "text", "text": "Be"}]

        assert messages_of(system=blocks)[0]["content"] == "Be"

    def test_images_by_bytes_and_by_address(self) -> None:
        url = {"type": "url", "url": "http://x/a.png"}
        content = [{"type": "image", "source": PNG}, {"type": "image", "source": url}, {"type": "text", "text": "?"}]

        assert messages_of({"role": "user", "content": content})[0]["content"] == [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
            {"type": "image_url", "image_url": {"url": "http://x/a.png"}},
            {"type": "text", "text": "?"},
        ]

    def test_calls_and_their_results(self) -> None:
        call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "ü"}}
        thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
        shown = {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "image", "source": PNG}]}

        said = messages_of(
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "?"}, call]},
            {"role": "user", "content": [result, shown, {"type": "text", "text": "and?"}]},
        )

        function = {"name": "look", "arguments": '{"at":"ü"}'}
        assert said[1:] == [
            {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "t2", "content": ""},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                    {"type": "text", "text": "and?"},
                ],
            },
        ]

    def test_only_results_are_no_message_of_the_user(self) -> None:
        said = messages_of({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]})

        assert said == [{"role": "tool", "tool_call_id": "t", "content": "1"}]

    def test_an_answer_that_was_begun_goes_on(self) -> None:
        begun = chat_request(ASKED | {"messages": [*ASKED["messages"], {"role": "assistant", "content": "{"}]})

        assert (begun["continue_final_message"], begun["add_generation_prompt"]) == (True, False)
        assert "continue_final_message" not in chat_request(ASKED)

    def test_tools(self) -> None:
        tool = {"name": "look", "description": "Looks", "input_schema": {"type": "object"}, "cache_control": None}

        assert chat_request(ASKED | {"tools": [tool]})["tools"] == [
            {
                "type": "function",
                "function": {"name": "look", "parameters": {"type": "object"}, "description": "Looks"},
            }
        ]

    @pytest.mark.parametrize(
        ("choice", "said"),
        [
            ({"type": "auto"}, {"tool_choice": "auto"}),
            ({"type": "any"}, {"tool_choice": "required"}),
            ({"type": "none"}, {"tool_choice": "none"}),
            (
                {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
                {
                    "tool_choice": {"type": "function", "function": {"name": "look"}},
                    "parallel_tool_calls": False,
                },
            ),
        ],
    )
    def test_choice_of_tools(self, choice: dict[str, Any], said: dict[str, Any]) -> None:
        assert chat_request(ASKED | {"tool_choice": choice}) == ASKED | said

    def test_thinking_is_a_matter_of_the_chat_template(self) -> None:
        thinking = {"type": "enabled", "budget_tokens": 1024}

        assert chat_request(ASKED | {"thinking": thinking})["chat_template_kwargs"] == {"enable_thinking": True}
        assert "chat_template_kwargs" not in chat_request(ASKED | {"thinking": {"type": "adaptive"}})

    def test_a_schema_for_the_answer(self) -> None:
        config = {"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}}
        chat = chat_request(ASKED | {"output_config": config})

        assert chat["reasoning_effort"] == "high"
        assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}

    @pytest.mark.parametrize(
        ("block", "path"),
        [
            ({"type": "document", "source": PNG}, "messages[1].content[1].type"),
            ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "messages[1].content[1].source.type"),
            ({"type": "tool_use", "id": "1", "name": "x", "input": {}}, "messages[1].content[1].type"),
            ({"type": "text"}, "messages[1].content[1]"),
            ("text", "messages[1].content[1]"),
        ],
    )
    def test_what_cannot_be_said_is_refused_by_its_place(self, block: Any, path: str) -> None:
        content = [{"type": "text", "text": "a"}, block]
        error = refused(messages=[{"role": "user", "content": "a"}, {"role": "user", "content": content}])

        assert error.param == path
        assert path in error.message

    @pytest.mark.parametrize(
        ("fields", "path"),
        [
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
            ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
            ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
            ({"container": "c"}, "container"),
            ({"max_tokens": "many"}, "max_tokens"),
            ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
            ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ],
    )
    def test_fields_that_are_refused(self, fields: dict[str, Any], path: str) -> None:
        assert refused(**fields).param == path

    def test_max_tokens_must_be_said(self) -> None:
        with pytest.raises(ApiError, match="max_tokens"):
            chat_request({"model": "m", "messages": []})


def whole(**fields: Any) -> dict[str, Any]:
    return MessageAnswer(ASKED).whole(read_answer(answer(**fields), "r1"))


class TestWholeAnswer:
    def test_text(self) -> None:
        assert whole(content="Hello") == {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [{"type": "text", "text": "Hello"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 5,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "output_tokens": 3,
            },
        }

    def test_thoughts_and_calls(self) -> None:
        function = {"name": "look", "arguments": '{"at": 1}'}
        calls = [{"id": "t1", "type": "function", "function": function}]
        message = whole(reasoning_content="hm", tool_calls=calls, finish_reason="tool_calls")

        assert message["stop_reason"] == "tool_use"
        assert message["content"] == [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
        ]

    def test_a_call_that_was_demanded_ends_like_any_other(self) -> None:
        calls = [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": ""}}]

        assert whole(tool_calls=calls, finish_reason="stop")["stop_reason"] == "tool_use"
        assert told(*CALLS[:5], finish("stop"), DONE)[-2][1]["delta"]["stop_reason"] == "tool_use"

    def test_a_cut_call_is_told_as_cut(self) -> None:
        calls = [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at'}}]

        assert whole(tool_calls=calls, finish_reason="length")["stop_reason"] == "max_tokens"
        with pytest.raises(ApiError, match="no JSON object"):
            whole(tool_calls=calls, finish_reason="tool_calls")

    @pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
    def test_the_stop_string_is_told_where_the_engine_tells(self, name: str) -> None:
        message = whole(content="a", choice={name: "\n"})

        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "\n")

    @pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"choices":[]}', b'{"choices":[{"message":{"content":1}}]}'])
    def test_an_answer_that_is_none(self, body: bytes) -> None:
        with pytest.raises(ApiError) as caught:
            read_answer(body, "r1")
        assert caught.value.status == 502

    def test_an_answer_its_engine_gave_up(self) -> None:
        with pytest.raises(ApiError, match="gave the answer up"):
            whole(content="a", finish_reason="abort")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.sampled_from(["", "a", "stop"]),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.sampled_from("ab"), children, max_size=2),
    max_leaves=4,
)
FUNCTION = st.fixed_dictionaries({}, optional={"name": JSON, "arguments": JSON})
CALL = st.fixed_dictionaries({}, optional={"index": st.integers(0, 2) | JSON, "id": JSON, "function": FUNCTION | JSON})
DELTA = st.fixed_dictionaries(
    {}, optional={"content": JSON, "reasoning": JSON, "tool_calls": st.lists(CALL, max_size=2) | JSON}
)
CHOICE = st.fixed_dictionaries({}, optional={"delta": DELTA | JSON, "finish_reason": JSON, "index": JSON})
CHUNKS = JSON | st.fixed_dictionaries(
    {}, optional={"id": JSON, "choices": st.lists(CHOICE, max_size=2) | JSON, "usage": JSON, "error": JSON}
)
"""Of engines that send anything."""


def told(*pieces: bytes) -> list[tuple[str, dict[str, Any]]]:
    reader, message = ChatReader("r1"), MessageAnswer(ASKED)
    written = [message.events(reader.feed(piece)) for piece in pieces]
    return events_of(b"".join([*written, message.events(reader.end())]))


def golden(*pieces: bytes) -> list[str]:
    """Each event in a line, without what is the same in all."""
    lines = []
    for name, event in told(*pieces):
        assert event.pop("type") == name
        lines.append(f"{name} {orjson.dumps(event).decode()}" if event else name)
    return lines


_START = (
    'message_start {"message":{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[],'
    '"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":0,"cache_creation_input_tokens":0,'
    '"cache_read_input_tokens":0,"output_tokens":0}}}'
)
_USAGE = '"usage":{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":3}'


class TestStream:
    def test_text(self) -> None:
        assert golden(*TEXT) == [
            _START,
            'content_block_start {"index":0,"content_block":{"type":"text","text":""}}',
            'content_block_delta {"index":0,"delta":{"type":"text_delta","text":"Hel"}}',
            'content_block_delta {"index":0,"delta":{"type":"text_delta","text":"lö"}}',
            'content_block_stop {"index":0}',
            'message_delta {"delta":{"stop_reason":"end_turn","stop_sequence":null},' + _USAGE + "}",
            "message_stop",
        ]

    def test_calls_behind_a_text(self) -> None:
        assert golden(*CALLS) == [
            _START,
            'content_block_start {"index":0,"content_block":{"type":"text","text":""}}',
            'content_block_delta {"index":0,"delta":{"type":"text_delta","text":"Look"}}',
            'content_block_stop {"index":0}',
            'content_block_start {"index":1,"content_block":{"type":"tool_use","id":"t1","name":"look","input":{}}}',
            'content_block_delta {"index":1,"delta":{"type":"input_json_delta","partial_json":"{\\"a\\""}}',
            'content_block_delta {"index":1,"delta":{"type":"input_json_delta","partial_json":":1}"}}',
            'content_block_stop {"index":1}',
            'content_block_start {"index":2,"content_block":{"type":"tool_use","id":"t2","name":"go","input":{}}}',
            'content_block_delta {"index":2,"delta":{"type":"input_json_delta","partial_json":"{}"}}',
            'content_block_stop {"index":2}',
            'message_delta {"delta":{"stop_reason":"tool_use","stop_sequence":null},' + _USAGE + "}",
            "message_stop",
        ]

    def test_thoughts_before_a_text(self) -> None:
        assert golden(*THOUGHT)[1:6] == [
            'content_block_start {"index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}',
            'content_block_delta {"index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}',
            'content_block_delta {"index":0,"delta":{"type":"thinking_delta","thinking":"."}}',
            'content_block_stop {"index":0}',
            'content_block_start {"index":1,"content_block":{"type":"text","text":""}}',
        ]

    def test_a_comment_is_a_ping_wherever_it_comes(self) -> None:
        names = [name for name, _ in told(b": keep-alive\n\n", TEXT[0], b": keep-alive\n\n", *TEXT[1:])]

        assert names[:3] == ["ping", "message_start", "ping"]

    @pytest.mark.parametrize(
        ("broken", "kind"),
        [
            (b'data: {"error":{"message":"gone","type":"overloaded_error"}}\n\n' + DONE, "overloaded_error"),
            (b'data: {"error":"gone"}\n\n' + chunk(content="more"), "api_error"),
            (CALLS[1] + chunk(content="x") + CALLS[1] + finish() + DONE, "api_error"),
            (b'data: {"id": gone\n\n' + chunk(content="more") + finish() + DONE, "api_error"),
            (b'data: {"choices": 1}\n\n' + DONE, "api_error"),
            (chunk(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]) + finish() + DONE, "api_error"),
            (finish("abort") + DONE, "api_error"),
            (b"", "api_error"),
            (b"data: {", "api_error"),
            (usage(), "api_error"),
        ],
    )
    def test_what_is_not_whole_never_ends_as_whole(self, broken: bytes, kind: str) -> None:
        events = told(*TEXT[:3], broken)
        names = [name for name, _ in events]

        assert names.count("error") == 1
        assert names[-1] == "error"
        assert events[-1][1]["error"]["type"] == kind

    def test_a_stream_with_only_an_end_is_no_answer(self) -> None:
        assert [name for name, _ in told(DONE)] == ["error"]

    @given(st.sampled_from([TEXT, CALLS, THOUGHT]), st.lists(st.integers(0, 2000)), st.booleans())
    def test_every_way_of_cutting_says_the_same(self, pieces: list[bytes], cuts: list[int], crlf: bool) -> None:
        data = b"".join(pieces)
        if crlf:
            data = data.replace(b"\n", b"\r\n")
        edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})

        assert told(*(data[a:b] for a, b in itertools.pairwise(edges))) == told(*pieces)

    @given(st.lists(CHUNKS, max_size=4))
    def test_whatever_an_engine_sends_has_one_end(self, chunks: list[Any]) -> None:
        reader, message, response = ChatReader("r1"), MessageAnswer(ASKED), ResponseAnswer(ASKED)
        pieces = [piece for event in chunks for piece in reader.feed(b"data: %s\n\n" % orjson.dumps(event))]
        pieces += [*reader.feed(DONE), *reader.end()]

        assert [type(piece) for piece in pieces if isinstance(piece, (Broke, Ended))] == [type(pieces[-1])]
        names = [name for name, _ in events_of(message.events(pieces))]
        assert names[-1] == ("message_stop" if isinstance(pieces[-1], Ended) else "error")
        assert names.count("content_block_start") >= names.count("content_block_stop")
        response.events(pieces)

    @given(st.sampled_from([TEXT, CALLS, THOUGHT]), st.integers(0, 5000))
    def test_a_stream_that_is_cut_short_ends_with_an_error(self, pieces: list[bytes], cut: int) -> None:
        data = b"".join(pieces)
        names = [name for name, _ in told(data[: cut % (len(data) - 1)])]

        assert names[-1] == "error"
        assert "message_stop" not in names


def test_errors_have_anthropics_form() -> None:
    body = orjson.loads(error_body(ApiError(404, "No such model."), "r1"))

    assert body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "No such model."},
        "request_id": "r1",
    }
