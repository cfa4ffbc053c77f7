"""YAML in which a key written twice is an error, not the last one's victory; and where in its text each part stands."""

from __future__ import annotations

from typing import Any

import yaml


class NotYaml(Exception):
    """The text is no YAML, or has a key twice; one line that says where."""


class _StrictLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is written twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """What `text` says. Raises NotYaml."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise NotYaml(" ".join(str(error).split())) from error
    except (RecursionError, ValueError) as error:  # Nested too deeply; a date like 2026-99-99.
        raise NotYaml(str(error)) from error


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

    walk(yaml.compose(text, Loader=yaml.SafeLoader), "")
    return found
