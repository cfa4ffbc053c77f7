"""Digests: equal for equal knowledge, in whatever order it came; different in exactly the buckets that differ."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.registry_digest import BUCKETS, Digest, bucket_of
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.runtime.registry_replica import RegistryReplica
from unit.fakes import record_of

records = st.builds(
    lambda number, lifecycle, version: record_of(f"s{number}", lifecycle, version=version),
    st.integers(0, 30),
    st.sampled_from(Lifecycle),
    st.integers(0, 5),
)


def copy_of(heard: list[SessionRecord]) -> RegistryReplica:
    replica = RegistryReplica()
    for record in heard:
        replica.merge(record, 0.0)
    return replica


@given(st.lists(records, max_size=60), st.randoms(use_true_random=False))
def test_copies_that_heard_the_same_have_the_same_digest(heard: list[SessionRecord], order: object) -> None:
    other = [*heard, *heard]
    order.shuffle(other)  # type: ignore[attr-defined]
    ours, theirs = copy_of(heard), copy_of(other)
    assert ours.digest("local").buckets == theirs.digest("local").buckets
    assert ours.digest("local").root == Digest(ours.records_of_site("local")).root


@given(st.lists(records, min_size=1, max_size=40), st.data())
def test_a_difference_shows_in_its_bucket_and_no_other(heard: list[SessionRecord], data: st.DataObject) -> None:
    ours, theirs = copy_of(heard), copy_of(heard)
    record = data.draw(st.sampled_from(ours.records()))
    theirs.merge(replace(record, version=record.version + 1), 1.0)
    expected = [] if record.lifecycle is Lifecycle.LEFT else [bucket_of(record.session)]
    assert ours.digest("local").differing(theirs.digest("local").buckets) == expected
    assert (ours.digest("local").root == theirs.digest("local").root) == (expected == [])


def test_who_left_is_in_no_digest_and_forgetting_changes_none() -> None:
    replica = copy_of([record_of("s1"), record_of("s2")])
    before = replica.digest("local").root
    replica.merge(record_of("s3", Lifecycle.LEFT), 1.0)
    assert replica.digest("local").root == before
    replica.forget(["s3"])
    assert replica.digest("local").root == before
    replica.forget(["s1", "s2"])
    assert replica.digest("local").root == 0
    assert replica.digest("local").buckets == [0] * BUCKETS


def test_buckets_are_the_same_everywhere() -> None:
    """Other copies, of other versions, must put a session into the same bucket."""
    assert [bucket_of(session) for session in ("", "s1", "alps-slurm-4711-0-c0ffee123456")] == [46, 186, 148]
