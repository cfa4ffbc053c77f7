"""Placement problems for tests: small ones by hand, and random ones for Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from serai.placer.demand import LengthSpread, ModelDemand
from serai.placer.fleet import Fleet, Node
from serai.placer.options import Option
from serai.placer.placement import Rules, Running

A100, GH200 = "a100-sxm-80", "gh200-96"
LENGTHS = LengthSpread.about(500)


def demand(model: str, requests_s: float, **more: object) -> ModelDemand:
    """A model that is asked for."""
    return ModelDemand(model, requests_s, LENGTHS, LENGTHS, **more)  # type: ignore[arg-type]


def option(model: str, requests_s: float, gpu: str = A100, tensor: int = 1, **more: object) -> Option:
    """One way to run it."""
    given = {"load_s": 60.0, "latency_s": 5.0, "memory_bytes_per_gpu": 70e9} | more
    return Option(model, gpu, tensor, requests_s, **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """All that `solve` takes."""

    fleet: Fleet
    demands: tuple[ModelDemand, ...]
    options: tuple[Option, ...]
    running: tuple[Running, ...]
    rules: Rules


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Fleets of odd nodes, sizes that do not divide each other, sessions that run, some of them pinned."""
    nodes = [
        Node(
            f"node-{number}",
            draw(st.sampled_from([A100, GH200])),
            draw(st.sampled_from([1, 2, 3, 4, 4, 6, 8, 8])),
            provider=draw(st.sampled_from(["north", "south"])),
            failure_domain=draw(st.sampled_from(["", "", "rack-a", "rack-b"])),
            ends_in_s=draw(st.sampled_from([None, None, 200.0, 500.0, 4000.0])),
        )
        for number in range(draw(st.integers(1, 7)))
    ]
    models = [f"model-{number}" for number in range(draw(st.integers(1, 4)))]
    demands = tuple(
        demand(
            model,
            draw(st.sampled_from([0.0, 0.5, 3.0, 20.0, 400.0])),
            priority=draw(st.sampled_from([1.0, 3.0])),
            min_replicas=draw(st.sampled_from([0, 0, 1, 2, 3])),
            max_replicas=draw(st.sampled_from([None, None, 3, 5])),
            providers_allowed=draw(st.sampled_from([(), (), ("north",), ("north", "south")])),
            project=draw(st.sampled_from(["", "physics"])),
        )
        for model in models
    )
    options = tuple(
        option(
            model,
            draw(st.floats(0.1, 30)),
            gpu,
            tensor,
            pipeline=pipeline,
            nodes=pipeline,
            load_s=draw(st.sampled_from([30.0, 120.0])),
            latency_s=draw(st.floats(0.5, 20)),
        )
        for model in models
        for gpu in (A100, GH200)
        for tensor in draw(st.sets(st.sampled_from([1, 2, 3, 4, 5, 8]), max_size=3))
        for pipeline in draw(st.sampled_from([(1,), (1,), (1, 2)]))
    )
    quota = draw(st.sampled_from([None, None, 4, 20]))
    rules = Rules(
        {} if quota is None else {"physics": quota}, worst_share_slack=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    )
    return Case(Fleet(nodes), demands, options, tuple(_running(draw, nodes, options)), rules)


def _running(draw: st.DrawFn, nodes: list[Node], options: tuple[Option, ...]) -> list[Running]:
    free = {node.name: node.gpus for node in nodes}
    found: list[Running] = []
    for number in range(draw(st.integers(0, 6))):
        if not options:
            break
        chosen = draw(st.sampled_from(options))
        room = [n.name for n in nodes if n.gpu == chosen.gpu and free[n.name] >= chosen.gpus_per_node]
        if len(room) < chosen.nodes:
            continue
        on = draw(st.permutations(room))[: chosen.nodes]
        for name in on:
            free[name] -= chosen.gpus_per_node
        held = tuple((name, chosen.gpus_per_node) for name in on)
        found.append(Running(f"session-{number}", chosen, held, draw(st.sampled_from([False, False, False, True]))))
    return found
