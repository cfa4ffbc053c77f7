"""YAML in which a key written twice is an error, not the last one's victory."""

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
