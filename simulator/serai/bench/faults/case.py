"""What a case is, what it finds, and how findings are compared. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from serai.bench.faults.stage import Stage

SERAI = "serai"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one gateway did in one case. `value`: where less is better, by how much."""

    holds: bool
    text: str
    value: float | None = None
    evidence: Sequence[Mapping[str, object]] = field(default=())
    seconds: float = 0.0


Play = Callable[[Stage], Awaitable[Finding]]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. `rule` says in words when it holds."""

    name: str
    title: str
    rule: str
    play: Play
    group: str = ""
    quick: bool = True
    beside: bool = True
    """A stream of somebody else runs beside, and must not be harmed."""
    needs_both: bool = False
    """Both engines must be in use when it begins."""
    close_enough: float = 0.0
    """A peer's `value` is better only if it is smaller by more than that."""


def better_peers(case: Case, findings: Mapping[str, Finding]) -> list[str]:
    """The peers that do better than Serai in this row: they hold where it does not, or by clearly less."""
    ours = findings.get(SERAI)
    if ours is None:
        return []
    found = []
    for name, theirs in findings.items():
        if name == SERAI or not theirs.holds:
            continue
        is_less = ours.value is not None and theirs.value is not None and theirs.value < ours.value - case.close_enough
        if not ours.holds or is_less:
            found.append(name)
    return found
