"""The fluid against the fast simulator on a piece: the same requests, the same engines, the same bounded queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from serai.bench.place.fluid import QUEUE_SHARE, FluidQueue
from serai.bench.place.policies import SLO_TPOT_S, SLO_TTFT_S
from serai.bench.place.traces import STEP_S, RateTrace
from serai.engine_emulator.batching.settings import BatchSettings
from serai.performance.hardware import GPUS
from serai.performance.latency_profile import profile_for
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card
from serai.placer.options import Option
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.dispatch import Arrived, Effect, Ended, Event, Refuse, Request, Send
from serai.simulator.fast.instance import InstanceSpec
from serai.simulator.fast.run import NS
from serai.simulator.outcomes import LatencyDefinition, SloTarget, attainment
from serai.simulator.workloads.lengths import LogNormal
from serai.simulator.workloads.workload import Arrival

MINUTES = 20
CONCURRENCY = 256


class BoundedQueue:
    """Least loaded, each engine up to its concurrency; who would wait for more than half the target is refused."""

    watches_steps = False

    def __init__(self, option: Option, instances: int) -> None:
        self._room = max(1, option.concurrency)
        self._waiting_most = QUEUE_SHARE * option.requests_s * instances * SLO_TTFT_S
        self._in_flight = [0] * instances
        self._waiting: deque[Request] = deque()

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        """A `Send` where there is room, a `Refuse` where the queue is full."""
        match event:
            case Arrived(request):
                if len(self._waiting) >= self._waiting_most:
                    return (Refuse(request.number),)
                self._waiting.append(request)
            case Ended(_, instance, _):
                self._in_flight[instance] -= 1
        return self._sent()

    def _sent(self) -> list[Effect]:
        found: list[Effect] = []
        while self._waiting:
            place = min(range(len(self._in_flight)), key=self._in_flight.__getitem__)
            if self._in_flight[place] >= self._room:
                break
            self._in_flight[place] += 1
            found.append(Send(self._waiting.popleft().number, place))
        return found


def gaps(trace: RateTrace, options: Sequence[Option], seed: int) -> list[tuple[str, float, float]]:
    """Attainment by the fluid and by the simulator, for the models with the most requests: engines for their mean, a
    piece around their busiest minute."""
    order = sorted(range(len(trace.models)), key=lambda place: -sum(trace.counts[place]))[:6]
    found = []
    for place in order:
        counts = trace.counts[place]
        busiest = max(range(len(counts)), key=counts.__getitem__)
        first = max(0, min(len(counts) - MINUTES, busiest - MINUTES // 2))
        piece = counts[first : first + MINUTES]
        own = [option for option in options if option.model == trace.models[place].name]
        option = max(own, key=lambda o: o.requests_s / o.gpus)
        instances = max(1, round(sum(piece) / (MINUTES * STEP_S) / option.requests_s))
        fluid = FluidQueue(SLO_TTFT_S)
        for count in piece:
            fluid.step(count, instances * option.requests_s, STEP_S)
        simulated = _simulated(trace, place, piece, option, instances, seed)
        found.append((option.key, fluid.met / max(fluid.arrived, 1e-12), simulated))
    return found


def _simulated(trace: RateTrace, place: int, piece: Sequence[int], option: Option, instances: int, seed: int) -> float:
    model = RooflineModel(
        shipped_card(trace.models[place].card),
        GPUS[option.gpu],
        Parallelism(option.tensor, option.pipeline, option.expert),
        profile=profile_for(option.gpu),
    )
    settings = BatchSettings(model.kv_capacity_tokens(), sequences_max=CONCURRENCY, step_tokens_max=2048)
    specs = [InstanceSpec(model, settings, gpus=option.gpus) for _ in range(instances)]
    run = simulate(
        specs,
        _arrivals(trace, place, piece, seed),
        BoundedQueue(option, instances),
        ClusterSettings(keep_phases=False),
    )
    return attainment(run.outcomes, SloTarget(SLO_TTFT_S, SLO_TPOT_S), LatencyDefinition.INDUSTRY)


def _arrivals(trace: RateTrace, place: int, piece: Sequence[int], seed: int) -> Iterator[Arrival]:
    """Each minute's requests at random moments of it."""
    random, model = Random(f"{seed}/{place}/piece"), trace.models[place]
    prompt = LogNormal(model.prompt.mean, model.prompt.p50)
    output = LogNormal(model.output.mean, model.output.p50)
    for minute, count in enumerate(piece):
        for at_s in sorted(random.random() * STEP_S for _ in range(count)):
            yield Arrival(round((minute * STEP_S + at_s) * NS), prompt.draw(random), output.draw(random))
