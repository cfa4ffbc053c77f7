"""A scenario file: which systems serve which workload on which GPUs, and what is asked of them.

```yaml
name: l20-codellama-sharegpt
model: codellama/CodeLlama-34b-hf     # a shipped model, or a config.json beside this file
gpu: l20
tp: 4                                 # GPUs per instance, 1 if left out
instances: 8
instances_per_node: 2                 # share a node's links; all in one node if left out
links: {inside: pcie4, between: ethernet-10g, share: 0.6}   # for systems that move KV; the GPU's link if left out
overheads: {step_s: 0.018, mixed_s: 0.012}                  # of an older engine; the profile's if left out
systems:                              # names, or mappings with what differs from the preset
  - vllm
  - {name: sarathi, label: sarathi-128, policy: least-loaded, sequences_max: 128}
  - {name: mooncake, prefill: [2, 3]}  # the best of these ratios is told; all are tried if left out
workload: {...}                       # serai.simulator.workloads.fields
slo: {ttft_s: 5, tpot_s: 0.1}
definition: strict                    # or industry
rates_per_s: [10, 20, 30]             # instead of workload.arrivals.rate_per_s; or rate_scales for a trace; or
                                      # {from: 10, to: 60, by: 10}
levels: [0.9, 0.99]                   # goodput is the highest rate at which this share meets the slo
refinements: 1                        # scan this often between rates where a level turns
seeds: 3                              # or a list
warm_up_s: 10                         # requests that arrive before do not count
drain_s: 300                          # go on this long after the last arrival
status_delay_s: 0                     # how late instances' status reaches the policy
send_delay_s: 0                       # from policy to engine
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serai.bench.profile.engine import read_card
from serai.ingress.routing import POLICIES
from serai.performance.hardware import LINKS, Link, UnknownHardware, find_gpu, find_link
from serai.performance.latency_profile import profile_for
from serai.performance.memory import BadParallelism, MemoryBudget, Parallelism
from serai.performance.model_card import BadModelConfig
from serai.performance.roofline import RooflineModel
from serai.runtime import strict_yaml
from serai.runtime.fields import BadInput, Fields
from serai.simulator.fast.cluster import ClusterSettings
from serai.simulator.fast.links import Network
from serai.simulator.fast.presets import (
    DISAGGREGATED,
    SYSTEMS,
    EnginePreset,
    Overheads,
    System,
    default_policy,
    disaggregated_system,
    engine_preset,
    ratios,
    whole_system,
)
from serai.simulator.goodput import LEVELS
from serai.simulator.outcomes import LatencyDefinition, SloTarget, Window
from serai.simulator.workloads.fields import workload_from_fields
from serai.simulator.workloads.workload import Workload

RUNS_MAX = 10_000
SEEDS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Variant:
    """One system as it is run; several ratios of one disaggregated system are several variants of one label."""

    label: str
    """What it is called in results."""
    system: System

    @property
    def name(self) -> str:
        """Label and ratio."""
        ratio = self.system.name.partition(" ")[2]
        return f"{self.label} {ratio}" if ratio else self.label


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario, read and checked."""

    name: str
    file: str
    variants: Sequence[Variant]
    workload: Mapping[str, Any]
    """Fields of the workload, as written."""
    slo: SloTarget
    definition: LatencyDefinition
    seeds: Sequence[int]
    rates: Sequence[float]
    """What is scanned; empty for one run a seed."""
    scales: bool
    """Whether `rates` are scales of a trace, not requests per second."""
    levels: Sequence[float]
    refinements: int
    warm_up_s: float
    cluster: ClusterSettings
    model: RooflineModel
    instances: int
    notes: Sequence[str] = field(default_factory=list)

    def workload_at(self, rate: float | None, seed: int) -> Workload:
        """The workload at a rate of the scan (None: as written) with a seed of its own. Raises BadInput."""
        fields: Any = deepcopy(dict(self.workload))
        fields["seed"] = seed
        if rate is not None:
            if self.scales:
                fields["trace"] = {**fields["trace"], "rate_scale": rate}
            else:
                fields["arrivals"] = {**fields["arrivals"], "rate_per_s": rate}
        return workload_from_fields(fields, place="workload")

    @property
    def window(self) -> Window:
        """Which requests count."""
        return Window(begin_ns=round(self.warm_up_s * 1e9))


