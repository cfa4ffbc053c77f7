"""Placement: what pool agents have and run, what they are told to run, and what the placer says of it.

A pool agent is a node agent without an engine command. It says what it has (`PoolReport`, on core NATS, may be lost)
and obeys `Assignments` that are newer than the last ones. Those lie in KV too, one key for each pool, so that an agent
that starts anew finds them while no placer runs. The placer's own state is one KV key, which is a lease: written by
compare-and-set by whoever acts, before it acts. No time of any clock is in any of them, only durations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from serai.contracts.session_record import GpuDevice

ASSIGNMENTS_MAX = 64
"""Of one pool agent: it has at most so many GPUs (`session_record.GPUS_MAX`)."""
POOL_CHARACTERS_MAX = 120
POOL_LABEL, ASSIGNMENT_LABEL = "pool", "assignment"
"""Labels of a session that a pool agent runs: where, and for what."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One engine that a pool agent is to run."""

    id: str
    """New for each start, and never used again."""
    model: str
    """The name clients ask for."""
    engine: str
    """Which of the agent's templates."""
    gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    quantization: str = ""
    """As the engine calls it; empty = as the weights are stored."""
    path: str = ""
    """Where the weights are, a file or a public name; empty = the model's name."""
    arguments: list[str] = field(default_factory=list)
    """Further words of the engine's command."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Assignments:
    """All that a pool agent is to run from now on. What it runs and is not in `run` is drained and stopped."""

    pool: str
    generation: int
    """Counts changes of the site's placement. An agent obeys only what is newer than the last that it obeyed."""
    run: list[Assignment] = field(default_factory=list)
    stops: dict[str, str] = field(default_factory=dict)
    """Why an assignment ends, by its id."""
    drain_s: float = 60.0
    """How long requests of those that end may take to finish."""


class RunState(StrEnum):
    """Of one assignment at its pool agent."""

    WAITING = "waiting"
    """For GPUs that another assignment still has."""
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    """Its engine has ended and is not started again; its GPUs are free."""


@dataclass(frozen=True, slots=True)
class PoolRun:
    """One assignment, and what has become of it."""

    assignment: Assignment
    state: RunState
    session: str = ""
    """The session it is now; empty = not begun."""
    gpus: list[int] = field(default_factory=list)
    """Positions in the report's `gpus`."""
    age_s: float = 0.0
    """Since it is in that state."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A pool agent's word, every few seconds and after each change. Also its answer to `Assignments`."""

    pool: str
    """Names the agent's place: an allocation on a host. The same after the agent's own restart."""
    instance: str
    """New with each start of the agent."""
    sequence: int = 0
    interval_s: float = 2.0
    site: str = "local"
    provider: str = "local"
    allocation: str = ""
    host: str = ""
    failure_domain: str = ""
    """What fails together, e.g. a rack; empty = the host alone."""
    gpu: str = ""
    """Kind of its GPUs, as the driver or the operator calls it; empty = it has none."""
    gpus: list[GpuDevice] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    """Templates whose program is there."""
    generation: int = 0
    """Of the assignments that it has obeyed last; 0 = none."""
    runs: list[PoolRun] = field(default_factory=list)
    allocation_remaining_s: float | None = None
    storage_bytes_s: float = 0.0
    """How fast it reads weights; 0 = not known."""
    stopping: bool = False
    """It is about to end, and takes nothing new."""
    refused: str = ""
    """Why it does not obey the assignments that this answers."""


class ActionKind(StrEnum):
    """What a plan does with one engine."""

    START = "start"
    STOP = "stop"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class PlanAction:
    """One step of a plan, with its reason."""

    kind: ActionKind
    pool: str
    assignment: Assignment
    session: str = ""
    why: str = ""
    after: list[str] = field(default_factory=list)
    """Assignments that have to serve before this stop, by id; or to have ended before this start."""
    done: bool = False


@dataclass(frozen=True, slots=True)
class ModelWord:
    """What the placer thinks of one model, in figures and in lines for people."""

    model: str
    instances: int = 0
    """That serve now."""
    wanted: int = 0
    """That the plan wants."""
    demand_requests_s: float = 0.0
    capacity_requests_s: float = 0.0
    """Of what serves now, within its latency targets."""
    served_share: float = 0.0
    """Of the demand, with the plan; 1 = all of it."""
    text: list[str] = field(default_factory=list)


