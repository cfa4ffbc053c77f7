"""When the allocation ends, as the batch system says. Parsing is pure; the shell around it is thin and never fatal.

Slurm tells the end in `SLURM_JOB_END_TIME` (not in every version), and by `squeue`, which may hang, fail, or answer
with nothing: then the end is what it was known to be before, or unknown.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import structlog

from serai.runtime.bounded_command import output_of
from serai.runtime.slurm_time import duration_s

log = structlog.get_logger()

ASK_TIMEOUT_S = 5.0
ASK_EVERY_S = 600.0
"""Operators extend and shorten jobs; hundreds of agents must not be a load on the controller."""
MOVED_S = 60.0
"""An end that moved by less is the same: Slurm counts in minutes."""


def remaining_s_in(environment: Mapping[str, str], wall_s: float) -> float | None:
    """Seconds left by `SLURM_JOB_END_TIME` (seconds since 1970) at wall-clock time `wall_s`; None when it is not
    there or no number."""
    text = environment.get("SLURM_JOB_END_TIME", "")
    return max(0.0, int(text) - wall_s) if text.isdigit() else None


class AllocationEnd:
    """When this allocation ends. Durations run on the monotonic clock, so a clock that is set changes nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._ends_at_s: float | None = None

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
        before_s, self._ends_at_s = self._ends_at_s, time.monotonic() + remaining_s
        return before_s is None or abs(before_s - self._ends_at_s) > MOVED_S

    async def pause(self) -> None:
        """Until it is time to ask again. A host without a batch system has no end, and is not asked."""
        if "SLURM_JOB_ID" not in self._environment:
            await asyncio.Event().wait()
        await asyncio.sleep(ASK_EVERY_S * random.uniform(0.8, 1.2))

    async def _asked_s(self) -> float | None:
        job = self._environment.get("SLURM_JOB_ID", "")
        if job.isdigit():
            text = await output_of(["squeue", "-h", "-j", job, "-o", "%L"], ASK_TIMEOUT_S)
            remaining_s = duration_s(text) if text is not None else None
            if remaining_s is not None:
                return remaining_s
            log.info("allocation.end_not_told", answer=(text or "").strip()[:80])
        return remaining_s_in(self._environment, time.time())
