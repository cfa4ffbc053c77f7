"""What the emulated engine says beyond words: tools, JSON, stop strings, choices, numbers of texts."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.engine_emulator import pooling
from serai.engine_emulator.completion import Completion, CompletionReader, RequestRefused
from serai.engine_emulator.script import Choice, Say
from serai.engine_emulator.settings import EmulatorSettings
from serai.engine_emulator.transcription import form_fields

READER = CompletionReader(EmulatorSettings("m"))
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
OTHER = {"type": "function", "function": {"name": "clock"}}


def read(chat: bool = True, **fields: Any) -> Completion:
    given = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    return READER.read(json.dumps({"model": "m", **given, **fields}).encode(), chat=chat)


def choices(chat: bool = True, **fields: Any) -> tuple[Choice, ...]:
    script = read(chat, **fields).script
    assert script is not None
    return script.choices


def test_plain_words_have_no_script() -> None:
    fields = {"n": 1, "stop": None, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}
    assert read(**fields).script is None
    assert read(tools=[TOOL], tool_choice="none").script is None
    assert read(False, echo=False, logprobs=None, prompt=["hi"]).script is None


@pytest.mark.parametrize(
    ("fields", "called", "reason"),
    [
        ({"tools": [TOOL, OTHER]}, ["weather"], "tool_calls"),
        ({"tools": [TOOL, OTHER], "tool_choice": "required"}, ["weather"], "tool_calls"),
        ({"tools": [TOOL, OTHER], "parallel_tool_calls": True}, ["weather", "clock"], "tool_calls"),
        (
            {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
            ["clock"],
            "stop",
        ),
    ],
)
def test_tools_are_called_as_asked(fields: dict[str, Any], called: list[str], reason: str) -> None:
    (choice,) = choices(**fields)
    assert (choice.calls, choice.finish_reason) == (called, reason)
    for number, name in enumerate(called):
        arguments = json.loads(choice.text(Say.ARGUMENTS, number))
        assert set(arguments) == ({"city", "days"} if name == "weather" else set())


def test_after_a_tool_has_answered_the_engine_speaks() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "x", "content": "sun"}]
    assert read(messages=turns, tools=[TOOL]).script is None
    forced = read(messages=turns, tools=[TOOL], tool_choice="required").script
    assert forced is not None
    assert forced.choices[0].calls == ["weather"]


def test_json_follows_the_schema_and_may_be_cut() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    (choice,) = choices(response_format=form)
    assert json.loads(choice.text(Say.CONTENT)) == {"a": 7, "b": "x"}
    (cut,) = choices(response_format=form, max_tokens=2)
    assert (cut.text(Say.CONTENT), cut.finish_reason) == ('{"a":7,"', "length")
    assert list(json.loads(choices(response_format={"type": "json_object"})[0].text(Say.CONTENT))) == ["answer"]


def test_stop_strings_end_the_text_before_them() -> None:
    words = read(max_tokens=9).answer.text(9)
    third = words.split()[2]
    (choice,) = choices(max_tokens=9, stop=["never", third[2:]])
    assert choice.text(Say.CONTENT) == words[: words.index(third) + 2]
    assert (choice.finish_reason, choice.stopped_by) == ("stop", third[2:])
    assert choices(max_tokens=9, stop="never")[0].text(Say.CONTENT) == words


def test_several_choices_and_prompts_differ_and_are_counted() -> None:
    completion = read(n=3, max_tokens=5)
    assert completion.script is not None
    assert len({choice.text(Say.CONTENT) for choice in completion.script.choices}) == 3
    assert (completion.tokens, completion.script.said(5), completion.script.said(2)) == (5, 15, 6)
    both = read(False, prompt=["one", [1, 2]], n=2, echo=True, max_tokens=1)
    assert both.script is not None
    assert [choice.echoed for choice in both.script.choices] == ["one", "one", "1 2", "1 2"]
    assert both.answer.prompt_tokens == 2
    assert read(seed=5, max_tokens=3).answer.key != read(max_tokens=3).answer.key


def test_reasoning_comes_first_when_asked_for() -> None:
    for fields in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}):
        (choice,) = choices(**fields)
        assert [piece.say for piece in choice.pieces] == [Say.REASONING] * 8 + [Say.CONTENT] * 32
    assert read(reasoning_effort="none").script is None


def test_nothing_may_be_asked_for() -> None:
    (choice,) = choices(max_tokens=0)
    assert (choice.pieces, choice.finish_reason) == ((), "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "a"}}}}, None),
        ({"stop": [3]}, "stop"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_what_an_engine_refuses(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestRefused) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@given(st.text(max_size=200))
def test_tokens_make_their_text_again(text: str) -> None:
    assert pooling.text_of(pooling.tokens_of(text)) == text.encode("utf-8", "replace").decode()


def test_both_encodings_of_an_embedding_say_the_same() -> None:
    asked = {"input": ["one", [1, 2, 3]], "dimensions": 5}
    floats = json.loads(pooling.embeddings(asked, "m").body)
    packed = json.loads(pooling.embeddings({**asked, "encoding_format": "base64"}, "m").body)
    for one, other in zip(floats["data"], packed["data"], strict=True):
        assert list(struct.unpack("<5f", base64.b64decode(other["embedding"]))) == one["embedding"]
        assert sum(part * part for part in one["embedding"]) == pytest.approx(1, abs=1e-5)
    assert floats["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_ranks_are_sorted_and_scores_are_pairs() -> None:
    asked = {"query": "sand and camels", "documents": ["snow", {"text": "camels and sand"}, "sand"], "top_n": 2}
    ranked = json.loads(pooling.rerank(asked, "m").body)
    assert [result["index"] for result in ranked["results"]] == [1, 2]
    scored = json.loads(pooling.scores({"text_1": "a", "text_2": ["a", "b"]}, "m").body)
    assert scored["data"][0]["score"] > scored["data"][1]["score"]
    with pytest.raises(RequestRefused, match="as many"):
        pooling.scores({"text_1": ["a", "b"], "text_2": ["a"]}, "m")


def test_a_form_is_read_with_its_file_as_bytes() -> None:
    kind = "multipart/form-data; boundary=xx"
    raw = b"\x00\xff\r\n--x\x80"
    body = b'--xx\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\xc3\xa9\r\n--xx\r\nContent-Disposition: '
    body += b'form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n' + raw + b"\r\n--xx--\r\n"
    assert form_fields(body, kind) == {"model": "mé", "file": raw}
    with pytest.raises(RequestRefused, match="multipart"):
        form_fields(b"{}", "application/json")
