"""A plan under way, against a small world of pools: minimums hold, no GPU is promised twice, it comes to an end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from serai.contracts.placement import ActionKind, Assignment, PlanAction, RunState
from serai.placer.carrying_out import CarryingOut, Floor, Seen, SeenRun, Step


@dataclass
class World:
    """Pools that obey at once, and whose engines start and drain when they are told to go on."""

    pools: dict[str, int]
    told: dict[str, dict[str, Assignment]] = field(default_factory=dict)
    runs: dict[str, tuple[str, Assignment, RunState]] = field(default_factory=dict)
    least: Counter[str] = field(default_factory=Counter)

    def add(self, id: str, model: str, pool: str, gpus: int = 1) -> Assignment:
        one = Assignment(id, model, "emulated", gpus)
        self.told.setdefault(pool, {})[id] = one
        self.runs[id] = (pool, one, RunState.SERVING)
        return one

    def seen(self) -> Seen:
        serving = Counter(one.model for _, one, state in self.runs.values() if state is RunState.SERVING)
        runs = {id: SeenRun(pool, state) for id, (pool, _, state) in self.runs.items()}
        return Seen(self.pools, runs, self.told, frozenset(self.pools), serving)

    def obey(self, step: Step) -> None:
        for pool, run in step.told.items():
            assert sum(one.gpus for one in run) <= self.pools[pool], "more GPUs promised than there are"
            self.told[pool] = {one.id: one for one in run}
            for id, (where, one, _) in list(self.runs.items()):
                if where == pool and id not in self.told[pool]:
                    self.runs[id] = (pool, one, RunState.DRAINING)
            for one in run:
                self.runs.setdefault(one.id, (pool, one, RunState.WAITING))

    def go_on(self) -> None:
        """What drains is gone; what waits starts when there is room; what started serves."""
        self.runs = {id: run for id, run in self.runs.items() if run[2] is not RunState.DRAINING}
        for id, (pool, one, state) in self.runs.items():
            if state is RunState.STARTING:
                self.runs[id] = (pool, one, RunState.SERVING)
            elif state is RunState.WAITING:
                self.runs[id] = (pool, one, RunState.STARTING)

    def serving(self, model: str) -> int:
        return sum(one.model == model and state is RunState.SERVING for _, one, state in self.runs.values())


def start(id: str, model: str, pool: str, gpus: int = 1) -> PlanAction:
    return PlanAction(ActionKind.START, pool, Assignment(id, model, "emulated", gpus))


def stop(one: Assignment, pool: str, *after: str) -> PlanAction:
    return PlanAction(ActionKind.STOP, pool, one, after=list(after))


def carried_out(world: World, carrying: CarryingOut, steps: int = 30) -> list[Counter[str]]:
    """How many of each model served, look by look."""
    history = []
    for second in range(steps):
        world.obey(carrying.look(world.seen(), float(second)))
        history.append(Counter({model: world.serving(model) for model in "ab"}))
        if carrying.over:
            break
        world.go_on()
    return history


def test_the_new_engine_serves_before_the_old_one_ends() -> None:
    world = World({"p0": 1, "p1": 1})
    old = world.add("a0", "a", "p0")
    carrying = CarryingOut([start("a1", "a", "p1"), stop(old, "p0", "a1")], {"a": Floor(1, True)})
    history = carried_out(world, carrying)
    assert min(count["a"] for count in history) == 1
    assert carrying.done == {"a0", "a1"}


def test_an_exchange_on_one_pool_is_told_at_once() -> None:
    world = World({"p0": 1})
    old = world.add("a0", "a", "p0")
    carrying = CarryingOut([start("b0", "b", "p0"), stop(old, "p0")], {"a": Floor(0, False), "b": Floor(0, True)})
    step = carrying.look(world.seen(), 0.0)
    assert [one.id for one in step.told["p0"]] == ["b0"]
    assert step.moves == 2


def test_the_last_engine_of_a_used_model_goes_only_when_nothing_else_can() -> None:
    """Its own new engine needs the same GPUs, and the model has no minimum."""
    world = World({"p0": 1})
    old = world.add("a0", "a", "p0")
    actions = [start("a1", "a", "p0"), stop(old, "p0")]
    carrying = CarryingOut(actions, {"a": Floor(0, True)})
    history = carried_out(world, carrying)
    assert history[-1]["a"] == 1
    assert carrying.done == {"a0", "a1"}
    kept = CarryingOut(actions, {"a": Floor(1, True)})
    world = World({"p0": 1})
    world.add("a0", "a", "p0")
    carried_out(world, kept)
    assert world.serving("a") == 1
    assert kept.over
    assert "below its minimum" in kept.skipped["a0"]


def test_a_stop_is_called_off_when_what_replaces_it_fails() -> None:
    world = World({"p0": 1, "p1": 1})
    old = world.add("a0", "a", "p0")
    carrying = CarryingOut([start("a1", "a", "p1"), stop(old, "p0", "a1")], {"a": Floor(0, False)})
    world.obey(carrying.look(world.seen(), 0.0))
    world.runs["a1"] = ("p1", world.runs["a1"][1], RunState.FAILED)
    carrying.look(world.seen(), 1.0)
    assert carrying.failed["a1"].pool == "p1"
    assert "does not serve" in carrying.skipped["a0"]
    assert carrying.over
    assert world.serving("a") == 1


def test_what_does_not_serve_in_time_has_failed() -> None:
    world = World({"p0": 1})
    carrying = CarryingOut([start("a1", "a", "p0")], {}, start_timeout_s=10.0)
    world.obey(carrying.look(world.seen(), 0.0))
    carrying.look(world.seen(), 11.0)
    assert carrying.failed["a1"].why == "not serving after 10 s"


def test_a_pool_that_goes_takes_its_steps_with_it() -> None:
    world = World({"p0": 1, "p1": 1})
    old = world.add("a0", "a", "p0")
    carrying = CarryingOut([start("b0", "b", "p1"), stop(old, "p0")], {})
    world.pools = {}
    world.told = {}
    carrying.look(world.seen(), 0.0)
    assert carrying.over
    assert carrying.failed["b0"].why == "its pool has gone"


worlds = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 2)), max_size=6)


@settings(max_examples=200, deadline=None)
@given(worlds, worlds, st.integers(0, 2), st.integers(0, 2), st.lists(st.booleans(), min_size=6, max_size=6))
def test_no_model_falls_below_its_minimum_whatever_the_plan(
    before: list[tuple[str, int]], new: list[tuple[str, int]], minimum_a: int, minimum_b: int, ends: list[bool]
) -> None:
    world = World({"p0": 4, "p1": 4})
    actions: list[PlanAction] = []
    for number, (model, gpus) in enumerate(new):
        actions.append(start(f"n{number}", model, f"p{number % 2}", gpus))
    for number, (model, gpus) in enumerate(before):
        pool = f"p{number % 2}"
        if sum(one.gpus for one in world.told.get(pool, {}).values()) + gpus > 4:
            continue
        one = world.add(f"o{number}", model, pool, gpus)
        if ends[number]:
            actions.append(stop(one, pool))
    minimums = {"a": minimum_a, "b": minimum_b}
    at_first = {model: world.serving(model) for model in "ab"}
    carrying = CarryingOut(actions, {model: Floor(least, True) for model, least in minimums.items()})
    history = carried_out(world, carrying, 60)
    assert carrying.over
    for model, least in minimums.items():
        assert min((count[model] for count in history), default=9) >= min(least, at_first[model])


def test_a_stop_waits_for_an_engine_that_loads_already() -> None:
    world = World({"p0": 1, "p1": 1})
    a0, a1 = world.add("a0", "a", "p0"), world.add("a1", "a", "p1")
    world.runs["a1"] = ("p1", a1, RunState.STARTING)
    carrying = CarryingOut([PlanAction(ActionKind.STOP, "p0", a0, after=["a1"])], {"a": Floor(0, False)})
    assert not carrying.look(world.seen(), 0.0).told
    world.go_on()
    assert carrying.look(world.seen(), 1.0).told == {"p0": []}


def test_a_stop_is_left_out_when_what_it_waits_for_fails() -> None:
    world = World({"p0": 1, "p1": 1})
    a0, a1 = world.add("a0", "a", "p0"), world.add("a1", "a", "p1")
    world.runs["a1"] = ("p1", a1, RunState.FAILED)
    carrying = CarryingOut([PlanAction(ActionKind.STOP, "p0", a0, after=["a1"])], {"a": Floor(0, False)})
    assert not carrying.look(world.seen(), 0.0).told
    assert carrying.over
    assert "a1" in carrying.skipped["a0"]
