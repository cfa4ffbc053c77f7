"""Puts virtual time, seeded chance and ordered sets in place of the real ones, in our own modules, for one run.

Services read `time`, `random`, `secrets` and the like as attributes of their module, and so they are replaced there:
one walk over the loaded modules of `serai`, undone at the end. Nothing in the services knows of it.
"""

from __future__ import annotations

import itertools
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import structlog

from serai.engine_emulator import responses
from serai.runtime.connection_settings import host_name
from serai.simulator.whole.virtual_loop import VirtualLoop

T = TypeVar("T")

_ROOMS = (
    "serai.ingress",
    "serai.registry",
    "serai.macro_scheduler",
    "serai.worker_agent",
    "serai.engine_emulator",
    "serai.runtime",
)
_ASYNCIO = ("asyncio.taskgroups",)
"""A TaskGroup cancels its tasks in the order of a set."""

LogSink = Callable[[str, dict[str, Any]], None]
"""Takes a log event's name and its fields."""


class OrderedSet(dict[T, None]):
    """A set that is walked in the order in which things came in: objects hash by address, so that the order of a real
    one changes from run to run."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: T) -> None:
        self[item] = None

    def discard(self, item: T) -> None:
        self.pop(item, None)

    def remove(self, item: T) -> None:
        del self[item]

    def update(self, items: Iterable[T]) -> None:  # type: ignore[override]
        for item in items:
            self[item] = None

    def copy(self) -> OrderedSet[T]:
        return OrderedSet(self)

    def __or__(self, other: Iterable[T]) -> OrderedSet[T]:  # type: ignore[override]
        return OrderedSet(itertools.chain(self, other))

    def __ior__(self, other: Iterable[T]) -> OrderedSet[T]:  # type: ignore[override]
        self.update(other)
        return self

    def __and__(self, other: Iterable[T]) -> OrderedSet[T]:
        there = frozenset(other)
        return OrderedSet(item for item in self if item in there)

    def __rsub__(self, other: Iterable[T]) -> OrderedSet[T]:
        return OrderedSet(item for item in other if item not in self)

    def __le__(self, other: Iterable[T]) -> bool:
        there = frozenset(other)
        return all(item in there for item in self)

    def __ge__(self, other: Iterable[T]) -> bool:
        return all(item in self for item in other)

    def __sub__(self, other: Iterable[T]) -> OrderedSet[T]:
        gone = frozenset(other)
        return OrderedSet(item for item in self if item not in gone)


@contextmanager
def substituted(loop: VirtualLoop, chance: Random, on_log: LogSink | None = None) -> Iterator[None]:
    """Services live in `loop`'s time and on `chance` during the block; their log events go to `on_log`."""
    replacements: dict[str, tuple[Any, Any]] = {
        "time": (time, _time_of(loop)),
        "random": (random, _random_of(chance)),
        "secrets": (secrets, _secrets_of(chance)),
        "formatdate": (formatdate, lambda **_: "Thu, 01 Jan 1970 00:00:00 GMT"),
        "host_name": (host_name, lambda: "simulated"),
    }
    undo: list[tuple[ModuleType, str, Any]] = []
    for module in _modules():
        for name, (real, replacement) in replacements.items():
            if vars(module).get(name) is real:
                undo.append((module, name, real))
                setattr(module, name, replacement)
        undo.append((module, "set", None))
        vars(module)["set"] = OrderedSet
    logs_before = structlog.get_config()
    structlog.configure(processors=[_log_processor(on_log)], cache_logger_on_first_use=False)
    ids_before = responses._ids, responses._id_prefix
    responses._ids, responses._id_prefix = itertools.count(1), "00000000"
    try:
        yield
    finally:
        responses._ids, responses._id_prefix = ids_before
        structlog.configure(**logs_before)
        for module, name, real in undo:
            if real is None:
                del vars(module)[name]
            else:
                setattr(module, name, real)


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if module is not None and (name.startswith(_ROOMS) or name in _ASYNCIO)
    ]


def _time_of(loop: VirtualLoop) -> SimpleNamespace:
    return SimpleNamespace(
        monotonic=loop.time,
        monotonic_ns=loop.monotonic_ns,
        perf_counter=loop.time,
        perf_counter_ns=loop.monotonic_ns,
        time=lambda: loop.wall_ns() / 1e9,
        time_ns=loop.wall_ns,
    )


def _random_of(chance: Random) -> SimpleNamespace:
    return SimpleNamespace(
        Random=lambda: Random(chance.random()),
        random=chance.random,
        uniform=chance.uniform,
        choice=chance.choice,
        sample=chance.sample,
        randint=chance.randint,
        SystemRandom=lambda: chance,
    )


def _secrets_of(chance: Random) -> SimpleNamespace:
    return SimpleNamespace(
        token_hex=lambda size: chance.randbytes(size).hex(),
        token_urlsafe=lambda size: chance.randbytes(size).hex(),
        token_bytes=chance.randbytes,
    )


def _log_processor(on_log: LogSink | None) -> Callable[[Any, str, Any], Any]:
    def drop(logger: Any, method: str, event: Any) -> Any:
        if on_log is not None:
            fields = dict(event)
            on_log(str(fields.pop("event", "")), fields)
        raise structlog.DropEvent

    return drop
