"""Requests that are read field by field, because they are translated: their shape, and errors that say where it is not
kept. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from serai.ingress.openai_format import ApiError

T = TypeVar("T")

UNSUPPORTED = "unsupported"
"""Code of what is right in its API, but cannot be said to an engine that speaks only chat completions."""
_UNKNOWN_TAG = re.compile(r"Invalid value '(.{0,100})'")


def shaped(fields: Mapping[str, Any], shape: type[T]) -> T:
    """`fields` as `shape`, whose unions are told apart by `type`. Raises ApiError (400) naming the place."""
    try:
        return msgspec.convert(fields, shape)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `")
        path = place.rstrip("`").removeprefix("$").removeprefix(".") or None
        raise _misshapen(problem, path) from None


def _misshapen(problem: str, path: str | None) -> ApiError:
    if path is not None and path.endswith("type") and (tag := _UNKNOWN_TAG.match(problem)):
        return unsupported(path, f"{tag[1]!r} cannot be passed on to this model's engine")
    where = f"`{path}`: " if path else ""
    return ApiError(400, f"{where}{problem}.", param=path, code="invalid_type")


def unsupported(path: str, why: str) -> ApiError:
    """400: the field is right in its API, but not here."""
    return ApiError(400, f"`{path}`: {why}.", param=path, code=UNSUPPORTED)


def refuse(fields: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raises ApiError for the first field of `refused` that asks for something; its value there says why not."""
    for name, why in refused.items():
        if fields.get(name) not in (None, False, [], {}):
            raise unsupported(name, why)


def others(fields: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields that are not known here: they pass as they came, for engines take many that no API lists."""
    return {name: value for name, value in fields.items() if name not in known}
