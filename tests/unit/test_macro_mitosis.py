"""Mitosis: shapes by the paper's examples, and what holds for every sequence of comings and goings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.macro_scheduler.mitosis import (
    Bounds,
    Drain,
    Macro,
    Move,
    Plan,
    Sleep,
    Unknown,
    Way,
    joined,
    left,
    settled,
    shrunk,
)

TRACES = Path(__file__).parent.parent / "golden" / "mitosis"


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lower", "upper", "says"),
    [
        (0, 6, "N_l is 0: a macro-instance needs at least 1"),
        (6, 6, "N_l must be below N_u"),
        (7, 6, "N_l must be below N_u"),
        (5, 8, "would leave 4, fewer than N_l; use N_l ≤ 4"),
        (3, 1001, "must be at most 1000"),
    ],
)
def test_bounds_that_cannot_work_are_refused(lower: int, upper: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Bounds(lower, upper)


def test_the_papers_bounds_are_allowed() -> None:
    assert (Bounds().lower, Bounds().upper) == (6, 11)
    assert Bounds(3, 6)
    assert Bounds(1, 2)


# -- the paper's examples ----------------------------------------------------------------------------------------------


def test_figure_7() -> None:
    """N_l = 3, N_u = 6: the 7th makes 4 + 3; then the first is refilled to 6; then the second grows."""
    _check("figure_7", _history(Bounds(3, 6), grow_to=13, shrink_to=5))


def test_six_and_six() -> None:
    """The experiments' N_l = 6, N_u = 11: the 12th makes 6 + 6."""
    _check("six_and_six", _history(Bounds(6, 11), grow_to=18, shrink_to=10))


def _history(bounds: Bounds, grow_to: int, shrink_to: int) -> list[str]:
    lines = [f"N_l = {bounds.lower}, N_u = {bounds.upper}"]
    macros: tuple[Macro, ...] = ()
    for number in range(1, grow_to + 1):
        macros = _note(lines, joined(macros, f"s{number:02}", bounds, _serial(macros)))
    for _ in range(grow_to - shrink_to):
        macros = _note(lines, shrunk(macros, bounds, drain_s=60.0))
    return lines


def _note(lines: list[str], plan: Plan) -> tuple[Macro, ...]:
    lines.append(" + ".join([str(len(macro)) for macro in plan.macros]))
    lines += [f"  {reason}" for reason in plan.reasons]
    lines += [f"  {effect}" for effect in plan.effects]
    return plan.macros


