"""What a pool agent obeys, and that no GPU is ever given twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serai.contracts.placement import Assignment, Assignments, PoolRun, RunState
from serai.worker_agent.pool_book import Effect, Over, PoolBook, Refused, Serves, StartEngine, StopEngine, Told

ENGINES = {"emulated": 1}.keys()


def book(gpus: int = 4) -> PoolBook:
    return PoolBook("p", gpus, ENGINES)


def told(generation: int, *run: Assignment, stops: dict[str, str] | None = None, pool: str = "p") -> Told:
    return Told(Assignments(pool, generation, list(run), stops or {}, 5.0))


def one(id: str, gpus: int = 1, engine: str = "emulated") -> Assignment:
    return Assignment(id, "m", engine, gpus)


def states(made: PoolBook) -> dict[str, RunState]:
    return {run.assignment.id: run.state for run in made.runs(0.0)}


def started(effects: list[Effect]) -> dict[str, tuple[int, ...]]:
    return {effect.assignment.id: effect.gpus for effect in effects if isinstance(effect, StartEngine)}


def refusal(effects: list[Effect]) -> str:
    assert len(effects) == 1
    assert isinstance(effects[0], Refused)
    return effects[0].why


def test_what_is_new_starts_and_what_is_not_named_drains() -> None:
    made = book()
    assert started(made.handle(told(1, one("a", 2), one("b")), 0.0)) == {"a": (0, 1), "b": (2,)}
    made.handle(Serves("a"), 1.0)
    assert made.handle(told(2, one("b"), stops={"a": "it is cold"}), 2.0) == [StopEngine("a", "it is cold", 5.0)]
    assert states(made) == {"a": RunState.DRAINING, "b": RunState.STARTING}


def test_a_gpu_is_given_only_when_its_engine_has_stopped() -> None:
    made = book(2)
    made.handle(told(1, one("a", 2)), 0.0)
    effects = made.handle(told(2, one("b", 2)), 1.0)
    assert [type(effect) for effect in effects] == [StopEngine]
    assert states(made) == {"a": RunState.DRAINING, "b": RunState.WAITING}
    assert started(made.handle(Over("a", "it was told to end"), 2.0)) == {"b": (0, 1)}
    assert states(made) == {"b": RunState.STARTING}


def test_only_newer_assignments_of_its_own_are_obeyed() -> None:
    made = book()
    made.handle(told(7, one("a")), 0.0)
    assert "not newer than 7" in refusal(made.handle(told(7), 1.0))
    assert "not newer than 7" in refusal(made.handle(told(6), 1.0))
    assert "this is 'p'" in refusal(made.handle(told(8, pool="q"), 1.0))
    assert states(made) == {"a": RunState.STARTING}
    assert made.generation == 7


def test_more_than_there_is_is_refused_whole() -> None:
    made = book(2)
    assert refusal(made.handle(told(1, one("a"), one("b", 2)), 0.0)) == "they need 3 GPUs, and there are 2"
    assert "comes twice" in refusal(made.handle(told(1, one("a"), one("a")), 0.0))
    assert states(made) == {}


def test_an_engine_that_gives_up_frees_its_gpus_and_is_not_started_again() -> None:
    made = book(1)
    made.handle(told(1, one("a")), 0.0)
    made.handle(Over("a", "exit code 1"), 1.0)
    assert made.free == [0]
    assert made.handle(told(2, one("a")), 2.0) == []
    (run,) = made.runs(4.0)
    assert (run.state, run.problem, run.age_s) == (RunState.FAILED, "exit code 1", 3.0)
    assert started(made.handle(told(3, one("b")), 5.0)) == {"b": (0,)}
    assert states(made) == {"b": RunState.STARTING}


def test_an_engine_that_is_not_there_is_said_to_be_missing() -> None:
    made = book()
    assert made.handle(told(1, one("a", engine="vllm")), 0.0) == []
    (run,) = made.runs(0.0)
    assert run.problem == "there is no engine 'vllm' here (there is emulated)"


def test_what_drains_is_not_taken_back() -> None:
    """Its session has said that it leaves; what is wanted again is another one."""
    made = book(1)
    made.handle(told(1, one("a")), 0.0)
    made.handle(told(2), 1.0)
    assert made.handle(told(3, one("a")), 2.0) == []
    assert made.handle(Over("a"), 3.0) == []
    assert made.handle(told(4, one("a")), 4.0) == []
    assert states(made) == {}


def test_gpus_beside_each_other_go_to_one_engine() -> None:
    made = book(8)
    made.handle(told(1, one("a"), one("b", 4), one("c", 2)), 0.0)
    gpus = {run.assignment.id: run.gpus for run in made.runs(0.0)}
    assert gpus == {"a": [0], "b": [4, 5, 6, 7], "c": [2, 3]}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("told"), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=5)),
        st.tuples(st.just("over"), st.integers(0, 9)),
        st.tuples(st.just("serves"), st.integers(0, 9)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(0, 8))
def test_no_gpu_has_two_engines_whatever_comes(happenings: list[tuple[str, object]], gpus: int) -> None:
    made = PoolBook("p", gpus, ENGINES)
    running: dict[str, set[int]] = {}
    for generation, (what, detail) in enumerate(happenings, 1):
        if what == "told":
            wanted = dict(detail)  # type: ignore[call-overload]
            effects = made.handle(told(generation, *[one(f"i{id}", count) for id, count in wanted.items()]), 0.0)
        elif what == "over":
            running.pop(f"i{detail}", None)
            effects = made.handle(Over(f"i{detail}"), 0.0)
        else:
            effects = made.handle(Serves(f"i{detail}"), 0.0)
        for id, given_gpus in started(effects).items():
            assert id not in running
            assert len(given_gpus) == len(set(given_gpus))
            running[id] = set(given_gpus)
        taken = [gpu for each in running.values() for gpu in each]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(range(gpus))
        assert all(isinstance(run, PoolRun) for run in made.runs(0.0))
