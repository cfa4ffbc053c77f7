"""Snapshots, page by page: the registry's side of the conversation (the reader's: test_registry_copy.py)."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.codec import decode, encode
from serai.contracts.registry import SnapshotPage, SnapshotRequest
from serai.contracts.session_record import SessionRecord
from serai.contracts.subjects import SNAPSHOT
from serai.registry.service import PAGE_BYTES_MAX, Registry
from serai.registry.settings import RegistrySettings
from serai.runtime.bus import Message
from unit.fakes import FakeBus, record_of

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


def pages_of(registry: Registry) -> list[SnapshotPage]:
    pages = [registry.page("")]
    while pages[-1].more:
        pages.append(registry.page(pages[-1].records[-1].session))
        assert len(pages) <= len(registry.replica)
    return pages


def bytes_of(records: list[SessionRecord]) -> int:
    return sum(len(encode(record)) for record in records)


@given(sizes)
def test_pages_hold_every_record_once_in_order_and_no_more_than_fits(sizes: list[int]) -> None:
    records = records_of(sizes)
    pages = pages_of(registry_of(list(reversed(records))))
    assert [record for page in pages for record in page.records] == records
    for page in pages:
        assert len(page.records) == 1 or bytes_of(page.records) <= PAGE_BYTES_MAX
    for page, following in pairwise(pages):
        assert bytes_of([*page.records, following.records[0]]) > PAGE_BYTES_MAX


def test_a_page_begins_behind_a_session_whether_or_not_it_is_still_known() -> None:
    registry = registry_of(records_of([0, 0, 0]))
    assert [record.session for record in registry.page("s0").records] == ["s1", "s2"]
    registry.replica.forget(["s1"])
    assert [record.session for record in registry.page("s1").records] == ["s2"]
    assert registry.page("s2") == SnapshotPage([])


def test_a_request_for_a_page_is_answered_and_bytes_that_are_none_are_not() -> None:
    bus = FakeBus()
    registry = Registry(RegistrySettings(), bus)
    registry.on_snapshot(Message(SNAPSHOT.of_site("local"), b"{", "inbox"))
    assert bus.take() == []
    registry.on_snapshot(Message(SNAPSHOT.of_site("local"), encode(SnapshotRequest()), "inbox"))
    (answer,) = bus.take()
    assert (answer.subject, decode(SnapshotPage, answer.payload)) == ("inbox", SnapshotPage([]))
