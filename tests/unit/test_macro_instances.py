"""A group of many instances: macro-instances that follow mitosis, leases only where the owner is obeyed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from serai.contracts.admission import AdmissionAsk, Decision, GateMode, InstanceReport, InstanceState, Spread
from serai.macro_scheduler.group import (
    Answer,
    Asked,
    Drain,
    Gone,
    Group,
    GroupEffect,
    GroupEvent,
    GroupSettings,
    Joined,
    NotOwned,
    Own,
    Owned,
    Reported,
    Scale,
    Take,
    Tick,
    TookOver,
    WakeAt,
)
from serai.macro_scheduler.instance_view import StepPredictor
from serai.macro_scheduler.mitosis import Bounds
from serai.macro_scheduler.scaling import ScalingSettings

PREDICT = StepPredictor(lambda tokens: 0.01 + tokens * 1e-4, lambda sequences, tokens: 0.02)


class Site:
    """Instances that obey, and a KV in which every claim is won, unless told otherwise."""

    def __init__(self, settings: GroupSettings) -> None:
        self.group = Group(settings)
        self.epoch = 0
        self.obeyed: dict[str, tuple[str, int]] = {}
        self.sequence = 0
        self.effects: list[GroupEffect] = []
        self.wins: Callable[[str], bool] = lambda session: True
        self.obeys: Callable[[str], bool] = lambda session: True

    def tell(self, event: GroupEvent, now_s: float) -> None:
        for effect in self.group.handle(event, now_s):
            self.effects.append(effect)
            match effect:
                case Own(session, owner):
                    self.epoch += 1
                    won = self.wins(session)
                    self.tell(Owned(session, self.epoch, owner) if won else NotOwned(session, 0), now_s)
                case Take(session, take):
                    if self.obeys(session):
                        self.obeyed[session] = (take.owner, take.epoch)
                    self.tell(TookOver(self.state(session)), now_s)
                case _:
                    pass

    def state(self, session: str) -> InstanceState:
        return InstanceState(self.report(session), [], accepted=self.obeys(session))

    def report(self, session: str, **changes: object) -> InstanceReport:
        self.sequence += 1
        report = InstanceReport(
            session=session,
            sequence=self.sequence,
            epoch=self.obeyed.get(session, ("", 0))[1],
            applied=10_000,
            mode=GateMode.PADG,
            prefilling=False,
            window_s=0.0,
            decoding=Spread(0),
            waiting=0,
            waiting_prefill_s=0.0,
            laxity_s=1e9,
            kv_tokens_free=100_000,
            kv_tokens_total=100_000,
            step_s=0.02,
        )
        return msgspec.structs.replace(report, **changes)

    def join(self, count: int, now_s: float = 0.0, first: int = 0) -> list[str]:
        sessions = [f"s{number:02}" for number in range(first, first + count)]
        for session in sessions:
            self.tell(Joined(session, 100_000, PREDICT), now_s)
        return sessions

    def ask(self, number: int, now_s: float) -> tuple[Decision, str, int]:
        ask = AdmissionAsk(request_id=f"r{number}", prompt_tokens=100)
        answer = next(e.answer for e in self.group.handle(Asked(ask, "to"), now_s) if isinstance(e, Answer))
        return answer.decision, answer.session, answer.lease.epoch if answer.lease is not None else 0

    def of(self, kind: type) -> list[GroupEffect]:
        return [effect for effect in self.effects if isinstance(effect, kind)]


def _sizes(group: Group) -> list[int]:
    return [len(members) for _, members in group.macros.standing()]


def _site(bounds: Bounds | None = None, scaling: ScalingSettings | None = None) -> Site:
    return Site(GroupSettings(owner="me-1", bounds=bounds or Bounds(), scaling=scaling))


def test_the_twelfth_instance_splits_the_group_and_both_get_requests() -> None:
    site = _site()
    site.join(12)
    assert _sizes(site.group) == [6, 6]
    assert Counter(owner for owner, _ in site.obeyed.values()) == {"me-1/1": 6, "me-1/2": 6}
    asked = Counter(site.ask(number, 0.1)[1] for number in range(120))
    members = dict(site.group.macros.standing())
    assert all(sum(asked[session] for session in sessions) > 20 for sessions in members.values())


def test_leases_have_the_epoch_that_the_instance_obeys() -> None:
    site = _site(Bounds(1, 2))
    site.join(3)
    for number in range(30):
        decision, session, epoch = site.ask(number, 0.1)
        assert decision is Decision.ADMIT
        assert epoch == site.obeyed[session][1]


def test_until_its_instance_has_said_yes_no_lease_is_given() -> None:
    site = _site()
    site.obeys = lambda session: session != "s01"
    site.join(2)
    assert {site.ask(number, 0.1)[1] for number in range(20)} == {"s00"}


def test_a_claim_that_is_lost_is_made_again_and_nothing_is_leased_meanwhile() -> None:
    site = _site()
    site.wins = lambda session: False
    site.join(1)
    assert site.ask(1, 0.1)[0] is not Decision.ADMIT
    site.wins = lambda session: True
    site.tell(Tick(), 0.4)
    assert site.obeyed == {}
    site.tell(Tick(), 0.6)
    assert site.obeyed == {"s00": ("me-1/1", 2)}


def test_whom_an_instance_obeys_is_heard_from_its_reports() -> None:
    site = _site()
    site.join(2)
    site.obeyed["s00"] = ("other", 99)
    site.tell(Reported(site.report("s00")), 0.2)
    assert {site.ask(number, 0.2)[1] for number in range(20)} == {"s01"}


def test_an_instance_that_fell_back_is_told_again_at_once() -> None:
    site = _site()
    site.join(1)
    before = len(site.of(Take))
    site.obeyed["s00"] = ("", 0)
    site.tell(Reported(site.report("s00")), 0.2)
    assert len(site.of(Take)) == before + 1
    assert site.obeyed["s00"][0] == "me-1/1"
    assert site.ask(1, 0.2)[1] == "s00"


def test_beats_go_out_with_whatever_comes_also_where_nobody_ticks() -> None:
    site = _site()
    site.join(1)
    site.effects.clear()
    site.tell(Reported(site.report("s00")), 0.9)
    assert site.of(Take) == []
    site.tell(Reported(site.report("s00")), 1.1)
    assert len(site.of(Take)) == 1
    assert [wake.at_s for wake in site.of(WakeAt)] == [2.1]  # type: ignore[attr-defined]


def test_who_is_gone_gets_nothing_and_holes_are_closed_by_a_merge() -> None:
    site = _site(Bounds(2, 3))
    site.join(4)
    assert _sizes(site.group) == [2, 2]
    site.tell(Gone("s00"), 1.0)
    assert "s00" not in {site.ask(number, 1.0)[1] for number in range(20)}
    site.tell(Tick(), 7.0)
    assert _sizes(site.group) == [3]
    assert {owner for session, (owner, _) in site.obeyed.items() if session != "s00"} == {"me-1/1"}


def test_a_group_that_is_not_needed_shrinks_by_a_drain() -> None:
    site = _site(scaling=ScalingSettings(calm_windows=1, start_s=0.0, drain_s=20.0))
    sessions = site.join(3)
    for second in range(90):
        for session in sessions:
            site.tell(Reported(site.report(session)), float(second))
        if site.of(Drain):
            break
    (drain,) = site.of(Drain)
    assert drain == Drain("s02", 1, 20.0)
    assert [effect.change for effect in site.of(Scale)] == [-1]  # type: ignore[attr-defined]
    assert "s02" not in {site.ask(number, 90.0)[1] for number in range(20)}
    assert "s02" in {take.session for take in site.of(Take)}, "it is told whom it obeys until it has gone"  # type: ignore[attr-defined]
    assert any("drains within 20 s" in line for line in site.group.explain(""))


def test_a_group_that_waits_wishes_for_another() -> None:
    site = _site(scaling=ScalingSettings(start_s=60.0))
    (session,) = site.join(1)
    for second in range(40):
        site.tell(
            Reported(site.report(session, waiting=50, waiting_prefill_s=20.0, kv_tokens_free=2_000)), float(second)
        )
    wishes = site.of(Scale)
    assert [wish.change for wish in wishes] == [1]  # type: ignore[attr-defined]


def test_two_who_report_nothing_are_told_apart_by_explain() -> None:
    site = _site(Bounds(1, 2))
    site.join(3)
    lines: Sequence[str] = site.group.explain("")
    assert [line.split(",")[0] for line in lines if line.startswith("macro-instance")] == [
        "macro-instance me-1/1",
        "macro-instance me-1/2",
    ]
