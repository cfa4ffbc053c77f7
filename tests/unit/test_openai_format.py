"""Bodies: the smallest possible edit, and errors that name what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from serai.contracts.inference import FailureCode, InferenceFailure
from serai.ingress.openai_format import (
    ApiError,
    RequestBody,
    failure_error,
    parsed_object,
    read_fields,
    unknown_model,
    usage_of,
    with_model,
)


def read(body: bytes) -> RequestBody:
    return read_fields(parsed_object(body))


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8) | st.sampled_from(
    ["qwen2.5:7b", "org/model", 'quo"te', "back\\slash", "駱駝", "model", r"\g<1>", r"\1"]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | names
    | st.sampled_from(['"model": "x"', '{"model":"x"}', '\\"model": "x"']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names, inner, max_size=3)
        | st.fixed_dictionaries({"model": inner})
    ),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A request body as some JSON writer would write it, and its model."""
    model = draw(names)
    before, after = draw(st.dictionaries(names, values, max_size=3)), draw(st.dictionaries(names, values, max_size=3))
    content = before | {"model": model} | {key: value for key, value in after.items() if key != "model"}
    content["messages"] = [{"role": "user", "content": model, "model": draw(st.just(model) | values)}]
    written = json.dumps(
        content,
        ensure_ascii=draw(st.booleans()),
        separators=draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n ")])),
    )
    return model, written.encode()


@given(bodies(), names)
@example(("x", b'{"model":"x","tools":[{"model":"x"}]}'), "y")
@example(("x", rb'{"messages":[{"content":"\"model\": \"x\""}],"model":"x"}'), "y")
@example(("x", b'{"model":"z","model":"x"}'), "y")
@example(("x", rb'{"mod\u0065l":"x","messages":[{"model":"x"}]}'), "y")
@example(("x", rb'{"model":"\u0078","tools":[{"model":"x"}]}'), "y")
@example(("x", rb'{"a\"model":"x","mod\u0065l":"x"}'), "y")
@example(("x", b'{"seed":123456789012345678901234,"model":"x","tools":[{"model":"x"}]}'), "y")
def test_the_only_change_in_the_parsed_body_is_its_model(body: tuple[str, bytes], engine_model: str) -> None:
    model, written = body
    parsed: dict[str, Any] = json.loads(written)
    assert json.loads(with_model(written, model, engine_model)) == parsed | {"model": engine_model}


@given(names, names, st.sampled_from(["", " ", "\n  "]))
def test_every_other_byte_stays_when_the_name_stands_in_one_place(model: str, engine_model: str, gap: str) -> None:
    assume(model != engine_model)
    before = b'{ "temperature" : 1.0e0, "seed": 123456789012345678901234567890, '
    after = rb' , "stop":["\u0041\/"] ,"stream":true }' + b"\n"

    def written(name: str) -> bytes:
        quoted = json.dumps(name, ensure_ascii=False)
        return before + f'"model"{gap}:{gap}{quoted}'.encode() + after

    assert with_model(written(model), model, engine_model) == written(engine_model)


def test_a_body_whose_model_has_the_engines_name_is_the_same_object() -> None:
    body = b'{"model":"x"}'
    assert with_model(body, "x", "x") is body


def test_a_name_written_with_escapes_is_found() -> None:
    assert json.loads(with_model(rb'{"model":"\u0078","n":1}', "x", "y")) == {"model": "y", "n": 1}
    assert json.loads(with_model(rb'{"model":"org\/m"}', "org/m", "y")) == {"model": "y"}
    assert json.loads(with_model(rb'{"mod\u0065l":"x"}', "x", "y")) == {"model": "y"}


@pytest.mark.parametrize(
    ("body", "code", "param", "said"),
    [
        (b"", "invalid_json", None, "not valid JSON"),
        (b"{", "invalid_json", None, "not valid JSON"),
        (b'{"model": "\xff"}', "invalid_json", None, "not valid JSON"),
        (b'{"model": NaN}', "invalid_json", None, "not valid JSON"),
        (b"[" * 100_000, "invalid_json", None, "not valid JSON"),
        (b"[]", "invalid_json", None, "JSON object"),
        (b'"model"', "invalid_json", None, "JSON object"),
        (b"{}", "invalid_model", "model", "`model` is missing"),
        (b'{"model": null}', "invalid_model", "model", "`model` is missing"),
        (b'{"model": ""}', "invalid_model", "model", "`model` must be"),
        (b'{"model": 7}', "invalid_model", "model", "`model` must be"),
        (b'{"model": ["m"]}', "invalid_model", "model", "`model` must be"),
        (b'{"model": "m", "stream": "yes"}', "invalid_type", "stream", "`stream` must be"),
        (b'{"model": "m", "stream": 1}', "invalid_type", "stream", "`stream` must be"),
        (b'{"model": "m", "stream": 0}', "invalid_type", "stream", "`stream` must be"),
    ],
)
def test_an_error_in_the_body_names_the_field(body: bytes, code: str, param: str | None, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        read(body)
    error = caught.value
    assert (error.status, error.code, error.param, error.kind) == (400, code, param, "invalid_request_error")
    assert json.loads(error.body())["error"] == {
        "message": error.message,
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }


@given(st.binary(max_size=30) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_body_or_a_client_error(body: bytes) -> None:
    try:
        asked = read(body)
    except ApiError as error:
        status = error.status
    else:
        status = 400
        assert asked.model == json.loads(body)["model"]
    assert status == 400


def test_what_the_ingress_needs_of_a_body_is_read() -> None:
    assert read(b'{"model":"m"}') == RequestBody("m", stream=False)
    assert read(b'{"model":"m","stream":null}') == RequestBody("m", stream=False)
    assert read(b'{"model":"m","stream":true,"x":1}') == RequestBody("m", stream=True)


def test_an_error_event_is_one_whole_event() -> None:
    event = ApiError(502, "line\none", code="x").event()
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2


@pytest.mark.parametrize("code", FailureCode)
def test_every_failure_has_an_honest_status_and_its_code(code: FailureCode) -> None:
    error = failure_error(InferenceFailure(code, "the engine broke"))
    assert error.status == 413 if code is FailureCode.BODY_TOO_LARGE else error.status in (502, 503, 504)
    assert (error.code, error.message) == (code.value, "The engine broke.")
    assert (error.retry_after_s is not None) == (error.status == 503)


def test_the_agents_word_on_when_to_retry_reaches_the_client() -> None:
    assert failure_error(InferenceFailure(FailureCode.BUSY, "full", True, 7.5)).retry_after_s == 7.5


def test_an_unknown_model_is_answered_with_those_that_exist() -> None:
    error = unknown_model("x" * 1000, ["a", "b"])
    assert (error.status, error.param) == (404, "model")
    assert "Available: a, b." in error.message
    assert len(error.message) < 300
    assert "No model is being served" in unknown_model("x", []).message


def test_usage_is_found_however_much_stands_behind_it() -> None:
    """`prompt_logprobs` and token ids come behind it, and a client may ask for as many of them as it likes."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    for behind in (0, 10, 5000, 2_000_000):
        answer = {"choices": [{"text": '"usage":{"prompt_tokens":9}'}], "usage": usage, "prompt_logprobs": "x" * behind}
        assert usage_of(json.dumps(answer).encode()) == usage
    assert usage_of(b'{"usage":null,"text":"' + b"x" * 5000 + b'"}') is None
