"""When a group wants more instances or fewer: ours and the paper's rule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from serai.macro_scheduler.scaling import (
    Load,
    Samples,
    Scaling,
    ScalingSettings,
    Trigger,
    Word,
    mean,
    quantile,
    utilisation,
)

CALM = Load(slo_ttft_s=5.0, instances=8, requests=100, ttft_mean_s=1.0, ttft_slow_share=0.02, utilisation=0.8)
MEAN_TTFT = "mean TTFT 9.00 s > 5 s (Eq. 1)"
IDLE = replace(CALM, utilisation=0.4)


def _changes(scaling: Scaling, load: Load, until_s: float, from_s: float = 0.0) -> list[tuple[float, int]]:
    found = []
    for step in range(int((until_s - from_s) / 5.0) + 1):
        word = scaling.evaluate(load, from_s + 5.0 * step)
        if word is not None and word.scale is not None:
            found.append((from_s + 5.0 * step, word.scale.change))
    return found


def _first(load: Load, **settings: object) -> Word:
    word = Scaling(ScalingSettings(**settings)).evaluate(load, 0.0)  # type: ignore[arg-type]
    assert word is not None
    return word


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (replace(CALM, ttft_slow_share=0.11), "p90 TTFT > 4 s: 11% of first tokens took longer"),
        (replace(CALM, queue_age_s=1.6), "a request has waited 1.60 s > 1.5 s for a place"),
        (replace(CALM, utilisation=0.95), "utilised 0.95 > 0.9"),
    ],
)
def test_each_of_three_signs_asks_for_one_more(load: Load, why: str) -> None:
    word = _first(load)
    assert word.scale is not None
    assert (word.scale.change, word.scale.why) == (1, why)


def test_a_good_mean_hides_no_bad_tail_and_nothing_is_said_of_no_requests() -> None:
    assert _first(replace(CALM, ttft_mean_s=0.5, ttft_slow_share=0.2)).scale is not None
    assert _first(replace(CALM, requests=0, ttft_slow_share=0.2)).scale is None


def test_after_a_change_it_waits_until_an_instance_could_have_started() -> None:
    short = replace(CALM, ttft_slow_share=0.2)
    assert _changes(Scaling(ScalingSettings()), short, 400.0) == [(0.0, 1), (180.0, 1), (360.0, 1)]
    assert _changes(Scaling(ScalingSettings(start_s=10.0)), short, 30.0) == [(0.0, 1), (10.0, 1), (20.0, 1), (30.0, 1)]


def test_no_more_than_allowed_counting_those_that_start() -> None:
    short = replace(CALM, ttft_slow_share=0.2, starting=1)
    word = _first(short, instances_max=9)
    assert word.scale is None
    assert word.reasons[-1] == "but 9 instances are the most allowed"


def test_several_at_once_when_so_many_are_missing() -> None:
    heavy = replace(CALM, utilisation=1.3)
    assert _first(heavy, step_max=8).scale == _scale(4, "utilised 1.30 > 0.9")
    assert _first(heavy, step_max=3).scale == _scale(3, "utilised 1.30 > 0.9")
    assert _first(replace(heavy, starting=3), step_max=8).scale == _scale(1, "utilised 1.30 > 0.9")
    assert _first(replace(heavy, ttft_mean_s=9.0), trigger=Trigger.PAPER).scale == _scale(1, MEAN_TTFT)


def test_more_are_asked_for_while_others_start_when_those_will_not_do() -> None:
    scaling = Scaling(ScalingSettings())
    assert scaling.evaluate(replace(CALM, utilisation=1.0), 0.0) is not None
    word = scaling.evaluate(replace(CALM, utilisation=1.0, starting=1), 5.0)
    assert word is not None
    assert word.scale is None, "the one that starts will do"
    word = scaling.evaluate(replace(CALM, utilisation=1.3, starting=1), 10.0)
    assert word is not None
    assert word.scale == _scale(3, "utilised 1.30 > 0.9")


def _scale(change: int, why: str) -> object:
    from serai.macro_scheduler.mitosis import Scale

    return Scale(change, why)


def test_one_less_only_after_three_calm_windows() -> None:
    assert _changes(Scaling(ScalingSettings()), IDLE, 300.0) == [(90.0, -1), (270.0, -1)]


def test_calm_begins_anew_after_every_sign_of_shortage() -> None:
    scaling = Scaling(ScalingSettings(instances_max=8))
    assert _changes(scaling, IDLE, 60.0) == []
    scaling.evaluate(replace(IDLE, queue_age_s=3.0), 65.0)
    assert _changes(scaling, IDLE, 155.0, from_s=70.0) == []
    assert _changes(scaling, IDLE, 160.0, from_s=160.0) == [(160.0, -1)]


def test_nobody_goes_when_the_others_would_be_utilised_too_much() -> None:
    """8 × 0.66 / 7 = 0.754."""
    assert _changes(Scaling(ScalingSettings()), replace(CALM, utilisation=0.66), 600.0) == []
    assert _changes(Scaling(ScalingSettings()), replace(CALM, utilisation=0.65), 100.0) == [(90.0, -1)]


def test_nobody_goes_below_the_least_or_while_one_starts() -> None:
    assert _changes(Scaling(ScalingSettings(instances_min=8)), IDLE, 300.0) == []
    assert _changes(Scaling(ScalingSettings()), replace(IDLE, instances=1), 300.0) == []
    assert _changes(Scaling(ScalingSettings()), replace(IDLE, starting=1), 300.0) == []


def test_the_papers_rule_looks_at_means() -> None:
    paper = {"trigger": Trigger.PAPER}
    assert _first(replace(CALM, ttft_slow_share=0.9), **paper).scale is None
    word = _first(replace(CALM, ttft_mean_s=5.1), **paper)
    assert word.scale == _scale(1, "mean TTFT 5.10 s > 5 s (Eq. 1)")


def test_the_papers_rule_takes_one_away_when_slack_abounds() -> None:
    """S_TTFT · (n + 1) / n = 5 · 9 / 8 = 5.625."""
    paper = {"trigger": Trigger.PAPER}
    assert _first(replace(CALM, saved_tpot_mean_s=5.6), **paper).scale is None
    word = _first(replace(CALM, saved_tpot_mean_s=5.7), **paper)
    assert word.scale == _scale(-1, "mean saved TPOT 5.70 s > 5.62 s (Eq. 2)")


def test_the_papers_rule_never_lets_short_answers_shrink_a_group() -> None:
    """15 s and 100 ms: 100 tokens cannot save 15 s, however idle it is. Ours looks at utilisation."""
    short_answers = replace(IDLE, slo_ttft_s=15.0, saved_tpot_mean_s=100 * 0.1)
    assert _changes(Scaling(ScalingSettings(trigger=Trigger.PAPER)), short_answers, 600.0) == []
    assert _changes(Scaling(ScalingSettings()), short_answers, 100.0) == [(90.0, -1)]


def test_it_looks_when_it_is_due() -> None:
    scaling = Scaling(ScalingSettings())
    assert scaling.evaluate(CALM, 0.0) is not None
    assert scaling.evaluate(CALM, 4.9) is None
    assert scaling.due_s == 5.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"instances_min": 0}, "instances_min is 0"),
        ({"instances_min": 9, "instances_max": 8}, "the first not above the second"),
        ({"window_s": 0.0}, "window_s is 0.0: must be above 0"),
        ({"window_s": math.nan}, "window_s is nan: must be above 0"),
        ({"start_s": -1.0}, "start_s is -1.0"),
        ({"utilisation_low": 0.9}, "would come and go for ever"),
        ({"evaluate_every_s": 31.0}, "must not be above window_s"),
        ({"calm_windows": 0}, "calm_windows is 0"),
    ],
)
def test_settings_that_cannot_hold_together_are_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ScalingSettings(**settings)  # type: ignore[arg-type]


def test_a_target_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="TTFT target is 0 s"):
        Load(slo_ttft_s=0, instances=1)


def test_utilisation_is_prefill_and_the_share_that_decoding_needs_or_kv() -> None:
    assert utilisation(60.0, 30.0, 4, 0.04, 0.1, 0.2) == pytest.approx(0.9)
    assert utilisation(60.0, 30.0, 4, 0.04, 0.1, 0.95) == pytest.approx(0.95)
    assert utilisation(0.0, 30.0, 4, 0.04, 0.0, 0.2) == 0.2
    assert utilisation(1.0, 30.0, 0, 0.04, 0.1, 0.0) == math.inf


def test_samples_slide() -> None:
    samples = Samples(30.0)
    for at_s in range(10):
        samples.add(float(at_s), float(at_s))
    assert len(samples.values(29.0)) == 10
    assert samples.values(35.0) == [6.0, 7.0, 8.0, 9.0]
    assert samples.values(100.0) == []


def test_means_and_quantiles() -> None:
    assert mean([]) == quantile([], 0.9) == 0.0
    assert mean([1.0, 3.0]) == 2.0
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.9, 1.0)] == [1.0, 1.0, 2.0, 4.0, 4.0]
