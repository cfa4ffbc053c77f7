"""What nobody may believe a macro-scheduler: each kind of bad input, refused with its reason, and nothing changed."""

from __future__ import annotations

import asyncio
from math import inf, nan
from typing import Any, cast

import msgspec
import pytest

from serai.bench.stand_in_instances import easy_report
from serai.contracts.admission import AdmissionAsk, Decision, InstanceReport, Spread
from serai.contracts.codec import encode
from serai.macro_scheduler import metrics
from serai.macro_scheduler.group import GroupSettings, Reported, SpentBy
from serai.macro_scheduler.membership import MembershipSettings
from serai.macro_scheduler.mitosis import Bounds
from serai.macro_scheduler.service import MacroScheduler
from serai.macro_scheduler.settings import MacroSchedulerSettings
from serai.runtime.bus import Message
from unit.fakes import FakeBus
from unit.test_macro_granting import at_ease
from unit.test_macro_group import BUSY, Stand


def believed(stand: Stand, session: str = "a") -> InstanceReport:
    report = stand.group.views[session].report
    assert report is not None
    return report


# -- status ------------------------------------------------------------------------------------------------------------


def test_status_from_an_unknown_instance_is_counted_and_thrown_away() -> None:
    async def main() -> None:
        scheduler = MacroScheduler(MacroSchedulerSettings(), FakeBus(), cast(Any, None), cast(Any, None))
        before = metrics.REPORTS.of("unknown instance").value
        scheduler.on_instance(Message("instance.stranger", encode(easy_report("stranger", 1, 0, 1, 1))))
        assert metrics.REPORTS.of("unknown instance").value == before + 1
        assert scheduler._raw == {}

    asyncio.run(main())


def test_status_of_another_session_than_its_subject_names_is_malformed() -> None:
    async def main() -> None:
        scheduler = MacroScheduler(MacroSchedulerSettings(), FakeBus(), cast(Any, None), cast(Any, None))
        assert scheduler._report("s1", encode(easy_report("s2", 1, 0, 1, 1))) is None
        assert scheduler._report("s1", b"{") is None
        assert scheduler._report("s1", encode(easy_report("s1", 1, 0, 1, 1))) is not None

    asyncio.run(main())


def test_status_from_an_unknown_instance_changes_no_group() -> None:
    stand = Stand(("a",))
    stranger = msgspec.structs.replace(stand.blank("a", 1), session="z")
    assert stand.tell(Reported(stranger)) == []
    assert "z, which is not a member" in stand.group.last_refusal


def test_status_of_another_epoch_is_not_believed() -> None:
    stand = Stand(("a",))
    before = believed(stand)
    stand.report("a", epoch=99, waiting=7)
    assert believed(stand) is before
    assert "it is of epoch 99" in stand.group.last_refusal


def test_an_instance_that_obeys_nobody_any_more_is_told_again_and_that_answer_counts() -> None:
    stand = Stand(("a",))
    stand.report("a", epoch=0, waiting=7)
    assert believed(stand).waiting == 0


def test_status_that_is_older_than_what_is_known_is_not_believed() -> None:
    stand = Stand(("a",))
    stand.report("a", waiting=1)
    before = believed(stand)
    stand.report("a", sequence=before.sequence, waiting=7)
    assert believed(stand) is before
    assert "is not above" in stand.group.last_refusal


def test_time_that_goes_back_stands_still() -> None:
    stand = Stand(("a",))
    stand.now_s = 10.0
    stand.report("a", decoding=BUSY)
    stand.now_s = 5.0
    stand.report("a", decoding=BUSY)
    assert stand.group.views["a"].reported_at_s == 10.0
    assert stand.ask("r").decision is Decision.ADMIT


@pytest.mark.parametrize("slack_s", [nan, -inf, inf])
def test_slack_that_is_no_number_is_not_believed(slack_s: float) -> None:
    stand = Stand(("a",))
    before = believed(stand)
    stand.report("a", decoding=Spread(2, slack_s, slack_s, slack_s, slack_s))
    assert believed(stand) is before
    assert "no such spread is possible" in stand.group.last_refusal


def test_negative_slack_is_believed_for_streams_may_be_behind_and_leaves_no_room_for_a_window() -> None:
    stand = Stand(("a",))
    stand.report("a", decoding=Spread(4, -1.0, -2.0, -2.0, 0.5), step_s=0.09, waiting=1, waiting_prefill_s=3.0)
    assert believed(stand).decoding.low_s == -2.0
    assert stand.ask("r", 2000).decision is Decision.WAIT


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_request_longer_than_any_window_goes_late_or_is_refused_as_its_caller_chose() -> None:
    """A prefill of 6 s, with 5 s to the first token: no window can hold it."""
    stand = Stand()
    assert stand.ask("late", 6000).decision is Decision.BEST_EFFORT
    refused = stand.ask("no", 6000, best_effort=False)
    assert refused.decision is Decision.REFUSE
    assert "cannot come within the 5.00 s that are left" in refused.reason
    assert refused.retry_after_s >= 1


def test_a_request_longer_than_any_kv_cache_is_refused_whatever_its_caller_wants() -> None:
    for best_effort in (True, False):
        answer = Stand().ask("r", 10_000, best_effort=best_effort)
        assert answer.decision is Decision.REFUSE
        assert "does not fit into any KV cache; the largest has 10000" in answer.reason


@pytest.mark.parametrize("name", ["slo_ttft_s", "slo_tpot_s"])
@pytest.mark.parametrize("target_s", [0.0, -1.0, nan])
def test_a_target_of_zero_is_refused_by_its_name(name: str, target_s: float) -> None:
    answer = Stand().ask("r", **{name: target_s})
    assert answer.decision is Decision.REFUSE
    assert answer.reason.startswith(f"{name} is {target_s}: a target is above 0")


def test_a_request_that_can_never_meet_its_target_is_told_so_at_once() -> None:
    stand = Stand()
    assert stand.ask("r", 500, slo_ttft_s=0.1).decision is Decision.BEST_EFFORT
    assert stand.ask("s", 500, slo_ttft_s=0.1, best_effort=False).decision is Decision.REFUSE


def test_a_place_that_was_never_given_is_no_harm_when_it_is_said_to_be_used() -> None:
    stand = at_ease(("a",))
    view = stand.group.views["a"]
    stand.tell(SpentBy(AdmissionAsk("r", 20), "nobody", "inbox"))
    stand.tell(SpentBy(AdmissionAsk("s", 20), "a", "another inbox"))
    stand.report("a", granted_total=50)
    assert view.leased_prefill_s >= 0
    assert view.leased_kv_tokens >= 0


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lower", "upper"), [(6, 6), (7, 6), (0, 6), (5, 6)])
def test_bounds_under_which_no_split_can_work_are_refused(lower: int, upper: int) -> None:
    with pytest.raises(ValueError, match="N_l is"):
        Bounds(lower, upper)
    with pytest.raises(ValueError, match="--instances-lower, --instances-upper: N_l is"):
        MacroSchedulerSettings(instances_lower=lower, instances_upper=upper)


@pytest.mark.parametrize("name", ["slo_ttft_s", "slo_tpot_s"])
def test_a_group_with_a_target_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        GroupSettings(**{name: 0.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} 0: must be above 0"):
        MacroSchedulerSettings(**{name: 0.0})


def test_a_membership_has_the_same_bounds() -> None:
    with pytest.raises(ValueError, match="N_l must be below N_u"):
        MembershipSettings(Bounds(11, 11))
