"""Serving systems by name, as they can be simulated: how an engine batches, and who sends what where.

| name | engine | instances |
|---|---|---|
| `vllm` | vLLM V0 (0.7): whole prompts in batches of their own, before decoding | round robin |
| `vllm-v1` | vLLM V1: prompt chunks share steps with decoding | round robin |
| `sglang` | SGLang's default loop: prompts first, in pieces of 8,192 | round robin |
| `sarathi` | decoding first, prompt chunks in what is left of 512 tokens a step | round robin |
| `distserve` | DistServe as released: pairs of one prefill and one decode instance on a node | least loaded pair |
| `mooncake` | vLLM V0 with Mooncake's store: prefill and decode anywhere, KV through the store | round robin |
| `mooncake-direct` | the same, but from GPU to GPU, no copy on a host | round robin |
| `distserve-ideal` | prefill and decode on different instances of a node, in any ratio | least loaded |
| `mooncake-ideal` | prefill and decode anywhere, KV over the network at no cost to engines | least loaded |

What the released ones do: `kv_connectors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from serai.engine_emulator.batching.settings import BatchMode, BatchSettings
from serai.performance.latency_model import LatencyModel
from serai.performance.roofline import RooflineModel
from serai.simulator.fast.disaggregated import Disaggregated
from serai.simulator.fast.dispatch import Dispatch
from serai.simulator.fast.instance import InstanceSpec, Role
from serai.simulator.fast.kv_connectors import Connector, Migration, ObjectStore
from serai.simulator.fast.routed import Routed, routing_policy
from serai.simulator.fast.step_times import SlowerSteps, StepEnergy


class UnknownPreset(ValueError):
    """No preset of that name; the text names the nearest."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Time per step that an engine adds; None leaves what the latency profile says."""

    step_s: float | None = None
    """Instead of the profile's own overhead per step. 0.018 is what the PaDG paper's baselines (vLLM 0.7) come to."""
    mixed_s: float = 0.0
    """On top, where prompt chunks share a step with decoding; 0.012 for the same engine."""


@dataclass(frozen=True, slots=True)
class EnginePreset:
    """How an engine batches. `settings` lacks only the KV capacity, which is the instance's."""

    name: str
    mode: BatchMode
    step_tokens_max: int
    sequences_max: int = 256
    chunk_tokens_max: int | None = None
    prefix_cache: bool = True
    decode_reserve: float | None = None

    def settings(self, kv_tokens: int) -> BatchSettings:
        """For an instance whose cache holds `kv_tokens`."""
        return BatchSettings(
            kv_tokens=kv_tokens,
            mode=self.mode,
            sequences_max=self.sequences_max,
            step_tokens_max=self.step_tokens_max,
            chunk_tokens_max=self.chunk_tokens_max,
            prefix_cache=self.prefix_cache,
            decode_reserve=self.decode_reserve,
        )


# vLLM keeps no room for tokens to come (reserve 0) and had prefix caching switched off by default before V1. V0 put
# whole prompts into a batch up to the model's context length; 8,192 is between those of the models simulated here.
ENGINES: dict[str, EnginePreset] = {
    preset.name: preset
    for preset in (
        EnginePreset("vllm", BatchMode.PREFILL_FIRST, 8192, prefix_cache=False, decode_reserve=0.0),
        EnginePreset("vllm-v1", BatchMode.MIXED, 2048),
        EnginePreset("sglang", BatchMode.PREFILL_FIRST, 16384, sequences_max=1024, chunk_tokens_max=8192),
        EnginePreset("sarathi", BatchMode.MIXED, 512, chunk_tokens_max=512, prefix_cache=False),
        EnginePreset("padg", BatchMode.PHASE_GATED, 8192, prefix_cache=False, decode_reserve=0.0),
        # `--context-max-tokens-per-batch` and both `max-batch-size` as `distserve/engine.py` has them by default.
        EnginePreset("distserve", BatchMode.PREFILL_FIRST, 4096, prefix_cache=False, decode_reserve=0.0),
    )
}
IDEAL = {"distserve": "distserve-ideal", "mooncake": "mooncake-ideal"}
"""Disaggregated systems as released, and what each would be if handing KV over cost its engines nothing."""
DISAGGREGATED = (*IDEAL, "mooncake-direct", *IDEAL.values())
_THROUGH_STORE = ("mooncake", "mooncake-direct")
_ANYWHERE = (*_THROUGH_STORE, "mooncake-ideal")
"""Send KV to any node."""
SYSTEMS: tuple[str, ...] = ("vllm", "vllm-v1", "sglang", "sarathi", *DISAGGREGATED)
"""What can be named in a scenario. `padg` is an engine only: what makes it a system is its macro-scheduler."""


