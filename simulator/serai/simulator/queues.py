"""How many requests waited when, read off their outcomes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from serai.simulator.outcomes import NS, Outcome, Outcomes, in_columns


@dataclass(frozen=True, slots=True)
class Course:
    """A number over time, at even steps."""

    times_s: tuple[float, ...]
    values: tuple[int, ...]


def waiting(outcomes: Outcomes | Iterable[Outcome], step_s: float = 1.0) -> Course:
    """Requests between their arrival and their first token, at each step from time 0. Refused ones never wait; one
    without a first token waits to the end."""
    columns = in_columns(outcomes).columns
    arrived = [at for at, refused in zip(columns["arrival_ns"], columns["refused"], strict=True) if not refused]
    served = [
        at for at, refused in zip(columns["first_token_ns"], columns["refused"], strict=True) if at >= 0 and not refused
    ]
    return _course(arrived, served, max([*columns["finished_ns"], *columns["arrival_ns"]], default=0), step_s)


def in_system(outcomes: Outcomes | Iterable[Outcome], step_s: float = 1.0) -> Course:
    """Requests between their arrival and their last token."""
    columns = in_columns(outcomes).columns
    arrived = [at for at, refused in zip(columns["arrival_ns"], columns["refused"], strict=True) if not refused]
    ended = [at for at in columns["finished_ns"] if at >= 0]
    return _course(arrived, ended, max([*columns["finished_ns"], *columns["arrival_ns"]], default=0), step_s)


def _course(risen: list[int], fallen: list[int], end_ns: int, step_s: float) -> Course:
    step_ns = round(step_s * NS)
    steps = end_ns // step_ns + 2
    changes = [0] * steps
    # A change between two steps is seen at the later one.
    for at in risen:
        changes[min(steps - 1, -(-at // step_ns))] += 1
    for at in fallen:
        changes[min(steps - 1, -(-at // step_ns))] -= 1
    values, current = [], 0
    for change in changes:
        current += change
        values.append(current)
    return Course(tuple(place * step_s for place in range(steps)), tuple(values))
