"""Slurm by its commands, here or on a login node. One command at a time, each bounded in time; the queue is asked
seldom; after several failures nothing is asked for a while. What a cluster does is an answer, never an exception."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath

from serai.launcher.jobs import Cancelled, ExpectedStart, JobId, Jobs, RefusalKind, Refused, Unknown
from serai.launcher.site import CommandSettings
from serai.launcher.slurm_answers import (
    SQUEUE_FORMAT,
    Reservation,
    jobs_in,
    last_words,
    refusal,
    reservations_in,
    start_in,
    submitted,
)
from serai.runtime.bounded_command import Ended, run_bounded

_KILL_AFTER_S = 5
_MARK = "SERAI"


class Circuit:
    """Whether a batch system that has failed may be asked again. Time is an argument."""

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._closed_until_s = 0.0
        self._problem = ""

    def refuses(self, now_s: float) -> str:
        """Why not to ask; empty = ask. After a pause one command is let through, and decides."""
        if now_s >= self._closed_until_s:
            return ""
        return f"not asked for {self._closed_until_s - now_s:.0f} s more: {self._problem}"

    def answered(self) -> None:
        self._failures, self._closed_until_s = 0, 0.0

    def failed(self, problem: str, now_s: float) -> None:
        self._failures += 1
        self._problem = problem
        if (beyond := self._failures - self._settings.failures_max) >= 0:
            pause_s = self._settings.pause_s * 2 ** min(beyond, 20)
            self._closed_until_s = now_s + min(pause_s, self._settings.pause_max_s)


class SlurmCommands:
    """The commands sbatch, squeue, scancel and scontrol, as `jobs.Slurm`."""

    def __init__(self, settings: CommandSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._circuit = Circuit(settings)
        self._one_at_a_time = asyncio.Lock()
        self._answers = 0
        self._told: Jobs | Unknown | None = None
        self._told_at_s = 0.0

    async def jobs(self) -> Jobs | Unknown:
        """All jobs of this user, those that have just ended too."""
        async with self._one_at_a_time:
            age_s = self._clock() - self._told_at_s
            if self._told is None or age_s >= self._settings.query_every_s:
                self._told, age_s = await self._ask_for_jobs(), 0.0
                self._told_at_s = self._clock()
            return self._told if isinstance(self._told, Unknown) else replace(self._told, age_s=age_s)

    async def submit(self, script: str, options: Sequence[str] = ()) -> JobId | Refused | Unknown:
        """The script goes in by standard input: nothing has to be written where the login node sees it."""
        async with self._one_at_a_time:
            ended = await self._run(["sbatch", *self._cluster(), "--parsable", *options], script)
            if isinstance(ended, Unknown):
                return ended
            answer = submitted(ended.code, ended.output, ended.errors, self._settings.cluster)
            self._judge(answer)
            return answer

    async def cancel(self, job: JobId) -> Cancelled | Refused | Unknown:
        """Plain: with `--signal` scancel waits for a job that has not started."""
        cluster = ["--clusters", job.cluster] if job.cluster else self._cluster()
        async with self._one_at_a_time:
            ended = await self._run(["scancel", *cluster, job.job])
            if isinstance(ended, Unknown):
                return ended
            # Already over, or so long that Slurm has forgotten it.
            gone = "Invalid job id specified" in ended.errors or "already completing" in ended.errors
            answer = Cancelled() if ended.code == 0 or gone else refusal(ended.errors or f"exit code {ended.code}")
            self._judge(answer)
            return answer

    async def expected_start(self, script: str, options: Sequence[str] = ()) -> ExpectedStart | Refused | Unknown:
        """By `sbatch --test-only`."""
        async with self._one_at_a_time:
            ended = await self._run(["sbatch", *self._cluster(), "--test-only", *options], script)
            if isinstance(ended, Unknown):
                return ended
            answer = start_in(ended.code, ended.errors + ended.output, time.time())
            self._judge(answer)
            return answer

    async def reservations(self) -> tuple[Reservation, ...] | Unknown:
        """What nodes are kept for: maintenances above all."""
        async with self._one_at_a_time:
            ended = await self._run(["scontrol", *self._cluster(), "--oneliner", "show", "reservation"])
            if isinstance(ended, Unknown):
                return ended
            if ended.code:
                return self._failed(f"scontrol: {last_words(ended.errors) or f'exit code {ended.code}'}")
            self._circuit.answered()
            return reservations_in(ended.output)

    async def nodes(self) -> frozenset[str] | Unknown:
        """The names of all nodes: an unknown one in `--exclude` makes sbatch refuse the job."""
        async with self._one_at_a_time:
            ended = await self._run(["sinfo", *self._cluster(), "--noheader", "--Node", f"--format={_MARK} %N"])
            if isinstance(ended, Unknown):
                return ended
            if ended.code:
                return self._failed(f"sinfo: {last_words(ended.errors) or f'exit code {ended.code}'}")
            self._circuit.answered()
            lines = (line.split() for line in ended.output.splitlines())
            return frozenset(words[1] for words in lines if len(words) == 2 and words[0] == _MARK)

    async def _ask_for_jobs(self) -> Jobs | Unknown:
        # All states: a job that has ended says how, for some minutes. One line for each element of an array.
        flags = ["--me", "--all", "--array", "--states=all", f"--format={SQUEUE_FORMAT}"]
        ended = await self._run(["squeue", *self._cluster(), *flags])
        if isinstance(ended, Unknown):
            return ended
        if ended.code:
            return self._failed(f"squeue: {last_words(ended.errors) or f'exit code {ended.code}'}")
        found = jobs_in(ended.output, self._settings.cluster)
        if isinstance(found, Unknown):
            return self._failed(found.reason)
        self._circuit.answered()
        self._answers += 1
        return Jobs(found, self._answers, 0.0)

    async def _run(self, words: list[str], given: str = "") -> Ended | Unknown:
        if reason := self._circuit.refuses(self._clock()):
            return Unknown(f"the batch system is {reason}")
        ended = await run_bounded(command_line(words, self._settings), self._bound_s, given)
        return ended if isinstance(ended, Ended) else self._failed(ended.reason)

    def _judge(self, answer: object) -> None:
        """A refusal is an answer too, unless it says that nobody could be asked."""
        if isinstance(answer, Refused) and answer.kind is RefusalKind.TRANSIENT:
            self._circuit.failed(answer.text, self._clock())
        else:
            self._circuit.answered()

    def _failed(self, problem: str) -> Unknown:
        self._circuit.failed(problem, self._clock())
        return Unknown(problem)

    def _cluster(self) -> list[str]:
        return ["--clusters", self._settings.cluster] if self._settings.cluster else []

    @property
    def _bound_s(self) -> float:
        """The far end kills first, so that it can tell."""
        return self._settings.timeout_s + (_KILL_AFTER_S + 2 if _by_ssh(self._settings.prefix) else 0)


def command_line(words: Sequence[str], settings: CommandSettings) -> list[str]:
    """The words to start: with moments as counts, whatever the time zone; and quoted where a shell at the other end
    would read them, with a bound there too, since killing ssh ends nothing at the other end."""
    plain = ["env", "SLURM_TIME_FORMAT=%s", *words]
    if not _by_ssh(settings.prefix):
        return [*settings.prefix, *plain]
    bounded = ["timeout", f"--kill-after={_KILL_AFTER_S}", f"{settings.timeout_s:g}", *plain]
    return [*settings.prefix, shlex.join(bounded)]


def _by_ssh(prefix: Sequence[str]) -> bool:
    return bool(prefix) and PurePath(prefix[0]).name == "ssh"
