"""What a caller demands of whatever answers: `x-serai-require` and `x-serai-providers`. Pure.

    x-serai-require: context>=32768, quantization=none, engine=vllm>=0.25
    x-serai-providers: alps, jsc, -cloud

Requirements are joined by "and"; all must be met. Numbers take `>=`, `>`, `<=`, `<`, `=` and `!=`; words take `=` and
`!=`, and `a|b` means one of both; `engine=` may be followed by a version. Providers
are those that may answer, or with `-` those that may not; what is forbidden stays so even when it is allowed as well.

Both fail closed: what a session does not tell of itself does not meet a requirement on it, not even `!=`; a provider
that does not tell its name is neither allowed nor spared; and a header that cannot be understood is an error.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from serai.contracts.session_record import EngineParallelism, SessionRecord

REQUIRE_HEADER = "x-serai-require"
PROVIDERS_HEADER = "x-serai-providers"
HEADER_CHARACTERS_MAX = 2048
ITEMS_MAX = 32

_EXAMPLE = {
    REQUIRE_HEADER: "`context>=32768, quantization=none, engine=vllm>=0.25`",
    PROVIDERS_HEADER: "`alps, jsc, -cloud`",
}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_ITEM = re.compile(r"([a-z][a-z0-9_.-]*)\s*(>=|<=|!=|==|>|<|=)\s*([^<>=!\s].*)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/+ -]*")
_NUMBER = re.compile(r"\d{1,15}")
_VERSIONED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.+-]*)\s*(>=|<=|==|>|<)\s*(.+)")
_VERSION = re.compile(
    r"v?(\d{1,9}(?:\.\d{1,9}){0,5})(?:[.-]?(a|b|rc|alpha|beta|dev)\.?\d*)?(?:[.+-][A-Za-z0-9][A-Za-z0-9.+-]*)?",
    re.ASCII,
)


class BadHeader(ValueError):
    """A header of the caller's that cannot be understood; the text names it, and says what is expected."""

    def __init__(self, header: str, problem: str) -> None:
        super().__init__(f"{header}: {problem}; expected something like {_EXAMPLE[header]}")
        self.header = header


# -- facts of a session ------------------------------------------------------------------------------------------------


def _labelled(label: str) -> Callable[[SessionRecord], str]:
    return lambda record: record.metadata.labels.get(label, "")


def _told(field: str) -> Callable[[SessionRecord], str]:
    """What the agent found out, else what somebody wrote into the label of that name."""
    label = _labelled(field)
    return lambda record: getattr(record.metadata, field) or label(record)


def _gpu(record: SessionRecord) -> str:
    names = {gpu.name for gpu in record.metadata.gpus}
    return names.pop() if len(names) == 1 else ""


def _gpu_memory_gib(record: SessionRecord) -> int:
    """Of the smallest GPU, in whole GiB; a card sold as 80 GB shows 79."""
    return min((gpu.memory_bytes for gpu in record.metadata.gpus), default=0) >> 30


def _parallel(record: SessionRecord, degree: int) -> int:
    """All ones is also what a session says that does not know; with one GPU it is true."""
    return 0 if record.metadata.parallelism == EngineParallelism() and len(record.metadata.gpus) != 1 else degree


_NUMBERS: dict[str, Callable[[SessionRecord], int]] = {
    "context": lambda record: record.metadata.context_tokens_max,
    "kv_tokens": lambda record: record.metadata.kv_tokens_max,
    "concurrency": lambda record: record.metadata.concurrency_max,
    "gpus": lambda record: len(record.metadata.gpus),
    "gpu_memory_gib": _gpu_memory_gib,
    "tensor_parallel": lambda record: _parallel(record, record.metadata.parallelism.tensor),
    "pipeline_parallel": lambda record: _parallel(record, record.metadata.parallelism.pipeline),
    "data_parallel": lambda record: _parallel(record, record.metadata.parallelism.data),
}
"""0 = unknown."""
_WORDS: dict[str, Callable[[SessionRecord], str]] = {
    "engine": lambda record: record.metadata.engine,
    "engine_version": _told("engine_version"),
    "engine_model": lambda record: record.metadata.engine_model,
    "quantization": _told("quantization"),
    "dtype": _told("dtype"),
    "fingerprint": lambda record: record.metadata.fingerprint,
    "provider": lambda record: record.metadata.provider,
    "site": lambda record: record.metadata.site,
    "session": lambda record: record.session,
    "gpu": _gpu,
}
"""Empty = unknown. Beside them stands `label.NAME` for any label."""


