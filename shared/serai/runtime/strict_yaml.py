"""YAML in which a key written twice is an error, not the last one's victory, and `8:00:00` is text; and where in a text
each part stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml


class NotYaml(Exception):
    """The text is no YAML, or has a key twice; one line that says where."""


# The one in C where it is there: ten times faster.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_SafeLoader):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for part, _ in node.value:
            key = self.construct_object(part, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is written twice", part.start_mark)
            keys.append(key)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


# YAML 1.1 takes 8:00:00 for 28800, a number to the base of sixty. 1.2 does not, and nobody means it.
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_StrictLoader.yaml_implicit_resolvers = {
    first: [
        (tag, re.compile(f"(?!.*:)(?:{pattern.pattern})", pattern.flags) if tag in _NUMBERS else pattern)
        for tag, pattern in resolvers
    ]
    for first, resolvers in _SafeLoader.yaml_implicit_resolvers.items()
}


def load(text: str) -> Any:
    """What `text` says. Raises NotYaml."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        raise NotYaml(" ".join((f"line {mark.line + 1}: {problem}" if mark else str(error)).split())) from error
    except (RecursionError, ValueError) as error:  # Nested too deeply; a date like 2026-99-99.
        raise NotYaml(str(error)) from error


def placed(file: str, place: str, lines_of: Mapping[str, int]) -> str:
    """File, line and field, for messages; the line is that of `place` by `lines`, or of the part that it is missing
    from."""
    known = place
    while known and known not in lines_of:
        known = known[: max(known.rfind("."), known.rfind("["), 0)]
    return ": ".join(filter(None, (f"{file}:{lines_of[known]}" if known else file, place)))


def lines(text: str) -> dict[str, int]:
    """The line, from 1, of each part of a text that `load` takes; parts are named as `Fields` does: `a.b[0].c`."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def walk(node: yaml.Node | None, place: str) -> None:
        if id(node) in seen:
            return  # A part that is written once and meant in several places (`*name`), itself perhaps.
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{place}.{key.value}" if place else str(key.value)
                found[inner] = key.start_mark.line + 1
                walk(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                inner = f"{place}[{number}]"
                found[inner] = value.start_mark.line + 1
                walk(value, inner)

    walk(yaml.compose(text, Loader=_SafeLoader), "")
    return found
