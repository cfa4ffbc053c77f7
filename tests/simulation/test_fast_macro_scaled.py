"""A macro-scheduled group that grows with its load, splits, shrinks and merges, in the fast simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serai.bench.simulate.dynamic_scaling import Variant, course
from serai.macro_scheduler.group import GroupSettings
from serai.macro_scheduler.mitosis import Bounds
from serai.macro_scheduler.scaling import ScalingSettings, Trigger
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.macro_scaled import MacroScaled, MacroSettings
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.fast.presets import Overheads, engine_preset, instance_spec
from serai.simulator.fast.run import Run
from serai.simulator.outcomes import LatencyDefinition, SloTarget, attainment
from serai.simulator.workloads.lengths import dataset
from serai.simulator.workloads.processes import PoissonGaps, Segment, steps_and_ramps
from serai.simulator.workloads.synthetic import Traffic, synthetic
from serai.simulator.workloads.workload import Arrival

TARGET = SloTarget(5.0, 0.1)


def _work() -> list[Arrival]:
    """Two instances are enough, then not, then more than enough."""
    segments = [Segment(40.0, 4.0, 4.0), Segment(60.0, 10.0, 10.0), Segment(70.0, 2.0, 2.0)]
    traffic = Traffic(PoissonGaps(), steps_and_ramps(segments), dataset("sharegpt"), context_tokens=8192)
    return list(synthetic("up and down", "", traffic, 1))


def _run(policy: str, drain_s: float) -> tuple[Run, MacroScaled]:
    model = CLUSTERS["l20"].latency_model("codellama-34b")
    spec = replace(instance_spec(engine_preset("padg"), model, Overheads(step_s=0.018)), energy_j=None)
    scaling = ScalingSettings(
        instances_min=2, instances_max=5, start_s=5.0, window_s=10.0, calm_windows=1, drain_s=drain_s
    )
    group = GroupSettings(policy=policy, bounds=Bounds(1, 2), scaling=scaling)
    dispatch = MacroScaled([spec] * 2, MacroSettings(group), 5.0)
    return simulate([spec] * 2, _work(), dispatch, ClusterSettings(keep_phases=False)), dispatch


@pytest.mark.parametrize("drain_s", [60.0, 1.0], ids=["time to drain", "handed over"])
def test_a_group_grows_splits_shrinks_and_merges_with_its_load_and_loses_nothing(drain_s: float) -> None:
    result, dispatch = _run("serai", drain_s)
    sizes = [change.macros for change in dispatch.changes]
    assert result.unfinished == 0
    assert not any(result.outcomes.columns["refused"])
    assert all(figures.kv_tokens_held == 0 for figures in result.instances)
    assert max(map(sum, sizes)) > 2
    assert (2, 1) in sizes, "the third split it"
    assert sizes[-1] == (2,), "and when two fit into one again, they merged"
    drained = [change.instance for change in dispatch.changes if change.what == "drains"]
    left = [change.instance for change in dispatch.changes if change.what == "left"]
    assert drained
    assert sorted(drained) == sorted(left)
    assert (dispatch.moves > 0) == (drain_s < 10)
    assert attainment(result.outcomes, TARGET, LatencyDefinition.STRICT) > 0.9


def test_the_study_says_what_happened_and_what_it_cost() -> None:
    found = course(Variant("serai", "serai", Trigger.SERAI, 4.0), 1, step_s=6.0)
    assert len(found.sampled) == 1
    assert found.attainment > 0.9
    assert 0 < found.gpu_s_per_1k < 16 * 4 * 42.0
    fixed = course(Variant("always 8", "serai", None, 0.0), 1, step_s=6.0)
    assert fixed.instances_end == 8
    assert fixed.changes == ()
