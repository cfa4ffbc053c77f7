"""Which fault hits which request."""

from __future__ import annotations

import pytest

from serai.engine_emulator.faults import BadFault, Fault, FaultKind, FaultPlan, fault_from_fields, parse_fault


def test_a_fault_is_read_from_a_flag() -> None:
    assert parse_fault("hang") == Fault(FaultKind.HANG)
    assert parse_fault("cut:tokens=5,count=1") == Fault(FaultKind.CUT, tokens=5, count=1)
    assert parse_fault("status:status=429,retry_after_s=1.5") == Fault(FaultKind.STATUS, status=429, retry_after_s=1.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("explode", "no fault 'explode'"),
        ("cut:tokens", "expected key=value"),
        ("cut:tokens=x", "tokens must be a number"),
        ("cut:colour=1", "no field 'colour'"),
        ("cut:tokens=-1", "at least 0"),
        ("cut:count=0", "count at least 1"),
        ("status", "from 400 to 599"),
        ("slow:factor=0", "above 0"),
    ],
)
def test_a_wrong_fault_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(BadFault, match=message):
        parse_fault(text)


def test_fields_of_a_wrong_type_are_refused() -> None:
    for fields in ({"kind": "cut", "tokens": [1]}, {"kind": "cut", "tokens": True}, {"kind": "cut", "tokens": None}):
        with pytest.raises(BadFault, match="tokens must be a number"):
            fault_from_fields(fields)


def test_a_fault_spares_skip_requests_and_hits_count() -> None:
    cut = Fault(FaultKind.CUT, skip=1, count=2)
    plan = FaultPlan([cut])
    assert [plan.take() for _ in range(4)] == [None, cut, cut, None]
    assert plan.remaining() == []


def test_the_first_fault_that_was_set_wins_and_one_without_count_stays() -> None:
    once, always = Fault(FaultKind.HANG, count=1), Fault(FaultKind.CUT)
    plan = FaultPlan([once])
    plan.add(always)
    assert [plan.take() for _ in range(3)] == [once, always, always]
    plan.clear()
    assert plan.take() is None


def test_what_remains_is_told() -> None:
    plan = FaultPlan([Fault(FaultKind.CUT, skip=2, count=3)])
    plan.take()
    assert [(fault["kind"], fault["skip"], fault["count"]) for fault in plan.remaining()] == [("cut", 1, 3)]