def engine_preset(name: str) -> EnginePreset:
    """The engine `name`; those of disaggregated systems are vLLM's, but for DistServe's own. Raises UnknownPreset."""
    found = ENGINES.get(name)
    if found is None and name in DISAGGREGATED:
        return ENGINES["vllm"]
    if found is None:
        known = tuple(dict.fromkeys((*ENGINES, *DISAGGREGATED)))
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        raise UnknownPreset(f"no engine preset {name!r}: {hint}")
    return found


def with_overheads(model: LatencyModel, overheads: Overheads) -> LatencyModel:
    """`model` as slow as an engine with `overheads`."""
    if overheads.step_s is not None and isinstance(model, RooflineModel):
        model = model.with_overheads(step_s=overheads.step_s)
    elif overheads.step_s:
        model = SlowerSteps(model, step_s=overheads.step_s)
    return SlowerSteps(model, mixed_s=overheads.mixed_s) if overheads.mixed_s else model


@dataclass(frozen=True, slots=True)
class System:
    """A serving system ready to be simulated. `dispatch` is made anew for each run: policies remember."""

    name: str
    instances: Sequence[InstanceSpec]
    dispatch: Callable[[], Dispatch]


def whole_system(
    name: str,
    model: LatencyModel,
    instances: int,
    *,
    engine: EnginePreset | None = None,
    overheads: Overheads | None = None,
    policy: str = "round-robin",
    queue_limit: int | None = None,
    routers: int = 1,
    kv_tokens: int | None = None,
    gpus: int = 1,
) -> System:
    """`instances` equal engines of preset `name`, behind an ingress's routing policy."""
    preset = engine or engine_preset(name)
    spec = instance_spec(preset, model, overheads or Overheads(), kv_tokens, gpus)
    make_policy = routing_policy(policy)

    def dispatch() -> Dispatch:
        return Routed(make_policy, range(instances), queue_limit=queue_limit, routers=routers)

    return System(name, [spec] * instances, dispatch)


def disaggregated_system(
    name: str,
    model: LatencyModel,
    prefill: int,
    decode: int,
    instances_per_node: int,
    *,
    engine: EnginePreset | None = None,
    overheads: Overheads | None = None,
    policy: str | None = None,
    kv_tokens: int | None = None,
    gpus: int = 1,
) -> System:
    """`prefill` and `decode` engines. `distserve-ideal` spreads both over every node and sends KV only within a node,
    so the ratio must be the same in each; `distserve` has pairs, one of each kind; those of `mooncake` fill
    nodes with prefill instances first and send KV anywhere. The ingress's `policy` chooses on both sides
    (`default_policy` without).

    Raises ValueError when a node of DistServe would have only one kind, or no pair for somebody.
    """
    overheads = overheads or Overheads()
    spec = instance_spec(engine or engine_preset(name), model, overheads, kv_tokens, gpus)
    spec = replace(spec, connector=connector(name, model, overheads))
    roles = _roles(name, prefill, decode, instances_per_node)
    specs = [replace(spec, role=role, node=node) for role, node in roles]
    of_role = {role: [n for n, one in enumerate(specs) if one.role is role] for role in (Role.PREFILL, Role.DECODE)}
    pairs = name == "distserve"
    peers = {
        instance: [
            other
            for other in of_role[Role.DECODE]
            if name in _ANYWHERE or (other == instance + 1 if pairs else specs[other].node == specs[instance].node)
        ]
        for instance in of_role[Role.PREFILL]
    }
    make_policy = routing_policy(policy or default_policy(name))
    return System(
        f"{name} {prefill}:{decode}",
        specs,
        lambda: Disaggregated(of_role[Role.PREFILL], peers, make_policy, pairs=pairs),
    )