def _word_of(name: str) -> Callable[[SessionRecord], str] | None:
    if name.startswith("label."):
        return _labelled(name.removeprefix("label."))
    return _WORDS.get(name)


# -- requirements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requirement:
    """One of them. `text` is as the caller wrote it."""

    text: str
    met: Callable[[SessionRecord], bool]


@dataclass(frozen=True, slots=True)
class Requirements:
    """All of a request's; without any, everybody fits."""

    every: tuple[Requirement, ...] = ()

    def unmet(self, record: SessionRecord) -> str | None:
        """The first that `record` does not meet, as the caller wrote it; None = it fits."""
        for requirement in self.every:
            if not requirement.met(record):
                return requirement.text
        return None

    def fitting(self, records: Iterable[SessionRecord]) -> list[SessionRecord]:
        """Those that meet all, in their order."""
        return [record for record in records if self.unmet(record) is None]

    def in_the_way(self, records: Iterable[SessionRecord]) -> list[str]:
        """For a request that nobody fits: what each session fails first, without repetitions, for the message."""
        return list(dict.fromkeys(text for record in records if (text := self.unmet(record)) is not None))


def read_requirements(header: str | None) -> Requirements:
    """Of `x-serai-require`; None = not given. Raises BadHeader."""
    if header is None:
        return Requirements()
    return Requirements(tuple([_requirement(item) for item in _items(REQUIRE_HEADER, header)]))


def _items(header: str, text: str) -> list[str]:
    if len(text) > HEADER_CHARACTERS_MAX:
        raise BadHeader(header, f"{len(text)} characters, at most {HEADER_CHARACTERS_MAX}")
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise BadHeader(header, "is empty" if len(items) == 1 else "has an empty item between two commas")
    if len(items) > ITEMS_MAX:
        raise BadHeader(header, f"{len(items)} items, at most {ITEMS_MAX}")
    return items


def _requirement(item: str) -> Requirement:
    parts = _ITEM.fullmatch(item)
    if parts is None:
        raise BadHeader(REQUIRE_HEADER, f"{item[:80]!r} is no requirement (NAME, one of >= > <= < = !=, VALUE)")
    name, sign, value = parts[1], parts[2].replace("==", "="), parts[3].strip()
    if not name.startswith("label."):  # Labels are whatever somebody called them.
        name = name.lower()
    if number := _NUMBERS.get(name):
        return Requirement(item, _number_met(item, number, sign, value))
    word = _word_of(name)
    if word is None:
        known = ", ".join([*_NUMBERS, *_WORDS])
        raise BadHeader(REQUIRE_HEADER, f"{item[:80]!r} asks for {name!r}; known are {known} and label.NAME")
    if name == "engine_version":
        return Requirement(item, _version_met(item, word, sign, value))
    if name == "engine" and sign == "=" and (versioned := _VERSIONED.fullmatch(value)):
        engine, version_sign, version = versioned[1].lower(), versioned[2].replace("==", "="), versioned[3]
        newer = _version_met(item, _WORDS["engine_version"], version_sign, version)
        return Requirement(item, lambda record: record.metadata.engine.lower() == engine and newer(record))
    return Requirement(item, _word_met(item, word, sign, value))


