"""Files that people write, read field by field, strictly: what is not known is refused, with the nearest known name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, TypeVar

_T = TypeVar("_T")


class BadInput(Exception):
    """A file, or a part of one, that cannot be used: where, what is wrong and what to do, in a line. `place` names the
    file and line, or the field."""

    def __init__(self, place: str, problem: str, remedy: str) -> None:
        super().__init__(f"{place}: {problem}; {remedy}")
        self.place, self.problem, self.remedy = place, problem, remedy


class Fields:
    """A mapping that is read field by field; `done` refuses what nobody asked for."""

    def __init__(self, found: object, place: str) -> None:
        if not isinstance(found, Mapping):
            raise BadInput(place, f"is {found!r}", "write a mapping of names to values")
        self._found: Mapping[object, Any] = found
        self.place = place
        self._asked: list[str] = []

    def at(self, name: str) -> str:
        """Where a field is, for messages."""
        return f"{self.place}.{name}" if self.place else name

    def has(self, name: str) -> bool:
        """Whether the field is there; it counts as known."""
        self._asked.append(name)
        return self._found.get(name) is not None

    def any(self, name: str) -> Any:
        """The field, which must be there."""
        if not self.has(name):
            raise BadInput(self.at(name), "is missing", "write it" + self._nearest_to(name))
        return self._found[name]

    def number(self, name: str, default: float | None = None, *, least: float = -math.inf) -> float:
        """A finite number, at least `least`."""
        if default is not None and not self.has(name):
            return default
        value = self.any(name)
        # Not a number is the one that does not equal itself.
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) > 1e15:
            raise BadInput(self.at(name), f"is {value!r}", "write a number")
        if value < least:
            raise BadInput(self.at(name), f"is {value:g}", f"write {least:g} or more")
        return float(value)

    def whole(self, name: str, default: int | None = None, *, least: float = -math.inf) -> int:
        """A whole number, at least `least`."""
        if default is not None and not self.has(name):
            return default
        value = self.any(name)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 1e15:
            raise BadInput(self.at(name), f"is {value!r}", "write a whole number")
        if value < least:
            raise BadInput(self.at(name), f"is {value}", f"write {least:g} or more")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Text."""
        if default is not None and not self.has(name):
            return default
        value = self.any(name)
        if not isinstance(value, str):
            raise BadInput(self.at(name), f"is {value!r}", "write text")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts, none of them empty; one alone may stand without brackets."""
        value = self.any(name)
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not items:
            raise BadInput(self.at(name), f"is {value!r}", "write a text, or a list of them")
        for place, item in enumerate(items):
            if not isinstance(item, str) or not item.strip():
                raise BadInput(f"{self.at(name)}[{place}]", f"is {item!r}", "write text")
        return [item.strip() for item in items]

    def flag(self, name: str, default: bool) -> bool:
        """Yes or no."""
        if not self.has(name):
            return default
        value = self._found[name]
        if not isinstance(value, bool):
            raise BadInput(self.at(name), f"is {value!r}", "write true or false")
        return value

    def choice(self, name: str, among: type[StrEnum] | list[str]) -> str:
        """One of some names."""
        value, known = self.text(name), [str(item) for item in among]
        if value not in known:
            near = _near(value, known)
            raise BadInput(self.at(name), f"`{value}` is not known", f"choose one of {', '.join(known)}{near}")
        return value

    def part(self, name: str) -> Fields:
        """A mapping within."""
        return Fields(self.any(name), self.at(name))

    def parts(self, name: str) -> list[Fields]:
        """A list of mappings within."""
        value = self.any(name)
        if not isinstance(value, list) or not value:
            raise BadInput(self.at(name), "is no list", "write a list of mappings")
        return [Fields(item, f"{self.at(name)}[{place}]") for place, item in enumerate(value)]

    def names(self) -> Iterator[str]:
        """All names of a mapping whose names are the writer's own."""
        for name in self._found:
            if not isinstance(name, str) or not name:
                raise BadInput(self.at(str(name)), f"the name is {name!r}", "write text; put it in quotes")
            yield name

    def weights(self) -> dict[int, float]:
        """The whole mapping, as lengths and their shares."""
        if not all(type(key) is int and type(share) in (int, float) for key, share in self._found.items()):
            raise BadInput(self.place, "is no mapping of tokens to shares", "write {128: 0.5, 512: 0.5}")
        return {int(str(key)): float(share) for key, share in self._found.items()}

    def only(self, names: list[str]) -> str:
        """The one name among `names` that is there."""
        present = [name for name in names if self.has(name)]
        if len(present) != 1:
            if not present:
                # A misspelt one is better told as such.
                self.done()
            has = " and ".join(present) or "none"
            raise BadInput(self.place, f"has {has} of {', '.join(names)}", "write one of them")
        return present[0]

    def done(self) -> None:
        """Refuse what was not asked for."""
        for name in self._found:
            if name not in self._asked:
                near = _near(str(name), self._asked) or f"; known: {', '.join(dict.fromkeys(self._asked))}"
                raise BadInput(self.at(str(name)), "is not known", f"take it out{near}")

    def made(self, make: Callable[..., _T], *arguments: Any) -> _T:
        """What `make` makes, its complaint told with this place."""
        try:
            return make(*arguments)
        except BadInput as error:
            if error.place.startswith(self.place):
                raise
            raise BadInput(f"{self.place}: {error.place}", error.problem, error.remedy) from error

    def _nearest_to(self, name: str) -> str:
        unknown = [str(other) for other in self._found if other not in self._asked]
        near = difflib.get_close_matches(name, unknown, 1)
        return f" (there is `{near[0]}`)" if near else ""


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean `{near[0]}`?" if near else ""
