"""What a pool agent is to run, and which GPUs each has: events in, effects out. Pure.

Only newer assignments are obeyed. Nothing is ever stopped because a word is missing: what runs ends when newer
assignments do not name it, when its engine gives up, or when the agent itself ends. A GPU has one assignment at a time,
from before its engine starts until it has stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import assert_never

from serai.contracts.placement import Assignment, Assignments, BadReport, PoolRun, RunState, checked_assignments


@dataclass(frozen=True, slots=True)
class Told:
    """Assignments have come."""

    assignments: Assignments


@dataclass(frozen=True, slots=True)
class IsSession:
    """An assignment's engine is this session now."""

    id: str
    session: str


@dataclass(frozen=True, slots=True)
class Serves:
    """Its session serves; or, after its engine ended by accident, loads again."""

    id: str
    serving: bool = True


@dataclass(frozen=True, slots=True)
class Over:
    """Its engine has stopped, for good. `problem`: why, when nobody wanted it."""

    id: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Closing:
    """The whole agent drains, and ends."""


Event = Told | IsSession | Serves | Over | Closing


@dataclass(frozen=True, slots=True)
class StartEngine:
    """With these GPUs, by their positions."""

    assignment: Assignment
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Drain it, then stop it."""

    id: str
    why: str
    drain_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The assignments are not obeyed; nothing changes."""

    why: str


Effect = StartEngine | StopEngine | Refused


@dataclass(frozen=True, slots=True)
class _Run:
    assignment: Assignment
    state: RunState
    since_s: float
    session: str = ""
    gpus: tuple[int, ...] = ()
    problem: str = ""

    def turned(self, state: RunState, now: float) -> _Run:
        return self if state is self.state else replace(self, state=state, since_s=now)


_RUNNING = (RunState.STARTING, RunState.SERVING, RunState.DRAINING)


class PoolBook:
    """One pool agent's."""

    def __init__(self, pool: str, gpus: int, engines: AbstractSet[str]) -> None:
        self._pool = pool
        self._gpus = gpus
        self._engines = engines
        self._runs: dict[str, _Run] = {}
        self._known: set[str] = set()
        """Ids that were ever begun: none is started twice."""
        self.generation = 0

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What is to be done. `now`: seconds of any clock that does not go back."""
        match event:
            case Told(assignments):
                return self._told(assignments, now)
            case IsSession(id, session):
                self._change(id, session=session)
            case Serves(id, serving):
                run = self._runs.get(id)
                if run is not None and run.state in (RunState.STARTING, RunState.SERVING):
                    self._runs[id] = run.turned(RunState.SERVING if serving else RunState.STARTING, now)
            case Over(id, problem):
                return self._over(id, problem, now)
            case Closing():
                self._runs = {
                    id: run.turned(RunState.DRAINING, now) for id, run in self._runs.items() if run.state in _RUNNING
                }
            case _:
                assert_never(event)
        return []

    def runs(self, now: float) -> list[PoolRun]:
        """All, in the order in which they came."""
        return [
            PoolRun(run.assignment, run.state, run.session, list(run.gpus), round(now - run.since_s, 1), run.problem)
            for run in self._runs.values()
        ]

    @property
    def free(self) -> list[int]:
        """Positions of the GPUs that nobody has."""
        taken = {gpu for run in self._runs.values() for gpu in run.gpus}
        return [gpu for gpu in range(self._gpus) if gpu not in taken]

    # -- inside --------------------------------------------------------------------------------------------------

    def _told(self, told: Assignments, now: float) -> list[Effect]:
        if why := self._why_not(told):
            return [Refused(why)]
        self.generation = told.generation
        wanted = {one.id for one in told.run}
        effects: list[Effect] = []
        for id, run in list(self._runs.items()):
            if id in wanted or run.state is RunState.DRAINING:
                continue
            if run.state in _RUNNING:
                self._runs[id] = run.turned(RunState.DRAINING, now)
                why = told.stops.get(id) or f"placement {told.generation} does not have it"
                effects.append(StopEngine(id, why, told.drain_s))
            else:
                del self._runs[id]
        for one in told.run:
            if one.id not in self._runs and one.id not in self._known:
                self._runs[one.id] = self._begun(one, now)
        return [*effects, *self._granted(now)]

    def _why_not(self, told: Assignments) -> str:
        """Why not to obey; empty = do."""
        if told.pool != self._pool:
            return f"these are of pool {told.pool!r}, and this is {self._pool!r}"
        if told.generation <= self.generation:
            return f"generation {told.generation} is not newer than {self.generation}, which is obeyed already"
        try:
            checked_assignments(told)
        except BadReport as error:
            return str(error)
        wanted = sum(one.gpus for one in told.run)
        if wanted > self._gpus:
            return f"they need {wanted} GPUs, and there are {self._gpus}"
        return ""

    def _begun(self, one: Assignment, now: float) -> _Run:
        if one.engine in self._engines:
            return _Run(one, RunState.WAITING, now)
        known = ", ".join(sorted(self._engines)) or "none"
        return _Run(one, RunState.FAILED, now, problem=f"there is no engine {one.engine!r} here (there is {known})")

    def _granted(self, now: float) -> list[Effect]:
        """Starts those that wait and for which there are GPUs: their sum fits, so each has its turn."""
        effects: list[Effect] = []
        for id, run in list(self._runs.items()):
            if run.state is not RunState.WAITING:
                continue
            gpus = _neighbours(self.free, run.assignment.gpus)
            if gpus is None:
                continue
            self._runs[id] = replace(run.turned(RunState.STARTING, now), gpus=gpus)
            self._known.add(id)
            effects.append(StartEngine(run.assignment, gpus))
        return effects

    def _over(self, id: str, problem: str, now: float) -> list[Effect]:
        run = self._runs.get(id)
        if run is None or run.state not in _RUNNING:
            return []
        if run.state is RunState.DRAINING:
            del self._runs[id]
        else:
            why = problem or "its engine ended"
            self._runs[id] = replace(run.turned(RunState.FAILED, now), gpus=(), problem=why)
        return self._granted(now)

    def _change(self, id: str, *, session: str) -> None:
        if id in self._runs:
            self._runs[id] = replace(self._runs[id], session=session)


def _neighbours(free: Sequence[int], count: int) -> tuple[int, ...] | None:
    """`count` of the free ones, next to each other where that can be; None when there are too few."""
    if len(free) < count:
        return None
    for start in range(len(free) - count + 1):
        chosen = free[start : start + count]
        # Engines of two or four GPUs keep to the links between them where these begin at a multiple of that.
        if count and chosen[-1] - chosen[0] == count - 1 and chosen[0] % count == 0:
            return tuple(chosen)
    return tuple(free[:count])
