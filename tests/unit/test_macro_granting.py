"""Places given in advance: debited until they are counted or over, and only while all is at ease."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.contracts.admission import AdmissionAsk, Decision, Grant, Spread
from serai.macro_scheduler.grant_book import GrantBook, Place
from serai.macro_scheduler.granting import (
    EASE_SHARE,
    GRANT_S,
    HOLDERS_MAX,
    PLACES_EACH,
    PLACES_FIRST,
    STRICT_S,
    Holders,
)
from serai.macro_scheduler.group import Asked, Granted, GroupEffect, Owned, Reported, SpentBy, Tick
from serai.macro_scheduler.instance_view import InstanceView
from unit.test_macro_group import BUSY, PREDICT, Stand


def at_ease(sessions: Sequence[str] = ("a", "b"), **options: float | str | bool) -> Stand:
    stand = Stand(sessions, grants=True, **options)  # type: ignore[arg-type]
    for session in sessions:
        stand.report(session)
    return stand


def grants_of(effects: Sequence[GroupEffect]) -> list[Grant]:
    return [grant for effect in effects if isinstance(effect, Granted) for grant in effect.grants]


def asked(stand: Stand, request_id: str = "r", tokens: int = 20) -> list[Grant]:
    return grants_of(stand.tell(Asked(AdmissionAsk(request_id, tokens), "inbox")))


def test_each_place_is_debited_when_it_is_given() -> None:
    stand = at_ease()
    views = stand.group.views
    grants = asked(stand)
    assert len(grants) == PLACES_FIRST
    assert {grant.session for grant in grants} == {"a", "b"}
    assert all(grant.epoch == views[grant.session].epoch for grant in grants)
    for session, view in views.items():
        mine = [grant for grant in grants if grant.session == session]
        leased_s = sum([pending.debit_s for pending in view.leases.values()])
        assert view.waiting_prefill_s() == pytest.approx(leased_s + sum([one.prefill_s for one in mine]))


def test_a_scheduler_that_is_not_at_ease_gives_none() -> None:
    stand = at_ease()
    for session in ("a", "b"):
        stand.report(session, waiting=3, waiting_prefill_s=EASE_SHARE * 5.0)
    assert asked(stand) == []
    assert stand.answers[-1].decision is Decision.ADMIT


def test_no_more_than_a_small_part_of_the_target_is_given_away() -> None:
    stand = at_ease(("a",), slo_ttft_s=1.0)
    grants = asked(stand, tokens=1)
    assert 0 < len(grants) < PLACES_FIRST
    assert stand.group.views["a"].waiting_prefill_s() <= EASE_SHARE * 1.0


def test_nobody_gets_any_while_somebody_waits() -> None:
    stand = at_ease(("a",))
    stand.report("a", decoding=BUSY, waiting=3, waiting_prefill_s=4.9, step_s=0.09)
    assert stand.ask("r").decision is Decision.WAIT
    assert grants_of(stand.tell(SpentBy(AdmissionAsk("s", 20), "a", "inbox"))) == []


@pytest.mark.parametrize("policy", ["paper", "author_code"])
def test_policies_whose_windows_are_the_schedulers_give_none(policy: str) -> None:
    assert asked(at_ease(policy=policy)) == []


def test_what_the_instance_has_counted_is_credited() -> None:
    stand = at_ease(("a",))
    grants = asked(stand)
    view = stand.group.views["a"]
    before_s = view.waiting_prefill_s()
    leased_s = next(iter(view.leases.values())).debit_s
    stand.report("a", granted_total=2, applied=1)
    assert view.waiting_prefill_s() == pytest.approx(before_s - 2 * grants[0].prefill_s - leased_s)
    stand.report("a", granted_total=len(grants) + 5, applied=1)
    assert view.waiting_prefill_s() == 0
    assert view.leased_kv_tokens == 0


def test_what_is_over_is_credited_and_given_again() -> None:
    stand = at_ease(("a",))
    asked(stand)
    view = stand.group.views["a"]
    stand.now_s = GRANT_S + stand.group.settings.lease_s - 0.1
    stand.report("a")
    assert len(view.grants) > 0
    stand.now_s += 0.2
    stand.tell(Tick())
    assert (len(view.grants), view.leased_prefill_s) == (0, 0.0)
    assert asked(stand, "again")


def test_a_new_epoch_knows_none_of_them() -> None:
    stand = at_ease(("a",))
    asked(stand)
    view = stand.group.views["a"]
    view.owned(view.epoch + 1)
    assert (len(view.grants), view.leased_prefill_s, view.leased_kv_tokens) == (0, 0.0, 0)


def test_an_ingress_gets_more_when_half_of_its_places_are_gone_and_as_many_as_it_uses() -> None:
    stand = at_ease(slo_ttft_s=60.0)
    assert len(asked(stand)) == PLACES_FIRST
    assert asked(stand, "other") == []
    held, most = PLACES_FIRST, 0
    for number in range(200):
        held += len(grants_of(stand.tell(SpentBy(AdmissionAsk(f"s{number}", 20), "a", "inbox")))) - 1
        most = max(most, held)
        stand.report("a", granted_total=number + 1)
    assert most == PLACES_EACH


def test_an_ingress_that_uses_few_holds_few() -> None:
    holders = Holders()
    for number in range(20):
        now_s = number * 2 * GRANT_S
        missing = holders.missing("inbox", now_s)
        assert 0 < missing <= 2 * PLACES_FIRST
        for _ in range(missing):
            holders.give("inbox", now_s + GRANT_S)
        holders.spent("inbox")


def test_places_that_nobody_uses_keep_no_strict_request_from_its_own() -> None:
    """The group's target is 5 s, and now and then somebody asks for 0.3 s: after the first, what is debited in advance
    leaves room for it."""
    stand = at_ease(("a",))
    asked(stand, "first", 20)
    strict = stand.ask("strict", 20, slo_ttft_s=0.3)
    stand.now_s = STRICT_S / 2
    stand.report("a", applied=9)
    asked(stand, "other", 20)
    assert stand.group.views["a"].waiting_prefill_s() <= 0.3
    assert stand.ask("again", 20, slo_ttft_s=0.3).decision is Decision.ADMIT
    assert strict.decision in (Decision.ADMIT, Decision.WAIT)


def test_what_went_by_a_place_can_be_explained() -> None:
    stand = at_ease(("a",))
    asked(stand)
    stand.tell(SpentBy(AdmissionAsk("s", 20, project="p"), "a", "inbox"))
    assert "admit on a" in stand.group.explain("s")[0]
    assert "granted in advance" in stand.group.explain("s")[0]


def test_places_are_for_prompts_as_they_come() -> None:
    holders = Holders()
    holders.note(1000)
    assert holders.tokens_max == 2000, "the first one says what is usual"
    for _ in range(500):
        holders.note(100)
    assert 200 <= holders.tokens_max < 205


def test_ingresses_that_have_gone_are_forgotten() -> None:
    holders = Holders()
    for number in range(HOLDERS_MAX + 5):
        holders.give(number, 1.0)
    assert len(holders) == HOLDERS_MAX


@given(st.lists(st.tuples(st.sampled_from(["give", "count", "over"]), st.integers(1, 4)), max_size=60))
@settings(max_examples=150)
def test_the_debit_is_always_that_of_what_is_open(story: list[tuple[str, int]]) -> None:
    view = InstanceView("a", 10_000, PREDICT)
    view.owned(1)
    counted = 0
    blank = Stand(("a",)).blank("a", 1)
    for number, (what, amount) in enumerate(story, 1):
        now_s = number * 0.5
        if what == "give":
            for _ in range(amount):
                view.grant(Place(0.1 * amount, 10 * amount, now_s + GRANT_S))
        elif what == "count":
            counted += amount
            view.take_report(msgspec.structs.replace(blank, sequence=number + 1, granted_total=counted), now_s)
        elif what == "over":
            view.expire(now_s - 3.0)
        places = list(view.grants._open)
        assert view.leased_prefill_s == pytest.approx(sum([one.prefill_s for one in places]))
        assert view.leased_kv_tokens == sum([one.kv_tokens for one in places])


def test_a_book_credits_the_oldest_first_and_never_more_than_it_has() -> None:
    book = GrantBook()
    for number in range(3):
        book.give(Place(0.1, number, 10.0 + number))
    assert [place.kv_tokens for place in book.counted(1)] == [0]
    assert book.counted(1) == []
    assert [place.kv_tokens for place in book.over(11.5)] == [1]
    assert [place.kv_tokens for place in book.counted(9)] == [2]
    assert book.prefill_s == 0


def test_a_report_that_is_older_credits_nothing() -> None:
    stand = at_ease(("a",))
    asked(stand)
    view = stand.group.views["a"]
    open_before = len(view.grants)
    old = msgspec.structs.replace(stand.blank("a", view.epoch), sequence=0, granted_total=5)
    stand.tell(Reported(old))
    assert len(view.grants) == open_before


def test_unowned_instances_give_no_places() -> None:
    stand = at_ease(("a",))
    stand.tell(Owned("a", 99, "somebody"))
    view = stand.group.views["a"]
    view.owned(0)
    assert asked(stand) == []


def test_streams_without_slack_are_not_at_ease() -> None:
    stand = at_ease(("a",))
    stand.report("a", decoding=Spread(4, 0.0, -3.0, -3.0, 1.0), step_s=0.05, waiting=1, waiting_prefill_s=0.5)
    assert asked(stand) == []