def read_scenario(file: Path, seeds: int | None = None) -> Scenario:
    """The scenario in `file`; `seeds` overrides how many it has. Raises BadInput, its place beginning with the file."""
    try:
        found = strict_yaml.load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadInput(str(file), f"cannot be read ({reason})", "name a scenario file") from error
    except strict_yaml.NotYaml as error:
        raise BadInput(str(file), f"is not YAML ({error})", "correct it there") from error
    if not isinstance(found, Mapping):
        raise BadInput(str(file), "holds no mapping", "write `model:`, `gpu:`, `systems:`, … as in docs/scenarios/")
    try:
        return _scenario(Fields(found, ""), file, seeds)
    except BadInput as error:
        raise BadInput(f"{file}: {error.place}", error.problem, error.remedy) from error


def _scenario(fields: Fields, file: Path, seeds: int | None) -> Scenario:
    name = fields.text("name", file.stem)
    model = _model(fields, file)
    instances = _at_least(fields, "instances", 1, fields.whole("instances", 1))
    per_node = _at_least(fields, "instances_per_node", 1, fields.whole("instances_per_node", instances))
    overheads = _overheads(fields)
    kv_tokens = fields.whole("kv_tokens") if fields.has("kv_tokens") else None
    shape = _Shape(model, instances, per_node, overheads, kv_tokens)
    variants = _systems(fields, shape)
    workload, rates, scales = _workload(fields)
    slo_fields = fields.part("slo")
    slo = SloTarget(_above(slo_fields, "ttft_s"), _above(slo_fields, "tpot_s"))
    slo_fields.done()
    definition = LatencyDefinition.STRICT
    if fields.has("definition"):
        definition = LatencyDefinition(fields.choice("definition", LatencyDefinition))
    scenario = Scenario(
        name=name,
        file=str(file),
        variants=variants,
        workload=workload,
        slo=slo,
        definition=definition,
        seeds=_seeds(fields, seeds),
        rates=rates,
        scales=scales,
        levels=_levels(fields),
        refinements=_at_least(fields, "refinements", 0, fields.whole("refinements", 0)),
        warm_up_s=_not_negative(fields, "warm_up_s", 0.0),
        cluster=_cluster(fields, model),
        model=model,
        instances=instances,
        notes=[f"latency profile: {model.profile.gpu} {model.profile.engine}. {model.profile.provenance.note}"],
    )
    fields.done()
    runs = len(variants) * max(1, len(rates)) * len(scenario.seeds)
    if runs > RUNS_MAX:
        raise BadInput("rates_per_s", f"with systems and seeds makes {runs} runs", f"keep it to {RUNS_MAX}")
    # A bad workload is told now, not after the first hour.
    scenario.workload_at(rates[0] if rates else None, scenario.seeds[0])
    return scenario


@dataclass(frozen=True, slots=True)
class _Shape:
    """What all systems share."""

    model: RooflineModel
    instances: int
    per_node: int
    overheads: Overheads
    kv_tokens: int | None


def _model(fields: Fields, file: Path) -> RooflineModel:
    name, gpu_name = fields.text("model"), fields.text("gpu")
    beside = file.parent / name
    try:
        card = read_card(str(beside) if name.endswith(".json") and beside.is_file() else name)
    except BadModelConfig as error:
        raise BadInput("model", str(error), "name a shipped model or a config.json beside this file") from error
    try:
        gpu = find_gpu(gpu_name)
    except UnknownHardware as error:
        raise BadInput("gpu", str(error), "see serai profile show") from error
    tensor = _at_least(fields, "tp", 1, fields.whole("tp", 1))
    engine = fields.text("profile", "vllm")
    utilisation = fields.number("gpu_memory_utilisation", 0.9)
    try:
        return RooflineModel(
            card,
            gpu,
            Parallelism(tensor),
            profile=profile_for(gpu.name, engine),
            budget=MemoryBudget(utilisation=utilisation),
        )
    except BadParallelism as error:
        raise BadInput("tp", str(error), "choose another") from error