def _check(name: str, lines: Sequence[str]) -> None:
    path, text = TRACES / f"{name}.txt", "\n".join(lines) + "\n"
    if os.environ.get("SERAI_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


def _serial(macros: Sequence[Macro]) -> int:
    return macros[-1].serial + 1 if macros else 1


# -- single steps ------------------------------------------------------------------------------------------------------


def _macros(*sizes: int) -> tuple[Macro, ...]:
    return tuple([Macro(n, tuple([f"{n}.{k}" for k in range(size)])) for n, size in enumerate(sizes, 1)])


def _sizes(plan: Plan) -> list[int]:
    return [len(macro) for macro in plan.macros]


def test_of_three_the_one_that_was_split_is_refilled_first() -> None:
    plan = joined(_macros(11, 6, 6), "new", Bounds(), 4)
    assert _sizes(plan) == [11, 7, 6]
    assert plan.effects == (Move("new", 0, 2),)


def test_shrinking_goes_on_with_the_one_that_was_begun() -> None:
    assert _sizes(shrunk(_macros(11, 9, 6), Bounds(), 60.0)) == [11, 8, 6]
    assert _sizes(shrunk(_macros(11, 11, 6), Bounds(), 60.0)) == [11, 10, 6]
    assert _sizes(shrunk(_macros(11, 11, 8), Bounds(), 60.0)) == [11, 11, 7]


def test_who_has_least_left_is_drained_and_of_equals_the_last() -> None:
    macros = _macros(4)
    assert Drain("1.3", 1, 5.0) in shrunk(macros, Bounds(), 5.0).effects
    remaining_s = {"1.0": 9.0, "1.1": 2.0, "1.2": 3.0, "1.3": 4.0}
    assert Drain("1.1", 1, 5.0) in shrunk(macros, Bounds(), 5.0, remaining_s).effects


def test_an_engine_that_can_sleep_is_put_to_sleep() -> None:
    assert Sleep("1.3") in shrunk(_macros(4), Bounds(), 5.0, way=Way.SLEEP).effects


def test_the_last_one_stays() -> None:
    plan = shrunk(_macros(1), Bounds(), 5.0)
    assert (_sizes(plan), plan.effects) == ([1], ())
    plan = shrunk(_macros(3), Bounds(), 5.0, instances_min=3)
    assert (_sizes(plan), plan.effects) == ([3], ())
    assert "least allowed is 3" in plan.reasons[0]


def test_holes_that_the_dead_leave_are_closed_by_a_merge() -> None:
    plan = settled(_macros(3, 2, 11), Bounds())
    assert _sizes(plan) == [5, 11]
    assert plan.effects == (Move("2.0", 2, 1), Move("2.1", 2, 1))
    assert settled(_macros(6, 6), Bounds()).effects == ()


def test_one_that_is_there_cannot_join_and_a_stranger_can_leave() -> None:
    with pytest.raises(Unknown, match=r"1\.0 is a member of macro-instance 1"):
        joined(_macros(2), "1.0", Bounds(), 2)
    with pytest.raises(ValueError, match="serial 1 was used before"):
        joined(_macros(11), "new", Bounds(), 1)
    assert left(_macros(2), "stranger").macros == _macros(2)


def test_a_negative_deadline_is_refused() -> None:
    with pytest.raises(ValueError, match="drain deadline"):
        shrunk(_macros(2), Bounds(), -1.0)


# -- every sequence ----------------------------------------------------------------------------------------------------

BOUNDS = st.integers(1, 5).flatmap(
    lambda lower: st.integers(max(lower + 1, 2 * lower - 1), 3 * lower + 3).map(lambda upper: Bounds(lower, upper))
)
STEPS = st.lists(st.one_of(st.just("join"), st.just("shrink"), st.integers(0, 200)), max_size=80)


class World:
    """Sessions and whose they are, as moved by effects alone."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.macros: tuple[Macro, ...] = ()
        self.owner: dict[str, int] = {}
        self.serial = 0
        self.number = 0

    def step(self, step: str | int) -> None:
        if step == "join":
            self.number += 1
            self._do(joined(self.macros, f"s{self.number}", self.bounds, self.serial + 1))
        elif step == "shrink":
            self._do(shrunk(self.macros, self.bounds, 60.0))
        elif self.owner:
            session = list(self.owner)[int(step) % len(self.owner)]
            del self.owner[session]
            self._do(left(self.macros, session).then(settled(left(self.macros, session).macros, self.bounds)))

    def _do(self, plan: Plan) -> None:
        for effect in plan.effects:
            match effect:
                case Move(session, source, target):
                    assert self.owner.get(session, 0) == source, "moved from where it was not"
                    assert source != target
                    self.owner[session] = target
                case Drain(session, source, _):
                    assert self.owner.pop(session) == source
        self.macros = plan.macros
        self.serial = max([self.serial, *[macro.serial for macro in self.macros]])
        assert len(plan.reasons) > 0 or not plan.effects


@given(BOUNDS, STEPS)
def test_sizes_owners_and_serials_hold_whatever_comes_and_goes(bounds: Bounds, steps: list[str | int]) -> None:
    world = World(bounds)
    for step in steps:
        world.step(step)
        members = [session for macro in world.macros for session in macro.members]
        assert len(members) == len(set(members)), "in two macro-instances"
        assert {session: macro.serial for macro in world.macros for session in macro.members} == world.owner
        assert all(1 <= len(macro) <= bounds.upper for macro in world.macros)
        assert [macro.serial for macro in world.macros] == sorted({macro.serial for macro in world.macros})
        smallest = sorted(map(len, world.macros))[:2]
        if step != "join" and len(smallest) == 2:
            assert sum(smallest) > bounds.upper, "two that fit into one"


@given(BOUNDS, st.integers(1, 60))
def test_growth_and_shrinking_alone_never_go_below_the_lower_bound_while_two_are_there(
    bounds: Bounds, count: int
) -> None:
    world = World(bounds)
    for _ in range(count):
        world.step("join")
        assert len(world.macros) == 1 or all(len(macro) >= bounds.lower for macro in world.macros)
    for _ in range(count - 1):
        world.step("shrink")
        assert len(world.macros) == 1 or all(len(macro) >= bounds.lower for macro in world.macros)
    assert [len(macro) for macro in world.macros] == [1]
