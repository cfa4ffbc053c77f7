"""Continuation: what of a stream is known, when it is sound to go on, what is asked, and how the rest is fitted on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress import continuation
from serai.ingress.continuation import CHAT_PATH, COMPLETIONS_PATH, Continuing, plan
from serai.ingress.openai_format import DONE
from serai.ingress.sent_events import TEXT_CHARACTERS_MAX, Transcript, Unsound, usage_so_far
from serai.ingress.splice import Splice
from serai.ingress.sse_relay import SseRelay
from unit.fakes import record_of

GREEDY = {"model": "m", "stream": True, "temperature": 0, "max_tokens": 50}
CHAT = GREEDY | {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT = GREEDY | {"prompt": "Once"}
WORDS = [f" w{n}" for n in range(20)]


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"id": "a", "created": 1, "model": "m", **fields}).encode() + b"\n\n"


def delta(usage: dict[str, int] | None = None, finish: str | None = None, **said: Any) -> bytes:
    fields: dict[str, Any] = {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}
    return event(fields | ({} if usage is None else {"usage": usage}))


def text(said: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": said, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def chat_said(*words: str) -> Transcript:
    return said(delta(role="assistant", content=""), *[delta(content=word) for word in words])


def said(*events: bytes) -> Transcript:
    transcript = Transcript()
    for one in events:
        transcript.add(one)
    return transcript


def planned(
    body: dict[str, Any],
    transcript: Transcript,
    *,
    engine: str = "vllm",
    continuing: Continuing = Continuing.GREEDY,
) -> tuple[dict[str, Any], Splice]:
    path = CHAT_PATH if "messages" in body else COMPLETIONS_PATH
    made = plan(continuing, engine, path, json.dumps(body).encode(), transcript)
    asked: dict[str, Any] = json.loads(made.body)
    return asked, made.splice


def read(events: bytes) -> list[Any]:
    return [json.loads(block[6:]) for block in events.split(b"\n\n") if block.startswith(b"data: {")]


# -- the request -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "extra"),
    [
        ("vllm", {"continue_final_message": True, "add_generation_prompt": False}),
        ("sglang", {"continue_final_message": True}),
        ("llamacpp", {"continue_final_message": True, "add_generation_prompt": False}),
        ("emulated", {}),
    ],
)
def test_a_chat_goes_on_behind_its_own_words_and_some_of_them_are_asked_for_again(
    engine: str, extra: dict[str, Any]
) -> None:
    words = ["w", *WORDS[1:]]
    asked, splice = planned(CHAT | {"user": "u"}, chat_said(*words), engine=engine)
    kept = len(words) - continuation.REPEATED_EVENTS
    answer = {"role": "assistant", "content": "".join(words[:kept])}
    changed = {"messages": [*CHAT["messages"], answer], "max_tokens": 50 - kept}
    assert asked == CHAT | {"user": "u"} | changed | extra
    assert splice.edit(b"".join(delta(content=word) for word in words[kept:])) == b""
    assert read(splice.edit(delta(content=" more")))[0]["choices"][0]["delta"] == {"content": " more"}


def test_a_completion_goes_on_behind_its_prompt_and_its_words() -> None:
    asked, _ = planned(PROMPT, said(*map(text, WORDS)))
    kept = len(WORDS) - continuation.REPEATED_EVENTS
    assert asked == PROMPT | {"prompt": "Once" + "".join(WORDS[:kept]), "max_tokens": 50 - kept}


def test_what_is_short_is_said_again_from_its_beginning() -> None:
    asked, splice = planned(CHAT, chat_said(" a", " b"))
    assert asked == CHAT
    assert splice.edit(delta(role="assistant", content="")) == b""
    assert read(splice.edit(delta(content=" a bc")))[0]["choices"][0]["delta"] == {"content": "c"}


@pytest.mark.parametrize(
    "words",
    [
        ["a", *["bc"] * 20],
        ["a", *["\n"] * 20],
        ["a ", *["  b "] * 20],
        [" a", *WORDS],
    ],
    ids=["inside a word", "before a line break", "behind a space", "first space stripped by a chat template"],
)
def test_a_cut_is_only_where_a_tokenizer_cuts(words: list[str]) -> None:
    assert planned(CHAT, chat_said(*words))[0] == CHAT


def test_a_text_with_stop_strings_begins_anew_since_engines_hold_back_what_may_become_one() -> None:
    assert planned(CHAT | {"stop": ["x"]}, chat_said("w", *WORDS))[0] == CHAT | {"stop": ["x"]}


def test_nothing_becomes_prompt_behind_a_character_that_may_be_several_tokens_where_tokens_are_limited() -> None:
    words = ["w", *WORDS[:3], " \u00e9", *WORDS[3:]]
    asked, _ = planned(CHAT, chat_said(*words))
    assert (asked["messages"][-1]["content"], asked["max_tokens"]) == ("w w0 w1 w2", 46)
    asked, _ = planned(CHAT | {"max_tokens": None}, chat_said(*words))
    assert len(asked["messages"][-1]["content"]) > 20
    told = said(*[delta(usage(5, 2 * n + 2), content=word) for n, word in enumerate(words)])
    assert planned(CHAT, told)[0]["max_tokens"] == 50 - 2 * (len(words) - continuation.REPEATED_EVENTS)


def test_tokens_that_were_said_count_against_the_limit_as_the_engine_told_them() -> None:
    told = said(*[delta(usage(5, 2 * n + 2), content=word) for n, word in enumerate(["w", *WORDS])])
    asked, _ = planned(CHAT, told)
    assert asked["max_tokens"] == 50 - 2 * (21 - continuation.REPEATED_EVENTS)


def test_a_completion_without_a_limit_has_the_engines_own() -> None:
    body = {name: value for name, value in PROMPT.items() if name != "max_tokens"}
    transcript = said(*map(text, WORDS[:10]))
    assert planned(body, transcript)[0]["max_tokens"] == 14
    assert "max_tokens" not in planned(body, transcript, engine="llamacpp")[0]


# -- when it is sound ------------------------------------------------------------------------------------------------

SOUND = [
    {"n": 1},
    {"tools": [], "tool_choice": "none"},
    {"tools": None, "logprobs": None, "stop": None, "grammar": None},
    {"logprobs": False, "top_logprobs": 0},
    {"response_format": {"type": "text"}},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    {"stream_options": {"include_usage": True}, "seed": 7, "top_p": 0.5, "user": "u"},
]
UNSOUND = [
    {"n": 2},
    {"n": True},
    {"temperature": 0.1},
    {"temperature": None},
    {"temperature": "0"},
    {"tools": [{"type": "function"}]},
    {"functions": [{}]},
    {"tool_choice": "auto"},
    {"logprobs": True},
    {"logprobs": 1},
    {"top_logprobs": 2},
    {"prompt_logprobs": 0},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": {}}},
    {"guided_json": {}},
    {"grammar": "root ::= x"},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -1},
    {"repetition_penalty": 1.1},
    {"repeat_penalty": 1.1},
    {"min_tokens": 5},
    {"echo": True},
    {"suffix": "x"},
    {"best_of": 2},
    {"use_beam_search": True},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"something_new": 1},
    {"max_tokens": 12},
    {"max_tokens": "many"},
]


@pytest.mark.parametrize("changes", SOUND, ids=str)
@pytest.mark.parametrize("body", [CHAT, PROMPT], ids=["chat", "completion"])
def test_a_request_that_does_not_depend_on_where_the_answer_begins_is_continued(
    body: dict[str, Any], changes: dict[str, Any]
) -> None:
    transcript = chat_said("w", *WORDS) if body is CHAT else said(*map(text, WORDS))
    assert planned(body | changes, transcript)[0] != body | changes


@pytest.mark.parametrize("changes", UNSOUND, ids=str)
@pytest.mark.parametrize("body", [CHAT, PROMPT], ids=["chat", "completion"])
def test_a_request_that_may_depend_on_where_the_answer_begins_is_not_continued(
    body: dict[str, Any], changes: dict[str, Any]
) -> None:
    transcript = chat_said("w", *WORDS) if body is CHAT else said(*map(text, WORDS))
    with pytest.raises(Unsound):
        planned(body | changes, transcript)


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Well,"}]},
        {"messages": []},
        {"messages": "Hi"},
    ],
)
def test_a_chat_whose_last_message_is_open_already_is_not_continued(changes: dict[str, Any]) -> None:
    with pytest.raises(Unsound, match="messages"):
        planned(CHAT | changes, chat_said("w", *WORDS))


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2], [[1, 2]], None])
def test_a_prompt_that_is_not_one_text_is_not_continued(prompt: Any) -> None:
    with pytest.raises(Unsound, match="prompt"):
        planned(PROMPT | {"prompt": prompt}, said(text(" a")))


@pytest.mark.parametrize(
    "events",
    [
        [delta(content="w"), delta(finish="stop")],
        [delta(reasoning_content="hm")],
        [delta(tool_calls=[{"index": 0}])],
        [delta(refusal="no")],
        [event({"choices": [{"index": 1, "delta": {"content": "w"}}]})],
        [event({"choices": [{"index": 0, "delta": {"content": "w"}, "logprobs": {"content": []}}]})],
        [b"data: {nonsense\n\n"],
        [event({"error": {"message": "no"}})],
        [b"data: []\n\n"],
        [delta(content="x" * (TEXT_CHARACTERS_MAX + 1))],
    ],
)
def test_a_stream_of_which_more_than_plain_text_was_sent_is_not_continued(events: list[bytes]) -> None:
    with pytest.raises(Unsound):
        planned(CHAT, said(*events))


def test_a_sampled_text_is_continued_only_where_that_is_wanted_and_behind_its_last_word() -> None:
    body = CHAT | {"temperature": 0.7}
    words = ["w", *WORDS]
    with pytest.raises(Unsound, match="chance"):
        planned(body, chat_said(*words))
    asked, splice = planned(body, chat_said(*words), continuing=Continuing.ALWAYS)
    assert asked["messages"][-1]["content"] == "".join(words)
    assert asked["max_tokens"] == 50 - len(words)
    assert read(splice.edit(delta(content=" more")))[0]["choices"][0]["delta"] == {"content": " more"}
    with pytest.raises(Unsound, match="stop"):
        planned(body | {"stop": "x"}, chat_said(*words), continuing=Continuing.ALWAYS)
    assert planned(body, chat_said(*words), engine="emulated")[0]["max_tokens"] > 50 - len(words)


def test_a_stream_without_a_word_yet_begins_anew_whatever_its_temperature() -> None:
    assert planned(CHAT | {"temperature": 1}, chat_said())[0] == CHAT | {"temperature": 1}


def test_only_a_session_that_serves_the_same_may_go_on() -> None:
    one = record_of("s1", engine="vllm", fingerprint="f")
    assert continuation.can_replace(record_of("s2", engine="vllm", fingerprint="f"), one)
    assert not continuation.can_replace(record_of("s2", engine="vllm", fingerprint="g"), one)
    assert not continuation.can_replace(record_of("s2", engine="sglang", fingerprint="f"), one)
    assert continuation.can_replace(record_of("s2", engine="vllm", fingerprint="g"), one, any_fingerprint=True)
    assert not continuation.can_replace(record_of("s2", engine="sglang", fingerprint="g"), one, any_fingerprint=True)
    nameless = record_of("s1", engine="vllm")
    assert not continuation.can_replace(nameless, nameless)
    other = record_of("s1", engine="openai", fingerprint="f")
    assert not continuation.can_replace(other, other)


@pytest.mark.parametrize(
    ("continuing", "engine", "path", "body", "worth"),
    [
        (Continuing.GREEDY, "vllm", CHAT_PATH, CHAT, True),
        (Continuing.GREEDY, "vllm", "/v1/embeddings", CHAT, False),
        (Continuing.GREEDY, "openai", CHAT_PATH, CHAT, False),
        (Continuing.GREEDY, "vllm", CHAT_PATH, {}, False),
        (Continuing.GREEDY, "emulated", CHAT_PATH, {}, True),
        (Continuing.ALWAYS, "vllm", CHAT_PATH, {}, True),
        (Continuing.OFF, "vllm", CHAT_PATH, CHAT, False),
    ],
)
def test_a_copy_is_kept_only_of_what_may_be_continued(
    continuing: Continuing, engine: str, path: str, body: dict[str, Any], worth: bool
) -> None:
    record = record_of("s1", engine=engine, fingerprint="f")
    assert continuation.is_worth_keeping(continuing, record, path, json.dumps(body).encode()) is worth


# -- the transcript --------------------------------------------------------------------------------------------------


@given(st.lists(st.text(min_size=1, max_size=8), max_size=40), st.booleans(), st.data())
def test_the_text_is_known_whatever_is_in_it_and_however_the_stream_was_cut(
    words: list[str], windows: bool, data: st.DataObject
) -> None:
    stream = b"".join(delta(content=word) for word in words)
    if windows:
        stream = stream.replace(b"\n\n", b"\r\n\r\n")
    transcript, relay = Transcript(), SseRelay()
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        if events := relay.feed(stream[:size]):
            transcript.add(events)
        stream = stream[size:]
    transcript.read()
    assert transcript.pieces == words


def test_a_long_stream_is_read_on_its_way_and_takes_little_room() -> None:
    transcript = Transcript()
    words = [f" word{n}" for n in range(20_000)]
    for word in words:
        transcript.add(delta(content=word))
    assert transcript._raw_bytes < 50_000
    assert len(transcript._blocks) < 300
    transcript.read()
    assert transcript.pieces == words


# -- the splice ------------------------------------------------------------------------------------------------------


def spliced(words: list[str], *events: bytes) -> tuple[bytes, Splice]:
    _, splice = planned(CHAT, chat_said(*words))
    return b"".join(map(splice.edit, events)), splice


def test_events_of_the_other_session_get_the_head_of_the_first_and_keep_all_else() -> None:
    other = {"id": "b", "created": 2, "model": "path/m", "system_fingerprint": "x", "extra": [1]}
    out, _ = spliced([], event({**other, "choices": [{"index": 0, "delta": {"content": "hi"}, "more": 1}]}))
    (told,) = read(out)
    assert (told["id"], told["created"], told["model"], told["extra"]) == ("a", 1, "m", [1])
    assert told["choices"] == [{"index": 0, "delta": {"content": "hi"}, "more": 1}]


def test_a_role_is_told_once() -> None:
    out, _ = spliced(
        ["a"], delta(role="assistant", content=""), delta(role="assistant", content="a"), delta(content="b")
    )
    assert [one["choices"][0]["delta"] for one in read(out)] == [{"content": "b"}]
    _, splice = planned(CHAT, said(b": nothing yet\n\n"))
    assert b"role" in splice.edit(delta(role="assistant", content=""))
    assert splice.edit(delta(role="assistant", content="")) == b""


def test_usage_is_told_for_the_whole_answer() -> None:
    words = ["w", *WORDS]
    kept = len(words) - continuation.REPEATED_EVENTS
    out, splice = spliced(
        words,
        *[delta(content=word) for word in [*words[kept:], " end"]],
        delta(finish="stop"),
        event({"choices": [], "usage": usage(5 + kept, continuation.REPEATED_EVENTS + 1)}),
    )
    assert [one.get("usage") for one in read(out)] == [None, None, usage(5, len(words) + 1)]
    assert splice.usage == usage(5, len(words) + 1)


@pytest.mark.parametrize(
    "events",
    [
        [delta(content=" no")],
        [delta(content=" b"), delta(content="x")],
        [delta(content=" b"), delta(finish="stop")],
        [delta(content=" b"), DONE],
        [delta(content=" b"), event({"error": {"message": "no"}}), DONE],
    ],
    ids=["another word", "another end of a word", "finished too soon", "done too soon", "an error"],
)
def test_a_session_that_does_not_say_what_was_said_is_not_heard(events: list[bytes]) -> None:
    out, splice = spliced([" b", " c"], *events, delta(content=" never"))
    assert splice.mismatch
    assert out == b""


@given(st.text(min_size=1, max_size=30), st.text(max_size=30), st.data())
def test_however_the_repeated_text_is_cut_into_events_only_the_new_comes_out(
    old: str, new: str, data: st.DataObject
) -> None:
    _, splice = planned(CHAT | {"max_tokens": None}, chat_said(old))
    whole, out = old + new, b""
    while whole:
        size = data.draw(st.integers(1, len(whole)))
        out += splice.edit(delta(content=whole[:size]))
        whole = whole[size:]
    assert not splice.mismatch
    assert "".join(one["choices"][0]["delta"]["content"] for one in read(out)) == new


def test_what_is_no_answer_passes_as_it_came() -> None:
    for block in (b": alive\n\n", b"data: {nonsense\n\n", event({"error": {"message": "no"}}), DONE):
        assert spliced([], block)[0] == block


def test_the_usage_so_far_is_told_only_where_the_engine_told_it() -> None:
    (told,) = read(usage_so_far(delta(content="a") + delta(usage(5, 2), content="b")))
    assert (told["usage"], told["choices"], told["id"]) == (usage(5, 2), [], "a")
    for events in (b"", delta(content="a"), event({"choices": [], "usage": usage(5, 2)}), b"data: {x\n\n", DONE):
        assert usage_so_far(events) == b""


@pytest.mark.parametrize("choices", [5, True, "a", {"a": 1}])
def test_choices_that_are_no_list_are_nothing_to_go_on_with(choices: Any) -> None:
    event = b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n"
    said = Transcript()
    said.add(event)
    said.read()
    assert said.problem
    assert Splice(Transcript(), "", 0).edit(event)


def test_counts_that_no_sum_can_be_written_of_are_passed_as_they_came() -> None:
    usage = {"prompt_tokens": 2**64 - 1, "completion_tokens": 2**64 - 1}
    edited = Splice(Transcript(), "", 5).edit(b"data: " + json.dumps({"choices": [], "usage": usage}).encode())
    assert json.loads(edited[6:])["usage"] == usage
