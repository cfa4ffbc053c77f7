"""What holds for which models, by name or pattern: `llama-70b`, `llama-*`, `*`. Pure.

`*` is any text, `?` any character, `[abc]` one of these; upper and lower case differ, as they do in names of models. A
name that is written out goes before patterns; of patterns the first that fits counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

T = TypeVar("T")

REMEMBERED_MAX = 1024
"""Names of models come from clients, so what was found for them is not kept without end."""


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether `name` is one of these."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class ByPattern(Generic[T]):
    """One value per model; looking it up again is one look into a table."""

    def __init__(self, values: Mapping[str, T], default: T) -> None:
        self._values = dict(values)
        self._default = default
        self._found: dict[str, T] = {}

    def of(self, name: str) -> T:
        """What holds for the model `name`."""
        try:
            return self._found[name]
        except KeyError:
            pass
        if len(self._found) >= REMEMBERED_MAX:
            self._found.clear()
        found = self._found[name] = self._look_up(name)
        return found

    def _look_up(self, name: str) -> T:
        if name in self._values:
            return self._values[name]
        for pattern, value in self._values.items():
            if fnmatchcase(name, pattern):
                return value
        return self._default
