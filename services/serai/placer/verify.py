"""Whether a placement keeps to everything it must. Written apart from the solver and without its code, so that a fault
there does not hide itself here. Pure.

`violations` says what is wrong in sentences; an empty list is a placement that may be carried out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from serai.performance.hardware import GPUS
from serai.performance.model_card import ModelCard
from serai.performance.quantisation import WEIGHT_BITS, WeightFormat
from serai.placer.demand import ModelDemand
from serai.placer.fleet import Fleet
from serai.placer.options import Option
from serai.placer.placement import Placed, Placement, Rules, Running

_ROUNDING = 1e-6


def violations(
    fleet: Fleet,
    demands: Sequence[ModelDemand],
    placement: Placement,
    running: Sequence[Running] = (),
    rules: Rules | None = None,
    cards: Mapping[str, ModelCard] | None = None,
) -> list[str]:
    """Everything that is wrong with `placement`. With `cards`, weights are counted again from dimensions."""
    rules = rules or Rules()
    found = [
        *_gpus(fleet, placement.placed),
        *_instances(fleet, placement.placed, rules),
        *_sessions(placement.placed, running),
        *_models(fleet, demands, placement),
        *_quotas(demands, placement.placed, rules),
    ]
    for option in {instance.option.key: instance.option for instance in placement.placed}.values():
        found += _memory(option, (cards or {}).get(option.model))
    return found


def _gpus(fleet: Fleet, placed: Sequence[Placed]) -> list[str]:
    """No node holds more than its GPUs."""
    used: Counter[str] = Counter()
    for instance in placed:
        for name, gpus in instance.nodes:
            used[name] += gpus
    have = {node.name: node.gpus for node in fleet.nodes}
    unknown = [f"node {name} is not in the fleet" for name in used if name not in have]
    return unknown + [
        f"node {name} has {have[name]} GPUs, {gpus} are given away"
        for name, gpus in used.items()
        if gpus > have.get(name, gpus)
    ]


def _instances(fleet: Fleet, placed: Sequence[Placed], rules: Rules) -> list[str]:
    """Each instance holds what its option needs, on GPUs of its kind, for long enough."""
    nodes = {node.name: node for node in fleet.nodes}
    found = []
    for instance in placed:
        option, what = instance.option, instance.option.key
        if sum(gpus for _, gpus in instance.nodes) != option.tensor * option.pipeline * option.data:
            found.append(f"{what} holds {instance.nodes}, not its {option.gpus} GPUs")
        if len({name for name, _ in instance.nodes}) != option.nodes:
            found.append(f"{what} lies on {len(instance.nodes)} nodes, not on {option.nodes}")
        for name, gpus in instance.nodes:
            node = nodes.get(name)
            if node is None:
                continue
            if node.gpu != option.gpu:
                found.append(f"{what} lies on {name}, whose GPUs are {node.gpu}")
            if gpus % option.tensor:
                found.append(f"{what} splits a tensor-parallel group over nodes")
            short = node.ends_in_s is not None and node.ends_in_s < option.load_s + rules.useful_s_min
            if short and instance.session is None:
                found.append(f"{what} would be started on {name}, whose allocation ends in {node.ends_in_s} s")
    return found


def _sessions(placed: Sequence[Placed], running: Sequence[Running]) -> list[str]:
    """Pinned sessions are there, and what is said to be kept is what runs, where it runs."""
    found = []
    known = {session.session: session for session in running}
    kept = Counter(instance.session for instance in placed if instance.session is not None)
    found += [f"session {name} is placed {times} times" for name, times in kept.items() if times > 1]
    found += [f"pinned session {s.session} is left out" for s in running if s.pinned and not kept[s.session]]
    for instance in placed:
        if instance.session is None:
            continue
        session = known.get(instance.session)
        if session is None:
            found.append(f"session {instance.session} does not run")
        elif sorted(session.nodes) != sorted(instance.nodes) or session.option.key != instance.option.key:
            found.append(f"session {instance.session} is not what runs: a session can be neither moved nor changed")
    return found


def _models(fleet: Fleet, demands: Sequence[ModelDemand], placement: Placement) -> list[str]:
    """Providers, most and fewest replicas, and that shares are what the instances give."""
    nodes = {node.name: node for node in fleet.nodes}
    found = []
    for demand in demands:
        own = [instance for instance in placement.placed if instance.option.model == demand.model]
        at = {name for instance in own for name, _ in instance.nodes if name in nodes}
        at_providers = {nodes[name].provider for name in at} if demand.providers_allowed else set()
        forbidden = at_providers - set(demand.providers_allowed)
        found += [f"{demand.model} is at {name}, which is not allowed" for name in sorted(forbidden)]
        if demand.max_replicas is not None and len(own) > demand.max_replicas:
            found.append(f"{demand.model} has {len(own)} replicas, at most {demand.max_replicas} are allowed")
        domains = {nodes[name].failure_domain or name for name in at}
        told = any(m.model == demand.model and m.what == "replicas" for m in placement.missing)
        if len(domains) < demand.min_replicas and not told:
            found.append(
                f"{demand.model} stands in {len(domains)} failure domains, and nothing says that more are missing"
            )
        served = sum(instance.option.requests_s for instance in own)
        share = 1.0 if demand.planned_requests_s == 0 else min(1.0, served / demand.planned_requests_s)
        if abs(share - placement.served_share.get(demand.model, -1)) > _ROUNDING:
            found.append(f"{demand.model} is said to be served {placement.served_share.get(demand.model)}, not {share}")
        if share < 1 - _ROUNDING and not any(m.model == demand.model for m in placement.missing):
            found.append(f"{demand.model} lacks capacity, and nothing says so")
    return found


def _quotas(demands: Sequence[ModelDemand], placed: Sequence[Placed], rules: Rules) -> list[str]:
    project = {demand.model: demand.project for demand in demands}
    used: Counter[str] = Counter()
    for instance in placed:
        used[project.get(instance.option.model, "")] += sum(gpus for _, gpus in instance.nodes)
    return [
        f"project {name} has {used[name]} GPUs, its quota is {quota}"
        for name, quota in rules.quota_gpus.items()
        if used[name] > quota
    ]


def _memory(option: Option, card: ModelCard | None) -> list[str]:
    """What the option says it needs fits the GPU, and is not less than the weights alone."""
    have = GPUS[option.gpu].memory_bytes
    found = []
    if option.memory_bytes_per_gpu > have:
        found.append(f"{option.key} needs {option.memory_bytes_per_gpu:.3g} bytes a GPU, there are {have:.3g}")
    if card is not None:
        # Embedding and head may stay in wider formats: at least all weights in the named one.
        bits = WEIGHT_BITS[WeightFormat(option.quantisation)]
        least = card.parameters() * min(bits, 16) / 8 / (option.tensor * option.pipeline)
        if option.memory_bytes_per_gpu < 0.98 * least:
            found.append(
                f"{option.key} says {option.memory_bytes_per_gpu:.3g} bytes a GPU; its weights are {least:.3g}"
            )
    return found
