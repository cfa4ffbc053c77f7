"""When and why the allocation ends, as the batch system says. Parsing is pure; the shell around it is thin and never
fatal.

| where | the end | what SIGTERM means, and for how long |
|---|---|---|
| Slurm | `squeue`, else `SLURM_JOB_END_TIME` (not in every version) | `scontrol show job`; `KillWait` |
| PBS | `qstat -f`, else `PBS_WALLTIME` | not told; its `kill_delay` is 10 s unless somebody changed it |
| Kubernetes | `--allocation-s` | not told; a pod has 30 s unless it says otherwise (`--grace-s`) |
| elsewhere | `--allocation-s` | as long as a drain takes |

Commands may hang, fail, or answer with nothing: then the end is what it was known to be before, or unknown.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import structlog

from serai.runtime.bounded_command import output_of
from serai.runtime.slurm_time import duration_s
from serai.worker_agent.drain import Ending, Reason

log = structlog.get_logger()

ASK_TIMEOUT_S = 5.0
ASK_EVERY_S = 600.0
"""Operators extend and shorten jobs; hundreds of agents must not be a load on the controller."""
MOVED_S = 60.0
"""An end that moved by less is the same: Slurm counts in minutes."""
SLURM_KILL_WAIT_S, PBS_KILL_DELAY_S, KUBERNETES_GRACE_S = 30.0, 10.0, 30.0
"""From SIGTERM to SIGKILL where nobody has said otherwise."""

_SLURM_FIELD = re.compile(r"(\w+)=(\S+)")
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d{1,6})", re.MULTILINE)
_PBS_WALL_TIME = re.compile(r"(Resource_List|resources_used)\.walltime\s*=\s*([\d:]+)")
_PBS_REMAINING = re.compile(r"Walltime\.Remaining\s*=\s*(\d{1,9})")


def remaining_s_in(environment: Mapping[str, str], wall_s: float) -> float | None:
    """Seconds left by `SLURM_JOB_END_TIME` (seconds since 1970) at wall-clock time `wall_s`; None when it is not
    there or no number."""
    text = environment.get("SLURM_JOB_END_TIME", "")
    return max(0.0, int(text) - wall_s) if text.isdigit() else None


def slurm_ending_in(text: str, kill_wait_s: float, wall_s: float) -> Ending | None:
    """What `scontrol show job` says after a SIGTERM, at wall-clock time `wall_s`: a job that is being preempted still
    runs, until its new end; one that was cancelled, requeued or is over is killed `kill_wait_s` seconds later. None
    when it says nothing of use."""
    fields = dict(_SLURM_FIELD.findall(text))
    state, preempted = fields.get("JobState", ""), fields.get("PreemptTime", "None") != "None"
    if not state:
        return None
    if state != "RUNNING":
        told = fields.get("Reason", "None")
        over = Reason.ALLOCATION_END if told == "TimeLimit" else Reason.STOPPING
        return Ending(Reason.PREEMPTED if preempted else over, kill_wait_s, f"Slurm: {state}, {told}")
    ends_at_s = _time_s(fields.get("EndTime", ""))
    if ends_at_s is None:
        return None
    left_s = ends_at_s - wall_s
    preempted_at_s = _time_s(fields.get("PreemptTime", ""))
    if preempted_at_s is None:
        return Ending(Reason.ALLOCATION_END, max(0.0, left_s), "Slurm: a signal while it runs")
    # Both by the controller's clock, with which ours need not agree (H26): the signal came when the grace began.
    grace_s = max(0.0, ends_at_s - preempted_at_s)
    return Ending(Reason.PREEMPTED, left_s if 0 <= left_s <= grace_s else grace_s, "Slurm: preempted")


def _time_s(text: str) -> float | None:
    """Seconds since 1970 of a time as Slurm writes it; None for `None`, `Unknown` and the like."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def kill_wait_s_in(text: str) -> float | None:
    """`KillWait` of `scontrol show config`, in seconds."""
    found = _KILL_WAIT.search(text)
    return float(found[1]) if found else None


