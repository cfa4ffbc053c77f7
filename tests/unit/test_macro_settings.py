"""Settings of the macro-scheduler: each wrong one is named by its flag."""

from __future__ import annotations

from typing import Any

import pytest

from serai.macro_scheduler.group import Group
from serai.macro_scheduler.scaling import ScalingSettings, Trigger
from serai.macro_scheduler.settings import POLICIES, MacroSchedulerSettings


@pytest.mark.parametrize("admission", POLICIES)
def test_a_group_is_made_of_them(admission: str) -> None:
    settings = MacroSchedulerSettings(admission=admission, scaling=True, attainment=0.9)
    group = Group(settings.group("me-1"))
    assert group.policy.name == admission
    assert group.settings.attainment == 0.9
    assert group.settings.scaling == ScalingSettings()


def test_when_and_how_far_a_group_scales() -> None:
    settings = MacroSchedulerSettings(
        scaling=True,
        scaling_trigger="paper",
        scaling_drain_s=20.0,
        instances_min=2,
        instances_max=9,
        instance_start_s=30.0,
    )
    expected = ScalingSettings(Trigger.PAPER, instances_min=2, instances_max=9, start_s=30.0, drain_s=20.0)
    assert settings.group("me-1").scaling == expected
    assert MacroSchedulerSettings().group("me-1").scaling is None


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"admission": "mine"}, "--admission"),
        ({"attainment": 1.0}, "--attainment"),
        ({"slo_ttft_s": 0.0}, "--slo-ttft-s"),
        ({"slo_tpot_s": -1.0}, "--slo-tpot-s"),
        ({"lease_s": 0.0}, "--lease-s"),
        ({"beat_s": 0.0}, "--beat-s"),
        ({"pending_max": 0}, "--pending-max"),
        ({"instances_lower": 6, "instances_upper": 6}, "--instances-lower"),
        ({"models": ()}, "--models"),
        ({"scaling_trigger": "gut"}, "--scaling-trigger 'gut': must be one of serai, paper"),
        ({"instances_min": 3, "instances_max": 2}, "--instances-min is 3 and --instances-max 2"),
        ({"instance_start_s": -1.0}, "--instance-start-s is -1.0: must be at least 0"),
        ({"scaling_drain_s": -1.0}, "--scaling-drain-s is -1.0: must be at least 0"),
    ],
)
def test_a_wrong_one_is_refused_by_its_flag(wrong: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        MacroSchedulerSettings(**wrong)
