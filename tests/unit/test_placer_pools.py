"""What the placer makes of pool agents' words, of usage, and what it asks launchers for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from serai.contracts.placement import Assignment, BadReport, PoolReport, PoolRun, RunState, checked_report
from serai.contracts.session_record import GpuDevice
from serai.contracts.usage import DemandAnswer, LengthQuantiles, ModelUse
from serai.placer.observed import demand_of, observed
from serai.placer.options import Option
from serai.placer.past import Past
from serai.placer.placement import Missing
from serai.placer.placement_file import Launchable, read_placement
from serai.placer.pools import Pools, PoolView, fleet_of, judged
from serai.placer.wishes import Wish, wishes

GPUS = [GpuDevice("u0", "NVIDIA H100 80GB HBM3"), GpuDevice("u1", "NVIDIA H100 80GB HBM3")]


def report(pool: str = "p", instance: str = "i", sequence: int = 1, **fields: object) -> PoolReport:
    usual = {"gpu": GPUS[0].name, "gpus": GPUS, "engines": ["vllm"], "host": pool}
    return PoolReport(pool, instance, sequence, **(usual | fields))  # type: ignore[arg-type]


def run_of(id: str, *gpus: int, state: RunState = RunState.SERVING) -> PoolRun:
    return PoolRun(Assignment(id, "m", "vllm", len(gpus)), state, gpus=list(gpus))


def problem(pools: Pools, now: float) -> str:
    (view,) = pools.views(now)
    return view.problem


def test_a_pool_is_a_node_of_the_fleet() -> None:
    pools = Pools("local")
    assert pools.hear(report(provider="cscs", failure_domain="rack-1", allocation_remaining_s=60.0), 0.0)
    (node,) = fleet_of(pools.views(0.0)).nodes
    assert (node.name, node.gpu, node.gpus, node.provider, node.domain, node.ends_in_s) == (
        *("p", "h100-sxm-80", 2, "cscs", "rack-1", 60.0),
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"gpu": "Quantum 9000"}, "unknown GPU 'Quantum 9000'"),
        ({"gpus": []}, "it has no GPUs"),
        ({"stopping": True}, "about to end"),
        ({"engines": []}, "no engine's program"),
    ],
)
def test_a_pool_that_is_no_use_says_why_and_is_in_no_fleet(fields: dict[str, object], told: str) -> None:
    pools = Pools("local")
    pools.hear(report(**fields), 0.0)
    assert told in problem(pools, 0.0)
    assert fleet_of(pools.views(0.0)).nodes == ()


def test_a_node_that_appears_twice_gets_nothing_until_it_is_one_again() -> None:
    pools = Pools("local")
    for second in range(6):
        pools.hear(report(instance="ab"[second % 2], sequence=second), float(second))
    assert problem(pools, 6.0) == "two agents speak for pool p; give each --pool-name"
    for second in range(6, 40):
        pools.hear(report(instance="a", sequence=second), float(second))
    assert problem(pools, 40.0) == ""


def test_an_agent_that_was_started_anew_is_no_second_one() -> None:
    pools = Pools("local")
    pools.hear(report(instance="a", sequence=900), 0.0)
    for second in range(1, 9):
        pools.hear(report(instance="b", sequence=second), float(second))
    assert problem(pools, 9.0) == ""


def test_silence_first_doubts_a_pool_and_then_drops_it() -> None:
    pools = Pools("local")
    pools.hear(report(interval_s=2.0), 0.0)
    assert problem(pools, 5.0) == ""
    assert problem(pools, 9.0) == "it has been silent for 9 s"
    assert pools.views(61.0) == []


def test_quarantine_and_the_end_of_an_allocation_keep_new_engines_away() -> None:
    pools = Pools("local")
    pools.hear(report("p", host="n1"), 0.0)
    pools.hear(report("q", host="n2", allocation_remaining_s=100.0), 0.0)
    pools.hear(report("r", host="n3", allocation_remaining_s=900.0), 0.0)
    found = judged(pools.views(0.0), {"n1": "uncorrectable ECC error"}, leaving_s=180.0)
    assert [view.problem for view in found] == [
        "its host is in quarantine: uncorrectable ECC error",
        "its allocation ends in 100 s",
        "",
    ]


def test_another_sites_pool_and_an_overtaken_report_do_not_count() -> None:
    pools = Pools("local")
    assert not pools.hear(report(site="far"), 0.0)
    pools.hear(report(sequence=7, generation=7), 0.0)
    assert not pools.hear(report(sequence=6, generation=6), 1.0)
    assert pools.views(1.0)[0].report.generation == 7


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (report("a.b"), "is no name of a pool"),
        (report(interval_s=math.inf), "interval_s"),
        (report(runs=[run_of("a", 0), run_of("b", 0)]), "GPU 0 is used twice"),
        (report(runs=[run_of("a", 2)]), "a uses GPU 2 of 2"),
    ],
)
def test_a_report_that_cannot_be_is_refused(bad: PoolReport, told: str) -> None:
    with pytest.raises(BadReport, match=told):
        checked_report(bad)


# -- usage ---------------------------------------------------------------------------------------------------------

FILE = read_placement(
    "models: {m: {engine: e, demand: {requests_s: 1}, instances: [{gpu: h100, requests_s: 2}]}}", "placement.yaml"
)


def seen(*arrivals: int, **fields: object) -> object:
    use = replace(ModelUse("m", list(arrivals)), **fields)  # type: ignore[arg-type]
    return observed(DemandAnswer([use]), bucket_s=1.0, window_s=4.0, age_s=1.0)["m"]


def test_usage_becomes_a_rate_between_bounds() -> None:
    found = seen(0, 0, 9, 5, 5, 5, 5, prompt=LengthQuantiles(100, 80, 200, 400), cached_share=0.5)
    assert found.requests_s == 5.0
    assert found.low < 5.0 < found.high
    assert (found.prompt.p90, found.output, found.prefix_reuse, found.unused_s) == (200, None, 0.5, 0.0)


def test_bursts_widen_the_bounds() -> None:
    assert seen(1, 9, 1, 9).high > seen(5, 5, 5, 5).high


def test_how_long_nobody_has_asked() -> None:
    assert seen(3, 0, 0, 0, 0).unused_s == 4.0
    assert seen(0, 0, 0).unused_s == math.inf


def test_the_file_is_the_least_and_usage_what_is_more() -> None:
    model = FILE.models["m"]
    assert demand_of(model, seen(0, 0, 0, 0)).requests_s == 1
    more = demand_of(model, seen(5, 5, 5, 5))
    assert (more.requests_s, more.planned_requests_s > 5) == (5, True)


def test_what_comes_each_morning_is_started_before_it_comes() -> None:
    past = Past()
    hours = [20 if 9 <= hour < 17 else 0 for hour in range(24)]
    morning_s = 8 * 86_400.0
    answer = DemandAnswer([ModelUse("m", [count for count in hours for _ in range(2)] * 7)])
    past.hear(answer, ["m", "n"], morning_s - 7 * 86_400, 1800.0, 336)
    loads_s = {"m": 300.0}
    assert past.prewarm(loads_s, morning_s + 3 * 3600.0) == frozenset()
    assert past.prewarm(loads_s, morning_s + 8.95 * 3600.0) == {"m"}
    steady = {"m": seen(5, 5, 5, 5)}
    assert past.with_rises(steady, loads_s, 4.0, morning_s) == steady  # type: ignore[arg-type, comparison-overlap]
    past.hear(answer, ["m"], morning_s - 7 * 86_400, 1800.0, 336)
    assert past.told_until_s == morning_s, "what is known is not counted again"


# -- wishes --------------------------------------------------------------------------------------------------------

SLURM = Launchable("slurm", "pool", "h100-sxm-80", 2, most=4, least=1)
OPTION = Option("m", "h100-sxm-80", 1, 2.0)


def wish(
    there: int = 1,
    missing: float = 0.0,
    empty_s: dict[str, float] | None = None,
    asked: dict[str, int] | None = None,
    one: Launchable = SLURM,
) -> Wish:
    views = [PoolView(report(f"p{number}"), "h100-sxm-80") for number in range(there)]
    lacks = [Missing("m", "capacity", missing, "no room")] if missing else []
    (made,) = wishes([one], views, FILE.models, [OPTION], lacks, empty_s or {}, asked or {})
    return made


def test_more_pools_for_what_is_missing_up_to_the_most() -> None:
    assert (wish(missing=3.0).count, wish(missing=3.0).why) == (2, "m lacks 3.00")
    assert wish(missing=100.0).count == 4


def test_what_is_on_its_way_is_not_asked_for_again() -> None:
    assert wish(missing=3.0, asked={"pool": 2}).count == 2


def test_a_pool_that_is_long_empty_is_given_back_and_the_least_stays() -> None:
    assert wish(3, empty_s={"p2": 700.0}).count == 2
    assert wish(3, empty_s={"p2": 100.0}).count == 3
    assert wish(1, empty_s={"p0": 700.0}).count == 1
    assert wish(2, empty_s={"p0": 700.0}, asked={"pool": 3}).count == 3, "one is still in the queue"


def test_kubernetes_chooses_itself_which_pod_ends_so_all_have_to_be_empty() -> None:
    kubernetes = replace(SLURM, launcher="kubernetes")
    assert wish(2, empty_s={"p0": 700.0}, one=kubernetes).count == 2
    assert wish(2, empty_s={"p0": 700.0, "p1": 700.0}, one=kubernetes).count == 1


def test_pools_that_cannot_run_it_are_not_asked_for() -> None:
    assert wish(missing=3.0, one=replace(SLURM, gpu="a100-sxm-80")).count == 1
