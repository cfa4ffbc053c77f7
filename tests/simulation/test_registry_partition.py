"""Two sites whose link is cut and healed (`serai simulate partition`): a few seeds, and runs that must be found bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from serai.contracts.session_record import Lifecycle
from serai.registry.federation import Federation
from serai.registry.membership import Cause, Membership
from serai.runtime.registry_replica import RegistryReplica
from serai.simulator.whole.partition_run import PartitionPlan, partition_run

HARD = PartitionPlan(lost=0.3, doubled=0.3, reordered=0.3, cut_s=(5.0, 15.0))


@pytest.mark.parametrize("seed", range(1, 5))
def test_no_request_fails_nothing_comes_back_and_views_are_equal_soon(seed: int) -> None:
    result = partition_run(seed)
    assert result.holds, result.line
    assert result.heal_s is not None
    assert result.heal_s <= 5.0
    assert result.left > 0
    assert result.requests > 100


@pytest.mark.parametrize("seed", range(1, 3))
def test_a_link_that_loses_a_third_of_all_records_only_takes_longer(seed: int) -> None:
    result = partition_run(seed, HARD)
    assert result.holds, result.line


def test_a_link_of_which_nobody_is_told_that_it_is_gone_fails_no_request_either() -> None:
    result = partition_run(2, PartitionPlan(silent=True, cut_s=(15.0, 20.0)))
    assert result.holds, result.line


def test_the_same_seed_is_the_same_run() -> None:
    plan = PartitionPlan(cut_s=(3.0, 4.0))
    assert partition_run(9, plan).line == partition_run(9, plan).line


def test_a_registry_that_dies_in_the_cut_with_its_kv_brings_nothing_back() -> None:
    result = partition_run(4, PartitionPlan(registry_dies=True, cut_s=(8.0, 10.0)))
    assert result.holds, result.line


# -- the run finds what is broken ------------------------------------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]


def brings_back_what_is_said_twice(patch: pytest.MonkeyPatch) -> None:
    """LEFT, said a second time, makes it serve again."""

    def merge(replica: RegistryReplica, record: Any, now: float, *, heard: bool = False) -> bool:
        known = replica.get(record.session)
        if known is not None and known.lifecycle is record.lifecycle is Lifecycle.LEFT:
            replica._replace(known, replace(known, lifecycle=Lifecycle.SERVING))
            return True
        return sound(replica, record, now, heard=heard)

    sound = RegistryReplica.merge
    patch.setattr(RegistryReplica, "merge", merge)


def closes_silent_sessions_of_other_sites(patch: pytest.MonkeyPatch) -> None:
    def look(machine: Membership, now: float, whole: Any = Membership._look) -> Any:
        abroad = [session for session in machine._sessions.values() if not machine._ours(session)]
        silent = [session for session in abroad if now - session.since_s > 4.0]
        return [*whole(machine, now), *machine._close(silent, Cause.SILENT, now)]

    patch.setattr(Membership, "_look", look)


def never_compares(patch: pytest.MonkeyPatch) -> None:
    async def nothing(federation: Federation, site: str) -> None: ...

    patch.setattr(Federation, "repair", nothing)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (brings_back_what_is_said_twice, lambda result: result.resurrections > 0),
        (closes_silent_sessions_of_other_sites, lambda result: result.closed_alive > 0),
        (never_compares, lambda result: result.heal_s is None or result.heal_s > 5.0),
    ],
    ids=["brings sessions back", "closes other sites' sessions", "never compares"],
)
def test_a_broken_registry_is_found(
    broken: Break, found: Callable[[Any], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    results = []
    for seed in (1, 6):
        result = partition_run(seed, PartitionPlan(cut_s=(10.0, 12.0), doubled=0.9, churn_every_s=1.0))
        results.append(result.line)
        if not result.holds and found(result):
            return
    pytest.fail("\n".join(results))
