"""What a launcher knows of its jobs over time, from answers that are late, partial, or none. Pure.

Two witnesses tell of a job: the batch system, and the sessions in it. Neither is believed alone where a mistake would
harm: a job is over when the batch system says so in as many words, or when it is missing from several answers in a row
while none of its sessions is alive. Jobs are known by name, which is new for each submission: numbers are used again,
and a submission that was not answered has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from serai.contracts.launcher import KeptRun, KeptTrouble, LauncherState
from serai.launcher.jobs import JobId, JobName, Jobs, JobState, ObservedJob, Refused, Unknown
from serai.launcher.learned import Durations
from serai.launcher.runs import HAS_NODES, Ended, Event, Requeued, Run, SeenSession, Served, Started
from serai.launcher.slots import Slot, SlotNames
from serai.launcher.trouble import FAILED, Trouble, after_failure, after_refusal
from serai.runtime.session_state import SessionState


@dataclass(frozen=True, slots=True, kw_only=True)
class BookRules:
    """How much evidence is needed. Times in seconds."""

    gone_answers: int = 3
    """So many answers in a row without a job, and no session of it alive: it is over."""
    gone_empty_answers: int = 10
    """So many, where the answers show no other job of ours either: an empty queue is what a queue that is not well
    looks like, and a job that waits has no session to speak for it."""
    answer_settle_s: float = 10.0
    """An answer that came sooner after a submission may have been on its way already, and proves nothing."""
    brake_share: float = 0.5
    """When more than this share of three or more jobs is missing at once, the answers are doubted …"""
    brake_s: float = 300.0
    """… for so long. Then they are believed: power fails, too."""
    short_life_s: float = 300.0
    """Who ends by itself sooner after its first token has failed."""


BRAKE_FROM_JOBS = 3


class JobBook:
    """Told of submissions, answers and sessions; tells runs, troubles and durations."""

    def __init__(self, rules: BookRules, names: SlotNames, specifications: Mapping[str, str]) -> None:
        self._rules = rules
        self._names = names
        self._specifications = dict(specifications)
        """Per deployment: the digest of what it is. Troubles belong to one."""
        self._runs: dict[str, Run] = {}
        self._troubles: dict[Slot, Trouble] = {}
        self._generations: dict[Slot, int] = {}
        self._waits: dict[str, Durations] = {}
        self._loads: dict[str, Durations] = {}
        self._requests: dict[str, int] = {}
        self.active_at_s: dict[str, float] = {}
        """Per deployment: when a request was last seen, or when there was last nobody to take one."""
        self.asleep: set[str] = set()
        self.answers = 0
        """Whole answers of the batch system since the start, or since `forget_answers`."""
        self.unknown = "it has not answered yet"
        """Why it did not answer when last asked; empty = it did."""
        self.heard_at_s: float | None = None
        self._answer_number: int | None = None
        self._doubted_since_s: float | None = None
        self.foreign: tuple[str, ...] = ()
        """Jobs that carry a launcher's name, but none of this site's deployments."""

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def runs(self) -> tuple[Run, ...]:
        """Of all slots, older generations first."""
        return tuple(sorted(self._runs.values(), key=lambda run: (run.slot, run.generation, run.name)))

    def trouble(self, slot: Slot) -> Trouble | None:
        """Only that of the deployment as it is now."""
        found = self._troubles.get(slot)
        return found if found and found.specification == self._specifications.get(slot.deployment, "") else None

    @property
    def troubled(self) -> set[Slot]:
        return set(self._troubles)

    def waits(self, deployment: str) -> Durations:
        return self._waits.setdefault(deployment, Durations())

    def loads(self, deployment: str) -> Durations:
        return self._loads.setdefault(deployment, Durations())

    def next_generation(self, slot: Slot) -> int:
        known = [run.generation for run in self._runs.values() if run.slot == slot]
        return max([self._generations.get(slot, 0), *known]) + 1

    def braked(self, now: float) -> bool:
        """Too many jobs are missing at once to believe it."""
        return self._doubted_since_s is not None and now - self._doubted_since_s < self._rules.brake_s

    # -- what this launcher does ---------------------------------------------------------------------------------

    def submitting(self, name: JobName, time_limit_s: float, now: float) -> None:
        """Before anything is submitted: from now on the job may exist."""
        named = self._names.read(str(name))
        if named is None:
            raise ValueError(f"{name} is no name of a job of this site")
        self._generations[named.slot] = named.generation
        self._runs[str(name)] = Run(
            name=str(name),
            slot=named.slot,
            generation=named.generation,
            submitted_at_s=now,
            submission_seen=True,
            time_limit_s=time_limit_s,
        )

    def submitted(self, name: JobName, answer: JobId | Refused | Unknown, now: float) -> None:
        """What became of it. After `Unknown` it counts as a job, until answers enough have not shown it."""
        run = self._runs.get(str(name))
        if run is None:
            return
        match answer:
            case JobId():
                found = run.id or answer
                self._runs[run.name] = replace(run, id=found, allocation=run.allocation or f"slurm-{found.job}")
            case Refused():
                del self._runs[run.name]
                self._fail(run.slot, after_refusal(self._troubles.get(run.slot), answer, now))
            case Unknown():
                self._runs[run.name] = replace(run, submitted_at_s=now, submission_seen=False)

    def withdrawn(self, name: JobName) -> None:
        """It was not submitted after all."""
        self._runs.pop(str(name), None)

    def cancelling(self, name: str, now: float, *, dismissed: bool) -> None:
        if run := self._runs.get(name):
            self._runs[name] = replace(run, cancelled_at_s=now, dismissed=run.dismissed or dismissed)

    def wake(self, deployment: str, now: float) -> None:
        """By hand: it is wanted again, whatever stopped it."""
        self.asleep.discard(deployment)
        self.active_at_s[deployment] = now
        self._troubles = {slot: one for slot, one in self._troubles.items() if slot.deployment != deployment}

    # -- the batch system ----------------------------------------------------------------------------------------

    def hear_jobs(self, answer: Jobs | Unknown, now: float) -> list[Event]:
        """One answer. The same one again says nothing new."""
        if isinstance(answer, Unknown):
            self.unknown = answer.reason or "no reason told"
            return []
        self.unknown = ""
        self.heard_at_s = now - answer.age_s
        if answer.number == self._answer_number:
            return []
        self._answer_number = answer.number
        self.answers += 1
        self._adopt(answer.jobs, now)
        seen = {job.name: job for job in answer.jobs}
        events: list[Event] = []
        for run in self.runs:
            if job := seen.get(run.name):
                events += self._seen(run, job, self.heard_at_s)
            elif run.state is not None or run.submitted_at_s + self._rules.answer_settle_s <= self.heard_at_s:
                self._runs[run.name] = replace(run, absent=run.absent + 1)
        self._doubt(now)
        return events + self._gone(now, shows_ours=any(job.name in self._runs for job in answer.jobs))

    def _adopt(self, jobs: Iterable[ObservedJob], now: float) -> None:
        """Jobs that carry a name of this site, and are not known: of an earlier launcher."""
        foreign = []
        for job in jobs:
            if job.ours is None or job.state.over or job.name in self._runs:
                continue
            named = self._names.read(job.name)
            if named is None:
                foreign.append(job.name)
                continue
            self._runs[job.name] = Run(name=job.name, slot=named.slot, generation=named.generation, submitted_at_s=now)
        self.foreign = tuple(sorted(foreign))

    def _seen(self, run: Run, job: ObservedJob, at_s: float) -> list[Event]:
        if job.state.over:
            return [self._end(run, job.state, at_s)]
        if job.state is JobState.UNKNOWN:  # A word nobody knows: it is there, and that is all.
            self._runs[run.name] = replace(run, id=job.id, allocation=job.allocation, absent=0)
            return []
        events: list[Event] = []
        now_run = replace(
            run,
            id=job.id,
            state=job.state,
            why=job.reason if job.state is JobState.PENDING else "",
            allocation=job.allocation,
            absent=0,
            time_limit_s=job.time_limit_s or run.time_limit_s,
        )
        if job.state is JobState.PENDING and run.state in (*HAS_NODES, JobState.COMPLETING):
            waiting = Run(name=run.name, slot=run.slot, generation=run.generation, submitted_at_s=at_s)
            now_run = replace(
                waiting,
                id=job.id,
                state=job.state,
                why=job.reason,
                allocation=job.allocation,
                submission_seen=True,
                time_limit_s=now_run.time_limit_s,
                dismissed=run.dismissed,
            )
            events.append(Requeued(run))
        if job.state in HAS_NODES:
            now_run = replace(now_run, ends_at_s=None if job.time_left_s is None else at_s + job.time_left_s)
            if run.started_at_s is None:
                elapsed_s = (job.time_limit_s or 0.0) - (job.time_left_s or 0.0)
                started_at_s = max(run.submitted_at_s, at_s - max(0.0, elapsed_s))
                now_run = replace(now_run, started_at_s=started_at_s)
                wait_s = started_at_s - run.submitted_at_s if run.submission_seen else None
                if wait_s is not None:
                    self.waits(run.slot.deployment).add(wait_s)
                events.append(Started(now_run, wait_s))
        self._runs[run.name] = now_run
        return events

    def _doubt(self, now: float) -> None:
        known = [run for run in self._runs.values() if run.state is not None]
        missing = [run for run in known if run.absent and run.left_since_s is None and not run.dismissed]
        if len(known) >= BRAKE_FROM_JOBS and len(missing) > self._rules.brake_share * len(known):
            self._doubted_since_s = now if self._doubted_since_s is None else self._doubted_since_s
        else:
            self._doubted_since_s = None

    def _gone(self, now: float, *, shows_ours: bool) -> list[Event]:
        if self.braked(now):
            return []
        gone = []
        wanted = self._rules.gone_answers if shows_ours else self._rules.gone_empty_answers
        for run in self.runs:
            enough = 1 if run.left_since_s is not None else wanted
            if run.absent >= enough and not run.live:
                gone.append(self._end(run, None, now))
        return list(gone)

    def _end(self, run: Run, state: JobState | None, now: float) -> Ended:
        del self._runs[run.name]
        short = run.served_at_s is not None and now - run.served_at_s < self._rules.short_life_s
        crashed = short and state in (JobState.FAILED, JobState.NODE_FAILED) and run.draining_since_s is None
        failed = not run.dismissed and (run.served_at_s is None or crashed)
        if failed:
            how = "disappeared" if state is None else f"ended ({state})"
            text = f"job {run.id} {how} " + ("soon after its first token" if crashed else "before its first token")
            if run.id is None:
                text = "a submission was not answered, and no job came of it"
            self._fail(run.slot, after_failure(self._troubles.get(run.slot), FAILED, text, now))
        return Ended(run, state, failed)

    def _fail(self, slot: Slot, trouble: Trouble) -> None:
        self._troubles[slot] = replace(trouble, specification=self._specifications.get(slot.deployment, ""))

    # -- the sessions --------------------------------------------------------------------------------------------

    def hear_sessions(self, sessions: Iterable[SeenSession], now: float) -> list[Event]:
        """All sessions of the site that have not left, and those that left a short while ago."""
        by_allocation: dict[str, list[SeenSession]] = {}
        for session in sessions:
            by_allocation.setdefault(session.allocation, []).append(session)
        events: list[Event] = []
        for run in self.runs:
            there = by_allocation.get(run.allocation, []) if run.allocation else []
            events += self._hear_run(run, there, now)
        for deployment in {run.slot.deployment for run in self._runs.values()}:
            self._note_activity(deployment, now)
        return events

    def _hear_run(self, run: Run, there: list[SeenSession], now: float) -> list[Event]:
        present = tuple(one for one in there if one.state is not SessionState.LEFT)
        live = any(one.alive for one in present)
        joined = run.joined or live
        all_left = joined and bool(there) and not present
        updated = replace(
            run,
            sessions=present,
            joined=joined,
            silent_since_s=None if live or not joined else _since(run.silent_since_s, now),
            left_since_s=_since(run.left_since_s, now) if all_left else None,
        )
        if updated.draining:
            updated = replace(updated, draining_since_s=_since(run.draining_since_s, now))
        elif updated.serving:  # A drain can be taken back; but who has left was draining to the end.
            updated = replace(updated, draining_since_s=None)
        events: list[Event] = []
        if updated.serving and run.served_at_s is None:
            load_s = now - run.started_at_s if run.started_at_s is not None and run.submission_seen else None
            updated = replace(updated, served_at_s=now)
            if load_s is not None:
                self.loads(run.slot.deployment).add(load_s)
            events.append(Served(updated, load_s))
        served_for_s = now - updated.served_at_s if updated.serving and updated.served_at_s is not None else 0.0
        if served_for_s >= self._rules.short_life_s:
            self._troubles.pop(run.slot, None)
        self._runs[run.name] = updated
        return events

    def _note_activity(self, deployment: str, now: float) -> None:
        """Idle is a deployment only while somebody could take its requests and none comes."""
        sessions = [one for run in self._runs.values() if run.slot.deployment == deployment for one in run.sessions]
        total = sum(one.requests_total for one in sessions)
        busy = any(one.in_flight for one in sessions)
        serves = any(one.state is SessionState.SERVING for one in sessions)
        moved = total > self._requests.get(deployment, total)
        self._requests[deployment] = total
        if busy or moved or not serves or deployment not in self.active_at_s:
            self.active_at_s[deployment] = now

    # -- over a restart ------------------------------------------------------------------------------------------

    def kept(self, holder: str, beat: int, now: float) -> LauncherState:
        """What another launcher, or this one started anew, needs."""
        return LauncherState(
            holder,
            beat,
            runs=[
                KeptRun(
                    run.name,
                    run.id.job if run.id else "",
                    run.id.cluster if run.id else "",
                    run.served_at_s is not None,
                    run.time_limit_s,
                )
                for run in self.runs
            ],
            troubles=[
                KeptTrouble(str(slot), one.kind, one.text, one.count, one.wait_s(now), one.specification)
                for slot, one in sorted(self._troubles.items())
            ],
            generations={str(slot): generation for slot, generation in sorted(self._generations.items())},
            asleep=sorted(self.asleep),
            waits_s={name: one.seen for name, one in sorted(self._waits.items()) if one.seen},
            loads_s={name: one.seen for name, one in sorted(self._loads.items()) if one.seen},
        )

    def restore(self, state: LauncherState, now: float) -> None:
        """What an earlier holder knew. What it was about to submit may exist; what it had is looked for anew. Answers
        from before count for nothing."""
        self._runs.clear()
        for kept in state.runs:
            named = self._names.read(kept.name)
            if named is None:
                continue  # Its deployment is no longer in the site file.
            id = JobId(kept.cluster, kept.job) if kept.job else None
            self._runs[kept.name] = Run(
                name=kept.name,
                slot=named.slot,
                generation=named.generation,
                id=id,
                allocation=f"slurm-{kept.job}" if kept.job else "",
                submitted_at_s=now,
                served_at_s=now if kept.served else None,
                time_limit_s=kept.time_limit_s,
            )
        self._troubles = {}
        for trouble in state.troubles:
            if slot := Slot.of(trouble.slot):
                until_s = None if trouble.wait_s is None else now + trouble.wait_s
                self._troubles[slot] = Trouble(
                    trouble.kind, trouble.text, trouble.count, until_s, trouble.specification
                )
        self._generations = {slot: value for text, value in state.generations.items() if (slot := Slot.of(text))}
        self.asleep = set(state.asleep)
        self._waits = {name: Durations(list(seen)) for name, seen in state.waits_s.items()}
        self._loads = {name: Durations(list(seen)) for name, seen in state.loads_s.items()}
        self.active_at_s = {}
        self._requests = {}
        self.answers = 0
        self._answer_number = None
        self._doubted_since_s = None


def _since(before_s: float | None, now: float) -> float:
    return now if before_s is None else before_s
