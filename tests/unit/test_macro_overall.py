"""Which of several macro-instances is asked first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.macro_scheduler.overall import Capacity, free_s, order


def _firsts(capacities: list[Capacity], count: int = 3000, affinity: str = "") -> Counter[int]:
    return Counter([order(capacities, f"r{number}", affinity).serials[0] for number in range(count)])


def test_free_capacity_is_bounded_by_the_target_and_never_below_zero() -> None:
    assert free_s([7.0, 2.0, -3.0], 5.0) == 7.0
    assert free_s([], 5.0) == 0.0


def test_more_room_gets_more_requests_but_not_all() -> None:
    firsts = _firsts([Capacity(1, 30.0, 11), Capacity(2, 20.0, 6), Capacity(3, 10.0, 6)])
    assert firsts[1] > firsts[2] > firsts[3]
    assert firsts[2] > 300, "between two reports many requests come, which must not all go to one"


def test_the_fuller_of_two_is_never_first() -> None:
    assert set(_firsts([Capacity(1, 10.0, 6), Capacity(2, 9.0, 6)])) == {1}


def test_when_nobody_has_room_instances_count() -> None:
    firsts = _firsts([Capacity(1, 0.0, 1), Capacity(2, 0.0, 9), Capacity(3, 0.0, 10)])
    assert firsts[1] > 0
    assert firsts[3] > firsts[1]


def test_all_are_asked_in_order_of_room() -> None:
    capacities = [Capacity(1, 1.0, 6), Capacity(2, 5.0, 6), Capacity(3, 3.0, 6), Capacity(4, 9.0, 0)]
    for number in range(50):
        serials = order(capacities, f"r{number}").serials
        assert sorted(serials) == [1, 2, 3]
        rest = [serial for serial in (2, 3, 1) if serial != serials[0]]
        assert list(serials[1:]) == rest


def test_home_is_first_while_it_has_half_of_the_best() -> None:
    roomy = [Capacity(serial, 10.0, 6) for serial in (1, 2, 3)]
    homes = {f"p{number}": order(roomy, "r", f"p{number}").serials[0] for number in range(60)}
    assert set(homes.values()) == {1, 2, 3}
    for affinity, home in homes.items():
        fuller = [Capacity(one.serial, 6.0 if one.serial == home else 10.0, 6) for one in roomy]
        assert order(fuller, "other", affinity).serials[0] == home
        full = [Capacity(one.serial, 4.0 if one.serial == home else 10.0, 6) for one in roomy]
        assert order(full, "other", affinity).serials[0] != home or len(full) < 3


def test_only_what_was_its_own_moves_when_a_macro_instance_goes() -> None:
    three = [Capacity(serial, 10.0, 6) for serial in (1, 2, 3)]
    for number in range(100):
        before = order(three, "r", f"p{number}").serials[0]
        after = order(three[:2], "r", f"p{number}").serials[0]
        assert before in (3, after)


def test_few_or_none() -> None:
    assert order([], "r").serials == ()
    assert order([Capacity(1, 0.0, 0)], "r").serials == ()
    assert order([Capacity(7, 0.0, 1)], "r").serials == (7,)


@pytest.mark.parametrize("affinity", ["", "p"])
def test_the_choice_says_why(affinity: str) -> None:
    why = order([Capacity(1, 3.0, 6), Capacity(2, 2.0, 6)], "r", affinity).why
    assert "3.00" in why


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 11)), max_size=8),
    st.text(max_size=20),
    st.text(max_size=5),
)
def test_every_usable_one_is_asked_once(raw: list[tuple[float, int]], request_id: str, affinity: str) -> None:
    capacities = [Capacity(serial, free, instances) for serial, (free, instances) in enumerate(raw)]
    choice = order(capacities, request_id, affinity)
    assert sorted(choice.serials) == [one.serial for one in capacities if one.instances]
    assert choice == order(capacities, request_id, affinity)
