"""What is to be done so that a service outlives its jobs: `plan(picture) -> Plan`. Pure, and it says why.

A slot is a place that one job fills at a time. Before the time of that job is up another one is submitted, early enough
to wait in the queue and to load; when it serves, the old one drains, and it alone. So a slot has at most two jobs.
Nothing that has requests is cancelled. A launcher that does not see the whole picture does nothing at all: jobs go on
without it, and agents leave by themselves before their time is up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from serai.contracts.launcher import SlotWord
from serai.launcher.jobs import JobState
from serai.launcher.picture import Cancel, Drain, Picture, Plan, Rules, Sleep, Submit, Wanted
from serai.launcher.runs import Run
from serai.launcher.slots import Slot


def plan(picture: Picture, rules: Rules) -> Plan:
    """What follows from the picture; the same picture gives the same plan."""
    by_slot: dict[Slot, list[Run]] = {}
    for run in picture.runs:
        by_slot.setdefault(run.slot, []).append(run)
    if picture.blind:
        unseen = [_word(slot, "blind", picture.blind, by_slot.get(slot, ())) for slot in _slots(picture, by_slot)]
        return Plan(says=tuple(unseen), blind=picture.blind)
    parts = [_deployment(wanted, by_slot, picture, rules) for wanted in picture.wanted]
    return Plan(
        drain=tuple(one for part in parts for one in part.drain),
        cancel=tuple(one for part in parts for one in part.cancel),
        submit=tuple(one for part in parts for one in part.submit),
        sleep=tuple(one for part in parts for one in part.sleep),
        says=tuple(one for part in parts for one in part.says),
    )


def _slots(picture: Picture, by_slot: Mapping[Slot, Sequence[Run]]) -> list[Slot]:
    wanted = {Slot(one.deployment, number) for one in picture.wanted for number in range(one.count)}
    return sorted(wanted | set(by_slot))


def _deployment(wanted: Wanted, by_slot: Mapping[Slot, Sequence[Run]], picture: Picture, rules: Rules) -> Plan:
    numbers = {slot.number for slot in by_slot if slot.deployment == wanted.deployment}
    slots = [Slot(wanted.deployment, number) for number in sorted(numbers | set(range(wanted.count)))]
    if why := _idle(wanted):
        idle = [_word(slot, "idle", why, by_slot.get(slot, ())) for slot in slots]
        return Plan(sleep=(Sleep(wanted.deployment, why),), says=tuple(idle))
    views = [_Slot(slot, tuple(by_slot.get(slot, ())), wanted, picture, rules) for slot in slots]
    due = _spaced({view.slot: view.due_at_s for view in views if view.due_at_s is not None}, rules)
    ends = {view.slot: view.end_at_s for view in views}
    succeeded_at_s = picture.succeeded_at_s.get(wanted.deployment, -math.inf)
    drains: list[Drain] = []
    cancels: list[Cancel] = []
    submits: list[Submit] = []
    says: list[SlotWord] = []
    # Whoever is due first comes first, so that the others wait for it and not it for them.
    for view in sorted(views, key=lambda view: (due.get(view.slot, math.inf), view.slot)):
        drains += view.drains()
        cancels += view.cancels()
        verdict = view.verdict(due.get(view.slot), succeeded_at_s)
        if verdict.submit:
            limit_s = view.staggered_limit_s([end for slot, end in ends.items() if slot != view.slot])
            submits.append(Submit(view.slot, limit_s, verdict.text))
            ends[view.slot] = picture.now + wanted.wait_s + limit_s
            if verdict.name == _SUCCESSOR:
                succeeded_at_s = picture.now
        says.append(view.word(verdict, due.get(view.slot)))
    says.sort(key=lambda word: (len(word.slot), word.slot))
    return Plan(tuple(drains), tuple(cancels), tuple(submits), says=tuple(says))


def _idle(wanted: Wanted) -> str:
    if wanted.idle_s is None or wanted.idle_for_s is None or wanted.asleep or wanted.count == 0:
        return ""
    if wanted.idle_for_s < wanted.idle_s:
        return ""
    return f"no request for {wanted.idle_for_s:.0f} s (idle_s {wanted.idle_s:g})"


def _spaced(due: Mapping[Slot, float], rules: Rules) -> dict[Slot, float]:
    """Moves what is due too soon before another to an earlier time, so that none has to come later than it is due."""
    spaced: dict[Slot, float] = {}
    next_s = math.inf
    for slot in sorted(due, key=lambda slot: (due[slot], slot), reverse=True):
        next_s = spaced[slot] = min(due[slot], next_s - rules.birth_spacing_s)
    return spaced


_BIRTH, _SUCCESSOR = "birth", "successor"


@dataclass(frozen=True, slots=True)
class _Verdict:
    name: str
    text: str
    submit: bool = False
    alert: bool = False


@dataclass(frozen=True, slots=True)
class _Slot:
    """One slot and what is thought of it."""

    slot: Slot
    runs: tuple[Run, ...]
    """Older generations first."""
    wanted: Wanted
    picture: Picture
    rules: Rules

    @property
    def now(self) -> float:
        return self.picture.now

    @property
    def surplus(self) -> bool:
        """Nobody wants a job in it."""
        return self.wanted.asleep or self.slot.number >= self.wanted.count

    @property
    def successor(self) -> Run | None:
        """The newest that serves: all older ones have been succeeded."""
        return next((run for run in reversed(self.runs) if self._steady(run)), None)

    def _steady(self, run: Run) -> bool:
        return run.serving and run.served_at_s is not None and self.now - run.served_at_s >= self.rules.steady_s

    @property
    def newest(self) -> Run | None:
        return self.runs[-1] if self.runs else None

    @property
    def due_at_s(self) -> float | None:
        """When the newest job's successor should be submitted; None: not known yet, or never."""
        newest = self.newest
        if newest is None or self.surplus or not newest.started:
            return None
        if self._leaves(newest):
            return self.now
        remaining_s = newest.remaining_s(self.now)
        return None if remaining_s is None else self.now + remaining_s - self.wanted.lead_s(self.rules)

    @property
    def end_at_s(self) -> float | None:
        """When the newest job ends, or would if it started when it is expected to; None = no end, or no job."""
        newest = self.newest
        if newest is None:
            return None
        if newest.started:
            remaining_s = newest.remaining_s(self.now)
            return None if remaining_s is None else self.now + remaining_s
        start_s = max(self.now, newest.submitted_at_s + self.wanted.wait_s)
        return start_s + (newest.time_limit_s or self.wanted.time_limit_s)

    def _leaves(self, run: Run) -> bool:
        """Nothing more is to be expected of it, though it is still there."""
        silent = run.silent_since_s is not None and self.now - run.silent_since_s > self.rules.silent_s_max
        over = run.state is JobState.COMPLETING or run.cancelled_at_s is not None
        left = run.left_since_s is not None and self.now - run.left_since_s > self.rules.left_s
        leaves = over or left or run.draining_since_s is not None or (silent and not self.picture.many_silent)
        # Of one that has not served, or hardly, the end is awaited: a failure has to be seen as one, and to back off.
        return leaves and (run.draining_since_s is not None or self._served_for_s(run) >= self.rules.short_life_s)

    def _served_for_s(self, run: Run) -> float:
        return 0.0 if run.served_at_s is None else self.now - run.served_at_s

    # -- drain -------------------------------------------------------------------------------------------------------

    def drains(self) -> list[Drain]:
        """Of those that are not needed, and of those whose successor serves."""
        if self.surplus:
            why = "let go: idle" if self.wanted.asleep else "the slot is no longer wanted"
            return [one for run in self.runs for one in self._drain(run, why)]
        successor = self.successor
        if successor is None:
            return []
        older = [run for run in self.runs[: self.runs.index(successor)] if not self._young(run)]
        why = f"job {successor.id} of generation {successor.generation} serves in its place"
        return [one for run in older for one in self._drain(run, why)]

    def _young(self, run: Run) -> bool:
        """More than half of its time is left: a queue that was feared to be long was short. Both serve then, or models
        would be loaded again and again, for minutes each."""
        remaining_s = run.remaining_s(self.now)
        return remaining_s is not None and remaining_s > (run.time_limit_s or self.wanted.time_limit_s) / 2

    def _drain(self, run: Run, why: str) -> list[Drain]:
        remaining_s = run.remaining_s(self.now)
        left_s = self.rules.drain_s_max if remaining_s is None else remaining_s - self.rules.stop_margin_s
        within_s = round(max(0.0, left_s), 1)
        waiting = [one for one in run.live if one.state != "draining"]
        return [Drain(one.session, self.slot, run.name, within_s, why) for one in waiting]

    # -- cancel ------------------------------------------------------------------------------------------------------

    def cancels(self) -> list[Cancel]:
        found = []
        for run in self.runs:
            if run.id is None or run.state is None or run.state is JobState.COMPLETING:
                continue
            if run.cancelled_at_s is not None and self.now - run.cancelled_at_s < self.rules.linger_s:
                continue  # It has been asked for.
            if why := self._not_needed(run) or self._lingers(run):
                found.append(Cancel(run.id, self.slot, run.name, why))
            elif why := self._hangs(run):
                found.append(Cancel(run.id, self.slot, run.name, why, dismissed=False))
        return found

    def _not_needed(self, run: Run) -> str:
        """It waits in the queue for nothing."""
        if run.started or run.sessions:
            return ""
        if self.surplus:
            return "it waits for a slot that is not wanted now"
        successor = self.successor
        if successor is not None and run.generation < successor.generation:
            return f"it waits again, and job {successor.id} serves in its place"
        return ""

    def _lingers(self, run: Run) -> str:
        """It should have ended by itself."""
        if run.left_since_s is not None and self.now - run.left_since_s > self.rules.linger_s and not run.sessions:
            return f"its session left {self.now - run.left_since_s:.0f} s ago, and the job goes on"
        if run.draining_since_s is not None and run.in_flight == 0:
            drained_s = self.now - run.draining_since_s
            if drained_s > self.rules.linger_s:
                return f"it has drained for {drained_s:.0f} s and has no request left"
        return ""

    def _hangs(self, run: Run) -> str:
        """It runs, and nothing was ever heard of it. Of a session that loads, its agent is the judge: it sees whether
        the load goes on."""
        if run.state is not JobState.RUNNING or run.started_at_s is None or run.served_at_s is not None:
            return ""
        ran_s = self.now - run.started_at_s
        if run.sessions or ran_s <= self.wanted.load_s_max:
            return ""
        return f"no session has been heard of within {ran_s:.0f} s of its start (load_s_max {self.wanted.load_s_max:g})"

    # -- submit ------------------------------------------------------------------------------------------------------

    def verdict(self, due_at_s: float | None, succeeded_at_s: float) -> _Verdict:
        """What is thought of the slot, and whether a job is submitted for it."""
        if self.surplus:
            name = "asleep" if self.wanted.asleep else "surplus"
            wake = f"; `serai launcher wake {self.slot.deployment}` starts it again" if self.wanted.asleep else ""
            return _Verdict(name, ("it was idle" if self.wanted.asleep else "it is not wanted any more") + wake)
        newest = self.newest
        if newest is not None:
            if not newest.started:
                state = f"job {newest.id or '(no number yet)'} waits in the queue"
                return _Verdict("waits", f"{state}{f': {newest.why}' if newest.why else ''}")
            if due_at_s is None:
                return _Verdict("holds", f"job {newest.id} has no end that is known: no successor is needed")
            if due_at_s > self.now:
                return _Verdict(
                    "holds", f"job {newest.id} has time; its successor is due in {due_at_s - self.now:.0f} s"
                )
        if len(self.runs) >= self.rules.slot_jobs_max:
            text = f"a successor is due, but the slot has {len(self.runs)} jobs, and COMPLETING ones are not free yet"
            return _Verdict("full", text)
        if stop := self._stopped():
            return stop
        if newest is None:
            return _Verdict(_BIRTH, "the slot has no job", submit=True)
        if self._leaves(newest):
            return _Verdict(_BIRTH, f"job {newest.id} leaves", submit=True)
        if (since_s := self.now - succeeded_at_s) < self.rules.birth_spacing_s:
            return _Verdict("spaced", f"another slot's successor was submitted {since_s:.0f} s ago")
        remaining_s = newest.remaining_s(self.now) or 0.0
        lead_s = self.wanted.lead_s(self.rules)
        text = f"job {newest.id} has {remaining_s:.0f} s left; waiting and loading may take {lead_s:.0f} s"
        return _Verdict(_SUCCESSOR, text, submit=True)

    def _stopped(self) -> _Verdict | None:
        """By its own trouble, or by one that a submission of another slot of the deployment would run into, too."""
        own = self.picture.troubles.get(self.slot)
        shared = [
            one
            for slot, one in sorted(self.picture.troubles.items())
            if slot.deployment == self.slot.deployment and one.kind in ("invalid", "quota")
        ]
        for trouble in [*([own] if own else []), *shared]:
            if trouble.stops(self.now):
                wait_s = trouble.wait_s(self.now)
                then = (
                    f"stopped until the deployment changes, or `serai launcher wake {self.slot.deployment}`"
                    if wait_s is None
                    else f"next try in {wait_s:.0f} s"
                )
                return _Verdict("stopped", f"{trouble.text}; {trouble.count} in a row; {then}", alert=trouble.alert)
        return None

    def staggered_limit_s(self, others: Iterable[float | None]) -> float:
        """The time limit of the next job of this slot: cut, at most by half, so that it ends well apart from the jobs
        of the deployment's other slots. The first ones share the whole span, so that births never meet again."""
        limit_s = self.wanted.time_limit_s
        ends = [end for end in others if end is not None]
        first = self.newest is None
        spacing_s = limit_s / (2 * max(1, self.wanted.count)) if first else 2 * self.rules.birth_spacing_s
        start_s = self.now + self.wanted.wait_s
        for cut in range(max(1, self.wanted.count) + 1):
            shorter_s = limit_s - cut * spacing_s
            if shorter_s < limit_s / 2 - 1e-6:
                break
            if all(abs(start_s + shorter_s - end) >= spacing_s * 0.99 for end in ends):
                return shorter_s
        return limit_s

    # -- words -------------------------------------------------------------------------------------------------------

    def word(self, verdict: _Verdict, due_at_s: float | None) -> SlotWord:
        newest = self.newest
        remaining_s = newest.remaining_s(self.now) if newest else None
        facts = {"expected_wait_s": self.wanted.wait_s, "expected_load_s": self.wanted.load_s}
        facts["lead_s"] = self.wanted.lead_s(self.rules)
        if remaining_s is not None:
            facts["time_left_s"] = remaining_s
        if due_at_s is not None:
            facts["successor_due_in_s"] = due_at_s - self.now
        rounded = {name: round(value, 1) for name, value in facts.items()}
        return _word(self.slot, verdict.name, verdict.text, self.runs, alert=verdict.alert, facts=rounded)


def _word(
    slot: Slot,
    verdict: str,
    text: str,
    runs: Sequence[Run],
    *,
    alert: bool = False,
    facts: Mapping[str, float] | None = None,
) -> SlotWord:
    return SlotWord(str(slot), verdict, text, alert, [run.text for run in runs], dict(facts or {}))
