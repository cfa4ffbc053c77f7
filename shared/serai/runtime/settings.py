"""Settings: one frozen dataclass per service, filled from flags, then environment variables, then what a file says,
then defaults.

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
import stat
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
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
        default = _default(item) if item.default is MISSING else f"default: {_default(item)}"
        text = f"{item.metadata['help']} ({_env(item)}; {default})".replace("%", "%%")
        options: dict[str, Any] = {"help": text, "default": None}
        if hints[item.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif hints[item.name] == tuple[str, ...]:
            options |= {"action": "append", "metavar": _flag(item).removeprefix("--").upper()}
        else:
            options["metavar"] = _metavar(item.name, hints[item.name])
        parser.add_argument(_flag(item), dest=item.name, **options)


@dataclass(frozen=True, slots=True)
class Given:
    """A setting's value as somebody gave it."""

    value: Any
    source: str
    """The flag, the variable, or the file, line and field."""
    in_file: bool = False
    """From a file: it has its type already, and a relation it breaks is told with that place."""


class BadSettings(ValueError):
    """A value is missing, malformed or out of range; one line that says where it was given."""


def read_settings(kind: type[T], arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> T:
    """The settings of `kind`. Exits with status 2 and one line when a value is missing, malformed or out of range."""
    try:
        return settings_of(kind, given_settings(kind, arguments, environment))
    except BadSettings as error:
        refuse(str(error))


def given_settings(
    kind: type,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    written: Mapping[str, Given] | None = None,
) -> dict[str, Given]:
    """What was given for the fields of `kind`; `written` is what a file says."""
    found: dict[str, Given] = {}
    for item in _fields(kind):
        name, variable = item.name, _env(item)
        if (text := getattr(arguments, name, None)) is not None:
            found[name] = Given(text, _flag(item))
        elif text := environment.get(variable):
            found[name] = Given(text, variable)
        elif written and name in written:
            found[name] = written[name]
    return found


def settings_of(kind: type[T], given: Mapping[str, Given]) -> T:
    """Raises BadSettings."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for item in _fields(kind):
        if one := given.get(item.name):
            values[item.name] = _convert(one, hints[item.name])
        elif item.default is MISSING:
            raise BadSettings(f"{_flag(item)} (or {_env(item)}) is required: {item.metadata['help']}")
    try:
        return kind(**values)
    except ValueError as error:
        text = str(error)
        for item in _fields(kind):
            one, flag = given.get(item.name), _flag(item)
            if one is not None and one.in_file and text.startswith((f"{flag} ", f"{flag}:")):
                text = one.source + text.removeprefix(flag)
        raise BadSettings(text) from error


def setting_names(kind: type) -> list[str]:
    """Of the fields that can be given."""
    return [item.name for item in _fields(kind)]


@dataclass(frozen=True, slots=True)
class SettingFacts:
    """How one setting is given, in words for people."""

    flag: str
    variable: str
    default: str
    help: str


def setting_facts(kind: type) -> list[SettingFacts]:
    """Of the fields that can be given, in their order."""
    return [SettingFacts(_flag(item), _env(item), _default(item), item.metadata["help"]) for item in _fields(kind)]


def file_fault(path: Path) -> str:
    """Why `path` is no file that can be read; empty when it is one, as far as looking at it tells."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"no such file: {path}"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "" if stat.S_ISREG(mode) else f"{path} is no file"


def refuse(message: str) -> NoReturn:
    """Ends the process with one line for the person who started it."""
    sys.stderr.write(f"serai: {message}\n")
    raise SystemExit(2)


def _convert(one: Given, kind: Any) -> Any:
    value = one.value
    try:
        if kind in (Path, Path | None):
            return Path(msgspec.convert(str(value) if isinstance(value, Path) else value, str)).expanduser()
        if kind == tuple[str, ...]:
            # A variable holds all of them, a flag is given once for each.
            if isinstance(value, str):
                return tuple(word.strip() for word in value.split(",") if word.strip())
            return msgspec.convert(value, kind)
        converted = msgspec.convert(value, kind, strict=one.in_file)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError
        return converted
    except (msgspec.ValidationError, ValueError, TypeError):
        raise BadSettings(f"{one.source}: {value!r} {_fault(kind)}") from None


_FAULTS = {
    int: "is not a whole number",
    float: "is not a number",
    bool: "is neither true nor false",
    str: "is not text",
    Path: "is not a path",
}


def _fault(kind: Any) -> str:
    """What is wrong with a value that cannot be converted, in words for people."""
    return next((text for plain, text in _FAULTS.items() if kind in (plain, plain | None)), "is not a list of texts")


def _metavar(name: str, kind: Any) -> str:
    """What stands for the value in the help; of numbers it says the unit."""
    if name.endswith("_s"):
        return "SECONDS"
    last = "BYTES" if "bytes" in name else name.rpartition("_")[2].upper()
    if kind in (int, float):
        return last if last in ("BYTES", "DAYS", "GIB", "PORT") else "N"
    if kind in (Path, Path | None):
        return "FILE" if last in ("FILE", "CONFIG", "TEMPLATES") else "FOLDER"
    return "true|false" if kind == bool | None else last


def _fields(kind: type) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(kind) if "help" in item.metadata]


def _flag(item: dataclasses.Field[Any]) -> str:
    return item.metadata["flag"] or "--" + item.name.replace("_", "-")


def _env(item: dataclasses.Field[Any]) -> str:
    return item.metadata["env"] or "SERAI_" + item.name.upper()


def _default(item: dataclasses.Field[Any]) -> str:
    value = item.default
    if value is MISSING:
        return "required"
    if value in (None, "", ()):
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
