"""A Slurm, its jobs and the sessions in them, in a few lines and virtual time, with faults at will."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from serai.launcher.deployments import Deployment, picture_of
from serai.launcher.job_book import BookRules, JobBook
from serai.launcher.jobs import JobId, Jobs, JobState, ObservedJob, RefusalKind, Refused, Unknown
from serai.launcher.picture import Plan, Rules
from serai.launcher.runs import SeenSession
from serai.launcher.slots import Slot, SlotNames, slot_name
from serai.launcher.succession import plan
from serai.runtime.session_state import SessionState

STEP_S = 10.0
ANSWER_EVERY_S = 30.0
FORGOTTEN_S = 3600.0


@dataclass
class TinyJob:
    number: int
    name: str
    slot: Slot
    limit_s: float
    submitted_at_s: float
    starts_at_s: float
    load_s: float
    fails_at_s: float | None = None
    """Ends by itself then."""
    over_at_s: float | None = None
    over: JobState | None = None
    runs: int = 0
    mute: bool = False
    """No session of it is ever heard."""
    draining: bool = False
    in_flight: int = 0

    def running(self, now: float) -> bool:
        return self.over is None and now >= self.starts_at_s

    def serving(self, now: float) -> bool:
        return self.running(now) and now >= self.starts_at_s + self.load_s


@dataclass
class World:
    """Chances are per job or per answer; `waits_s` says what a job waits."""

    seed: int
    deployment: Deployment
    waits_s: Callable[[random.Random], float]
    load_s: float = 120.0
    fail: float = 0.0
    hang: float = 0.0
    preempt: float = 0.0
    unknown: float = 0.0
    empty: float = 0.0
    unanswered: float = 0.0
    refuse: float = 0.0
    restarts: float = 0.0
    """Chance of a restart of the launcher, per step."""
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.now = 1000.0
        self.jobs: dict[int, TinyJob] = {}
        self.number = 100
        self.answers = 0
        self.answer: Jobs | Unknown = Unknown("not asked yet")
        self.answered_at_s = self.now
        self.unserved_s: dict[int, float] = {}
        self.last_served_s: dict[int, float] = {}
        self.submissions: list[tuple[float, Slot, str]] = []
        self.broken: list[str] = []
        self.dropped = 0
        """Requests that ended with their jobs."""
        self.succeeded: dict[str, float] = {}
        self.book = self.new_book()

    def new_book(self) -> JobBook:
        names = SlotNames("site", [self.deployment.name])
        return JobBook(BookRules(), names, {self.deployment.name: self.deployment.specification})

    # -- the cluster ---------------------------------------------------------------------------------------------

    def submit(self, slot: Slot, name: str, limit_s: float) -> JobId | Refused | Unknown:
        if self.random.random() < self.refuse:
            return Refused(RefusalKind.TRANSIENT, "sbatch: error: Socket timed out", "wait")
        lost = self.random.random() < self.unanswered
        if not lost or self.random.random() < 0.5:
            self.number += 1
            hangs = self.random.random() < self.hang
            job = TinyJob(self.number, name, slot, limit_s, self.now, self.now + self.waits_s(self.random), self.load_s)
            if hangs:  # Half of them never get as far as an agent, whose deadline would end them.
                job.load_s, job.mute = 1e9, self.random.random() < 0.5
                job.fails_at_s = None if job.mute else job.starts_at_s + 1800
            if self.random.random() < self.fail:
                job.fails_at_s = job.starts_at_s + self.random.uniform(0, 2 * self.load_s)
            self.jobs[job.number] = job
        return Unknown("sbatch: no answer in 30 s") if lost else JobId("", str(self.number))

    def advance(self) -> None:
        self.now += STEP_S
        self.jobs = {
            number: job
            for number, job in self.jobs.items()
            if job.over_at_s is None or self.now - job.over_at_s < FORGOTTEN_S
        }
        for job in self.jobs.values():
            if job.over is not None or not job.running(self.now):
                continue
            if job.fails_at_s is not None and self.now >= job.fails_at_s:
                self.end(job, JobState.FAILED)
            elif self.now >= job.starts_at_s + job.limit_s:
                self.end(job, JobState.TIMED_OUT)
            elif self.random.random() < self.preempt:
                job.runs += 1
                job.in_flight, job.draining = 0, False
                job.starts_at_s = self.now + self.waits_s(self.random)
            elif job.draining and job.in_flight == 0:
                self.end(job, JobState.COMPLETED)
            elif job.serving(self.now):
                # Long answers: a fifth of them end in a step; an agent takes no new ones when its time is up.
                job.in_flight -= sum(self.random.random() < 0.2 for _ in range(job.in_flight))
                left_s = job.starts_at_s + job.limit_s - self.now
                if not job.draining and left_s > 180:
                    job.in_flight += self.random.randrange(4)

    def end(self, job: TinyJob, state: JobState) -> None:
        job.over, job.over_at_s = state, self.now
        self.dropped += job.in_flight
        job.in_flight = 0

    def look(self) -> None:
        """squeue, every now and then."""
        if self.now - self.answered_at_s < ANSWER_EVERY_S:
            return
        self.answered_at_s = self.now
        if self.random.random() < self.unknown:
            self.answer = Unknown("squeue: no answer in 30 s")
            return
        self.answers += 1
        listed = [] if self.random.random() < self.empty else [self.observed(job) for job in self.jobs.values()]
        self.answer = Jobs(tuple(job for job in listed if job is not None), self.answers, 0.0)

    def observed(self, job: TinyJob) -> ObservedJob | None:
        if job.over_at_s is not None and self.now - job.over_at_s > 300:
            return None
        if job.over is not None and job.over_at_s is not None and self.now - job.over_at_s < 20:
            state = JobState.COMPLETING
        elif job.over is not None:
            state = job.over
        else:
            state = JobState.RUNNING if job.running(self.now) else JobState.PENDING
        left_s = job.limit_s if not job.running(self.now) else job.starts_at_s + job.limit_s - self.now
        return ObservedJob(
            id=JobId("", str(job.number), int(job.submitted_at_s), "me"),
            state=state,
            word=state.upper(),
            number=str(job.number),
            name=job.name,
            time_limit_s=job.limit_s,
            time_left_s=max(0.0, left_s),
        )

    def sessions(self) -> list[SeenSession]:
        found = []
        for job in self.jobs.values():
            if job.mute:
                continue
            if not job.running(self.now):
                if job.over_at_s is not None and self.now - job.over_at_s < 600:
                    found.append(
                        SeenSession(session=f"s{job.number}", allocation=f"slurm-{job.number}", state=SessionState.LEFT)
                    )
                continue
            state = SessionState.SERVING if job.serving(self.now) else SessionState.LOADING
            found.append(
                SeenSession(
                    session=f"s{job.number}",
                    allocation=f"slurm-{job.number}",
                    state=SessionState.DRAINING if job.draining else state,
                    in_flight=job.in_flight,
                    remaining_s=job.starts_at_s + job.limit_s - self.now,
                )
            )
        return found

    # -- the launcher's shell, in short --------------------------------------------------------------------------

    def step(self) -> Plan:
        self.advance()
        self.look()
        if self.random.random() < self.restarts:
            kept = self.book.kept("me", 1, self.now)
            self.book = self.new_book()
            self.book.restore(kept, self.now)
        self.book.hear_jobs(self.answer, self.now)
        self.book.hear_sessions(self.sessions(), self.now)
        blind = self.book.unknown or ("doubt" if self.book.braked(self.now) else "")
        blind = blind or ("" if self.book.answers else "no answer since the start")
        picture = picture_of(self.book, [self.deployment], self.now, blind=blind, succeeded_at_s=self.succeeded)
        made = plan(picture, self.rules)
        self.check(made, blind)
        self.act(made)
        self.note()
        return made

    def check(self, made: Plan, blind: str) -> None:
        if blind and not made.idle:
            self.broken.append(f"{self.now}: acts on a picture that is not whole")
        for cancel in made.cancel:
            job = self.jobs[int(cancel.job.job)]
            if job.running(self.now) and job.in_flight:
                self.broken.append(f"{self.now}: cancels job {job.number}, which has {job.in_flight} requests")
        for drain in made.drain:
            job = next(job for job in self.jobs.values() if f"s{job.number}" == drain.session)
            others = [one for one in self.jobs.values() if one.slot == job.slot and one is not job]
            if not any(one.serving(self.now) and not one.draining for one in others):
                self.broken.append(f"{self.now}: drains {drain.session}, and nobody serves in its place")

    def act(self, made: Plan) -> None:
        for drain in made.drain:
            for job in self.jobs.values():
                if f"s{job.number}" == drain.session:
                    job.draining = True
        for cancel in made.cancel:
            self.book.cancelling(cancel.run, self.now, dismissed=cancel.dismissed)
            job = self.jobs[int(cancel.job.job)]
            if job.over is None:
                self.end(job, JobState.CANCELLED)
        for submit in made.submit:
            generation = self.book.next_generation(submit.slot)
            name = slot_name("site", submit.slot, generation, self.deployment.model, f"{self.number}")
            verdict = next(word.verdict for word in made.says if word.slot == str(submit.slot))
            self.book.submitting(name, submit.time_limit_s, self.now)
            answer = self.submit(submit.slot, str(name), submit.time_limit_s)
            self.book.submitted(name, answer, self.now)
            self.submissions.append((self.now, submit.slot, verdict))
            if verdict == "successor":
                self.succeeded[self.deployment.name] = self.now

    def note(self) -> None:
        for number in range(self.deployment.count):
            mine = [job for job in self.jobs.values() if job.slot.number == number]
            if any(job.serving(self.now) for job in mine):
                self.last_served_s[number] = self.now
            elif number in self.last_served_s:
                self.unserved_s[number] = self.unserved_s.get(number, 0.0) + STEP_S
            there = [job for job in mine if job.over is None]
            if len(there) > 2:
                self.broken.append(f"{self.now}: slot {number} has {len(there)} jobs")

    def run(self, hours: float) -> World:
        until_s = self.now + hours * 3600
        while self.now < until_s:
            self.step()
        return self
