"""A plan under way: which of its steps may be done now, as pools and sessions are now. Pure.

Starts come first where there are GPUs. An engine ends when the new ones that it waits for serve, and when its model
keeps its minimum without it. Below one serving engine a model that is used falls only when nothing else of the plan can
go on: when its own new engine needs the GPUs of the old one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serai.contracts.placement import ActionKind, Assignment, PlanAction, RunState


@dataclass(frozen=True, slots=True)
class SeenRun:
    """What a pool says of one assignment."""

    pool: str
    state: RunState
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """How things are now."""

    pools: Mapping[str, int]
    """GPUs of each pool that is there."""
    runs: Mapping[str, SeenRun]
    told: Mapping[str, Mapping[str, Assignment]]
    """What each pool has been told to run, by id."""
    settled: frozenset[str]
    """Pools that have obeyed the last that they were told."""
    serving: Mapping[str, int]
    """Sessions of each model that get requests, wherever they are."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What a model keeps."""

    minimum: int
    used: bool
    """It is asked for, and the plan gives it an engine: one goes on serving where that can be."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be told now."""

    told: Mapping[str, Sequence[Assignment]] = field(default_factory=dict)
    """All that a pool is to run from now on; only pools for which that changes."""
    stops: Mapping[str, str] = field(default_factory=dict)
    """Why what is not among them any more ends, by id."""
    moves: int = 0
    """Starts and stops in it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A start that came to nothing."""

    model: str
    pool: str
    why: str


