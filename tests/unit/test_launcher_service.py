"""The launcher's shell: what it asks of the batch system and of sessions, in which order, and what it keeps first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serai.contracts.codec import decode, encode
from serai.contracts.drain import DrainAnswer, DrainRequest
from serai.contracts.launcher import ExplainRequest, LauncherState, LauncherWord, ScaleRequest, WakeRequest
from serai.contracts.placement import Assignment, PoolReport, PoolRun, RunState
from serai.contracts.registry import AllocationEnded
from serai.contracts.session_record import Fault, GpuDevice
from serai.contracts.subjects import DRAIN, ENDED
from serai.launcher.deployments import Deployment
from serai.launcher.jobs import (
    Cancelled,
    ExpectedStart,
    JobId,
    Jobs,
    JobState,
    ObservedJob,
    RefusalKind,
    Refused,
    Unknown,
)
from serai.launcher.picture import Cancel, Drain, Plan, Sleep, Submit
from serai.launcher.runs import SeenSession
from serai.launcher.service import Launcher
from serai.launcher.settings import LauncherSettings
from serai.launcher.slots import Slot
from serai.launcher.slurm_answers import Reservation
from serai.launcher.succession import plan
from serai.runtime.bus import Message
from serai.runtime.session_state import SessionState
from unit.fakes import FakeBus, record_of
from unit.test_launcher_lease import Keys

CHAT = Deployment(name="chat", model="m", script="#!/bin/bash\n")
SLOT = Slot("chat", 0)


@dataclass
class RecordingSlurm:
    """Does nothing, and says what it is told to."""

    keys: Keys
    answer: JobId | Refused | Unknown = field(default_factory=lambda: JobId("", "101"))
    queue: Jobs | Unknown = field(default_factory=lambda: Jobs((), 1, 0.0))
    calls: list[tuple[str, Any]] = field(default_factory=list)
    kept: list[LauncherState] = field(default_factory=list)
    """What stood in KV when it was called."""

    async def submit(self, script: str, options: Sequence[str] = ()) -> JobId | Refused | Unknown:
        self._note("submit", (script, tuple(options)))
        return self.answer

    async def jobs(self) -> Jobs | Unknown:
        return self.queue

    async def cancel(self, job: JobId) -> Cancelled | Refused | Unknown:
        self._note("cancel", job)
        return Cancelled()

    reserved: tuple[Reservation, ...] = ()

    async def reservations(self) -> tuple[Reservation, ...] | Unknown:
        return self.reserved

    async def expected_start(self, script: str, options: Sequence[str] = ()) -> ExpectedStart | Refused | Unknown:
        return Unknown("not asked")

    async def nodes(self) -> frozenset[str] | Unknown:
        return self.known_nodes

    known_nodes: frozenset[str] | Unknown = frozenset({"n1", "n2", "n3"})

    def _note(self, what: str, told: Any) -> None:
        self.calls.append((what, told))
        assert self.keys.value is not None
        self.kept.append(decode(LauncherState, self.keys.value))


class Shell:
    def __init__(self, folder: Path) -> None:
        site_file = folder / "site.yaml"
        site_file.touch()
        settings = LauncherSettings(site_file=site_file, site="local")
        self.bus, self.keys = FakeBus(), Keys()
        self.slurm = RecordingSlurm(self.keys)
        self.launcher = Launcher(settings, [CHAT], self.bus, self.slurm, self.keys, 30.0, calendar=self.slurm)
        asyncio.run(self.launcher.lease.beat())

    def act(self, **changes: Any) -> None:
        asyncio.run(self.launcher._act(Plan(**changes)))

    def hear(self, *jobs: ObservedJob, number: int = 2) -> None:
        asyncio.run(self.launcher._note(self.launcher.book.hear_jobs(Jobs(jobs, number, 0.0), 10**6 + 30.0 * number)))


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def observed(name: str, state: JobState) -> ObservedJob:
    return ObservedJob(id=JobId("", "101"), state=state, word=state.upper(), number="101", name=name)


def test_a_submission_is_kept_before_it_is_made(shell: Shell) -> None:
    shell.act(submit=(Submit(SLOT, 7200.0, "the slot has no job"),))
    ((what, (script, options)),) = shell.slurm.calls
    assert (what, script) == ("submit", CHAT.script)
    name = options[0].removeprefix("--job-name=")
    assert options[1:] == ("--time=2:00:00", "--comment=serai chat/0 generation 1")
    assert [run.name for run in shell.slurm.kept[0].runs] == [name]
    (run,) = shell.launcher.book.runs
    assert (run.id, run.allocation) == (JobId("", "101"), "slurm-101")


@pytest.mark.parametrize(
    ("known", "told"), [(frozenset({"n1", "n9"}), ["--exclude=n7,n1"]), (frozenset({"x"}), []), (Unknown("down"), [])]
)
def test_h29_hosts_in_quarantine_get_no_job(shell: Shell, known: frozenset[str] | Unknown, told: list[str]) -> None:
    shell.launcher.scaled.now["chat"] = replace(CHAT, excluded=("n7",))
    shell.slurm.known_nodes = known
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    faults = [Fault("uncorrectable ECC error", at, "GPU-1")]
    record = record_of("s1", site="local", host="n1.cluster", faults=faults)
    shell.launcher.copy.replica.merge(record, time.monotonic(), heard=True)
    shell.act(submit=(Submit(SLOT, 7200.0, "the slot has no job"),))
    ((_, (_, options)),) = shell.slurm.calls
    assert list(options[3:]) == told


def test_h10_a_job_ends_before_a_maintenance(shell: Shell) -> None:
    starts_at_s = int(time.time()) + 7200
    shell.slurm.reserved = (Reservation("upgrade", starts_at_s, starts_at_s + 3600, True, True),)
    shell.act(submit=(Submit(SLOT, 28_800.0, ""),))
    ((_, (_, options)),) = shell.slurm.calls
    assert options[1] < "--time=2:00:00"
    assert 3600 < shell.launcher.book.runs[0].time_limit_s < 7200


@pytest.mark.parametrize("away", [True, False])
def test_h14_who_has_lost_its_lease_does_nothing(shell: Shell, away: bool) -> None:
    shell.keys.away = away
    if not away:
        shell.keys.value, shell.keys.revision = encode(LauncherState("other", 1)), 99
    shell.act(
        submit=(Submit(SLOT, 7200.0, ""),),
        cancel=(Cancel(JobId("", "101"), SLOT, "n", ""),),
        drain=(Drain("s", SLOT, "n", 5.0, ""),),
    )
    assert shell.slurm.calls == []
    assert shell.bus.published == []
    assert shell.launcher.book.runs == ()


def test_h13_refusals_and_silence_are_kept_apart(shell: Shell) -> None:
    shell.slurm.answer = Refused(RefusalKind.INVALID, "Invalid account", "write another")
    shell.act(submit=(Submit(SLOT, 7200.0, ""),))
    assert shell.launcher.book.runs == ()
    trouble = shell.launcher.book.trouble(SLOT)
    assert trouble is not None
    assert trouble.until_s is None
    shell.slurm.answer = Unknown("no answer in 30 s")
    shell.act(submit=(Submit(SLOT, 7200.0, ""),))
    assert [run.id for run in shell.launcher.book.runs] == [None]


def test_a_drain_is_asked_for_once_in_a_while(shell: Shell) -> None:
    asked: list[DrainRequest] = []

    def answer(data: bytes) -> bytes:
        asked.append(decode(DrainRequest, data))
        return encode(DrainAnswer("s1", True, 3))

    shell.bus.answers[DRAIN.of("s1")] = answer
    for _ in range(3):
        shell.act(drain=(Drain("s1", SLOT, "n", 880.0, "another one serves"),))
    assert asked == [DrainRequest("another one serves", 880.0)]


def test_a_cancel_and_a_sleep(shell: Shell) -> None:
    shell.act(cancel=(Cancel(JobId("", "101"), SLOT, "n", "left"),), sleep=(Sleep("chat", "idle"),))
    assert shell.slurm.calls == [("cancel", JobId("", "101"))]
    assert shell.launcher.book.asleep == {"chat"}


def test_the_registry_is_told_of_a_job_that_ended_with_its_session(shell: Shell) -> None:
    told: list[AllocationEnded] = []

    def answer(data: bytes) -> bytes:
        told.append(decode(AllocationEnded, data))
        return data

    shell.bus.answers[ENDED.of_site("local")] = answer
    shell.act(submit=(Submit(SLOT, 7200.0, ""),))
    name = shell.launcher.book.runs[0].name
    shell.hear(observed(name, JobState.RUNNING))
    seen = SeenSession(session="s", allocation="slurm-101", state=SessionState.SUSPECTED)
    shell.launcher.book.hear_sessions([seen], 10**6 + 61.0)
    shell.hear(observed(name, JobState.NODE_FAILED), number=3)
    assert told == [AllocationEnded("local", "slurm-101", "job 101: node_failed")]


def test_it_tells_its_plan_and_wakes_what_sleeps(shell: Shell) -> None:
    launcher = shell.launcher
    launcher.book.asleep.add("chat")
    launcher.last = plan(launcher._picture(""), launcher._settings.rules)

    def answered(handler: Any, question: object) -> LauncherWord:
        shell.bus.take()
        handler(Message("x", encode(question), "_INBOX_tools.1"))
        (message,) = shell.bus.take()
        return decode(LauncherWord, message.payload)

    word = answered(launcher.answers.on_explain, ExplainRequest("chat"))
    assert [slot.verdict for slot in word.slots] == ["asleep"]
    assert answered(launcher.answers.on_explain, ExplainRequest("nobody/0")).problem == "there is no slot 'nobody/0'"
    assert "there is no deployment 'nobody'" in answered(launcher.answers.on_wake, WakeRequest("nobody")).problem
    answered(launcher.answers.on_wake, WakeRequest("chat"))
    assert launcher.book.asleep == set()


def test_h17_it_sees_no_whole_picture_before_everybody_has_spoken(shell: Shell) -> None:
    launcher = shell.launcher
    assert launcher._blind() == "the registry has not answered yet"
    launcher.copy.synced = True
    assert launcher._blind().startswith("it has listened for 0 s only")
    launcher._listening_since_s -= 60
    assert launcher._blind() == "the batch system: it has not answered yet"
    launcher.book.hear_jobs(Jobs((), 1, 0.0), launcher._listening_since_s + 60)
    assert launcher._blind() == ""
    launcher.book.hear_jobs(Unknown("squeue: no answer"), launcher._listening_since_s + 60)
    assert launcher._blind() == "the batch system: squeue: no answer"
    launcher.book.hear_jobs(Jobs((), 2, 0.0), launcher._listening_since_s + 60)
    shell.bus.lose_connection()
    assert launcher._blind() == "there is no connection to NATS"
    shell.bus.reconnect()
    assert launcher._blind().startswith("it has listened for 0 s only")


# -- pool agents -----------------------------------------------------------------------------------------------------


def pool_report(**fields: Any) -> PoolReport:
    one = PoolRun(Assignment("g1-1", "m", "vllm"), RunState.SERVING, "s1", [0])
    usual = {"allocation": "slurm-101", "gpus": [GpuDevice("u")], "runs": [one], "allocation_remaining_s": 600.0}
    return PoolReport("slurm-101-n1", "i", 1, **(usual | fields))


def sessions_seen(shell: Shell, report: PoolReport, silent_s: float = 0.0) -> list[SeenSession]:
    shell.launcher.on_pool(Message("pool.x", encode(report)))
    return list(shell.launcher._seen({"slurm-101"}, time.monotonic() + silent_s))


def test_a_pool_agent_is_to_its_job_what_a_session_is(shell: Shell) -> None:
    """The sessions in it are the placer's business: they come and go, and the job goes on."""
    for name, allocation in (("s1", "slurm-101"), ("s2", "slurm-102")):
        record = record_of(name, site="local", allocation=allocation)
        shell.launcher.copy.replica.merge(record, time.monotonic(), heard=True)
    (seen,) = sessions_seen(shell, pool_report())
    assert (seen.session, seen.state, seen.in_flight) == ("slurm-101-n1", SessionState.SERVING, 1)
    assert 599 < (seen.remaining_s or 0.0) <= 600
    (empty,) = sessions_seen(shell, pool_report(runs=[]))
    assert (empty.state, empty.in_flight) == (SessionState.SERVING, 0), "an empty pool is no failed job"


