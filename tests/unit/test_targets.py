"""What headers say of time and order, and how large a prompt is thought to be."""

from __future__ import annotations

import pytest

from serai.ingress.openai_format import ApiError, parsed_object, read_fields
from serai.ingress.targets import Targets, prompt_tokens, read_targets

MODEL = '{"model":"m",'


def test_without_headers_the_setting_and_the_callers_class_hold() -> None:
    assert read_targets({"accept": "*/*"}, 600, "normal") == Targets(600, 1)


def test_times_are_read_and_the_timeout_never_exceeds_the_setting() -> None:
    headers = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5", "x-request-timeout": "30"}
    assert read_targets(headers, 600, "normal") == Targets(30, 1, 0.25, 0.0125)
    assert read_targets({"x-request-timeout": "1e9"}, 600, "normal").timeout_s == 600


@pytest.mark.parametrize(
    ("asked", "highest", "priority"),
    [
        ("batch", "normal", 2),
        ("normal", "normal", 1),
        ("interactive", "normal", 1),
        (" Interactive ", "interactive", 0),
    ],
)
def test_a_caller_may_lower_its_class_and_never_raise_it(asked: str, highest: str, priority: int) -> None:
    assert read_targets({"x-priority": asked}, 600, highest).priority == priority


@pytest.mark.parametrize(
    ("header", "value"),
    [
        *[("x-slo-ttft-ms", value) for value in ("", "0", "-1", "nan", "inf", "1_000", "1e12", "soon", "٣", "1,5")],
        *[("x-slo-tpot-ms", "0"), ("x-request-timeout", "0"), ("x-request-timeout", "inf"), ("x-priority", "0")],
    ],
)
def test_what_cannot_be_understood_is_refused_and_named(header: str, value: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_targets({header: value}, 600, "normal")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, header, "invalid_header")
    assert header in refused.value.message


def test_pictures_count_by_their_number_and_not_by_their_bytes() -> None:
    assert prompt_tokens(b"x" * 3000) == 1000
    picture = b'{"url":"data:image/png;base64,' + b"A" * 3_000_000 + b'"}'
    assert 2000 < prompt_tokens(picture + picture) < 4000
    assert prompt_tokens(b"x" * 3_000_000) == 1_000_000


@pytest.mark.parametrize(
    ("body", "tokens", "outputs"),
    [
        ("{}", 0, 1),
        ('{"max_tokens":5,"max_completion_tokens":7,"n":3}', 7, 3),
        ('{"max_output_tokens":9,"best_of":4,"n":2}', 9, 4),
        ('{"prompt":["a","b"],"n":2}', 0, 4),
        ('{"prompt":[1,2,3]}', 0, 1),
        ('{"prompt":[[1,2],[3]]}', 0, 2),
        ('{"max_tokens":true,"n":"3","best_of":-1}', 0, 1),
        ('{"max_tokens":99999999999999}', 1 << 31, 1),
    ],
)
def test_how_much_a_request_asks_for(body: str, tokens: int, outputs: int) -> None:
    asked = read_fields(parsed_object(body.replace("{", MODEL, 1).replace(",}", "}").encode()))
    assert (asked.output_tokens_max, asked.outputs) == (tokens, outputs)


@pytest.mark.parametrize(("said", "best_effort"), [("yes", True), ("no", False), (" No ", False)])
def test_a_caller_says_whether_late_is_better_than_refused(said: str, best_effort: bool) -> None:
    assert read_targets({"x-slo-best-effort": said}, 600, "normal").best_effort is best_effort


@pytest.mark.parametrize("said", ["", "maybe", "false"])
def test_what_is_neither_yes_nor_no_is_refused(said: str) -> None:
    with pytest.raises(ApiError, match="x-slo-best-effort"):
        read_targets({"x-slo-best-effort": said}, 600, "normal")