def _overheads(fields: Fields) -> Overheads:
    if not fields.has("overheads"):
        return Overheads()
    part = fields.part("overheads")
    step_s = _not_negative(part, "step_s", 0.0) if part.has("step_s") else None
    found = Overheads(step_s, _not_negative(part, "mixed_s", 0.0))
    part.done()
    return found


def _systems(fields: Fields, shape: _Shape) -> list[Variant]:
    found = fields.any("systems")
    if not isinstance(found, list) or not found:
        raise BadInput("systems", "is no list", f"write a list of {', '.join(SYSTEMS)}")
    variants: list[Variant] = []
    for place, item in enumerate(found):
        part = Fields({"name": item} if isinstance(item, str) else item, f"systems[{place}]")
        variants += _variants(part, shape)
        part.done()
    names = [variant.name for variant in variants]
    for name in names:
        if names.count(name) > 1:
            raise BadInput("systems", f"has two of the name `{name}`", "give one a `label`")
    return variants


def _variants(part: Fields, shape: _Shape) -> list[Variant]:
    name = part.choice("name", list(SYSTEMS))
    label = part.text("label", name)
    preset = _preset(part, engine_preset(name))
    overheads = _overheads(part) if part.has("overheads") else shape.overheads
    gpus = shape.model.parallelism.gpus
    policy = default_policy(name) if name in DISAGGREGATED else "round-robin"
    if part.has("policy"):
        policy = part.choice("policy", list(POLICIES))
    try:
        if name in DISAGGREGATED:
            chosen = _ratios(part, name, shape)
            return [
                Variant(
                    label,
                    disaggregated_system(
                        name,
                        shape.model,
                        prefill,
                        decode,
                        shape.per_node,
                        engine=preset,
                        overheads=overheads,
                        policy=policy,
                        kv_tokens=shape.kv_tokens,
                        gpus=gpus,
                    ),
                )
                for prefill, decode in chosen
            ]
        limit = _at_least(part, "queue_limit", 1, part.whole("queue_limit")) if part.has("queue_limit") else None
        system = whole_system(
            name,
            shape.model,
            shape.instances,
            engine=preset,
            overheads=overheads,
            policy=policy,
            queue_limit=limit,
            routers=_at_least(part, "routers", 1, part.whole("routers", 1)),
            kv_tokens=shape.kv_tokens,
            gpus=gpus,
        )
    except ValueError as error:
        raise BadInput(part.place, str(error), "change it there, or tp, instances or kv_tokens") from error
    return [Variant(label, system)]


def _preset(part: Fields, preset: EnginePreset) -> EnginePreset:
    """The preset with what the scenario changes of it."""
    changes: dict[str, Any] = {
        name: _at_least(part, name, 1, part.whole(name))
        for name in ("step_tokens_max", "sequences_max", "chunk_tokens_max")
        if part.has(name)
    }
    if part.has("prefix_cache"):
        value = part.any("prefix_cache")
        if not isinstance(value, bool):
            raise BadInput(part.at("prefix_cache"), f"is {value!r}", "write true or false")
        changes["prefix_cache"] = value
    if part.has("decode_reserve"):
        changes["decode_reserve"] = _not_negative(part, "decode_reserve", 0.0)
    return replace(preset, **changes)


def _ratios(part: Fields, name: str, shape: _Shape) -> list[tuple[int, int]]:
    possible = ratios(shape.instances, shape.per_node, name)
    if not possible:
        many = "an even number of" if name == "distserve" else "at least two"
        raise BadInput(part.place, f"{name} needs {many} instances in each node", "change instances_per_node")
    if not part.has("prefill"):
        return possible
    wanted = part.any("prefill")
    wanted = wanted if isinstance(wanted, list) else [wanted]
    known = [prefill for prefill, _ in possible]
    for prefill in wanted:
        if prefill not in known:
            raise BadInput(part.at("prefill"), f"has {prefill!r}", f"choose from {', '.join(map(str, known))}")
    return [(prefill, shape.instances - prefill) for prefill in wanted]


