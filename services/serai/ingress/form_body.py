"""Bodies of `multipart/form-data` (audio): where their fields stand. Pure. Files are stepped over, never copied."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from typing import NamedTuple

from serai.ingress.openai_format import ApiError, RequestBody

FIELDS_MAX = 128
FIELD_HEAD_BYTES_MAX = 8 * 1024
TEXT_BYTES_MAX = 1024
"""Of the fields that are read here; those that are only passed on may be as long as the body."""
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")


class Field(NamedTuple):
    """One field of a form: where its value begins and ends in the body."""

    name: str
    start: int
    end: int


def read_form(body: bytes, content_type: str) -> RequestBody:
    """Raises ApiError: 415 when it is no form, 400 when it is broken, or naming the field that is wrong."""
    found = _fields_read_here(body, content_type)
    model = _text(body, found.get("model"))
    if not model:
        problem = "is missing" if "model" not in found else "must not be empty"
        raise ApiError(400, f"`model` {problem}.", param="model", code="invalid_model")
    stream = _text(body, found.get("stream")).strip().lower()
    if stream not in _TRUE + _FALSE:
        raise ApiError(400, "`stream` must be true or false.", param="stream", code="invalid_type")
    return RequestBody(model, stream in _TRUE)


def form_with_model(body: bytes, content_type: str, engine_model: str) -> bytes:
    """`body` with another `model`; every other byte as it was."""
    field = _fields_read_here(body, content_type)["model"]
    return b"".join((body[: field.start], engine_model.encode(), body[field.end :]))


def _fields_read_here(body: bytes, content_type: str) -> dict[str, Field]:
    found: dict[str, Field] = {}
    for field in fields(body, _boundary(content_type)):
        if field.name not in ("model", "stream"):
            continue
        if field.name in found:
            raise ApiError(400, f"`{field.name}` is given twice.", param=field.name, code="invalid_form")
        found[field.name] = field
    return found


def fields(body: bytes, boundary: bytes) -> Iterator[Field]:
    """All fields, in order. Raises ApiError (400) where the form is broken."""
    delimiter = b"\r\n--" + boundary
    at = 0 if body.startswith(delimiter[2:]) else body.find(delimiter) + 2
    if at == 1:
        raise _broken("its boundary does not occur in it")
    at += len(delimiter) - 2
    for _ in range(FIELDS_MAX):
        if body.startswith(b"--", at):
            return
        head_end = body.find(b"\r\n\r\n", at, at + FIELD_HEAD_BYTES_MAX)
        if head_end < 0:
            raise _broken(f"a field has no head, or one of more than {FIELD_HEAD_BYTES_MAX} bytes")
        start = head_end + 4
        end = body.find(delimiter, start)
        if end < 0:
            raise _broken("it is cut short")
        yield Field(_name(body[at:head_end]), start, end)
        at = end + len(delimiter)
    raise _broken(f"it has more than {FIELDS_MAX} fields")


def _boundary(content_type: str) -> bytes:
    parsed = Message()
    parsed["content-type"] = content_type
    boundary = parsed.get_param("boundary")
    if parsed.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        text = "Send this as multipart/form-data, with its boundary in the Content-Type header."
        raise ApiError(415, text, code="unsupported_media_type")
    return boundary.encode("latin-1", "replace")


def _name(head: bytes) -> str:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            parsed = Message()
            parsed["content-disposition"] = value.decode("utf-8", "replace").strip()
            name = parsed.get_param("name", header="content-disposition")
            return name if isinstance(name, str) else ""
    return ""


def _text(body: bytes, field: Field | None) -> str:
    if field is None:
        return ""
    value = body[field.start : min(field.end, field.start + TEXT_BYTES_MAX + 1)]
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = ""
    if len(value) > TEXT_BYTES_MAX or (not text and value):
        raise ApiError(
            400,
            f"`{field.name}` must be UTF-8 text of at most {TEXT_BYTES_MAX} bytes.",
            param=field.name,
            code="invalid_type",
        )
    return text


def _broken(problem: str) -> ApiError:
    return ApiError(400, f"The form in the request body is broken: {problem}.", code="invalid_form")
