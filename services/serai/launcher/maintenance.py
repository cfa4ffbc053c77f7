"""Jobs that would not end before a maintenance are never started before it: they are made shorter, and it is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from serai.launcher.jobs import ExpectedStart, Refused, Unknown
from serai.launcher.slurm_answers import Reservation, in_the_way, time_before
from serai.runtime.slurm_time import duration_text

TIME_LEAST_S = 1800.0
"""A shorter job is hardly worth loading a model for."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The time limit to ask for."""

    time_s: float
    note: str = ""
    """For people; empty = as it was asked for."""


class Calendar(Protocol):
    """What `slurm_commands.SlurmCommands` has for this."""

    async def reservations(self) -> tuple[Reservation, ...] | Unknown:
        """What nodes are kept for."""

    async def expected_start(self, script: str, options: Sequence[str] = ()) -> ExpectedStart | Refused | Unknown:
        """When such a job would start."""


async def fitted(
    calendar: Calendar, script_for: Callable[[float], str], time_s: float, now_s: float, least_s: float | None = None
) -> Fitted:
    """`time_s`, or less where the next maintenance wants it. `now_s`: seconds since 1970. `least_s`: the shortest job
    that is of use."""
    reservations = await calendar.reservations()
    if isinstance(reservations, Unknown):
        return Fitted(time_s, f"maintenances are not known ({reservations.reason})")
    maintenance = in_the_way(reservations, now_s, time_s)
    if maintenance is None:
        return Fitted(time_s)
    if not maintenance.all_nodes:
        # Perhaps it has other nodes than those that the job would get; Slurm knows.
        start = await calendar.expected_start(script_for(time_s))
        if not isinstance(start, ExpectedStart) or now_s + start.wait_s < maintenance.starts_at_s:
            return Fitted(time_s)
    begins = f"maintenance `{maintenance.name}` begins in {duration_text(maintenance.starts_at_s - now_s)}"
    shorter_s = time_before(maintenance, now_s)
    if shorter_s < (TIME_LEAST_S if least_s is None else least_s):
        ends = duration_text(maintenance.ends_at_s - now_s)
        return Fitted(time_s, f"{begins}: too soon for a job before it; the job starts when it is over, in {ends}")
    told = f"{duration_text(time_s)} is shortened to {duration_text(shorter_s)}, so that the job can start before it"
    return Fitted(shorter_s, f"{begins}: {told}")
