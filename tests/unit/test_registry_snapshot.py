"""Snapshots, page by page: the registry's side of the conversation (the reader's: test_registry_copy.py)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.codec import decode, encode
from serai.contracts.registry import DigestAnswer, DigestRequest, SnapshotPage, SnapshotRequest
from serai.contracts.registry_digest import BUCKETS, bucket_of
from serai.contracts.session_record import SessionRecord
from serai.contracts.subjects import DIGEST, SNAPSHOT
from serai.registry import federation, service
from serai.registry.federation import PAGE_BYTES_MAX
from serai.registry.service import Registry
from serai.registry.settings import RegistrySettings
from serai.runtime.bus import Message
from unit.fakes import Clock, FakeBus, record_of

LARGE = PAGE_BYTES_MAX + 1
sizes = st.lists(st.sampled_from([0, PAGE_BYTES_MAX // 3, PAGE_BYTES_MAX // 2, PAGE_BYTES_MAX, LARGE]), max_size=7)


def records_of(sizes: list[int]) -> list[SessionRecord]:
    """Records with so many bytes in them, beside the rest, in the order of their session ids."""
    return [record_of(f"s{number}", labels={"x": "x" * size}) for number, size in enumerate(sizes)]


def registry_of(records: list[SessionRecord]) -> Registry:
    registry = Registry(RegistrySettings(), FakeBus())
    for record in records:
        registry.replica.merge(record, 0.0)
    return registry


def page(registry: Registry, after: str = "", site: str = "", buckets: list[int] | None = None) -> SnapshotPage:
    return registry.federation.page(SnapshotRequest(after, site, buckets or []))


def pages_of(registry: Registry) -> list[SnapshotPage]:
    pages = [page(registry)]
    while pages[-1].more:
        pages.append(page(registry, pages[-1].records[-1].session))
        assert len(pages) <= len(registry.replica)
    return pages


def bytes_of(records: list[SessionRecord]) -> int:
    return sum(len(encode(record)) + 24 for record in records)


@given(sizes)
def test_pages_hold_every_record_once_in_order_and_no_more_than_fits(sizes: list[int]) -> None:
    records = records_of(sizes)
    pages = pages_of(registry_of(list(reversed(records))))
    assert [record for one in pages for record in one.records] == records
    for one in pages:
        assert len(one.records) == 1 or bytes_of(one.records) <= PAGE_BYTES_MAX
        assert len(one.silent_s) == len(one.records)
    for one, following in pairwise(pages):
        assert bytes_of([*one.records, following.records[0]]) > PAGE_BYTES_MAX


def test_a_page_begins_behind_a_session_whether_or_not_it_is_still_known() -> None:
    registry = registry_of(records_of([0, 0, 0]))
    assert [record.session for record in page(registry, "s0").records] == ["s1", "s2"]
    registry.replica.forget(["s1"])
    assert [record.session for record in page(registry, "s1").records] == ["s2"]
    assert page(registry, "s2").records == []


def test_only_the_site_and_the_buckets_that_were_asked_for() -> None:
    records = [record_of(f"s{number}", site=("here", "there")[number % 2]) for number in range(40)]
    registry = registry_of(records)
    there = [record for record in registry.replica.records() if record.metadata.site == "there"]
    assert page(registry, site="there").records == there
    buckets = sorted({bucket_of(record.session) for record in there})[:5]
    found = page(registry, site="there", buckets=buckets).records
    assert found == [record for record in there if bucket_of(record.session) in buckets] != []
    assert page(registry, site="nowhere").records == []


def test_beside_each_record_stands_how_long_its_session_has_been_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.put_into(monkeypatch, federation, service)
    registry = registry_of([record_of("s1"), record_of("s2")])
    registry.replica.vouch("s1", clock.now_s)
    clock.advance(2.5)
    assert page(registry).silent_s == [2.5, None]
    assert page(registry).complete_since_s == 2.5


def test_requests_are_answered_and_bytes_that_are_none_are_not() -> None:
    bus = FakeBus()
    registry = Registry(RegistrySettings(), bus)
    for handler in (registry.on_snapshot, registry.on_digest, registry.on_opinion, registry.on_ended):
        handler(Message("registry.x.local", b"{", "inbox"))
    assert bus.take() == []
    registry.on_snapshot(Message(SNAPSHOT.of_site("local"), encode(SnapshotRequest()), "inbox"))
    registry.on_digest(Message(DIGEST.of_site("local"), encode(DigestRequest("local")), "inbox"))
    page_sent, digest_sent = bus.take()
    assert decode(SnapshotPage, page_sent.payload).records == []
    assert decode(DigestAnswer, digest_sent.payload) == DigestAnswer("local", [0] * BUCKETS)
