"""Plans as text, checked in: what the placer does in situations that people will ask about, and why.

A change there is a change of what it does. When that is meant, write them anew and look at the difference:

    SERAI_WRITE_GOLDEN=1 .venv/bin/pytest tests/golden/test_placement_plans.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serai.contracts.placement import ActionKind, Assignment, RunState
from serai.placer.demand import LengthSpread, ModelDemand
from serai.placer.options import Option
from serai.placer.picture import Instance, ModelFacts, Picture, PlanRules, PoolFacts
from serai.placer.placement import Placed, Placement
from serai.placer.plan import Plan, make_plan

FOLDER = Path(__file__).parent / "placement"
WRITE = os.environ.get("SERAI_WRITE_GOLDEN") == "1"
LENGTHS = LengthSpread.about(100)
RULES = PlanRules(horizon_s=600, cool_down_s=60, cold_after_s=900, drain_s=30)


def option(model: str, *, requests_s: float = 2.0, tensor: int = 1, load_s: float = 20.0) -> Option:
    return Option(model, "h100-sxm-80", tensor, requests_s, load_s=load_s)


def facts(model: str, requests_s: float = 0.0, *, minimum: int = 0, **more: object) -> ModelFacts:
    demand = ModelDemand(model, requests_s, LENGTHS, LENGTHS, min_replicas=minimum)
    return ModelFacts(demand, "emulated", **more)  # type: ignore[arg-type]


def pools(*gpus: int) -> list[PoolFacts]:
    return [
        PoolFacts(f"p{number}", "h100-sxm-80", count, "local", frozenset({"emulated"}))
        for number, count in enumerate(gpus)
    ]


def runs(id: str, model: str, pool: str, *, age_s: float = 1000.0, **more: object) -> Instance:
    made = more.pop("option", option(model))
    assert isinstance(made, Option)
    one = Assignment(id, model, "emulated", made.gpus, made.tensor)
    state = more.pop("state", RunState.SERVING)
    assert isinstance(state, RunState)
    return Instance(id, made, pool, one, state, f"s-{id}", age_s, **more)  # type: ignore[arg-type]


def wanted(*placed: tuple[Option, str, str | None]) -> Placement:
    all_placed = tuple([Placed(one, ((pool, one.gpus),), session) for one, pool, session in placed])
    return Placement(all_placed, {}, (), "greedy", 0.0, 0.0)


def text(plan: Plan) -> str:
    lines = []
    for action in plan.actions:
        after = f" after {', '.join(action.after)}" if action.after else ""
        why = f": {action.why}" if action.kind is not ActionKind.KEEP else ""
        lines.append(f"{action.kind} {action.assignment.model} ({action.assignment.id}) on {action.pool}{after}{why}")
    lines += [f"held: {held}" for held in plan.held]
    lines += [f"let go: {model}" for model in plan.let_go]
    return "\n".join(lines) + "\n"


A, B, D = option("a"), option("b"), option("d")
CASES = {
    "first engines on free GPUs": (
        Picture(pools(1, 1), [], [facts("a", 1.0), facts("b", minimum=1)]),
        wanted((A, "p0", None), (B, "p1", None)),
    ),
    "demand has moved from a to b": (
        Picture(
            pools(1, 1, 1, 1),
            [runs("a0", "a", "p0"), runs("a1", "a", "p1"), runs("a2", "a", "p2"), runs("b0", "b", "p3")],
            [facts("a", 0.5, minimum=1), facts("b", 5.0, minimum=1)],
        ),
        wanted((A, "p0", "a0"), (B, "p1", None), (B, "p2", None), (B, "p3", "b0")),
    ),
    "what was started lately stays": (
        Picture(
            pools(1, 1),
            [runs("a0", "a", "p0"), runs("a1", "a", "p1", age_s=20)],
            [facts("a", 1.0), facts("b", 2.0)],
        ),
        wanted((A, "p0", "a0"), (B, "p1", None)),
    ),
    "a gain that does not pay for the load": (
        Picture(
            pools(1, 1),
            [runs("a0", "a", "p0", in_flight=3), runs("a1", "a", "p1", in_flight=20)],
            [facts("a", 2.2), facts("b", 2.0, others_requests_s=1.75)],
        ),
        wanted((A, "p0", "a0"), (B, "p1", None)),
    ),
    "a horizon shorter than the load": (
        Picture(pools(1), [runs("a0", "a", "p0")], [facts("a", 0.1), facts("b", 2.0)]),
        wanted((option("b", load_s=700.0), "p0", None)),
    ),
    "a minimum is kept": (
        Picture(pools(1), [runs("a0", "a", "p0")], [facts("a", 0.1, minimum=1), facts("b", 9.0)]),
        wanted((B, "p0", None)),
    ),
    "a pinned session": (
        Picture(pools(1), [runs("a0", "a", "p0", pinned=True)], [facts("a", 0.1), facts("b", 9.0)]),
        wanted((B, "p0", None)),
    ),
    "a cold model is let go": (
        Picture(
            pools(1, 1), [runs("a0", "a", "p0"), runs("b0", "b", "p1")], [facts("a", unused_s=1000.0), facts("b", 1.0)]
        ),
        wanted((A, "p0", "a0"), (B, "p1", "b0")),
    ),
    "what nobody asks for is left alone when nobody wants its GPUs": (
        Picture(
            pools(1, 1), [runs("a0", "a", "p0"), runs("b0", "b", "p1")], [facts("a", unused_s=100.0), facts("b", 1.0)]
        ),
        wanted((B, "p1", "b0")),
    ),
    "a warm pool is preferred": (
        Picture(pools(1, 1, 1), [], [facts("a", 1.0)], warm={"a": ["p2"]}),
        wanted((A, "p0", None)),
    ),
    "a pool where it failed is avoided": (
        Picture(pools(1, 1), [], [facts("a", 1.0)], failed={"a at p0": 60.0}),
        wanted((A, "p0", None)),
    ),
    "a larger engine takes the place of two": (
        Picture(
            pools(2),
            [runs("a0", "a", "p0"), runs("a1", "a", "p0")],
            [facts("a", 0.2), facts("b", 3.0)],
        ),
        wanted((option("b", tensor=2, requests_s=5.0), "p0", None)),
    ),
    "a small engine moves to make room for a large one": (
        Picture(
            pools(2, 2, 1),
            [
                runs("a0", "a", "p0"),
                runs("a1", "a", "p1"),
                runs("a2", "a", "p2"),
                runs("c0", "c", "p0"),
                runs("d0", "d", "p1"),
            ],
            [facts("a", 1.0), facts("b", 3.0), facts("c", 1.0), facts("d", 1.0)],
        ),
        wanted(
            (option("b", tensor=2, requests_s=5.0), "p0", None),
            (option("c"), "p1", None),
            (D, "p1", "d0"),
            (A, "p2", "a2"),
        ),
    ),
    "what ends waits for an engine that loads": (
        Picture(
            pools(1, 1),
            [runs("a0", "a", "p0"), runs("a1", "a", "p1", state=RunState.STARTING, age_s=20)],
            [facts("a", 1.0), facts("b", 2.0)],
        ),
        wanted((A, "p1", "a1"), (B, "p0", None)),
    ),
    "who has plenty gives, though models have turned lately": (
        Picture(
            pools(1, 1, 1),
            [runs("a0", "a", "p0"), runs("a1", "a", "p1"), runs("b0", "b", "p2")],
            [facts("a", 0.5), facts("b", 2.4)],
            turns={"b": 3},
        ),
        wanted((A, "p0", "a0"), (B, "p1", None), (B, "p2", "b0")),
    ),
    "who has just enough does not, when models have turned lately": (
        Picture(
            pools(1, 1, 1),
            [runs("a0", "a", "p0"), runs("a1", "a", "p1"), runs("b0", "b", "p2")],
            [facts("a", 1.9), facts("b", 2.4)],
            turns={"b": 3},
        ),
        wanted((A, "p0", "a0"), (B, "p1", None), (B, "p2", "b0")),
    ),
    "limits of the hour": (
        Picture(pools(1, 1), [], [facts("a", 1.0), facts("b", 1.0)], moves_last_hour=59),
        wanted((A, "p0", None), (B, "p1", None)),
    ),
    "limits of one change": (
        Picture(
            pools(1, 1, 1, 1),
            [runs(f"a{number}", "a", f"p{number}") for number in range(4)],
            [facts("a", 0.1), facts("b", 9.0)],
        ),
        wanted((A, "p0", "a0"), (B, "p1", None), (B, "p2", None), (B, "p3", None)),
    ),
    "an engine that no pool has": (
        Picture(
            [PoolFacts("p0", "h100-sxm-80", 1, "local", frozenset({"sglang", "vllm"}))],
            [],
            [facts("a", 1.0)],
        ),
        wanted((A, "p0", None)),
    ),
    "a burst is predicted": (
        Picture(pools(1), [], [facts("a", prewarm=True, unused_s=5000.0)]),
        wanted((A, "p0", None)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_as_it_was(name: str) -> None:
    picture, placement = CASES[name]
    made = f"# {name}\n" + text(make_plan(picture, placement, RULES, 7, limited=True))
    path = FOLDER / f"{name.replace(' ', '-')}.txt"
    if WRITE:
        path.write_text(made)
    assert made == path.read_text()


def test_each_text_is_of_a_case() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {name.replace(" ", "-") for name in CASES}


def test_without_limits_a_person_looks_at_it() -> None:
    picture, placement = CASES["limits of one change"]
    assert len(make_plan(picture, placement, RULES, 7, limited=False).changes) == 6