class PlanState(StrEnum):
    """Of the placer's last plan."""

    PROPOSED = "proposed"
    """It waits for `serai place apply`."""
    APPLYING = "applying"
    DONE = "done"
    REPLACED = "replaced"
    """The fleet or the demand changed under it; a newer one has been made, or will be."""


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """One plan, whole."""

    generation: int
    state: PlanState
    actions: list[PlanAction] = field(default_factory=list)
    models: list[ModelWord] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """What would have been better and was not done, and why."""
    note: str = ""
    """How it was found: by the solver, with which bound, or without."""


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What a placer has to know that neither pools nor sessions tell; the lease, too."""

    holder: str = ""
    """Who acts for the site; empty = nobody, the last one has gone of its own will."""
    beat: int = 0
    """Counts writes: a holder whose beat stands still for the length of a lease has gone."""
    generation: int = 0
    """The last one that was used, for a plan or for assignments."""
    plan: KeptPlan | None = None
    moved_ago_s: list[float] = field(default_factory=list)
    """How long ago engines were started or stopped, those of the last hour."""
    warm: dict[str, list[str]] = field(default_factory=dict)
    """Models that were let go because they were cold, and the pools that had them last."""
    failed: dict[str, float] = field(default_factory=dict)
    """`MODEL at POOL` whose engine failed there: for so many seconds it is not tried again."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Asks a placer for its last plan."""

    model: str = ""
    """Only of this model; empty = of all."""
    anew: bool = False
    """Make a new plan first."""


@dataclass(frozen=True, slots=True)
class StartableModels:
    """Models of which a site's placer starts an engine when somebody asks for them; said every few seconds."""

    site: str
    holds_s: float
    """For so long it may be counted on."""
    models: dict[str, float]
    """By name; what an engine takes to serve, in seconds."""


@dataclass(frozen=True, slots=True)
class Knock:
    """Somebody asks for a model that nothing serves; said again while he waits."""

    model: str
    waiting: int = 1
    """Requests at this ingress."""


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """Lets a proposed plan be carried out. Another generation than that of the proposed plan is refused."""

    generation: int


@dataclass(frozen=True, slots=True)
class PoolWord:
    """What the placer knows of one pool."""

    pool: str
    gpu: str
    gpus: int
    free: int
    provider: str = ""
    runs: list[str] = field(default_factory=list)
    problem: str = ""
    """Why nothing is placed there."""


@dataclass(frozen=True, slots=True)
class PlacementWord:
    """A placer's last plan, or why it has none."""

    site: str
    holder: str
    acting: bool
    """False: another one acts for the site, or it does not see enough to act (`blind`)."""
    mode: str = ""
    """`automatic`, or `by hand`: plans wait for `serai place apply`."""
    blind: str = ""
    plan: KeptPlan | None = None
    models: list[ModelWord] = field(default_factory=list)
    """As things are now."""
    pools: list[PoolWord] = field(default_factory=list)
    problem: str = ""
    """Why the question could not be answered, or the plan not be applied."""


_POOL = re.compile(rf"[A-Za-z0-9_=-]{{1,{POOL_CHARACTERS_MAX}}}")


class BadReport(ValueError):
    """A report or assignments that no honest sender writes; the text names the field."""


def checked_report(report: PoolReport) -> PoolReport:
    """`report` itself. Raises BadReport when a field is out of its bounds, or GPUs are used twice in it."""
    if not _POOL.fullmatch(report.pool):
        raise BadReport(f"pool: {report.pool[:40]!r} is no name of a pool (1 to {POOL_CHARACTERS_MAX} of A-Za-z0-9_=-)")
    if not 0 < report.interval_s <= 60:
        raise BadReport(f"interval_s: {report.interval_s:g} is not within 0 and 60")
    if len(report.gpus) > ASSIGNMENTS_MAX or len(report.runs) > 2 * ASSIGNMENTS_MAX:
        raise BadReport(f"gpus, runs: {len(report.gpus)} GPUs and {len(report.runs)} runs are too many")
    taken: set[int] = set()
    for run in report.runs:
        for gpu in run.gpus:
            if not 0 <= gpu < len(report.gpus):
                raise BadReport(f"runs: {run.assignment.id} uses GPU {gpu} of {len(report.gpus)}")
            if gpu in taken:
                raise BadReport(f"runs: GPU {gpu} is used twice")
            taken.add(gpu)
    return report


def checked_assignments(told: Assignments) -> Assignments:
    """`told` itself. Raises BadReport when a field is out of its bounds, or an id comes twice."""
    if len(told.run) > ASSIGNMENTS_MAX:
        raise BadReport(f"run: {len(told.run)} assignments; at most {ASSIGNMENTS_MAX}")
    if not 0 <= told.drain_s <= 86_400:
        raise BadReport(f"drain_s: {told.drain_s:g} is not within 0 and 86400")
    seen: set[str] = set()
    for one in told.run:
        if not one.id or not one.model or not one.engine:
            raise BadReport("run: an assignment without id, model or engine")
        if one.id in seen:
            raise BadReport(f"run: {one.id} comes twice")
        seen.add(one.id)
        if one.gpus < 0 or min(one.tensor, one.pipeline, one.data) < 1:
            raise BadReport(f"run: {one.id}: {one.gpus} GPUs, {one.tensor} × {one.pipeline} × {one.data}")
    return told