def pbs_remaining_s_in(text: str) -> float | None:
    """Seconds left by `qstat -f`, of PBS Pro, OpenPBS and Torque; None when it does not say."""
    if found := _PBS_REMAINING.search(text):
        return float(found[1])
    times = {name: _clock_s(clock) for name, clock in _PBS_WALL_TIME.findall(text)}
    limit_s = times.get("Resource_List")
    return None if limit_s is None else max(0.0, limit_s - (times.get("resources_used") or 0.0))


def _clock_s(text: str) -> float | None:
    """`H:M:S`, `M:S` or seconds, as PBS writes them."""
    seconds = 0
    for part in text.split(":"):
        if not part.isdigit():
            return None
        seconds = seconds * 60 + int(part)
    return float(seconds)


class AllocationEnd:
    """When this allocation ends. Durations run on the monotonic clock, so a clock that is set changes nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ, total_s: float = 0.0) -> None:
        """`total_s`: it ends so many seconds from now, unless a batch system knows better; 0 = no such end."""
        self._environment = environment
        self._ends_at_s = time.monotonic() + total_s if total_s > 0 else None
        self._told_s: float | None = None
        self._kill_wait_s: float | None = None

    @property
    def _slurm_job(self) -> str:
        job = self._environment.get("SLURM_JOB_ID", "")
        return job if job.isdigit() else ""

    @property
    def _pbs_job(self) -> str:
        return self._environment.get("PBS_JOBID", "")

    def remaining_s(self) -> float | None:
        """Time left, in seconds; None = no end known."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - time.monotonic())

    def ends_at(self) -> str:
        """The end as ISO 8601 in UTC, for people; empty = no end known."""
        remaining_s = self.remaining_s()
        if remaining_s is None:
            return ""
        return datetime.fromtimestamp(time.time() + remaining_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def ask(self) -> bool:
        """Asks the batch system, where there is one. True when the end is new or has moved."""
        remaining_s = await self._asked_s()
        if remaining_s is None:
            return False
        before_s, self._ends_at_s = self._told_s, time.monotonic() + remaining_s
        self._told_s = self._ends_at_s
        return before_s is None or abs(before_s - self._ends_at_s) > MOVED_S

    async def pause(self) -> None:
        """Until it is time to ask again. A host without a batch system has no end, and is not asked."""
        if not self._slurm_job and not self._pbs_job:
            await asyncio.Event().wait()
        await asyncio.sleep(ASK_EVERY_S * random.uniform(0.8, 1.2))

    def grace_s(self) -> float | None:
        """From SIGTERM to SIGKILL, as is usual here; None = nobody is known to kill us."""
        if self._slurm_job:
            return SLURM_KILL_WAIT_S if self._kill_wait_s is None else self._kill_wait_s
        if self._pbs_job:
            return PBS_KILL_DELAY_S
        return KUBERNETES_GRACE_S if "KUBERNETES_SERVICE_HOST" in self._environment else None

    async def ending(self) -> Ending | None:
        """After a signal: what it was for, and when we will be killed. None when nobody tells."""
        if not self._slurm_job:
            return None
        text = await output_of(["scontrol", "--oneliner", "show", "job", self._slurm_job], ASK_TIMEOUT_S)
        return slurm_ending_in(text or "", self.grace_s() or 0.0, time.time())

    async def _asked_s(self) -> float | None:
        if self._slurm_job:
            return await self._slurm_s()
        if self._pbs_job:
            text = await output_of(["qstat", "-f", self._pbs_job], ASK_TIMEOUT_S)
            remaining_s = pbs_remaining_s_in(text or "")
            limit = self._environment.get("PBS_WALLTIME", "")  # Torque's; counted from the start, which is now.
            if remaining_s is None and self._ends_at_s is None and limit.isdigit():
                return float(limit)
            return remaining_s
        return self.remaining_s()

    async def _slurm_s(self) -> float | None:
        if self._kill_wait_s is None:
            config = await output_of(["scontrol", "show", "config"], ASK_TIMEOUT_S)
            self._kill_wait_s = kill_wait_s_in(config or "")
        text = await output_of(["squeue", "-h", "-j", self._slurm_job, "-o", "%L"], ASK_TIMEOUT_S)
        remaining_s = duration_s(text) if text is not None else None
        if remaining_s is not None:
            return remaining_s
        log.info("allocation.end_not_told", answer=(text or "").strip()[:80])
        return remaining_s_in(self._environment, time.time())
