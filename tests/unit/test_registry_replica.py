"""A copy of the registry: joined records, and who is alive by this observer's own ears and clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.session_record import Draining, Lifecycle, SessionRecord, join
from serai.contracts.status import SessionStatus
from serai.runtime.registry_replica import SILENCE_INTERVALS_MAX, RegistryReplica
from unit.fakes import record_of

MODELS = ("m", "n")


def status_of(session: str = "s1", sequence: int = 1, **said: Any) -> SessionStatus:
    filled: dict[str, Any] = {"lifecycle": Lifecycle.SERVING, "version": 1, "interval_s": 1.0} | said
    return SessionStatus(session=session, sequence=sequence, **filled)


@pytest.fixture
def replica() -> RegistryReplica:
    """Knows `s1`, which serves `m` and was heard at 100."""
    replica = RegistryReplica()
    replica.merge(record_of(), 100.0, heard=True)
    return replica


def routable(replica: RegistryReplica, now: float, model: str = "m") -> list[str]:
    return [record.session for record in replica.routable(model, now)]


def test_a_session_is_routed_to_until_it_is_silent_for_some_of_its_own_intervals(replica: RegistryReplica) -> None:
    replica.hear(status_of(interval_s=2.0), 100.0)
    limit = 100.0 + SILENCE_INTERVALS_MAX * 2.0
    assert routable(replica, limit) == ["s1"]
    assert replica.suspected("s1", limit + 0.01)
    assert routable(replica, limit + 0.1) == []
    replica.hear(status_of(sequence=2, interval_s=2.0), limit + 1)
    assert routable(replica, limit + 1) == ["s1"]


def test_silence_changes_no_record(replica: RegistryReplica) -> None:
    before = replica.get("s1")
    assert replica.suspected("s1", 10_000.0)
    assert replica.get("s1") is before
    assert replica.silent_s("s1", 10_000.0) == 9_900.0


def test_a_record_from_a_store_is_no_proof_of_life() -> None:
    replica = RegistryReplica()
    replica.merge(record_of(), 100.0)
    assert routable(replica, 100.0) == []
    assert replica.silent_s("s1", 107.0) == 7.0
    assert replica.knows_model("m")
    replica.hear(status_of(), 101.0)
    assert routable(replica, 101.0) == ["s1"]
    assert replica.silent_s("s1", 107.0) == 6.0


def test_an_unreachable_session_is_avoided_until_its_next_status(replica: RegistryReplica) -> None:
    replica.hear(status_of(sequence=5), 100.0)
    replica.unreachable("s1")
    assert routable(replica, 100.0) == []
    replica.hear(status_of(sequence=5), 100.5)
    assert routable(replica, 100.5) == []  # A repeated status may be older than the bad news.
    replica.hear(status_of(sequence=6), 101.0)
    assert routable(replica, 101.0) == ["s1"]
    replica.unreachable("never heard of")


def test_an_old_status_is_no_sign_of_life_and_changes_nothing(replica: RegistryReplica) -> None:
    replica.hear(status_of(sequence=9, in_flight=3), 100.0)
    assert not replica.hear(status_of(sequence=8, in_flight=1, version=99), 110.0)
    assert replica.silent_s("s1", 110.0) == 10.0
    said = replica.status("s1")
    assert said is not None
    assert said.in_flight == 3


def test_a_status_tells_when_a_record_was_missed(replica: RegistryReplica) -> None:
    assert not replica.hear(status_of(sequence=1), 100.0)
    assert replica.hear(status_of(sequence=2, version=2), 100.0)
    assert replica.hear(status_of(sequence=3, lifecycle=Lifecycle.DOWN, version=0), 100.0)
    assert not replica.hear(status_of(sequence=4, lifecycle=Lifecycle.JOIN, version=9), 100.0)
    assert replica.hear(status_of("unknown"), 100.0)
    assert replica.status("unknown") is None
    assert replica.suspected("unknown", 100.0)


def test_a_draining_session_and_one_that_is_not_serving_get_no_requests(replica: RegistryReplica) -> None:
    replica.merge(record_of(version=2, draining=Draining("stopping", 5.0)), 100.0, heard=True)
    assert routable(replica, 100.0) == []
    replica.merge(record_of(version=3), 100.0, heard=True)
    assert routable(replica, 100.0) == ["s1"]
    replica.merge(record_of("s2", Lifecycle.JOIN), 100.0, heard=True)
    assert routable(replica, 100.0) == ["s1"]
    replica.merge(record_of(lifecycle=Lifecycle.DOWN, version=4), 100.0, heard=True)
    assert routable(replica, 100.0) == []


def test_a_session_that_changes_its_model_is_found_under_the_new_name_only(replica: RegistryReplica) -> None:
    replica.merge(record_of(version=2, model="n"), 100.0, heard=True)
    assert (routable(replica, 100.0, "m"), routable(replica, 100.0, "n")) == ([], ["s1"])
    assert replica.models(100.0) == ["n"]
    assert not replica.knows_model("m")


def test_merging_what_is_known_changes_nothing(replica: RegistryReplica) -> None:
    assert not replica.merge(record_of(), 100.0)
    assert not replica.merge(record_of(lifecycle=Lifecycle.JOIN, version=9), 100.0)
    assert replica.merge(record_of(version=2), 100.0)


def test_what_left_never_comes_back(replica: RegistryReplica) -> None:
    replica.merge(record_of(lifecycle=Lifecycle.LEFT, version=2), 100.0)
    replica.merge(record_of(version=50), 101.0, heard=True)
    assert routable(replica, 101.0) == []
    assert not replica.knows_model("m")


def test_a_forgotten_session_leaves_no_trace(replica: RegistryReplica) -> None:
    replica.hear(status_of(), 100.0)
    replica.forget(["s1", "never heard of"])
    assert len(replica) == 0
    assert (replica.get("s1"), replica.status("s1"), replica.records()) == (None, None, [])
    assert (routable(replica, 100.0), replica.models(100.0), replica.knows_model("m")) == ([], [], False)
    assert replica.hear(status_of(sequence=2), 100.0)


records = st.builds(
    record_of,
    st.sampled_from(["s1", "s2", "s3"]),
    st.sampled_from(Lifecycle),
    st.integers(0, 3),
    model=st.sampled_from(MODELS),
    draining=st.none() | st.just(Draining("stopping", 1.0)),
)
steps = st.one_of(
    st.tuples(st.just("merge"), records, st.booleans()),
    st.tuples(st.just("hear"), st.sampled_from(["s1", "s2", "s3"]), st.integers(0, 5)),
    st.tuples(st.just("unreachable"), st.sampled_from(["s1", "s2", "s3"])),
    st.tuples(st.just("forget"), st.sampled_from(["s1", "s2", "s3"])),
)


@given(st.lists(steps, max_size=25))
def test_what_is_routable_agrees_with_the_records_whatever_happened(history: list[tuple[Any, ...]]) -> None:
    replica, expected = RegistryReplica(), dict[str, SessionRecord]()
    for now, step in enumerate(history):
        match step:
            case ("merge", record, heard):
                replica.merge(record, now, heard=heard)
                known = expected.get(record.session)
                expected[record.session] = record if known is None else join(known, record)
            case ("hear", session, sequence):
                replica.hear(status_of(session, sequence), now)
            case ("unreachable", session):
                replica.unreachable(session)
            case ("forget", session):
                replica.forget([session])
                expected.pop(session, None)
        assert {record.session: record for record in replica.records()} == expected
        for model in MODELS:
            of_model = [record for _, record in sorted(expected.items()) if record.metadata.model == model]
            serving = [
                record
                for record in of_model
                if record.lifecycle is Lifecycle.SERVING
                and record.metadata.draining is None
                and not replica.suspected(record.session, now)
            ]
            assert replica.routable(model, now) == serving
            assert (model in replica.models(now)) == bool(serving)
            assert replica.knows_model(model) == any(record.lifecycle < Lifecycle.DOWN for record in of_model)


@given(st.lists(records, max_size=10), st.data())
def test_copies_that_merged_the_same_records_are_equal(merged: list[SessionRecord], data: st.DataObject) -> None:
    one, other = RegistryReplica(), RegistryReplica()
    for record in merged:
        one.merge(record, 0.0)
    for record in data.draw(st.permutations(merged)):
        other.merge(record, 0.0)
    assert one.records() == other.records()


def test_a_silent_session_is_asked_after_once_and_its_answer_counts_as_a_word(replica: RegistryReplica) -> None:
    assert replica.doubtful(102.0) == []
    assert replica.doubtful(102.5) == ["s1"]
    assert replica.doubtful(102.6) == []
    replica.vouch("s1", 102.7)
    assert not replica.suspected("s1", 105.0)
    assert replica.doubtful(105.0) == ["s1"]
    assert replica.suspected("s1", 106.0)


def test_a_peer_s_word_is_as_old_as_the_peer_says(replica: RegistryReplica) -> None:
    replica.vouch("s1", 110.0, silent_s=3.0)
    assert replica.heard_ago_s("s1", 110.0) == 3.0
    assert not replica.suspected("s1", 110.0)
    replica.vouch("s1", 111.0, silent_s=60.0)
    assert replica.heard_ago_s("s1", 111.0) == 4.0, "an older word takes nothing back"


def test_the_bus_s_word_that_nobody_is_there_outweighs_a_peer_s(replica: RegistryReplica) -> None:
    replica.unreachable("s1")
    replica.vouch("s1", 100.5)
    assert replica.why_not_routable("s1", 100.5) == (
        "its connection to NATS has closed; its next sign of life lifts that"
    )
    replica.hear(status_of(), 101.0)
    assert routable(replica, 101.0) == ["s1"]


def test_a_stalled_engine_gets_no_requests_until_it_moves_again(replica: RegistryReplica) -> None:
    replica.hear(status_of(stalled_s=2.6), 100.5)
    assert routable(replica, 100.5) == []
    assert replica.why_not_routable("s1", 100.5) == "its engine has made no progress for 2.6 s"
    replica.hear(status_of(sequence=2), 101.0)
    assert routable(replica, 101.0) == ["s1"]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (record_of("s2", Lifecycle.JOIN), "its lifecycle is JOIN"),
        (record_of("s2", Lifecycle.LEFT), "its lifecycle is LEFT"),
        (record_of("s2"), "its record is known, but no sign of life has come yet"),
    ],
)
def test_why_a_session_is_not_routed_to(replica: RegistryReplica, record: SessionRecord, why: str) -> None:
    replica.merge(record, 100.0)
    assert replica.why_not_routable("s2", 100.0) == why
    assert replica.why_not_routable("s3", 100.0) == "not known here"
    assert replica.why_not_routable("s1", 100.0) is None