def default_policy(name: str) -> str:
    """How a disaggregated system chooses instances. Mooncake's proxy takes them in turn; DistServe has no proxy."""
    return "round-robin" if name in _THROUGH_STORE else "least-loaded"


def connector(name: str, model: LatencyModel, overheads: Overheads) -> Connector | None:
    """How the disaggregated system `name` hands KV over; None for ideal ones."""
    if name == "distserve":
        return Migration()
    if name not in _THROUGH_STORE:
        return None
    store = ObjectStore(step_s=overheads.step_s or 0.0)
    if isinstance(model, RooflineModel):
        step_s = model.profile.overheads.step_s if overheads.step_s is None else overheads.step_s
        # Hidden states are of two bytes, as weights and KV of all models here.
        store = ObjectStore(model.parallelism.tensor, 2.0 * model.card.hidden, step_s)
    return store if name == "mooncake" else replace(store, save_bytes_s=math.inf, load_bytes_s=math.inf)


def ratios(instances: int, instances_per_node: int, name: str) -> list[tuple[int, int]]:
    """Every prefill : decode ratio that `instances` can be split into."""
    if name == "distserve":
        whole = instances % 2 == 0 and instances_per_node % 2 == 0
        return [(instances // 2, instances // 2)] if whole else []
    if name in _ANYWHERE:
        return [(prefill, instances - prefill) for prefill in range(1, instances)]
    if instances_per_node < 2 or instances % instances_per_node:
        return []
    nodes = instances // instances_per_node
    return [(nodes * prefill, nodes * (instances_per_node - prefill)) for prefill in range(1, instances_per_node)]


def instance_spec(
    preset: EnginePreset, model: LatencyModel, overheads: Overheads, kv_tokens: int | None = None, gpus: int = 1
) -> InstanceSpec:
    """One instance of `preset`. `kv_tokens` overrides what fits by the model.
    Raises ValueError when the weights leave no room."""
    capacity = model.kv_capacity_tokens() if kv_tokens is None else kv_tokens
    if capacity < 16:
        raise ValueError("the weights leave no room for a KV cache: use more or larger GPUs per instance (tp)")
    slower = with_overheads(model, overheads)
    settings = preset.settings(capacity)
    if not isinstance(model, RooflineModel):
        return InstanceSpec(slower, settings, gpus=gpus)
    waiting = model if overheads.step_s is None else model.with_overheads(step_s=overheads.step_s)
    idle_w = model.gpu.idle_power_w * model.parallelism.gpus
    return InstanceSpec(slower, settings, gpus=gpus, energy_j=StepEnergy(waiting.energy_j), idle_power_w=idle_w)


def _roles(name: str, prefill: int, decode: int, instances_per_node: int) -> list[tuple[Role, int]]:
    if prefill < 1 or decode < 1:
        raise ValueError(f"{name} needs at least one instance of each kind, not {prefill} and {decode}")
    total = prefill + decode
    if name == "distserve":
        if prefill != decode or instances_per_node % 2:
            raise ValueError(
                f"distserve has pairs of one prefill and one decode instance on a node: {prefill} and {decode} with "
                f"{instances_per_node} a node are none (distserve-ideal takes any ratio that is the same in each node)"
            )
        return [
            (role, number // instances_per_node) for number, role in enumerate([Role.PREFILL, Role.DECODE] * prefill)
        ]
    if name in _ANYWHERE:
        order = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        return [(role, number // instances_per_node) for number, role in enumerate(order)]
    nodes = -(-total // instances_per_node)
    if prefill % nodes or decode % nodes:
        raise ValueError(
            f"{name} needs both kinds in each of {nodes} nodes: {prefill} prefill and {decode} decode instances "
            f"cannot be spread evenly"
        )
    one = [Role.PREFILL] * (prefill // nodes) + [Role.DECODE] * (decode // nodes)
    return [(role, node) for node in range(nodes) for role in one]
