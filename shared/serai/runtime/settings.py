"""Settings: one frozen dataclass per service, filled from flags, then environment variables, then defaults.

    @dataclass(frozen=True, slots=True)
    class Settings:
        port: int = setting(8000, "TCP port to listen on")

gives `--port` and `SERAI_PORT`; the help names both. A class checks relations in `__post_init__` by raising
ValueError; the user sees one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")


def setting(default: Any, help: str, *, flag: str | None = None, env: str | None = None) -> Any:
    """A dataclass field that is also a flag and an environment variable. `default=MISSING` makes it required."""
    metadata = {"help": help, "flag": flag, "env": env}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def add_settings(parser: argparse.ArgumentParser, kind: type) -> None:
    """Adds the flags of `kind`'s fields to `parser`; values stay text until `read_settings`."""
    hints = get_type_hints(kind)
    for item in _fields(kind):
        default = "required" if item.default is MISSING else f"default: {_shown(item.default)}"
        options: dict[str, Any] = {"help": f"{item.metadata['help']} ({_env(item)}; {default})", "default": None}
        if hints[item.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif hints[item.name] == tuple[str, ...]:
            options |= {"action": "append", "metavar": _flag(item).removeprefix("--").upper()}
        else:
            options["metavar"] = item.name.rsplit("_", 1)[-1].upper()
        parser.add_argument(_flag(item), dest=item.name, **options)


def read_settings(kind: type[T], arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> T:
    """The settings of `kind`. Exits with status 2 and one line when a value is missing, malformed or out of range."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for item in _fields(kind):
        text = getattr(arguments, item.name, None)
        source = _flag(item)
        if text is None:
            source = _env(item)
            text = environment.get(source) or None
        if text is None:
            if item.default is MISSING:
                refuse(f"{_flag(item)} (or {_env(item)}) is required: {item.metadata['help']}")
            continue
        values[item.name] = _convert(text, hints[item.name], source)
    try:
        return kind(**values)
    except ValueError as error:
        refuse(str(error))


def refuse(message: str) -> NoReturn:
    """Ends the process with one line for the person who started it."""
    sys.stderr.write(f"serai: {message}\n")
    raise SystemExit(2)


def _convert(text: Any, kind: Any, source: str) -> Any:
    try:
        if kind in (Path, Path | None):
            return Path(text).expanduser()
        if kind == tuple[str, ...]:
            # A variable holds all of them, a flag is given once for each.
            return (
                tuple(word.strip() for word in text.split(",") if word.strip())
                if isinstance(text, str)
                else tuple(text)
            )
        value = msgspec.convert(text, kind, strict=False)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
        return value
    except (msgspec.ValidationError, ValueError, TypeError):
        wanted = getattr(kind, "__name__", str(kind))
        refuse(f"{source}: {text!r} is not a valid {wanted}")


def _fields(kind: type) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(kind) if "help" in item.metadata]


def _flag(item: dataclasses.Field[Any]) -> str:
    return item.metadata["flag"] or "--" + item.name.replace("_", "-")


def _env(item: dataclasses.Field[Any]) -> str:
    return item.metadata["env"] or "SERAI_" + item.name.upper()


def _shown(value: Any) -> str:
    return "none" if value in (None, "", ()) else str(value)
