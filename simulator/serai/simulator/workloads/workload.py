"""One arriving request, and a workload: arrivals in order of time, made anew at each reading."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

BLOCK_TOKENS = 16
"""Tokens of one key in `Arrival.block_keys`: the KV block of vLLM."""
SOURCE_BITS = 56
"""Block keys of one source stay below 2 ** 56, so that sources can be mixed without false hits."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it arrives. `block_keys`: one key per full KV block of the prompt that others may share, chained:
    two equal keys mean two equal prefixes."""

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    block_keys: tuple[int, ...] = ()
    model: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals sorted by time. Each iteration makes the same ones again, so that policies can be compared on it."""

    name: str
    description: str
    arrivals: Callable[[], Iterator[Arrival]]

    def __iter__(self) -> Iterator[Arrival]:
        return self.arrivals()

    def digest(self, count: int | None = None) -> str:
        """A hash of the first `count` arrivals (None: all): equal digests, equal workloads."""
        found = hashlib.sha256()
        for arrival in islice(self, count):
            found.update(repr(_fields(arrival)).encode())
        return found.hexdigest()


def mixed(name: str, parts: Sequence[Workload]) -> Workload:
    """Several workloads at once, for example one a model. Their prefixes stay apart."""

    def arrivals() -> Iterator[Arrival]:
        streams = [_apart(part, number) for number, part in enumerate(parts)]
        return heapq.merge(*streams, key=lambda arrival: arrival.at_ns)

    return Workload(name, " + ".join(part.description for part in parts), arrivals)


def _apart(part: Workload, number: int) -> Iterator[Arrival]:
    offset = number << SOURCE_BITS
    for arrival in part:
        keys = tuple(key + offset for key in arrival.block_keys) if offset else arrival.block_keys
        yield replace(arrival, block_keys=keys) if keys else arrival


def _fields(arrival: Arrival) -> tuple[object, ...]:
    return (
        arrival.at_ns,
        arrival.prompt_tokens,
        arrival.output_tokens,
        arrival.block_keys,
        arrival.model,
        arrival.client,
    )
