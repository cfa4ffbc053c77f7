"""Deployments: what an operator wants to serve, and what the launcher has come to expect of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from serai.launcher.job_book import JobBook
from serai.launcher.picture import Picture, Wanted

ESTIMATE_FACTOR, ESTIMATE_FLOOR_S = 4.0, 300.0
"""Batch systems estimate as if every job took all its time. So an estimate lengthens what is expected, at most by this
factor, or to this factor times so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One model, in so many slots, each filled by one job at a time."""

    name: str
    model: str
    count: int = 1
    scale_to: int = 0
    """It may be asked for so many at most, in place of `count`; 0 = it may not be asked."""
    time_limit_s: float = 8 * 3600.0
    queue_wait_s: float = 600.0
    """What a job waits, until it is known better."""
    load_s: float = 300.0
    """Start of a job to its first token, until it is known better."""
    idle_s: float | None = None
    """Let go when no request has come for so long."""
    load_s_max: float | None = None
    """A job without a session for so long is given up; None = ten minutes and four times the load expected."""
    leaves_s: float = 180.0
    """So long before the end of its job a session takes no more requests."""
    script: str = ""
    """The batch script, without name and time limit."""
    excluded: tuple[str, ...] = ()
    """Nodes that the script stays away from."""

    @property
    def specification(self) -> str:
        """Differs when what is submitted does; counts are no part of it."""
        return sha256(f"{self.model}\n{self.time_limit_s}\n{self.script}".encode()).hexdigest()[:16]


def wished_slots(deployments: Sequence[Deployment], instances: int, given: Mapping[str, int]) -> tuple[str, int] | None:
    """Which of a model's deployments is to have how many slots, for so many `instances` in all; None when none may be
    scaled. `given`: the counts of the site file, below which nothing falls."""
    scalable = [one for one in deployments if one.scale_to]
    if not scalable:
        return None
    one = scalable[0]
    others = sum([other.count for other in deployments if other is not one])
    least, most = given.get(one.name, 0), max(one.scale_to, given.get(one.name, 0))
    return one.name, min(most, max(least, instances - others))


def picture_of(
    book: JobBook,
    deployments: Sequence[Deployment],
    now: float,
    *,
    blind: str = "",
    estimates_s: Mapping[str, float] | None = None,
    succeeded_at_s: Mapping[str, float] | None = None,
) -> Picture:
    """All that is known now. `estimates_s`: per deployment, what the batch system itself says a job would wait."""
    wanted = tuple(_wanted(one, book, now, (estimates_s or {}).get(one.name, 0.0)) for one in deployments)
    runs = book.runs
    slots = {run.slot for run in runs} | book.troubled
    troubles = {slot: trouble for slot in slots if (trouble := book.trouble(slot)) is not None}
    return Picture(
        now=now, blind=blind, wanted=wanted, runs=runs, troubles=troubles, succeeded_at_s=dict(succeeded_at_s or {})
    )


def _wanted(deployment: Deployment, book: JobBook, now: float, estimate_s: float) -> Wanted:
    name = deployment.name
    wait_s = book.waits(name).expected_s(deployment.queue_wait_s)
    load_s = book.loads(name).expected_s(deployment.load_s)
    active_at_s = book.active_at_s.get(name)
    return Wanted(
        deployment=name,
        model=deployment.model,
        count=deployment.count,
        time_limit_s=deployment.time_limit_s,
        wait_s=max(wait_s, min(estimate_s, ESTIMATE_FACTOR * max(wait_s, ESTIMATE_FLOOR_S))),
        load_s=load_s,
        leaves_s=deployment.leaves_s,
        load_s_max=deployment.load_s_max or 600.0 + 4 * load_s,
        idle_s=deployment.idle_s,
        idle_for_s=None if active_at_s is None else now - active_at_s,
        asleep=name in book.asleep,
    )
