"""The reconnect curve: what one client waits, and what five hundred do to a server. H67."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from serai.runtime.reconnect_curve import SPAN_FEW_S, SPAN_MANY_S, span_s, wait_s


def heals(numbers: list[int], outage_s: float, span_max_s: float = SPAN_MANY_S, seed: int = 1) -> list[float]:
    """Sorted seconds from the server's return until each client is back; `numbers` are of their lost connections."""
    chance = Random(seed)
    found = []
    for number in numbers:
        span, now_s, tries = span_s(number, span_max_s), 0.0, 0
        while True:
            now_s += wait_s(tries, span, chance.random)
            tries += 1
            if now_s >= outage_s:
                break
        found.append(now_s - outage_s)
    return sorted(found)


def most_in_a_second(times_s: list[float]) -> int:
    return max(sum(begin <= one < begin + 1 for one in times_s) for begin in times_s)


def test_five_hundred_clients_come_back_over_more_than_ten_seconds() -> None:
    for seed in range(5):
        back = heals(list(range(1, 501)), outage_s=0, seed=seed)
        assert back[-1] - back[0] > 10
        assert most_in_a_second(back) < 200
        assert sum(one > 5 for one in back) > 100, "a tail that is one straggler is no spread"
        assert max(after - before for before, after in pairwise(back)) < 2


def test_without_known_numbers_they_spread_too() -> None:
    assert most_in_a_second(heals([0] * 500, outage_s=0)) < 180


@pytest.mark.parametrize("outage_s", [5, 30, 300])
def test_after_a_long_outage_nobody_waits_longer_than_four_seconds_and_the_fleet_is_still_spread(outage_s: int) -> None:
    numbers = list(range(1, 501))
    back = heals(numbers, outage_s + SPAN_MANY_S)
    assert back[-1] <= 4
    assert most_in_a_second(back) < 220


def test_a_small_system_is_back_after_a_second_at_most() -> None:
    many = heals([8] * 2000, outage_s=0)
    assert many[1000] < 0.4
    assert many[-1] <= 1.05
    assert heals([8] * 200, outage_s=30)[-1] <= 1.0


def test_an_ingress_of_an_old_server_is_back_before_most_agents() -> None:
    few = heals([100_000] * 500, 0, SPAN_FEW_S)
    assert few[-1] <= 2.05
    assert few[250] < heals([100_000] * 500, 0)[250] / 3


def test_waits_have_bounds_and_chance_decides_within_them() -> None:
    for span in (1.0, 2.0, 12.0):
        assert wait_s(0, span, lambda: 0.0) == pytest.approx(0.05)
        assert wait_s(0, span, lambda: 1.0) == pytest.approx(span + 0.05)
        assert wait_s(7, span, lambda: 0.0) == pytest.approx(min(4, span) * 0.75)
        assert wait_s(7, span, lambda: 1.0) == pytest.approx(min(4, span))
    assert span_s(0, 12) == 12
    assert [span_s(n, 12) for n in (1, 10, 50, 120, 10**9)] == [1, 1, 5, 12, 12]
