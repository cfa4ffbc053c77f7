"""Jobs as a launcher sees them, and what it asks of a batch system. Pure: the shell is `slurm_commands.py`.

A batch system's word is evidence, not truth: commands hang, fail, and answer with nothing. Whatever cannot be told is
`Unknown`, with the reason for people, and nobody acts on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class JobId:
    """Batch systems use their numbers again, so a number alone is no identity."""

    cluster: str
    """Empty = the one that the commands talk to by themselves."""
    job: str
    """As the batch system writes it, and takes it: `123`, `123_4` (one of an array), `123+0` (a part of a
    heterogeneous job)."""
    submitted_at_s: int = 0
    """Seconds since 1970 by the controller's clock; 0 = not told (sbatch does not tell). A requeue makes it later."""
    user: str = ""
    """Empty = not told."""

    def may_be(self, other: JobId) -> bool:
        """Whether both can be the same job, at any of its runs: what one of them does not tell says nothing, and `self`
        was seen first."""
        return (
            self.job == other.job
            and (not self.cluster or not other.cluster or self.cluster == other.cluster)
            and (not self.user or not other.user or self.user == other.user)
            and (not self.submitted_at_s or not other.submitted_at_s or self.submitted_at_s <= other.submitted_at_s)
        )

    def __str__(self) -> str:
        return f"{self.job}@{self.cluster}" if self.cluster else self.job


class JobState(StrEnum):
    """What matters of the batch system's states; its own word is in `ObservedJob.word`."""

    PENDING = "pending"
    """Waits: for the first time, or again after a preemption or a requeue."""
    STARTING = "starting"
    """Has its nodes, which are being made ready."""
    RUNNING = "running"
    SUSPENDED = "suspended"
    """Has its nodes and is stopped: its session is silent and may come back."""
    COMPLETING = "completing"
    """Over, but its nodes are not free yet: processes may still hold GPUs."""
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    PREEMPTED = "preempted"
    NODE_FAILED = "node_failed"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """A word that this launcher does not know. Not an end."""

    @property
    def over(self) -> bool:
        """Its nodes are free: nothing of it runs, and it does not come back."""
        return self in _OVER


_OVER = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.TIMED_OUT,
        JobState.PREEMPTED,
        JobState.NODE_FAILED,
        JobState.FAILED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedJob:
    """One job (of an array: one element) as one answer of the batch system tells it."""

    id: JobId
    state: JobState
    word: str
    """The batch system's own word for the state."""
    number: str
    """What the job finds in `SLURM_JOB_ID`; differs from `id.job` for elements of arrays."""
    name: str = ""
    partition: str = ""
    reason: str = ""
    """Why it waits, or how it ended, in the batch system's words; may hold spaces."""
    nodes: str = ""
    time_limit_s: float | None = None
    """None = without limit, or not told."""
    time_left_s: float | None = None
    """None = without end, or not told; a pending job has all of it."""
    starts_at_s: int | None = None
    """When it started, or is expected to; seconds since 1970 by the controller's clock. None = nobody knows."""

    @property
    def allocation(self) -> str:
        """What its agents call their allocation in their records, unless they were told another name."""
        return f"slurm-{self.number}"

    @property
    def ours(self) -> JobName | None:
        """What its name says, when a launcher gave it."""
        return JobName.of(self.name)


_MODEL_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
_NAME = re.compile(r"serai\.(?P<model>[A-Za-z0-9._-]+)\.(?P<tag>[A-Za-z0-9]{4,32})")


@dataclass(frozen=True, slots=True)
class JobName:
    """The name of a launcher's job: `serai.MODEL.TAG`. It survives requeues and the launcher's own death, and finds a
    job whose submission was not answered."""

    model: str
    """Readable part only: characters that job names should not have are `_`."""
    tag: str
    """4 to 32 letters and digits, drawn anew for each submission."""

    @classmethod
    def of(cls, name: str) -> JobName | None:
        found = _NAME.fullmatch(name)
        return cls(found["model"], found["tag"]) if found else None

    @classmethod
    def for_model(cls, model: str, tag: str) -> JobName:
        return cls(_MODEL_CHARACTERS.sub("_", model)[:60] or "_", tag)

    def __str__(self) -> str:
        return f"serai.{self.model}.{self.tag}"


@dataclass(frozen=True, slots=True)
class Unknown:
    """The batch system did not tell, and why. After a submission or a cancellation: it may have been done all the
    same."""

    reason: str


@dataclass(frozen=True, slots=True)
class Jobs:
    """All jobs of this user, by one whole answer. A job that is not among them is over long ago, or never was: an
    answer that is cut short or empty where it should not be is `Unknown` instead."""

    jobs: tuple[ObservedJob, ...]
    number: int
    """Counts the answers; the same number = the same answer, given again because it is too soon to ask."""
    age_s: float
    """Seconds since the answer came."""

    def named(self, name: JobName) -> ObservedJob | None:
        return next((job for job in self.jobs if job.name == str(name)), None)


class RefusalKind(StrEnum):
    """What follows from a refusal."""

    QUOTA = "quota"
    """Too many jobs, or too much: try again when some have ended."""
    INVALID = "invalid"
    """Wrong as it is: trying again changes nothing, a person has to."""
    TRANSIENT = "transient"
    """The batch system is not well: try again after a while."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The batch system said no."""

    kind: RefusalKind
    text: str
    """Its own words, one line."""
    remedy: str
    """What a person can do, one line."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The batch system took the cancellation; the job may still be ending."""


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """When a job that is not submitted yet would start."""

    wait_s: float
    text: str = ""


class Slurm(Protocol):
    """A batch system. None of its methods raises for what a cluster does, and each returns in bounded time."""

    async def submit(self, script: str, options: Sequence[str] = ()) -> JobId | Refused | Unknown:
        """Submits a batch script; `options` are added to sbatch's own (`--dependency=afterany:123`). Only the job's
        number and cluster are told. After `Unknown` look for the job by its name before submitting again."""

    async def jobs(self) -> Jobs | Unknown:
        """All jobs of this user. The last answer again while it is too soon to ask."""

    async def cancel(self, job: JobId) -> Cancelled | Refused | Unknown:
        """Cancels a job in any state. To cancel one that is over is no error."""

    async def expected_start(self, script: str, options: Sequence[str] = ()) -> ExpectedStart | Refused | Unknown:
        """How long such a job would wait, by the batch system's own estimate. Nothing is submitted."""

    async def nodes(self) -> frozenset[str] | Unknown:
        """The names of all nodes: an unknown one in `--exclude` makes sbatch refuse the job."""
