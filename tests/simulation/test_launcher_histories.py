"""Days of a launcher's life in virtual time: whatever queue, jobs and answers do, nothing is harmed."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from serai.launcher.deployments import Deployment
from simulation.tiny_slurm import World


def deployment(count: int = 2, **changes: object) -> Deployment:
    facts = {"name": "d", "model": "m", "count": count, "time_limit_s": 4 * 3600.0, "queue_wait_s": 300.0}
    return Deployment(**(facts | {"load_s": 120.0, "load_s_max": 900.0} | changes))  # type: ignore[arg-type]


def steady_queue(source: random.Random) -> float:
    return source.uniform(0, 280)


@pytest.mark.parametrize("seed", range(2))
def test_a_slot_is_never_without_a_session_while_the_queue_is_shorter_than_expected(seed: int) -> None:
    count = 1 + seed % 4
    world = World(seed, deployment(count), steady_queue).run(hours=20)
    assert world.broken == []
    assert world.unserved_s == {}
    assert len(world.last_served_s) == count
    assert len(world.submissions) >= 5 * count


@pytest.mark.parametrize("seed", range(2))
def test_h08_births_never_meet_after_the_first_cycle(seed: int) -> None:
    count = 2 + seed % 4
    world = World(seed, deployment(count), steady_queue).run(hours=25)
    later = [at_s for at_s, _, verdict in world.submissions if verdict == "successor"]
    assert len(later) >= 5 * count
    assert all(b - a >= 60 for a, b in pairwise(sorted(later)))
    assert Counter(verdict for _, _, verdict in world.submissions)["birth"] == count


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_harmed_whatever_happens(seed: int) -> None:
    """At most one job more than slots, no cancel with requests in it, no drain before somebody else serves, nothing at
    all on an unknown or doubtful answer."""
    source = random.Random(seed)
    fail, hang, unknown, empty, unanswered, refuse = (source.choice([0.0, 0.1, 0.3]) for _ in range(6))
    world = World(
        seed,
        deployment(source.randrange(1, 5)),
        lambda source: source.expovariate(1 / 900),
        fail=fail,
        hang=hang,
        unknown=unknown,
        empty=empty,
        unanswered=unanswered,
        refuse=refuse,
        restarts=source.choice([0.0, 0.01]),
        preempt=source.choice([0.0, 0.002]),
    ).run(hours=8)
    assert world.broken == []


@pytest.mark.parametrize("seed", range(2))
def test_h19_failing_births_back_off(seed: int) -> None:
    """Nothing ever serves: tries come ever more seldom."""
    world = World(seed, deployment(1), lambda source: 0.0, fail=1.0, load_s=1e4).run(hours=8)
    assert world.broken == []
    # Each try takes what its job takes, and then a minute to half an hour more.
    assert len(world.submissions) <= 8 + 2 * 8
