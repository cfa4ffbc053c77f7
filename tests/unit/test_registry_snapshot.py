"""Snapshots, page by page: the registry's side and the ingress's side of the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.codec import decode, encode
from serai.contracts.registry import SnapshotPage, SnapshotRequest
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.subjects import SESSION, SNAPSHOT
from serai.ingress.registry_copy import RegistryCopy
from serai.registry.service import PAGE_BYTES_MAX, Registry
from serai.registry.settings import RegistrySettings
from serai.runtime.bus import Message, RequestTimeout
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


# -- the copy --------------------------------------------------------------------------------------------------------


def copy_of(answer: Callable[[str], bytes] | None) -> RegistryCopy:
    """A copy whose registry answers a request for the page behind a session with `answer`, or is not there."""
    bus = FakeBus()
    if answer is not None:
        bus.answers[SNAPSHOT.of_site("local")] = lambda data: answer(decode(SnapshotRequest, data).after)
    return RegistryCopy(bus, "local")


@given(sizes)
def test_a_copy_has_every_record_after_one_repair(sizes: list[int]) -> None:
    registry = registry_of(records_of(sizes))
    copy = copy_of(lambda after: encode(registry.page(after)))
    asyncio.run(copy.repair())
    assert copy.replica.records() == registry.replica.records()
    assert copy.synced


def test_a_repair_takes_nothing_back() -> None:
    registry = registry_of([record_of("s1"), record_of("s2", version=5)])
    copy = copy_of(lambda after: encode(registry.page(after)))
    left, mine = record_of("s1", Lifecycle.LEFT), record_of("s3")
    for record in (left, record_of("s2"), mine):
        copy.replica.merge(record, 0.0)
    asyncio.run(copy.repair())
    assert copy.replica.records() == [left, record_of("s2", version=5), mine]


def silent(after: str) -> bytes:
    raise RequestTimeout("no answer in time")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        silent,
        lambda after: b"",
        lambda after: b'{"records": "none"}',
        lambda after: encode(SnapshotPage([record_of("s1"), record_of("s2")]))[:-20],
    ],
    ids=["nobody there", "silent", "empty", "no list", "cut short"],
)
def test_without_a_page_that_can_be_read_the_copy_stays_as_it_was(answer: Callable[[str], bytes] | None) -> None:
    copy = copy_of(answer)
    copy.replica.merge(record_of(), 0.0)
    asyncio.run(copy.repair())
    assert copy.replica.records() == [record_of()]
    assert not copy.synced


def test_a_snapshot_that_breaks_off_is_no_whole_one_and_the_next_repair_begins_anew() -> None:
    registry = registry_of(records_of([LARGE, LARGE, LARGE]))
    asked: list[str] = []

    def breaks_off_once(after: str) -> bytes:
        asked.append(after)
        return b"{" if len(asked) == 2 else encode(registry.page(after))

    copy = copy_of(breaks_off_once)
    asyncio.run(copy.repair())
    assert not copy.synced
    asyncio.run(copy.repair())
    assert copy.synced
    assert asked == ["", "s0", "", "s0", "s1"]
    assert copy.replica.records() == registry.replica.records()


def test_an_empty_page_ends_a_snapshot_whatever_it_says_of_more() -> None:
    copy = copy_of(lambda after: encode(SnapshotPage([], more=True)))
    asyncio.run(copy.repair())
    assert copy.synced


def test_a_record_is_heard_on_its_own_subject_only() -> None:
    copy = copy_of(None)
    copy.on_session(Message(SESSION.of("s2"), encode(record_of("s1"))))
    copy.on_session(Message(SESSION.of("s1"), b"{"))
    assert copy.replica.records() == []
    copy.on_session(Message(SESSION.of("s1"), encode(record_of("s1"))))
    assert copy.replica.records() == [record_of("s1")]
