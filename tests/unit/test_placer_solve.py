"""The placement programme: the published optimum, its rules, its named errors, and what it says when it cannot."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from serai.bench.place import opentela_case
from serai.placer import baselines
from serai.placer.demand import BadDemand, LengthSpread, ModelDemand
from serai.placer.fleet import BadFleet, Fleet, Node
from serai.placer.options import Option
from serai.placer.picture import PREDICTED_SLACK, Fairness
from serai.placer.placement import BadRules, BadRunning, Placed, Placement, Rules, Running, SolveLimits
from serai.placer.solve import solve
from serai.placer.verify import violations
from unit.placer_cases import A100, GH200, demand, option

LIMITS = SolveLimits(20.0, workers=1)


def _fleet(*gpus: int, gpu: str = A100, **more: object) -> Fleet:
    return Fleet([Node(f"node-{place}", gpu, count, **more) for place, count in enumerate(gpus)])  # type: ignore[arg-type]


def _counts(placement: Placement) -> Counter[str]:
    return Counter(placed.option.key for placed in placement.placed)


# The published experiment


def test_the_published_optimum_is_found_and_proved() -> None:
    placement = solve(opentela_case.fleet(), opentela_case.demands(), opentela_case.measured_options(), limits=LIMITS)
    found = {(p.option.model.split("/")[1][:9], p.option.gpu): 0 for p in placement.placed}
    for placed in placement.placed:
        found[placed.option.model.split("/")[1][:9], placed.option.gpu] += 1
    assert found == {
        ("Llama-2-1", A100): 6,
        ("CodeLlama", A100): 5,
        ("CodeLlama", GH200): 8,
        ("Llama-3.3", A100): 2,
        ("Llama-3.3", GH200): 4,
    }
    assert placement.proved
    assert placement.levels[0].value / opentela_case.WINDOW_S == pytest.approx(8.0771e-4, rel=1e-4)
    score = opentela_case.score(opentela_case.pools_of_placed(placement.placed))
    assert score.total_rps >= 129.6
    assert score.longest_drain_s <= 1239


def test_the_exhaustive_search_of_the_paper_agrees_and_has_one_optimum() -> None:
    table = opentela_case.table(opentela_case.measured_options())
    every = list(baselines.allocations(table))
    assert len(every) == 3969
    worst = [min(table.shares(allocation)) for allocation in every]
    assert sum(share >= max(worst) * (1 - 1e-12) for share in worst) == 1
    assert baselines.exhaustive(table) == ((6, 0), (5, 8), (2, 4))


def test_mem_p_is_a_tie_in_total_with_fair_weights_and_far_behind_with_the_published_ones() -> None:
    table = opentela_case.table(opentela_case.measured_options())
    parameters = {model: opentela_case.PARAMETERS[name] for model, name in opentela_case.SHORT.items()}
    allocation = baselines.mem_p(table, parameters)
    assert allocation == ((4, 0), (8, 0), (1, 8))
    pools = opentela_case.pools_of(allocation, table)
    assert opentela_case.score(pools).total_rps == pytest.approx(125.9, abs=0.1)
    published = opentela_case.weighted(pools, {"70B": {A100: 0.11, GH200: 0.89}})
    assert opentela_case.score(published).total_rps == pytest.approx(72.6, abs=0.1)


def test_baselines_stay_within_the_gpus() -> None:
    table = opentela_case.table(opentela_case.measured_options())
    for place in (baselines.equal_share, baselines.maximize_replicas, baselines.workload_balanced):
        assert min(table.left(place(table))) >= 0


# What it must keep to


def test_tensor_parallel_groups_stay_on_one_node() -> None:
    placement = solve(_fleet(3, 3, 2), [demand("m", 100)], [option("m", 1, tensor=4)], limits=LIMITS)
    assert placement.placed == ()
    assert [(m.model, m.what) for m in placement.missing] == [("m", "option")]


def test_sizes_that_do_not_divide_each_other_are_packed_exactly() -> None:
    # Threes and twos: 8 = 3 + 3 + 2 on both nodes; taking twos first would waste a GPU on each.
    options = [option("a", 1, tensor=3), option("b", 1, tensor=2)]
    placement = solve(_fleet(8, 8), [demand("a", 4), demand("b", 2)], options, limits=LIMITS)
    assert placement.served_share == {"a": 1.0, "b": 1.0}
    assert violations(_fleet(8, 8), [demand("a", 4), demand("b", 2)], placement) == []


def test_minimum_replicas_stand_in_failure_domains_of_their_own() -> None:
    nodes = [Node(f"n{i}", A100, 4, failure_domain="rack-a" if i < 3 else "rack-b") for i in range(4)]
    wanted = [demand("m", 1, min_replicas=2)]
    placement = solve(Fleet(nodes), wanted, [option("m", 5)], limits=LIMITS)
    racks = {Fleet(nodes).by_name[name].domain for p in placement.placed for name, _ in p.nodes}
    assert racks == {"rack-a", "rack-b"}


def test_data_goes_to_allowed_providers_only() -> None:
    fleet = Fleet([Node("n", A100, 8, provider="north"), Node("s", A100, 2, provider="south")])
    placement = solve(fleet, [demand("m", 10, providers_allowed=("south",))], [option("m", 1)], limits=LIMITS)
    assert {name for p in placement.placed for name, _ in p.nodes} == {"s"}
    assert placement.served_share["m"] == pytest.approx(0.2)


def test_a_quota_binds_all_models_of_a_project() -> None:
    demands = [demand("a", 10, project="p"), demand("b", 10, project="p")]
    options = [option("a", 1), option("b", 1)]
    placement = solve(_fleet(8), demands, options, rules=Rules({"p": 4}), limits=LIMITS)
    assert sum(p.option.gpus for p in placement.placed) == 4
    assert "quota" in placement.missing[0].why


def test_nothing_is_started_where_the_allocation_ends_too_soon() -> None:
    fleet = Fleet([Node("short", A100, 4, ends_in_s=300.0), Node("long", A100, 1)])
    placement = solve(fleet, [demand("m", 5)], [option("m", 1)], limits=LIMITS)
    assert [name for p in placement.placed for name, _ in p.nodes] == ["long"]


def test_pinned_sessions_stay_and_running_ones_are_kept_without_gain() -> None:
    a, b = option("a", 1), option("b", 1)
    running = [
        Running("pinned", a, (("node-0", 1),), pinned=True),
        Running("kept", b, (("node-1", 1),)),
        Running("idle", b, (("node-1", 1),)),
    ]
    placement = solve(_fleet(2, 2), [demand("a", 0), demand("b", 1)], [a, b], running, limits=LIMITS)
    sessions = {placed.session for placed in placement.placed}
    assert "pinned" in sessions
    assert len(sessions & {"kept", "idle"}) == 1
    assert None not in sessions


def test_a_large_instance_may_move_small_ones_out_of_its_way() -> None:
    small, large = option("s", 1), option("l", 1, tensor=4)
    running = [Running(f"s{i}", small, ((f"node-{i}", 1),)) for i in range(2)]
    placement = solve(_fleet(4, 4), [demand("s", 2), demand("l", 1)], [small, large], running, limits=LIMITS)
    assert placement.served_share == {"s": 1.0, "l": 1.0}
    assert violations(_fleet(4, 4), [demand("s", 2), demand("l", 1)], placement, running) == []


def test_the_latency_objective_prefers_the_faster_split() -> None:
    options = [option("m", 1, latency_s=9.0), option("m", 1.5, tensor=2, latency_s=5.0)]
    wanted = [demand("m", 3)]
    by_share = solve(_fleet(4), wanted, options, limits=LIMITS)
    by_latency = solve(_fleet(4), wanted, options, limits=LIMITS, objective="latency")
    assert _counts(by_share) == {"m a100-sxm-80 tp1 bf16": 3}
    assert _counts(by_latency) == {"m a100-sxm-80 tp2 bf16": 2}


def test_without_time_or_solver_the_placement_is_greedy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [demand("m", 3)]
    assert solve(_fleet(4), wanted, [option("m", 1)], limits=SolveLimits(0)).status == "greedy"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    placement = solve(_fleet(4), wanted, [option("m", 1)], limits=LIMITS)
    assert placement.status == "greedy"
    assert placement.served_share == {"m": 1.0}


def test_when_not_everyone_can_have_an_engine_the_total_decides() -> None:
    demands = [demand(f"small-{i}", 0.1) for i in range(8)] + [demand("large", 50)]
    options = [option(d.model, 10) for d in demands]
    for limits in (SolveLimits(0), LIMITS):
        placement = solve(_fleet(4), demands, options, limits=limits)
        assert placement.served_share["large"] == pytest.approx(0.8), limits


# Bad input


def test_bad_fleets_are_named() -> None:
    with pytest.raises(BadFleet, match="node `a`: appears twice"):
        Fleet([Node("a", A100, 1), Node("a", A100, 1)])
    with pytest.raises(BadFleet, match="unknown GPU 'a1000'"):
        Fleet([Node("a", "a1000", 1)])
    with pytest.raises(BadFleet, match="gpus: is 0"):
        Fleet([Node("a", A100, 0)])


@pytest.mark.parametrize(
    ("field", "value"),
    [("requests_s", -1.0), ("requests_s", float("nan")), ("requests_s", 1e9), ("prefix_reuse", 2.0), ("priority", 0.0)],
)
def test_absurd_demand_is_named(field: str, value: float) -> None:
    with pytest.raises(BadDemand, match=f"demand of `m`, {field}"):
        demand("m", **{"requests_s": 1.0, field: value})  # type: ignore[arg-type]


def test_demand_that_contradicts_itself_is_named() -> None:
    with pytest.raises(BadDemand, match="min_replicas"):
        demand("m", 1, min_replicas=3, max_replicas=2)
    with pytest.raises(BadDemand, match="requests_s_high"):
        demand("m", 5, requests_s_high=2.0)
    with pytest.raises(BadDemand, match="appears twice"):
        solve(_fleet(1), [demand("m", 1), demand("m", 2)], [option("m", 1)])
    with pytest.raises(BadDemand, match=r"prompt\.mean"):
        ModelDemand("m", 1, LengthSpread(0, 0, 0, 0), LengthSpread.about(5))


def test_contradictory_rules_are_named() -> None:
    with pytest.raises(BadRules, match="quota of project `p`"):
        solve(_fleet(4), [demand("m", 1, project="p", min_replicas=3)], [option("m", 1)], rules=Rules({"p": 2}))
    fleet = Fleet([Node("n", A100, 4, provider="north")])
    pinned = [Running("s", option("m", 1), (("n", 1),), pinned=True)]
    with pytest.raises(BadRules, match="provider `north`, where `m` may not be"):
        solve(fleet, [demand("m", 1, providers_allowed=("south",))], [option("m", 1)], pinned)
    with pytest.raises(BadRules, match="nearest are"):
        solve(_fleet(4), [], [], rules=Rules(gpu_price={"a1000": 2.0}))


def test_running_sessions_that_cannot_be_are_named() -> None:
    one = option("m", 1)
    with pytest.raises(BadRunning, match="not in the fleet"):
        solve(_fleet(1), [], [], [Running("s", one, (("gone", 1),))])
    with pytest.raises(BadRunning, match="appears twice"):
        solve(_fleet(4), [], [], [Running("s", one, (("node-0", 1),))] * 2)
    with pytest.raises(BadRunning, match="2 GPUs in use"):
        solve(_fleet(1), [], [], [Running(f"s{i}", one, (("node-0", 1),)) for i in range(2)])


# The verifier can say no


def test_the_verifier_sees_what_is_wrong() -> None:
    fleet, wanted, one = _fleet(1, 4), [demand("m", 4)], option("m", 1)
    good = solve(fleet, wanted, [one], limits=LIMITS)
    assert violations(fleet, wanted, good) == []
    crowded = replace(good, placed=(*good.placed, Placed(one, (("node-0", 1),)), Placed(one, (("node-0", 1),))))
    assert any("are given away" in wrong for wrong in violations(fleet, wanted, crowded))
    fat = replace(good, placed=(Placed(replace(one, memory_bytes_per_gpu=1e12), (("node-0", 1),)),))
    assert any("bytes a GPU" in wrong for wrong in violations(fleet, wanted, fat))
    gone = [Running("s", one, (("node-0", 1),), pinned=True)]
    assert any("pinned session s is left out" in wrong for wrong in violations(fleet, wanted, good, gone))
    boast = replace(good, served_share={"m": 0.5})
    assert any("is said to be served" in wrong for wrong in violations(fleet, wanted, boast))


# Room by chains, and whom a shortage falls on


def _large_among_small() -> tuple[Fleet, list[ModelDemand], list[Option], list[Running]]:
    """`large` runs on GH200 only, where `small` has its one engine; on A100 `spare` has one more than it needs."""
    fleet = Fleet([Node("gh", GH200, 1), Node("a", A100, 2)])
    options = [option("large", 2.0, GH200), option("small", 5.0, GH200), option("small", 3.0), option("spare", 4.0)]
    running = [Running("s", options[1], (("gh", 1),))]
    running += [Running(f"x{place}", options[3], (("a", 1),)) for place in range(2)]
    return fleet, [demand("large", 2.0), demand("small", 2.0), demand("spare", 4.0)], options, running


def test_an_engine_goes_elsewhere_where_a_large_one_has_no_other_place() -> None:
    fleet, demands, options, running = _large_among_small()
    placement = solve(fleet, demands, options, running, limits=SolveLimits(0.0))
    assert placement.status == "greedy"
    assert min(placement.served_share.values()) == 1.0
    kept = {placed.session for placed in placement.placed if placed.session}
    assert len(kept) == 1
    assert kept < {"x0", "x1"}


@pytest.mark.parametrize("time_s", [0.0, 5.0])
def test_a_shortage_falls_on_the_dear_model_as_far_as_the_rules_let_it(time_s: float) -> None:
    fleet = _fleet(8)
    demands, options = [demand("dear", 8.0), demand("cheap", 80.0)], [option("dear", 1.0), option("cheap", 10.0)]
    shares = {}
    for slack in (0.0, 0.5, 1.0):
        rules = Rules(worst_share_slack=slack)
        found = solve(fleet, demands, options, rules=rules, limits=SolveLimits(time_s, workers=1))
        shares[slack] = (found.served_share["dear"], found.served_share["cheap"])
        assert not violations(fleet, demands, found)
    assert shares == {0.0: (0.5, 0.5), 0.5: (0.25, 0.75), 1.0: (0.0, 1.0)}


def test_strict_is_exact_where_rates_were_measured_only() -> None:
    predicted, measured = option("a", 1.0), replace(option("b", 1.0), measured=True)
    assert Fairness.STRICT.slack([measured]) == 0.0
    assert Fairness.STRICT.slack([measured, predicted]) == PREDICTED_SLACK
    assert Fairness.BALANCED.slack([measured]) == 0.5


def test_a_slack_that_is_no_share_is_refused() -> None:
    with pytest.raises(BadRules, match="worst_share_slack"):
        solve(_fleet(1), [demand("a", 1.0)], [option("a", 1.0)], rules=Rules(worst_share_slack=1.5))
