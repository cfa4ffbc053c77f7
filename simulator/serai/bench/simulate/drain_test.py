"""OpenTela's placement test, one instance at a time: how long one engine takes to serve its 300-second workload.

The paper's placement rests on six such times (`tools/bench_placement/calculator.py`), most likely measured: one
instance a model and GPU, far more requests than it can serve, so the time is that of a full engine draining a queue.
Here the fast simulator drains the same queue. There is no goal: engine versions and settings are not all known, and no
H100-class part with 96 GB was among the GPUs that the profiles were fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass

from serai.engine_emulator.batching.settings import BatchSettings
from serai.ingress.routing import RoundRobin
from serai.performance.hardware import GPUS
from serai.performance.latency_profile import profile_for
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.instance import InstanceSpec
from serai.simulator.fast.routed import Routed
from serai.simulator.fast.run import NS
from serai.simulator.workloads.fields import workload_from_fields
from serai.simulator.workloads.workload import Workload

CLIENT_CONNECTIONS = 1000
"""The client's limit (aiohttp's default was raised to this): what is above it waits outside the engine."""
STEP_TOKENS = 16384
"""Chunked prefill was off, so a step must hold any prompt of the workload."""


@dataclass(frozen=True, slots=True)
class Workload300s:
    """One model of the test. Lengths are normal, clamped at 1 and 5."""

    name: str
    model: str
    tensor: int
    rate_per_s: float
    prompt: tuple[float, float]
    output: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Drain:
    """One of the six times."""

    workload: Workload300s
    gpu: str
    measured_s: float
    sequences_max: int
    """vLLM V1's default: 256 on an A100, 1,024 on larger GPUs."""

    @property
    def name(self) -> str:
        """As a figure's name."""
        return f"{self.workload.name}_{self.gpu.split('-')[0]}"


_13B = Workload300s("13b", "meta-llama/Llama-2-13b-hf", 1, 110.0, (599, 822), (74, 211))
_34B = Workload300s("34b", "codellama/CodeLlama-34b-hf", 2, 185.5, (1169, 1276), (532, 435))
_70B = Workload300s("70b", "meta-llama/Llama-3.3-70B-Instruct", 4, 221.0, (727, 777), (64, 190))
DRAINS = (
    Drain(_13B, "a100-sxm-80", 6538.165924, 256),
    Drain(_13B, "gh200-96", 2617.779327, 1024),
    Drain(_34B, "a100-sxm-80", 37231.53667, 256),
    Drain(_34B, "gh200-96", 11626.39596, 1024),
    Drain(_70B, "a100-sxm-80", 14897.00265, 256),
    Drain(_70B, "gh200-96", 5939.552729, 1024),
)


def drained_s(drain: Drain, share: float = 1.0) -> float:
    """The simulated time of a drain. With `share` below 1 the queue is that much shorter, and the time is scaled up:
    a full engine's speed does not depend on how long its queue is, but for its beginning and end."""
    work = drain.workload
    model = RooflineModel(
        shipped_card(work.model),
        GPUS[drain.gpu],
        Parallelism(work.tensor),
        profile=profile_for(drain.gpu, "vllm"),
    )
    settings = BatchSettings(
        model.kv_capacity_tokens(),
        sequences_max=drain.sequences_max,
        step_tokens_max=STEP_TOKENS,
        prefix_cache=False,
    )
    dispatch = Routed(RoundRobin, [0], queue_limit=CLIENT_CONNECTIONS)
    run = simulate([InstanceSpec(model, settings)], queue(work, share), dispatch, ClusterSettings(keep_phases=False))
    return run.duration_ns / NS / share


def queue(work: Workload300s, share: float) -> Workload:
    """The workload's arrivals; with `share` below 1 for that much less than 300 s."""
    return workload_from_fields(
        {
            "seed": 0,
            "arrivals": {"process": "poisson", "rate_per_s": work.rate_per_s, "duration_s": 300 * share},
            "lengths": {
                "prompt": {"clamped-normal": {"mean": work.prompt[0], "deviation": work.prompt[1], "minimum": 1}},
                "output": {"clamped-normal": {"mean": work.output[0], "deviation": work.output[1], "minimum": 5}},
            },
        }
    )