class CarryingOut:
    """One plan's. `look` as often as one likes; it says only what has not been said."""

    def __init__(
        self, actions: Sequence[PlanAction], floors: Mapping[str, Floor], *, start_timeout_s: float = 3600.0
    ) -> None:
        self._actions = [action for action in actions if action.kind is not ActionKind.KEEP]
        self._floors = floors
        self._start_timeout_s = start_timeout_s
        self._released: dict[str, float] = {}
        self.done: set[str] = set()
        self.failed: dict[str, Failure] = {}
        self.skipped: dict[str, str] = {}
        """Steps that are not done after all, and why."""

    @property
    def over(self) -> bool:
        """Nothing of it is left to do."""
        return all(self._settled(action) for action in self._actions)

    def look(self, seen: Seen, now: float) -> Step:
        """What can be done now."""
        for action in self._actions:
            if not self._settled(action):
                self._judge(action, seen, now)
        fresh: list[PlanAction] = []
        for action in (*self._actions, *self._actions):  # Twice: what ends makes room for what starts.
            if self._may(action, seen):
                self._released[action.assignment.id] = now
                fresh.append(action)
        if not fresh and not self._under_way(seen) and (harmed := self._least_harm(seen)) is not None:
            self._released[harmed.assignment.id] = now
            fresh.append(harmed)
        return self._step(fresh, seen)

    # -- inside --------------------------------------------------------------------------------------------------

    def _settled(self, action: PlanAction) -> bool:
        id = action.assignment.id
        return id in self.done or id in self.failed or id in self.skipped

    def _under_way(self, seen: Seen) -> bool:
        """Something will come without a further step: what has been told, or an engine that loaded before."""
        return any(
            not self._settled(action)
            and (action.assignment.id in self._released or any(self._loads(one, seen) for one in action.after))
            for action in self._actions
        )

    def _loads(self, id: str, seen: Seen) -> bool:
        ours = any(action.assignment.id == id for action in self._actions)
        return not ours and not self._serves(id, seen) and not self._lost(id, seen)

    def _judge(self, action: PlanAction, seen: Seen, now: float) -> None:
        """Whether it has come to its end."""
        id, pool = action.assignment.id, action.pool
        run = seen.runs.get(id)
        released_s = self._released.get(id)
        if action.kind is ActionKind.STOP:
            if pool not in seen.pools or (run is None and (released_s is None or pool in seen.settled)):
                self.done.add(id)
            elif lost := [one for one in action.after if self._lost(one, seen)]:
                self.skipped[id] = f"it stays, for what was to take its place does not serve ({', '.join(lost)})"
            return
        if pool not in seen.pools:
            self.failed[id] = Failure(action.assignment.model, pool, "its pool has gone")
        elif run is not None and run.state is RunState.SERVING:
            self.done.add(id)
        elif run is not None and run.state is RunState.FAILED:
            self.failed[id] = Failure(action.assignment.model, pool, run.problem)
        elif released_s is not None and now - released_s > self._start_timeout_s:
            self.failed[id] = Failure(action.assignment.model, pool, f"not serving after {self._start_timeout_s:.0f} s")
        elif released_s is not None and run is None and pool in seen.settled:
            self.failed[id] = Failure(action.assignment.model, pool, "its pool does not know it any more")

    def _may(self, action: PlanAction, seen: Seen) -> bool:
        if self._settled(action) or action.assignment.id in self._released:
            return False
        if action.kind is ActionKind.START:
            return self._fits(action, seen)
        return all(self._serves(one, seen) for one in action.after) and self._above_floor(action, seen, soft=True)

    def _serves(self, id: str, seen: Seen) -> bool:
        """What a stop waits for: a start of this plan, or an engine that was loading when it was made."""
        run = seen.runs.get(id)
        return id in self.done or (run is not None and run.state is RunState.SERVING)

    def _lost(self, id: str, seen: Seen) -> bool:
        if id in {action.assignment.id for action in self._actions}:
            return id in self.failed or id in self.skipped
        run = seen.runs.get(id)
        return run is None or run.state is RunState.FAILED

    def _fits(self, action: PlanAction, seen: Seen) -> bool:
        """Whether its pool has the GPUs, once those that may end have ended."""
        wanted = self._wanted(action.pool, seen)
        return sum(one.gpus for one in wanted) + action.assignment.gpus <= seen.pools.get(action.pool, 0)

    def _wanted(self, pool: str, seen: Seen) -> list[Assignment]:
        """What the pool is to run, with all that has been released."""
        stops = {a.assignment.id for a in self._of(ActionKind.STOP, pool) if a.assignment.id in self._released}
        there = {id: one for id, one in seen.told.get(pool, {}).items() if id not in stops}
        starts = {
            a.assignment.id: a.assignment
            for a in self._of(ActionKind.START, pool)
            if a.assignment.id in self._released and a.assignment.id not in self.failed
        }
        return list((there | starts).values())

    def _of(self, kind: ActionKind, pool: str) -> list[PlanAction]:
        return [action for action in self._actions if action.kind is kind and action.pool == pool]

    def _above_floor(self, action: PlanAction, seen: Seen, *, soft: bool) -> bool:
        run = seen.runs.get(action.assignment.id)
        if run is None or run.state is not RunState.SERVING:
            return True
        model = action.assignment.model
        floor = self._floors.get(model, Floor(0, False))
        # Until it is gone: reports and records do not come at the same moment.
        ending = sum(
            a.assignment.model == model and a.assignment.id in self._released and not self._settled(a)
            for a in self._actions
            if a.kind is ActionKind.STOP
        )
        least = max(floor.minimum, 1 if floor.used and soft else 0)
        return seen.serving.get(model, 0) - ending - 1 >= least

    def _least_harm(self, seen: Seen) -> PlanAction | None:
        """One stop that leaves its model without an engine for a while, when the plan cannot go on otherwise: of the
        model with most engines left. Never below a minimum."""
        stops = [
            action
            for action in self._actions
            if action.kind is ActionKind.STOP
            and not self._settled(action)
            and all(self._serves(one, seen) for one in action.after)
            and self._above_floor(action, seen, soft=False)
        ]
        if stops:
            return max(stops, key=lambda action: (seen.serving.get(action.assignment.model, 0), action.assignment.id))
        for action in self._actions:
            if not self._settled(action):
                self.skipped[action.assignment.id] = self._why_stuck(action, seen)
        return None

    def _why_stuck(self, action: PlanAction, seen: Seen) -> str:
        if action.kind is ActionKind.START:
            return f"there is no room on {action.pool} now"
        model = action.assignment.model
        return f"{model} would fall below its minimum: {seen.serving.get(model, 0)} serve now"

    def _step(self, fresh: Sequence[PlanAction], seen: Seen) -> Step:
        told = {}
        for pool in {action.pool for action in fresh} & seen.pools.keys():
            told[pool] = self._wanted(pool, seen)
        # An earlier step whose message was lost is not repeated here: what was told is in `seen.told`.
        stops = {a.assignment.id: a.why for a in fresh if a.kind is ActionKind.STOP}
        return Step(told, stops, len(fresh))