def _number_met(
    item: str, fact: Callable[[SessionRecord], int], sign: str, value: str
) -> Callable[[SessionRecord], bool]:
    if not _NUMBER.fullmatch(value):
        raise BadHeader(REQUIRE_HEADER, f"{item[:80]!r}: {value[:40]!r} is no whole number")
    compare, wanted = _COMPARISONS[sign], int(value)

    def met(record: SessionRecord) -> bool:
        known = fact(record)
        return known > 0 and compare(known, wanted)

    return met


def _word_met(
    item: str, fact: Callable[[SessionRecord], str], sign: str, value: str
) -> Callable[[SessionRecord], bool]:
    if sign not in ("=", "!="):
        raise BadHeader(REQUIRE_HEADER, f"{item[:80]!r}: words take = or !=, not {sign}")
    words = [word.strip() for word in value.split("|")]
    if not all(_NAME.fullmatch(word) for word in words):
        raise BadHeader(REQUIRE_HEADER, f"{item[:80]!r}: {value[:40]!r} is no word, and no words with | between them")
    wanted, inside = frozenset(word.lower() for word in words), sign == "="

    def met(record: SessionRecord) -> bool:
        known = fact(record).lower()
        # A name like `NVIDIA H100 80GB HBM3` is also known by each of its words.
        return known != "" and (known in wanted or not wanted.isdisjoint(known.split())) == inside

    return met


def _version_met(
    item: str, fact: Callable[[SessionRecord], str], sign: str, value: str
) -> Callable[[SessionRecord], bool]:
    wanted, compare = read_version(value), _COMPARISONS[sign]
    if wanted is None:
        raise BadHeader(REQUIRE_HEADER, f"{item[:80]!r}: {value[:40]!r} is no version (like 0.25 or 0.25.1)")

    def met(record: SessionRecord) -> bool:
        known = read_version(fact(record))
        return known is not None and compare(known, wanted)

    return met


@lru_cache(maxsize=1024)  # Sessions tell the same few, again and again.
def read_version(text: str) -> tuple[tuple[int, ...], bool] | None:
    """Something that compares like versions do: 0.9 < 0.10rc1 < 0.10 = 0.10.0 = 0.10.0+cu128; None = it is none."""
    parts = _VERSION.fullmatch(text.strip())
    if parts is None:
        return None
    numbers = [int(number) for number in parts[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), parts[2] is None


# -- providers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Providers:
    """Who may answer. `allowed` None = everyone who is not denied."""

    allowed: frozenset[str] | None = None
    denied: frozenset[str] = frozenset()

    def permit(self, record: SessionRecord) -> bool:
        return self.permit_name(record.metadata.provider)

    def permit_name(self, name: str) -> bool:
        """Whether a provider of that name may answer; empty = it does not tell its name."""
        provider = name.lower()
        if provider in self.denied or (self.denied and not provider):
            return False
        return self.allowed is None or (provider != "" and provider in self.allowed)

    def permitted(self, records: Iterable[SessionRecord]) -> list[SessionRecord]:
        """Those that may answer, in their order."""
        if self.allowed is None and not self.denied:
            return list(records)
        return [record for record in records if self.permit(record)]

    def both(self, other: Providers) -> Providers:
        """What is permitted by this and by `other`: a key's list and a request's. A request never widens its key."""
        if self.allowed is None or other.allowed is None:
            allowed = other.allowed if self.allowed is None else self.allowed
        else:
            allowed = self.allowed & other.allowed
        return Providers(allowed, self.denied | other.denied)


def read_providers(header: str | None) -> Providers:
    """Of `x-serai-providers`; None = not given. Raises BadHeader."""
    if header is None:
        return Providers()
    allowed: set[str] = set()
    denied: set[str] = set()
    for item in _items(PROVIDERS_HEADER, header):
        name = item.removeprefix("-").strip().lower()
        if not _NAME.fullmatch(name):
            raise BadHeader(PROVIDERS_HEADER, f"{item[:80]!r} is no name of a provider")
        (denied if item.startswith("-") else allowed).add(name)
    return Providers(frozenset(allowed) if allowed else None, frozenset(denied))
