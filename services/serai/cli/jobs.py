"""Lists the Slurm jobs of `serai submit`, of the launcher and of `agent.sbatch`: their state, why they wait in plain
words, when they are expected to start, and beside each what the registry says of its session.

Works when Slurm does not answer, or the registry does not: it says so, and shows what the other one knows. Exit codes:
0 both were asked or nothing more could be, 1 Slurm did not answer, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from serai.cli.registry_reader import Reader, SeenSession, seen
from serai.cli.site_flag import add_site_flag, asked_site
from serai.cli.site_registry import look
from serai.launcher.jobs import Jobs, JobState, ObservedJob, Unknown
from serai.launcher.site import Site
from serai.launcher.slurm_answers import plain_reason
from serai.launcher.slurm_commands import SlurmCommands
from serai.runtime.slurm_time import duration_text
from serai.runtime.telemetry import set_up_logs

DONE, NO_ANSWER = 0, 1
BY_HAND = "serai-agent"
"""The name that `agent.sbatch` gives its job."""
_HEADS = ("JOB", "MODEL", "STATE", "LEFT", "PARTITION", "NODES", "SESSION", "WHY, OR WHEN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_site_flag(parser)
    parser.add_argument("--all", action="store_true", help="all your jobs, those that have ended and others too")
    parser.add_argument("--json", action="store_true", help="JSON instead of text for people")
    parser.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    site = asked_site(arguments)
    set_up_logs("tools", "error")
    try:
        return asyncio.run(_watch(site, arguments) if arguments.watch else _once(site, arguments))
    except BrokenPipeError:  # `… | head`
        sys.stderr.close()
        return DONE


async def _watch(site: Site, arguments: argparse.Namespace) -> int:
    slurm = SlurmCommands(site.commands)
    while True:
        view = await _look(site, slurm)
        if not arguments.json:
            print(f"\n{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")
        _show(view, arguments)
        await asyncio.sleep(site.commands.query_every_s)


async def _once(site: Site, arguments: argparse.Namespace) -> int:
    view = await _look(site, SlurmCommands(site.commands))
    _show(view, arguments)
    return NO_ANSWER if isinstance(view.jobs, Unknown) else DONE


@dataclass(frozen=True, slots=True)
class View:
    """What both say at one time."""

    jobs: Jobs | Unknown
    sessions: Sequence[SeenSession] | Unknown
    now_s: float
    """Seconds since 1970."""

    def sessions_of(self, job: ObservedJob) -> list[SeenSession]:
        if isinstance(self.sessions, Unknown):
            return []
        return [one for one in self.sessions if one.allocation == job.allocation]


async def _look(site: Site, slurm: SlurmCommands) -> View:
    jobs, sessions = await asyncio.gather(slurm.jobs(), look(site, _seen))
    return View(jobs, sessions, time.time())


async def _seen(reader: Reader) -> list[SeenSession]:
    await reader.listen()
    now = time.monotonic()
    return [seen(reader.copy, record, now) for record in reader.copy.replica.records()]


def _show(view: View, arguments: argparse.Namespace) -> None:
    jobs = (
        []
        if isinstance(view.jobs, Unknown)
        else [job for job in view.jobs.jobs if arguments.all or _current(job, view)]
    )
    if arguments.json:
        print(orjson.dumps(_json(view, jobs)).decode(), flush=True)
        return
    rows = [_row(job, view) for job in jobs]
    if isinstance(view.jobs, Unknown):
        rows = [_row_of_session(one) for one in _in_jobs(view)]
    lines = [_HEADS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)
    if isinstance(view.jobs, Unknown):
        _say(f"Slurm does not tell: {view.jobs.reason}; what runs goes on. Shown is what the registry knows")
    elif not rows:
        _say("no jobs with agents in the queue" + ("" if arguments.all else "; --all shows all of yours"))
    if isinstance(view.sessions, Unknown):
        _say(f"sessions are not known: {view.sessions.reason}")


def _current(job: ObservedJob, view: View) -> bool:
    """Also those that were submitted by hand."""
    return not job.state.over and (job.ours is not None or job.name == BY_HAND or bool(view.sessions_of(job)))


def _model(job: ObservedJob, view: View) -> str:
    if job.ours is not None:
        return job.ours.model
    return next((one.model for one in view.sessions_of(job)), job.name)


def _in_jobs(view: View) -> list[SeenSession]:
    if isinstance(view.sessions, Unknown):
        return []
    return [one for one in view.sessions if one.allocation.startswith("slurm-") and one.state != "left"]


def _row(job: ObservedJob, view: View) -> tuple[str, ...]:
    sessions = view.sessions_of(job)
    states = ", ".join(str(one.state) for one in sessions if one.state != "left")
    gone = "left" if sessions else "–"
    return (
        str(job.id),
        _model(job, view),
        str(job.state) if job.state is not JobState.UNKNOWN else job.word,
        "–" if job.time_left_s is None else duration_text(job.time_left_s),
        job.partition,
        job.nodes or "–",
        "?" if isinstance(view.sessions, Unknown) else states or gone,
        why(job, view.now_s),
    )


def why(job: ObservedJob, now_s: float) -> str:
    """Why it waits, and when it is expected to start; or how it ended."""
    reason = plain_reason(job.reason) if job.reason else ""
    if job.state is JobState.PENDING and job.starts_at_s is not None:
        wait_s = job.starts_at_s - now_s
        when = f"expected in {duration_text(wait_s)}" if wait_s >= 60 else "expected within a minute"
        return f"{reason}; {when}" if reason else when
    return reason


def _row_of_session(session: SeenSession) -> tuple[str, ...]:
    job = session.allocation.removeprefix("slurm-")
    return (job, session.model, "?", "–", "?", session.host or "–", str(session.state), session.why_not_routed or "")


def _json(view: View, jobs: list[ObservedJob]) -> dict[str, Any]:
    return {
        "slurm": {"answered": not isinstance(view.jobs, Unknown), "problem": _problem(view.jobs)},
        "registry": {"answered": not isinstance(view.sessions, Unknown), "problem": _problem(view.sessions)},
        "jobs": [
            {
                "job": job.id.job,
                "cluster": job.id.cluster,
                "user": job.id.user,
                "submitted_at_s": job.id.submitted_at_s,
                "name": job.name,
                "model": job.ours.model if job.ours else None,
                "state": job.state,
                "slurm_state": job.word,
                "reason": job.reason,
                "why": why(job, view.now_s),
                "partition": job.partition,
                "nodes": job.nodes,
                "time_limit_s": job.time_limit_s,
                "time_left_s": job.time_left_s,
                "starts_at_s": job.starts_at_s,
                "sessions": [{"session": one.session, "state": one.state} for one in view.sessions_of(job)],
            }
            for job in jobs
        ],
        "sessions": [
            {"session": one.session, "allocation": one.allocation, "model": one.model, "state": one.state}
            for one in _in_jobs(view)
        ],
    }


def _problem(answer: object) -> str:
    return answer.reason if isinstance(answer, Unknown) else ""


def _say(text: str) -> None:
    sys.stderr.write(f"serai jobs: {text}\n")