def test_a_pool_that_is_about_to_end_drains_and_then_has_left(shell: Shell) -> None:
    (draining,) = sessions_seen(shell, pool_report(stopping=True))
    assert (draining.state, draining.in_flight) == (SessionState.DRAINING, 1)
    (left,) = sessions_seen(shell, pool_report(stopping=True, runs=[]), silent_s=20.0)
    assert left.state is SessionState.LEFT
    (silent,) = sessions_seen(shell, pool_report(), silent_s=20.0)
    assert silent.state is SessionState.SUSPECTED


def scale(shell: Shell, name: str, count: int) -> LauncherWord:
    shell.launcher.answers.on_scale(Message("launcher.scale.local", encode(ScaleRequest(name, count, "why")), "reply"))
    return decode(LauncherWord, shell.bus.published[-1].payload)


def test_the_placer_may_ask_for_more_slots_and_fewer_where_the_site_file_lets_it(shell: Shell) -> None:
    assert "may be scaled to 0 at most, and 2 was asked for" in scale(shell, "chat", 2).problem
    assert "there is no deployment 'none' (there is chat)" in scale(shell, "none", 2).problem
    shell.launcher.scaled.now["chat"] = replace(CHAT, scale_to=3)
    assert scale(shell, "chat", 3).problem == ""
    assert shell.launcher.scaled.now["chat"].count == 3
    assert "may be scaled to 3 at most, and 4 was asked for" in scale(shell, "chat", 4).problem
    assert "-1 was asked for" in scale(shell, "chat", -1).problem
    assert scale(shell, "chat", 0).problem == ""
    asyncio.run(shell.launcher.lease.beat())
    assert shell.keys.value is not None
    assert decode(LauncherState, shell.keys.value).scaled == {"chat": 0}


def test_what_was_asked_for_outlives_the_launcher(shell: Shell) -> None:
    shell.launcher.scaled.now["chat"] = replace(CHAT, scale_to=3)
    shell.launcher._restore(LauncherState("other", 1, scaled={"chat": 2, "gone": 5}))
    assert shell.launcher.scaled.now["chat"].count == 2
