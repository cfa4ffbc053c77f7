"""Engines are asked for usage with the smallest edit, and what only they were asked for does not reach the client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress.endpoints import BY_PATH
from serai.ingress.openai_format import ApiError, parsed_object
from serai.ingress.stream_usage import is_hidden, with_usage, without_usage_event

CHAT, COMPLETIONS = BY_PATH["/v1/chat/completions"], BY_PATH["/v1/completions"]
OTHERS = [BY_PATH[f"/v1/{name}"] for name in ("embeddings", "messages", "responses", "audio/transcriptions")]
TOKEN = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ("", True),
        (',"stream_options":null', True),
        (',"stream_options":{}', True),
        (',"stream_options":{"include_usage":false}', True),
        (',"stream_options":{"include_usage":true}', False),
        (',"stream_options":"odd"', False),
        (',"tools":[{"stream_options":{"include_usage":true}}]', True),
    ],
)
def test_usage_is_asked_for_where_the_client_has_not(endpoint: Any, options: str, hidden: bool) -> None:
    body = ('{"model":"m","stream":true' + options + "}").encode()
    assert is_hidden(endpoint, True, body) is hidden
    assert not is_hidden(endpoint, False, body)
    if hidden:
        asked = json.loads(with_usage(body))
        assert asked.pop("stream_options")["include_usage"] is True
        told = json.loads(body)
        told.pop("stream_options", None)
        assert asked == told


@pytest.mark.parametrize("endpoint", OTHERS, ids=lambda endpoint: str(endpoint.path))
def test_other_endpoints_are_asked_nothing(endpoint: Any) -> None:
    assert not is_hidden(endpoint, True, b'{"model":"m"}')


def test_every_other_byte_of_the_body_stays() -> None:
    body = b' { "seed": 12345678901234567890123, "model":"m" }'
    assert (
        with_usage(body) == b' {"stream_options":{"include_usage":true}, "seed": 12345678901234567890123, "model":"m" }'
    )
    body = b'{"stream_options" : {"continuous_usage_stats":true},"n":1}'
    assert with_usage(body) == b'{"stream_options":{"include_usage":true,"continuous_usage_stats":true},"n":1}'


objects = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["stream_options", "include_usage", "a", "{"]), inner, max_size=3)
    ),
    max_leaves=8,
)
bodies = st.dictionaries(st.text(max_size=5), objects, max_size=4).map(lambda fields: fields | {"model": "m"})
options = st.none() | st.dictionaries(st.sampled_from(["include_usage", "x"]), st.none() | st.just(False), max_size=2)


@given(bodies, options, st.booleans(), st.sampled_from([None, 2]))
def test_whatever_the_body_holds_only_the_one_option_changes(
    fields: dict[str, Any], said: dict[str, Any] | None, says: bool, indent: int | None
) -> None:
    fields.pop("stream_options", None)
    body = json.dumps(fields | ({"stream_options": said} if says else {}), indent=indent).encode()
    assert is_hidden(CHAT, True, body)
    asked = json.loads(with_usage(body))
    assert asked.pop("stream_options") == ((said or {}) if says else {}) | {"include_usage": True}
    assert asked == fields


@pytest.mark.parametrize(
    "usage", [USAGE, USAGE.replace(b"\n", b"\r\n"), USAGE.replace(b":", b": ").replace(b",", b", ")]
)
def test_an_event_with_nothing_but_usage_does_not_pass(usage: bytes) -> None:
    assert without_usage_event(usage) == b""
    assert without_usage_event(TOKEN + usage + DONE) == TOKEN + DONE
    assert without_usage_event(usage + TOKEN) in (TOKEN, usage + TOKEN), "it is never followed by tokens"


@pytest.mark.parametrize(
    "event",
    [
        TOKEN,
        DONE,
        b'data: {"choices":[{"delta":{"content":"\\"usage\\":{"}}]}\n\n',
        b'data: {"choices":[{"delta":{}}],"usage":{"completion_tokens":1}}\n\n',
        b'data: {"choices":[],"usage":null}\n\n',
        b': a comment about "usage":{\n\n',
        b'data: {"error":{"usage":{}}}\n\n',
        b'data: {"choices":[],"usage":{broken\n\n',
    ],
)
def test_everything_else_passes_as_it_came(event: bytes) -> None:
    assert without_usage_event(event) == event
    assert without_usage_event(event + DONE) == event + DONE


def test_a_body_that_is_too_deep_for_an_edit_is_its_clients_fault() -> None:
    body = b'{"model":"m","stream_options":null,"x":' + b"[" * 1010 + b"]" * 1010 + b"}"
    parsed_object(body)
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        with_usage(body)
    assert caught.value.status == 400
