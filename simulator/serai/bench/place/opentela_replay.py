"""The same three workloads in the fast simulator: 300 s of arrivals, queues, batches, until everything is served.

Engines are the cost model's, their steps made slower by one factor a model and GPU, so that one instance alone takes
the time it was measured to take; what a placement adds (queues, shares, several instances) is simulated. Without the
factors (`calibrated=False`) the cost model stands alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from serai.bench.place.opentela_case import SHORT, Pool, Pools, Score
from serai.bench.simulate.drain_test import (
    CLIENT_CONNECTIONS,
    DRAINS,
    STEP_TOKENS,
    Drain,
    Workload300s,
    drained_s,
    queue,
)
from serai.engine_emulator.batching.settings import BatchSettings
from serai.performance.hardware import GPUS
from serai.performance.latency_model import LatencyModel, Step
from serai.performance.latency_profile import profile_for
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.dispatch import Arrived, Dispatch, Effect, Ended, Event, Request, Send
from serai.simulator.fast.instance import InstanceSpec
from serai.simulator.fast.run import NS

SINGLE_SHARE = 0.1
"""Of the queue, to find the factor of one instance: a full engine's speed does not depend on its length."""


class SlowedSteps:
    """`model` with every step `factor` times as long."""

    def __init__(self, model: LatencyModel, factor: float) -> None:
        self._model = model
        self._factor = factor

    def step_s(self, step: Step) -> float:
        """Duration of one engine step, in seconds."""
        return self._factor * self._model.step_s(step)

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        """Time to process `batch` prompts in one step."""
        return self._factor * self._model.prefill_s(prompt_tokens, cached_tokens, batch)

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        """Duration of a step that adds one token to each of `sequences`."""
        return self._factor * self._model.decode_step_s(sequences, context_tokens)

    def kv_capacity_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights."""
        return self._model.kv_capacity_tokens()

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values one token leaves in the whole instance."""
        return self._model.kv_bytes_per_token()


class WeightedRandom:
    """The router of the experiment: each request goes to an instance by weight, at once and for good; what is above the
    client's connections waits in front of that instance."""

    watches_steps = False

    def __init__(self, weights: Sequence[float], connections: int, seed: int = 0) -> None:
        self._weights = list(weights)
        self._places = range(len(weights))
        self._connections = connections
        self._random = Random(seed)
        self._in_flight = [0] * len(weights)
        self._waiting: list[deque[Request]] = [deque() for _ in weights]

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        """A `Send` where the chosen instance has a connection left."""
        match event:
            case Arrived(request):
                place = self._random.choices(self._places, self._weights)[0]
                self._waiting[place].append(request)
                return self._sent(place)
            case Ended(_, place, _):
                self._in_flight[place] -= 1
                return self._sent(place)
        return ()

    def _sent(self, place: int) -> Iterable[Effect]:
        if not self._waiting[place] or self._in_flight[place] >= self._connections:
            return ()
        self._in_flight[place] += 1
        return (Send(self._waiting[place].popleft().number, place),)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one replay came to."""

    score: Score
    unfinished: int
    requests: int


def replay(pools: Pools, *, share: float, calibrated: bool, tell: Callable[[str], None]) -> Replayed:
    """All three models, each on its own instances. `share` shortens the 300 s; times are scaled back up."""
    rps: dict[str, float] = {}
    longest, unfinished, requests = 0.0, 0, 0
    for model, own in pools.items():
        work = _workload(model)
        dispatch: Dispatch = WeightedRandom(
            [pool.share / pool.instances for pool in own for _ in range(pool.instances)], CLIENT_CONNECTIONS
        )
        instances = [_instance(pool, calibrated) for pool in own for _ in range(pool.instances)]
        run = simulate(instances, queue(work, share), dispatch, ClusterSettings(keep_phases=False))
        took_s = run.duration_ns / NS / share
        count = len(run.outcomes)
        rps[SHORT[model]] = count / share / took_s
        longest = max(longest, took_s)
        unfinished += run.unfinished + sum(run.outcomes.columns["refused"])
        requests += count
        tell(f"    {SHORT[model]}: {count} requests on {len(instances)} instances in {took_s:.0f} s")
    return Replayed(Score(rps, longest), unfinished, requests)


def _instance(pool: Pool, calibrated: bool) -> InstanceSpec:
    option = pool.option
    drain = _drain(option.model, option.gpu)
    model: LatencyModel = RooflineModel(
        shipped_card(option.model),
        GPUS[option.gpu],
        Parallelism(option.tensor, option.pipeline),
        profile=profile_for(option.gpu, "vllm"),
    )
    if calibrated:
        model = SlowedSteps(model, _factor(drain))
    settings = BatchSettings(
        model.kv_capacity_tokens(),
        sequences_max=drain.sequences_max,
        step_tokens_max=STEP_TOKENS,
        prefix_cache=False,
    )
    return InstanceSpec(model, settings, gpus=option.gpus)


@cache
def _factor(drain: Drain) -> float:
    """How much slower than the cost model one instance was measured to be."""
    return drain.measured_s / drained_s(drain, SINGLE_SHARE)


def _drain(model: str, gpu: str) -> Drain:
    return next(d for d in DRAINS if SHORT[_model_of(d)] == SHORT[model] and d.gpu == gpu)


def _model_of(drain: Drain) -> str:
    return next(model for model in SHORT if model.lower() == drain.workload.model.lower())


def _workload(model: str) -> Workload300s:
    return next(d.workload for d in DRAINS if _model_of(d) == model)
