"""Macro-scheduled systems in the fast simulator: small runs that show what each policy is for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from serai.engine_emulator.batching.settings import Phase
from serai.performance.latency_model import LatencyModel
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.macro_presets import macro_system
from serai.simulator.fast.macro_scheduled import ReportPath
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.fast.presets import Overheads, System, engine_preset, whole_system
from serai.simulator.fast.run import Run
from serai.simulator.outcomes import LatencyDefinition, SloTarget, attainment
from serai.simulator.workloads.lengths import dataset
from serai.simulator.workloads.processes import GammaGaps, steady
from serai.simulator.workloads.synthetic import Traffic, synthetic
from serai.simulator.workloads.workload import Arrival
from serai.worker_agent.phase_gate import Position

TARGET = SloTarget(5.0, 0.1)
V0 = Overheads(step_s=0.018, mixed_s=0.012)


@cache
def model() -> LatencyModel:
    return CLUSTERS["a800"].latency_model("codellama-34b")


@cache
def arrivals(rate: float, seconds: float = 20.0) -> tuple[Arrival, ...]:
    traffic = Traffic(GammaGaps(1.5), steady(rate, seconds), dataset("sharegpt"), context_tokens=8192)
    return tuple(synthetic("sharegpt", "", traffic, 3))


def run(system: System, rate: float, seconds: float = 20.0) -> Run:
    specs = [replace(spec, energy_j=None) for spec in system.instances]
    return simulate(specs, arrivals(rate, seconds), system.dispatch(), ClusterSettings(drain_s=120))


def met(found: Run) -> float:
    return attainment(found.outcomes, TARGET, LatencyDefinition.STRICT)


def test_algorithm_1_staggers_windows() -> None:
    found = run(macro_system("padg-paper", model(), 3, TARGET, overheads=V0), 12)
    prefills = [[interval for interval in phases.intervals() if interval[2] == "prefill"] for phases in found.phases]
    at_once = sum(
        1
        for began, ended, _ in prefills[0]
        for other in (*prefills[1], *prefills[2])
        if began < other[1] and other[0] < ended
    )
    assert all(prefills)
    assert at_once < len(prefills[0]) / 2
    assert found.unfinished == 0


def test_output_that_is_held_back_is_seen_later() -> None:
    plain = run(macro_system("padg-author-code", model(), 2, TARGET, overheads=V0), 6)
    held = run(macro_system("padg-author-code", model(), 2, TARGET, overheads=V0, hold_output=True), 6)
    first = "first_token_ns"
    assert sum(held.outcomes.columns[first]) > sum(plain.outcomes.columns[first])
    assert plain.steps == held.steps


def test_serai_is_no_worse_than_ordinary_serving_and_better_when_it_matters() -> None:
    for instances, rate in ((1, 4.0), (2, 13.0)):
        ordinary = max(
            met(run(whole_system(name, model(), instances, overheads=V0), rate)) for name in ("vllm", "sarathi")
        )
        ours = met(run(macro_system("serai", model(), instances, TARGET, overheads=V0), rate))
        assert ours >= ordinary - 0.01


def test_late_and_lost_reports_cost_serai_next_to_nothing() -> None:
    fresh = met(run(macro_system("serai", model(), 2, TARGET, overheads=V0), 13.0))
    path = ReportPath(delay_s=1.0, loss=0.05, seed=7)
    late = met(run(macro_system("serai", model(), 2, TARGET, overheads=V0, path=path), 13.0))
    assert late >= fresh - 0.02


def test_overload_serves_whom_it_can_and_the_others_in_the_end() -> None:
    found = run(macro_system("serai", model(), 1, TARGET, overheads=V0), 20.0, 12.0)
    assert met(found) > 0.3
    assert found.unfinished == 0


def test_where_an_engines_slots_are_the_limit_who_can_still_be_served_gets_them() -> None:
    few = {name: replace(engine_preset(name), sequences_max=16) for name in ("padg", "sarathi")}
    ours = macro_system("serai", model(), 2, TARGET, engine=few["padg"], overheads=V0)
    ordinary = whole_system("sarathi", model(), 2, engine=few["sarathi"], overheads=V0)
    assert met(run(ours, 6.0)) > 1.5 * met(run(ordinary, 6.0))


def test_a_run_is_the_same_again() -> None:
    system = macro_system("serai", model(), 2, TARGET, overheads=V0, path=ReportPath(0.2, 0.05, 1))
    assert run(system, 10.0, 8.0).sha256 == run(system, 10.0, 8.0).sha256


def test_phases_have_the_names_of_the_gates_positions() -> None:
    assert {phase.value for phase in Phase} == {position.value for position in Position}
