"""Mitosis, ownership and scaling together, and how a group's load is measured."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.contracts.admission import GateMode, InstanceOwner, InstanceReport, Spread
from serai.macro_scheduler.group_load import LoadMeter
from serai.macro_scheduler.membership import SETTLE_EVERY_S, Membership, MembershipEffect, MembershipSettings
from serai.macro_scheduler.mitosis import Bounds, Drain, Scale, Sleep, Wake
from serai.macro_scheduler.ownership import Claim, Say, claim
from serai.macro_scheduler.scaling import Load, ScalingSettings

SMALL = MembershipSettings(Bounds(2, 3))
IDLE = Load(slo_ttft_s=5.0, instances=4, requests=10, utilisation=0.1)
SHORT = replace(IDLE, queue_age_s=4.0)


class Site:
    """A KV and instances that do as they are told at once."""

    def __init__(self, members: Membership) -> None:
        self.members = members
        self.kv: dict[str, InstanceOwner] = {}
        self.obeyed: dict[str, tuple[str, int]] = {}
        self.others: list[MembershipEffect] = []

    def obey(self, effects: list[MembershipEffect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case Claim(session, owner, heard):
                    found = claim(self.kv.get(session), session, owner, 1, heard)
                    self.kv[session] = found
                    self.obey(self.members.owned(session, owner, found.epoch, now_s), now_s)
                case Say(session, owner, epoch):
                    assert epoch >= self.obeyed.get(session, ("", 0))[1]
                    self.obeyed[session] = (owner, epoch)
                    self.members.answered(session, epoch, True, now_s)
                case _:
                    self.others.append(effect)

    def join(self, *sessions: str, now_s: float = 0.0) -> None:
        for session in sessions:
            self.obey(self.members.joined(session, now_s), now_s)

    def sizes(self) -> list[int]:
        return [len(macro) for macro in self.members.macros]


def _site(settings: MembershipSettings = SMALL) -> Site:
    return Site(Membership(settings, "leader.7"))


def test_who_joins_is_claimed_told_and_may_get_leases() -> None:
    members = Membership(SMALL, "leader.7")
    (wanted,) = members.joined("a", 0.0)
    assert wanted == Claim("a", "leader.7/1", 0)
    assert members.epoch_of("a") is None
    (said,) = members.owned("a", "leader.7/1", 9, 0.0)
    assert said == Say("a", "leader.7/1", 9)
    assert members.answered("a", 9, True, 0.1)
    assert members.epoch_of("a") == 9


def test_a_split_moves_owners_with_higher_epochs() -> None:
    site = _site()
    site.join("a", "b", "c", "d")
    assert site.sizes() == [2, 2]
    assert site.obeyed["c"][0] == "leader.7/2"
    assert site.obeyed["c"][1] == site.obeyed["a"][1] + 1, "moved: its second epoch"
    assert site.obeyed["d"][0] == "leader.7/2"
    assert all(site.members.epoch_of(session) for session in "abcd")


def test_known_sessions_do_not_join_again() -> None:
    site = _site()
    site.join("a", "a")
    assert site.sizes() == [1]


def test_a_hole_is_closed_after_a_while_and_one_that_is_back_in_time_moves_nobody() -> None:
    site = _site()
    site.join("a", "b", "c", "d")
    site.members.gone("a", 10.0)
    assert site.sizes() == [1, 2]
    site.obey(site.members.due(10.0 + SETTLE_EVERY_S), 10.0 + SETTLE_EVERY_S)
    assert site.sizes() == [3]
    assert {owner for session, (owner, _) in site.obeyed.items() if session != "a"} == {"leader.7/1"}
    site = _site()
    site.join("a", "b", "c", "d")
    site.members.gone("a", 10.0)
    site.join("e", now_s=12.0)
    site.obey(site.members.due(20.0), 20.0)
    assert site.sizes() == [2, 2]


def test_beats_go_to_all_and_to_those_that_drain_until_they_have_gone() -> None:
    site = _site(replace(SMALL, scaling=ScalingSettings(calm_windows=1, start_s=0.0)))
    site.join("a", "b")
    assert {effect.session for effect in site.members.due(1.0) if isinstance(effect, Say)} == {"a", "b"}
    for at_s in (0.0, 30.0):
        site.obey(site.members.evaluate(replace(IDLE, instances=2), {}, at_s), at_s)
    assert [effect for effect in site.others if isinstance(effect, Drain)] == [Drain("b", 1, 60.0)]
    assert site.sizes() == [1]
    assert site.members.epoch_of("b") is None, "nothing new goes there"
    assert {effect.session for effect in site.members.due(32.0) if isinstance(effect, Say)} == {"a", "b"}
    site.join("b", now_s=32.5)
    assert site.sizes() == [1], "its record says for a while yet that it serves"
    site.members.gone("b", 33.0)
    assert {effect.session for effect in site.members.due(34.0) if isinstance(effect, Say)} == {"a"}


def test_a_drain_is_said_again_until_the_session_has_gone() -> None:
    site = _site(replace(SMALL, scaling=ScalingSettings(calm_windows=1, start_s=0.0, drain_s=12.0)))
    site.join("a", "b")
    for at_s in (0.0, 30.0):
        site.obey(site.members.evaluate(replace(IDLE, instances=2), {}, at_s), at_s)
    again = [
        effect for at_s in (34.0, 35.0, 40.0, 45.0) for effect in site.members.due(at_s) if isinstance(effect, Drain)
    ]
    assert again == [Drain("b", 0, 7.0), Drain("b", 0, 2.0), Drain("b", 0, 0.0)]
    site.members.gone("b", 46.0)
    assert not [effect for effect in site.members.due(60.0) if isinstance(effect, Drain)]


def test_a_wish_counts_as_starting_until_somebody_comes_or_it_is_old() -> None:
    site = _site(replace(SMALL, scaling=ScalingSettings(start_s=10.0)))
    site.join("a")
    effects = site.members.evaluate(SHORT, {}, 0.0)
    assert [type(effect) for effect in effects] == [Scale]
    assert site.members.starting == 1
    site.join("b", now_s=9.0)
    assert site.members.starting == 0
    site.members.evaluate(SHORT, {}, 10.0)
    site.members.forget_old_wishes(29.0)
    assert site.members.starting == 1
    site.members.forget_old_wishes(30.0)
    assert site.members.starting == 0


def test_sleepers_are_woken_before_others_are_started() -> None:
    site = _site(replace(SMALL, scaling=ScalingSettings(calm_windows=1, start_s=0.0, sleeps=True, step_max=2)))
    site.join("a", "b")
    for at_s in (0.0, 30.0):
        site.obey(site.members.evaluate(replace(IDLE, instances=2), {}, at_s), at_s)
    assert Sleep("b") in site.others
    site.members.slept("b", 40.0)
    heavy = replace(SHORT, instances=1, utilisation=2.5)
    effects = site.members.evaluate(heavy, {}, 50.0)
    assert effects[0] == Wake("b")
    assert isinstance(effects[1], Scale)
    assert effects[1].change == 1
    site.join("b", now_s=55.0)
    assert site.sizes() == [2]


def test_where_others_decide_a_shrink_is_only_a_wish() -> None:
    site = _site(replace(SMALL, drains=False, scaling=ScalingSettings(calm_windows=1, start_s=0.0)))
    site.join("a", "b")
    for at_s in (0.0, 30.0):
        site.obey(site.members.evaluate(replace(IDLE, instances=2), {}, at_s), at_s)
    assert [effect.change for effect in site.others if isinstance(effect, Scale)] == [-1]
    assert site.sizes() == [2]


def test_without_scaling_nothing_is_asked_for() -> None:
    site = _site()
    site.join("a")
    assert site.members.evaluate(SHORT, {}, 0.0) == []
    assert site.members.evaluation_due_s is None
    assert site.members.next_due_s() == 1.0


def test_changes_are_noted_with_their_reasons() -> None:
    site = _site(replace(SMALL, scaling=ScalingSettings()))
    site.join("a", now_s=3.0)
    site.members.evaluate(SHORT, {}, 4.0)
    assert [(at_s, why.split(":")[0]) for at_s, why in site.members.notes] == [
        (3.0, "a is the first"),
        (4.0, "+1"),
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["join", "gone", "grow", "shrink", "wait"]), st.integers(0, 30)), max_size=60)
)
def test_who_may_get_leases_obeys_the_macro_instance_it_is_in(steps: list[tuple[str, int]]) -> None:
    scaling = ScalingSettings(calm_windows=1, start_s=0.0, instances_min=1)
    site = _site(MembershipSettings(Bounds(2, 4), scaling=scaling))
    now_s, number = 0.0, 0
    for step, which in steps:
        now_s += 31.0
        sessions = [session for macro in site.members.macros for session in macro.members]
        if step == "join":
            number += 1
            site.join(f"s{number}", now_s=now_s)
        elif step == "gone" and sessions:
            site.members.gone(sessions[which % len(sessions)], now_s)
        elif step in ("grow", "shrink") and sessions:
            load = SHORT if step == "grow" else IDLE
            for at_s in (now_s - 30.5, now_s):
                site.obey(site.members.evaluate(replace(load, instances=len(sessions)), {}, at_s), at_s)
        site.obey(site.members.due(now_s), now_s)
        for macro in site.members.macros:
            assert 1 <= len(macro) <= 4
            for session in macro.members:
                assert site.obeyed[session][0] == site.members.owner_name(macro.serial)
                assert site.members.epoch_of(session) == site.obeyed[session][1]
        assert not set(site.members.draining) & {s for macro in site.members.macros for s in macro.members}


# -- load --------------------------------------------------------------------------------------------------------------

REPORT = InstanceReport(
    session="a",
    sequence=1,
    epoch=1,
    applied=0,
    mode=GateMode.PADG,
    prefilling=False,
    window_s=0.0,
    decoding=Spread(10, mean_s=2.0),
    waiting=0,
    waiting_prefill_s=0.0,
    laxity_s=1e9,
    kv_tokens_free=600,
    kv_tokens_total=1000,
    kv_tokens_promised=100,
    step_s=0.04,
)


def _report(session: str = "a", **changes: object) -> InstanceReport:
    return msgspec.structs.replace(REPORT, session=session, **changes)


def test_load_is_the_difference_over_a_window() -> None:
    meter = LoadMeter(30.0)
    for at_s in range(61):
        first = 10 * at_s
        meter.reported(
            _report(first_tokens_total=first, slow_first_tokens_total=at_s, ttft_s_total=2.5 * first), float(at_s)
        )
    meter.reported(_report("b", decoding=Spread(30, mean_s=4.0)), 60.0)
    for _ in range(30):
        meter.leased(0.5, 60.0)
    load = meter.load(["a", "b", "silent"], 5.0, 0.1, 60.0, starting=2, waited_s=[0.1, 0.7])
    assert (load.instances, load.starting, load.requests) == (3, 2, 302)
    assert load.ttft_mean_s == pytest.approx((300 * 2.5 + 0.8) / 302)
    assert load.ttft_slow_share == pytest.approx(30 / 302)
    assert load.queue_age_s == 0.7
    assert load.utilisation == pytest.approx(15.0 / 30.0 / 3 + 0.4)
    assert load.saved_tpot_mean_s == pytest.approx((10 * 2.0 + 30 * 4.0) / 40)


def test_who_waits_for_a_place_counts_as_slow_before_its_first_token() -> None:
    meter = LoadMeter(30.0)
    meter.reported(_report(first_tokens_total=0), 0.0)
    meter.reported(_report(first_tokens_total=10, ttft_s_total=5.0), 20.0)
    load = meter.load(["a"], 5.0, 0.1, 20.0, waited_s=[100.0] * 5)
    assert load.ttft_mean_s == pytest.approx(505 / 15)
    assert load.ttft_slow_share == pytest.approx(5 / 15)


def test_a_full_cache_is_load_too_what_is_promised_counted() -> None:
    meter = LoadMeter(30.0)
    meter.reported(_report(kv_tokens_free=150), 0.0)
    assert meter.load(["a"], 5.0, 0.1, 1.0).utilisation == pytest.approx(0.95)


def test_an_instance_that_counts_anew_is_not_taken_for_less_than_nothing() -> None:
    meter = LoadMeter(30.0)
    meter.reported(_report(first_tokens_total=500), 0.0)
    meter.reported(_report(first_tokens_total=3), 1.0)
    meter.reported(_report(first_tokens_total=8), 2.0)
    assert meter.load(["a"], 5.0, 0.1, 2.0).requests == 5
    meter.gone("a")
    assert meter.load(["a"], 5.0, 0.1, 2.0).requests == 0
