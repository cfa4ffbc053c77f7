"""A trace replayed minute by minute against engines that start, serve and stop, under a policy that decides which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serai.bench.place.fluid import SUB_STEP_S, FluidQueue
from serai.bench.place.traces import STEP_S, RateTrace
from serai.placer.fleet import Fleet
from serai.placer.options import Option

DRAIN_S = 30.0
START_S = 40.0
"""An engine's start without its weights."""
WARM_SPEED_UP = 5.0
"""Weights that a node has read lately come from its memory, so much faster than from storage."""
WARM_FOR_S = 2 * 3600.0


@dataclass(slots=True)
class Engine:
    """One engine in the replay."""

    id: str
    option: Option
    node: str
    started_s: float
    ready_s: float
    stopped_s: float | None = None
    """When it stopped taking requests; its GPUs are free DRAIN_S later."""
    held_from_s: float = 0.0
    """Since when it has its GPUs: those of engines that drain are not had twice."""

    def held_s(self, from_s: float, to_s: float) -> float:
        """For how much of that time it has its GPUs."""
        end_s = to_s if self.stopped_s is None else min(to_s, self.stopped_s + DRAIN_S)
        return max(0.0, end_s - max(from_s, self.held_from_s))


@dataclass(frozen=True, slots=True)
class Start:
    """Start an engine on a node, after those that end there have drained if `waits`."""

    option: Option
    node: str
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop an engine."""

    id: str


class Policy(Protocol):
    """What decides."""

    every_s: float

    def begin(self) -> Sequence[Start]:
        """What runs at the beginning, loaded."""
        ...

    def decide(self, now_s: float, seen: Mapping[str, int], engines: Sequence[Engine]) -> Sequence[Start | Stop]:
        """What to do now; `seen` are the requests of each model since the last time."""
        ...


@dataclass
class Course:
    """What a replay came to."""

    attainment: float
    """Share of all requests that met their targets."""
    model_attainment: float
    """Mean over models."""
    by_model: dict[str, float]
    gpu_hours: float
    """Of engines that loaded, served or drained."""
    starts: int
    stops: int
    cold_starts: int
    """Starts of a model that nothing served while requests waited."""
    moves_by_hour: list[int] = field(default_factory=list)
    requests: float = 0.0
    turned_away: float = 0.0
    samples: list[dict[str, float]] = field(default_factory=list)
    """Every ten minutes: GPUs in use, share met, moves."""

    @property
    def moves_per_hour(self) -> float:
        """Starts and stops after the beginning, on average."""
        return sum(self.moves_by_hour) / max(1, len(self.moves_by_hour))


class OverCommitted(AssertionError):
    """A policy gave a node more engines than it has GPUs for."""


def replay(trace: RateTrace, fleet: Fleet, policy: Policy, slo_ttft_s: float) -> Course:
    """The whole trace. Raises OverCommitted when a policy gives GPUs away twice."""
    return _Replay(trace, fleet, policy, slo_ttft_s).run()


class _Replay:
    def __init__(self, trace: RateTrace, fleet: Fleet, policy: Policy, slo_ttft_s: float) -> None:
        self._trace, self._fleet, self._policy = trace, fleet, policy
        self._queues = {model.name: FluidQueue(slo_ttft_s) for model in trace.models}
        self._engines: dict[str, Engine] = {}
        self._warm: dict[tuple[str, str], float] = {}
        self._seen: dict[str, int] = {model.name: 0 for model in trace.models}
        self._made = 0
        self._starts = self._stops = self._cold = 0
        self._gpu_s = 0.0
        self._moves: list[int] = [0] * max(1, round(trace.steps * STEP_S / 3600 + 0.4999))
        self._samples: list[dict[str, float]] = []

    def run(self) -> Course:
        for start in self._policy.begin():
            self._start(start, -1e9)
        self._check(0.0)
        due_s = 0.0
        for step in range(self._trace.steps):
            now_s = step * STEP_S
            if now_s >= due_s and step:
                self._decide(now_s)
                due_s = now_s + self._policy.every_s
            self._serve(step, now_s)
            if step % 10 == 9:
                self._sample(now_s + STEP_S)
        return self._course()

    def _decide(self, now_s: float) -> None:
        live = [engine for engine in self._engines.values() if engine.stopped_s is None]
        for action in self._policy.decide(now_s, self._seen, live):
            self._moves[min(len(self._moves) - 1, int(now_s // 3600))] += 1
            if isinstance(action, Stop):
                self._engines[action.id].stopped_s = now_s
                self._stops += 1
            else:
                model = action.option.model
                served = any(e.option.model == model and e.stopped_s is None for e in self._engines.values())
                self._cold += not served and self._queues[model].waiting > 0
                self._start(action, now_s)
                self._starts += 1
        self._seen = dict.fromkeys(self._seen, 0)
        self._check(now_s)

    def _start(self, start: Start, now_s: float) -> None:
        self._made += 1
        began_s = now_s + (DRAIN_S if start.waits else 0.0)
        key = (start.node, start.option.model)
        warm = now_s - self._warm.get(key, -1e12) < WARM_FOR_S
        reading_s = max(0.0, start.option.load_s - START_S) / (WARM_SPEED_UP if warm else 1.0)
        name = f"engine-{self._made}"
        ready_s = began_s + START_S + reading_s
        self._engines[name] = Engine(name, start.option, start.node, now_s, ready_s, held_from_s=began_s)

    def _check(self, now_s: float) -> None:
        """No node has more GPUs in use than it has. Engines that drain hold theirs; who starts there waits."""
        used: dict[str, int] = {}
        for engine in self._engines.values():
            if engine.stopped_s is None:
                used[engine.node] = used.get(engine.node, 0) + engine.option.gpus
        for node, gpus in used.items():
            if gpus > self._fleet.by_name[node].gpus:
                raise OverCommitted(f"at {now_s:.0f} s node {node} runs engines of {gpus} GPUs")

    def _serve(self, step: int, now_s: float) -> None:
        for place, model in enumerate(self._trace.models):
            count = self._trace.counts[place][step]
            self._seen[model.name] += count
        capacity: dict[str, list[tuple[float, float]]] = {}
        for name, engine in list(self._engines.items()):
            if engine.stopped_s is not None and now_s >= engine.stopped_s + DRAIN_S:
                self._warm[engine.node, engine.option.model] = now_s
                del self._engines[name]
                continue
            self._gpu_s += engine.option.gpus * engine.held_s(now_s, now_s + STEP_S)
            if engine.stopped_s is None:
                capacity.setdefault(engine.option.model, []).append((engine.ready_s, engine.option.requests_s))
        for place, model in enumerate(self._trace.models):
            arriving = self._trace.counts[place][step]
            queue, own = self._queues[model.name], capacity.get(model.name, ())
            if not arriving and not queue.waiting:
                continue
            # With the same capacity all the while, one step is as exact as many.
            changes = any(now_s < ready_s < now_s + STEP_S for ready_s, _ in own)
            parts = round(STEP_S / SUB_STEP_S) if changes else 1
            for part in range(parts):
                at_s = now_s + part * SUB_STEP_S
                ready = sum(rate for ready_s, rate in own if ready_s <= at_s)
                queue.step(arriving / parts, ready, STEP_S / parts)

    def _sample(self, at_s: float) -> None:
        arrived = sum(queue.arrived for queue in self._queues.values())
        met = sum(queue.met for queue in self._queues.values())
        used = sum(engine.option.gpus for engine in self._engines.values())
        moves = self._starts + self._stops
        self._samples.append({"at_s": at_s, "gpus": used, "arrived": arrived, "met": met, "moves": moves})

    def _course(self) -> Course:
        by_model = {name: q.met / q.arrived for name, q in self._queues.items() if q.arrived}
        arrived = sum(queue.arrived for queue in self._queues.values())
        return Course(
            attainment=sum(queue.met for queue in self._queues.values()) / max(arrived, 1e-12),
            model_attainment=sum(by_model.values()) / max(1, len(by_model)),
            by_model=by_model,
            gpu_hours=self._gpu_s / 3600,
            starts=self._starts,
            stops=self._stops,
            cold_starts=self._cold,
            moves_by_hour=self._moves,
            requests=arrived,
            turned_away=sum(queue.turned_away for queue in self._queues.values()),
            samples=self._samples,
        )
