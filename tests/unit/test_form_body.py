"""Forms: their fields are found wherever they stand, and only the model's value is ever changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress.endpoints import BY_PATH
from serai.ingress.form_body import FIELDS_MAX, TEXT_BYTES_MAX, Field, fields
from serai.ingress.openai_format import ApiError, RequestBody
from serai.ingress.request_body import body_with_model, read_body

AUDIO = BY_PATH["/v1/audio/transcriptions"]
TYPE = "multipart/form-data; boundary=b"
Pair = tuple[str, bytes]


def form(*pairs: Pair, boundary: str = "b", file: str = "") -> bytes:
    """As a browser would write it."""
    written = b""
    for name, value in pairs:
        of_file = f'; filename="{file}"\r\nContent-Type: audio/wav' if name == "file" else ""
        written += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{of_file}\r\n\r\n'.encode()
        written += value + b"\r\n"
    return written + f"--{boundary}--\r\n".encode()


def read(body: bytes, content_type: str = TYPE) -> RequestBody:
    return read_body(AUDIO, content_type, body)


names = st.sampled_from(["file", "language", "prompt", "x"])
contents = st.binary(max_size=40).filter(lambda content: b"\r\n--b" not in content and not content.startswith(b"--b"))
others = st.lists(st.tuples(names, contents), max_size=4)


@given(others, others, st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20))
def test_the_model_is_found_and_nothing_else_is_changed(before: list[Pair], behind: list[Pair], model: str) -> None:
    def written(name: str) -> bytes:
        return form(*before, ("model", name.encode()), *behind, file="a; name=model.wav")

    body = written(model)
    assert read(body) == RequestBody(model, stream=False)
    assert body_with_model(AUDIO, TYPE, body, model, "other") == written("other")
    assert body_with_model(AUDIO, TYPE, body, model, model) is body
    pairs = [(field.name, body[field.start : field.end]) for field in fields(body, b"b")]
    assert pairs == [*before, ("model", model.encode()), *behind]


@given(others, st.data())
def test_a_form_that_is_cut_anywhere_is_refused(pairs: list[Pair], data: st.DataObject) -> None:
    body = form(("model", b"m"), *pairs)
    end = body.rindex(b"--")
    cut = body[: data.draw(st.integers(0, end - 1))]
    with pytest.raises(ApiError) as caught:
        read(cut)
    assert (caught.value.status, caught.value.code) == (400, "invalid_form")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_form_or_a_client_error(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(b"--b\r\n" + body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "content_type",
    ['multipart/form-data; boundary="b"', "Multipart/Form-Data;charset=utf-8; boundary=b"],
)
def test_boundaries_as_clients_write_them(content_type: str) -> None:
    assert read(b"preamble\r\n" + form(("model", b"m"), ("stream", b"True")), content_type).stream


@pytest.mark.parametrize(
    ("body", "content_type", "status", "said"),
    [
        (form(("model", b"m")), "application/json", 415, "multipart/form-data"),
        (form(("model", b"m")), "", 415, "multipart/form-data"),
        (form(("model", b"m")), "multipart/form-data", 415, "boundary"),
        (form(("model", b"m")), "multipart/form-data; boundary=c", 400, "boundary does not occur"),
        (form(("file", b"abc")), TYPE, 400, "`model` is missing"),
        (form(("model", b"")), TYPE, 400, "`model` must not be empty"),
        (form(("model", b"\xff")), TYPE, 400, "`model` must be UTF-8"),
        (form(("model", b"m" * (TEXT_BYTES_MAX + 1))), TYPE, 400, "`model` must be UTF-8 text of at most"),
        (form(("model", b"m"), ("model", b"n")), TYPE, 400, "`model` is given twice"),
        (form(("model", b"m"), ("stream", b"perhaps")), TYPE, 400, "`stream` must be"),
        (form(*[("x", b"")] * (FIELDS_MAX + 1)), TYPE, 400, "more than 128 fields"),
        (b"--b\r\n" + b"X: y\r\n" * 5000, TYPE, 400, "head"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, content_type: str, status: int, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        read(body, content_type)
    assert caught.value.status == status


def test_fields_without_a_name_are_stepped_over() -> None:
    body = b"--b\r\n\r\nnameless\r\n--b\r\nContent-Disposition: form-data\r\n\r\n\r\n--b--"
    assert list(fields(body, b"b")) == [Field("", 7, 15), Field("", 56, 56)]
