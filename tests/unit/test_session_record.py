"""The session record is a join-semilattice: copies that have heard the same things are equal, in whatever order."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.session_record import (
    Draining,
    Lifecycle,
    SessionMetadata,
    SessionRecord,
    checked_session_id,
    join,
    new_session_id,
)
from unit.fakes import record_of

metadata = st.builds(
    SessionMetadata,
    model=st.sampled_from(["m", "n"]),
    engine_model=st.just("e"),
    engine=st.just("vllm"),
    host=st.sampled_from(["", "a", "ä"]),
    loading_progress=st.none() | st.sampled_from([0.25, 0.5]),
    draining=st.none()
    | st.builds(Draining, reason=st.sampled_from(["stopping", "wall time"]), remaining_s=st.just(5.0)),
    labels=st.dictionaries(st.sampled_from("xyz"), st.sampled_from("12")),
)
# Few values, so that equal ranks with different contents are common.
records = st.builds(
    SessionRecord,
    session=st.just("s"),
    lifecycle=st.sampled_from(Lifecycle),
    version=st.sampled_from([0, 9, 10]),  # As text, 9 would be above 10.
    metadata=metadata,
)


@given(records, records)
def test_join_is_commutative(a: SessionRecord, b: SessionRecord) -> None:
    assert join(a, b) == join(b, a)


@given(records, records, records)
def test_join_is_associative(a: SessionRecord, b: SessionRecord, c: SessionRecord) -> None:
    assert join(join(a, b), c) == join(a, join(b, c))


@given(records, records)
def test_join_is_idempotent(a: SessionRecord, b: SessionRecord) -> None:
    assert join(a, a) == a
    assert join(join(a, b), b) == join(a, b)


@given(records, records)
def test_join_never_goes_back(a: SessionRecord, b: SessionRecord) -> None:
    joined = join(a, b)
    assert joined in (a, b)
    for one in (a, b):
        assert (joined.lifecycle, joined.version) >= (one.lifecycle, one.version)


def test_a_higher_lifecycle_wins_over_a_higher_version() -> None:
    left = record_of(lifecycle=Lifecycle.LEFT, version=1)
    assert join(left, record_of(lifecycle=Lifecycle.SERVING, version=99)) is left


@st.composite
def histories(draw: st.DrawFn) -> list[SessionRecord]:
    """What one session says of itself in its life, in order."""
    record = SessionRecord("s", Lifecycle.JOIN, 8, draw(metadata))
    history = [record]
    for lifecycle in sorted(draw(st.lists(st.sampled_from(Lifecycle), max_size=6))):
        record = record.advanced(lifecycle, draw(metadata))
        history.append(record)
    return history


@given(st.data())
def test_a_history_heard_in_any_order_any_number_of_times_ends_with_its_last_word(data: st.DataObject) -> None:
    history = data.draw(histories())
    repeated = history + data.draw(st.lists(st.sampled_from(history), max_size=8))
    heard = data.draw(st.permutations(repeated))
    assert reduce(join, heard) == history[-1]


@given(st.lists(records, min_size=1, max_size=6), st.data())
def test_even_with_two_writers_every_copy_ends_with_the_same_record(
    said: list[SessionRecord], data: st.DataObject
) -> None:
    assert reduce(join, data.draw(st.permutations(said))) == reduce(join, said)


def test_the_order_in_which_labels_were_written_decides_nothing() -> None:
    one, same = record_of(labels={"x": "1", "y": "1"}), record_of(labels={"y": "1", "x": "1"})
    other = record_of(labels={"x": "2"})
    assert join(one, other) == join(same, other)


def test_records_of_two_sessions_are_not_joined() -> None:
    with pytest.raises(ValueError, match="s1 and s2"):
        join(record_of("s1"), record_of("s2"))


@given(st.sampled_from(Lifecycle), st.sampled_from(Lifecycle))
def test_the_owner_raises_the_version_and_never_lowers_the_lifecycle(now: Lifecycle, then: Lifecycle) -> None:
    record = record_of(lifecycle=now, version=7)
    if then < now:
        with pytest.raises(ValueError, match=f"{now.name} cannot become {then.name}"):
            record.advanced(then)
    else:
        assert record.advanced(then) == replace(record, lifecycle=then, version=8)
        assert join(record, record.advanced(then)) == record.advanced(then)


@given(st.text(), st.text(), st.integers(0, 10**6), st.integers(0, 2**48 - 1))
def test_any_site_and_allocation_make_a_valid_session_id(site: str, allocation: str, count: int, random: int) -> None:
    session = new_session_id(site, allocation, count, f"{random:012x}")
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,200}", session)
    assert session.endswith(f"-{count}-{random:012x}")
    assert checked_session_id(session) == session


def test_short_plain_names_stay_readable_in_the_id_and_shortened_ones_stay_apart() -> None:
    assert new_session_id("alps", "slurm-4711", 2, "c0ffee") == "alps-slurm-4711-2-c0ffee"
    long_a, long_b = "x" * 60 + "a", "x" * 60 + "b"
    assert new_session_id(long_a, "j", 0, "r") != new_session_id(long_b, "j", 0, "r")
    assert new_session_id("a.b", "j", 0, "r") != new_session_id("a:b", "j", 0, "r")


@pytest.mark.parametrize("session", ["", "a.b", "a b", "a*", ">", "a\n", "ä", "x" * 201])
def test_what_could_not_stand_in_a_subject_is_no_session_id(session: str) -> None:
    with pytest.raises(ValueError, match="not a session id"):
        checked_session_id(session)