def _workload(fields: Fields) -> tuple[Mapping[str, Any], list[float], bool]:
    """The workload's fields, the rates to scan, and whether they are scales of a trace."""
    workload = fields.any("workload")
    if not isinstance(workload, Mapping):
        raise BadInput("workload", f"is {workload!r}", "write a mapping of names to values")
    for name, kind, inside in (("rates_per_s", "arrivals", "rate_per_s"), ("rate_scales", "trace", "rate_scale")):
        if not fields.has(name):
            continue
        part = workload.get(kind)
        if not isinstance(part, Mapping):
            raise BadInput(name, f"needs workload.{kind}", "describe the workload there, or take the rates out")
        if inside in part:
            raise BadInput(f"workload.{kind}.{inside}", f"is there beside `{name}`", "write one of them")
        if "course" in part:
            raise BadInput(f"workload.{kind}.course", f"is there beside `{name}`", "write rate and duration instead")
        return workload, _rates(fields, name), kind == "trace"
    return workload, [], False


def _rates(fields: Fields, name: str) -> list[float]:
    found = fields.any(name)
    if isinstance(found, Mapping):
        part = fields.part(name)
        first, last, step = (_above(part, key) for key in ("from", "to", "by"))
        part.done()
        count = int((last - first) / step + 1e-9) + 1
        if not 1 <= count <= 1000:
            raise BadInput(fields.at(name), f"makes {count} rates", "write 1 to 1000")
        return [round(first + step * number, 6) for number in range(count)]
    if not isinstance(found, list) or not found:
        raise BadInput(fields.at(name), f"is {found!r}", "write a list of rates, or {from: 10, to: 60, by: 10}")
    for rate in found:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise BadInput(fields.at(name), f"has {rate!r}", "write numbers above 0")
    return sorted({float(rate) for rate in found})


def _seeds(fields: Fields, override: int | None) -> list[int]:
    found = fields.any("seeds") if fields.has("seeds") else 1
    if override is not None:
        found = override
    if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= SEEDS_MAX:
        return list(range(1, found + 1))
    if isinstance(found, list) and found and all(type(seed) is int for seed in found) and len(found) <= SEEDS_MAX:
        return sorted(set(found))
    raise BadInput("seeds", f"is {found!r}", f"write how many, 1 to {SEEDS_MAX}, or a list of whole numbers")


def _levels(fields: Fields) -> list[float]:
    if not fields.has("levels"):
        return list(LEVELS)
    found = fields.any("levels")
    if not isinstance(found, list) or not found:
        raise BadInput("levels", f"is {found!r}", "write a list of shares, such as [0.9, 0.99]")
    for level in found:
        if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level <= 1:
            raise BadInput("levels", f"has {level!r}", "write shares above 0 up to 1, such as 0.9")
    return sorted({float(level) for level in found})


def _cluster(fields: Fields, model: RooflineModel) -> ClusterSettings:
    network = Network(find_link(model.gpu.link), LINKS["ethernet-10g"])
    if fields.has("links"):
        part = fields.part("links")
        inside, between = _link(part, "inside", network.inside), _link(part, "between", network.between)
        network = part.made(lambda: _network(inside, between, part.number("share", network.share)))
        part.done()
    return ClusterSettings(
        network=network,
        status_delay_s=_not_negative(fields, "status_delay_s", 0.0),
        send_delay_s=_not_negative(fields, "send_delay_s", 0.0),
        drain_s=_not_negative(fields, "drain_s", 300.0),
        keep_phases=True,
    )


def _network(inside: Link, between: Link, share: float) -> Network:
    try:
        return Network(inside, between, share)
    except ValueError as error:
        raise BadInput("share", str(error), "write a share such as 0.6") from error


def _link(part: Fields, name: str, default: Link) -> Link:
    if not part.has(name):
        return default
    try:
        return find_link(part.text(name))
    except UnknownHardware as error:
        raise BadInput(part.at(name), str(error), "choose one of the catalogue") from error


def _at_least(fields: Fields, name: str, least: int, value: int) -> int:
    if value < least:
        raise BadInput(fields.at(name), f"is {value}", f"write {least} or more")
    return value


def _above(fields: Fields, name: str) -> float:
    value = fields.number(name)
    if value <= 0:
        raise BadInput(fields.at(name), f"is {value:g}", "write a number above 0")
    return value


def _not_negative(fields: Fields, name: str, default: float) -> float:
    value = fields.number(name, default)
    if value < 0:
        raise BadInput(fields.at(name), f"is {value:g}", "write 0 or more")
    return value
