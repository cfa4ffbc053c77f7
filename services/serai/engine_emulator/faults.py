"""Faults on demand: what goes wrong, with which request, and how often.

As a flag: `KIND[:key=value,…]`, e.g. `cut:tokens=5,count=1`. Over HTTP: the same fields as a JSON object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """Closed set. `tokens` below is the field of that name: how many tokens come first."""

    CUT = "cut"
    """Close the connection after `tokens` tokens; at 0, before the first byte of the answer."""
    RESET = "reset"
    """As `cut`, with a TCP reset."""
    HANG = "hang"
    """Say nothing more after `tokens` tokens; at 0, not even a status line. The slot stays taken."""
    SLOW = "slow"
    """Take `factor` times as long."""
    STATUS = "status"
    """Answer with the error `status`, at once; with `retry_after_s`, say so."""
    MALFORMED = "malformed"
    """After `tokens` tokens one event that is no JSON, then go on; not streamed: a body that is no JSON."""
    ERROR_EVENT = "error-event"
    """After `tokens` tokens an error object as an event, then `[DONE]`, as engines do; not streamed: status 500."""
    WRONG_CONTENT_TYPE = "wrong-content-type"
    """Status 200 and an HTML page, as a proxy in between would send."""
    NO_DONE = "no-done"
    """End the HTTP body cleanly after `tokens` tokens, without finish reason and `[DONE]`."""
    EXIT = "exit"
    """The process ends after `tokens` tokens."""
    REFUSE_START = "refuse-start"
    """Out of memory at start. Only as a flag."""


class BadFault(ValueError):
    """A fault that cannot be; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It spares the first `skip` requests, then hits `count` of them (None: all)."""

    kind: FaultKind
    tokens: int = 0
    factor: float = 1.0
    status: int = 0
    retry_after_s: float | None = None
    count: int | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.skip < 0 or (self.count is not None and self.count < 1):
            raise BadFault(f"fault {self.kind}: tokens and skip must be at least 0, count at least 1")
        if self.kind is FaultKind.STATUS and not 400 <= self.status <= 599:
            raise BadFault(f"fault status: status must be from 400 to 599, not {self.status}")
        if self.kind is FaultKind.SLOW and self.factor <= 0:
            raise BadFault(f"fault slow: factor must be above 0, not {self.factor}")

    def as_dict(self) -> dict[str, object]:
        """The fields as a JSON object."""
        return asdict(self)


def fault_from_fields(fields: Mapping[str, object]) -> Fault:
    """A fault from `kind` and its other fields. Raises BadFault."""
    rest = dict(fields)
    kind = _kind(rest.pop("kind", None))
    values: dict[str, float | int | None] = {}
    for name, value in rest.items():
        if name not in _FIELDS:
            raise BadFault(f"fault {kind}: no field {name!r}; there are {', '.join(_FIELDS)}")
        values[name] = _number(kind, name, value)
    return Fault(kind, **values)  # type: ignore[arg-type]


def parse_fault(text: str) -> Fault:
    """A fault from `KIND[:key=value,…]`. Raises BadFault."""
    kind, _, rest = text.partition(":")
    fields: dict[str, object] = {"kind": kind}
    for pair in filter(None, rest.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise BadFault(f"fault {kind}: expected key=value, not {pair!r}")
        fields[name.strip()] = value.strip()
    return fault_from_fields(fields)


class FaultPlan:
    """The faults that are set, each with the requests it still spares and hits."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._set: list[list[int | None]] = []
        self._faults: list[Fault] = []
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """`fault` applies from the next request on, after those that were set before it."""
        self._faults.append(fault)
        self._set.append([fault.skip, fault.count])

    def clear(self) -> None:
        """No fault is set any more."""
        self._faults.clear()
        self._set.clear()

    def take(self) -> Fault | None:
        """The fault that hits the next request; the first that was set wins."""
        for index, fault in enumerate(self._faults):
            left = self._set[index]
            if left[0]:
                left[0] -= 1
                continue
            if left[1] is not None:
                left[1] -= 1
                if left[1] == 0:
                    del self._faults[index], self._set[index]
            return fault
        return None

    def remaining(self) -> list[dict[str, object]]:
        """The faults that are set, with `skip` and `count` as they are left."""
        return [
            {**fault.as_dict(), "skip": skip, "count": count}
            for fault, (skip, count) in zip(self._faults, self._set, strict=True)
        ]


_INTEGERS = ("tokens", "status", "count", "skip")
_FIELDS = (*_INTEGERS, "factor", "retry_after_s")


def _kind(value: object) -> FaultKind:
    try:
        return FaultKind(str(value))
    except ValueError as error:
        raise BadFault(f"no fault {value!r}; there are {', '.join(FaultKind)}") from error


def _number(kind: FaultKind, name: str, value: object) -> float | int | None:
    if value is None and name in ("count", "retry_after_s"):
        return None
    try:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise TypeError
        return int(value) if name in _INTEGERS else float(value)
    except (TypeError, ValueError) as error:
        raise BadFault(f"fault {kind}: {name} must be a number, not {value!r}") from error
