"""Metrics of several workers as one: sums, whose gauges, and counters that never fall."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from serai.ingress import shared_metrics
from serai.ingress.shared_metrics import SharedMetrics, combined, rendered, snapshot


class Counting:
    """What one worker counts."""

    def __init__(self, requests: float, open_now: float, seconds: float) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("requests", "r", ["model"], registry=self.registry)
        self.requests.labels("m").inc(requests)
        Gauge("open", "o", registry=self.registry).set(open_now)
        Histogram("took", "t", buckets=(1, 2), registry=self.registry).observe(seconds)


def values(text: bytes) -> dict[str, float]:
    """Samples by name and labels."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_counters_and_histograms_are_added_up_and_gauges_say_whose_they_are() -> None:
    parts = {"0": snapshot(Counting(3, 1, 0.5).registry), "1": snapshot(Counting(4, 2, 1.5).registry)}
    assert values(rendered(combined(parts))) == {
        "requests_total[('model', 'm')]": 7,
        "open[('worker', '0')]": 1,
        "open[('worker', '1')]": 2,
        "took_bucket[('le', '1.0')]": 1,
        "took_bucket[('le', '2.0')]": 2,
        "took_bucket[('le', '+Inf')]": 2,
        "took_sum[]": 2.0,
        "took_count[]": 2,
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's: its names are too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="serai-test-") as made:
        yield Path(made)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counting]:
    """Workers of one process, each with counters of its own: by the name of the one that is looking."""
    workers = {f"{slot}.{slot + 1}": Counting(10, slot, 0.5) for slot in range(3)}

    def look(own: SharedMetrics) -> list[shared_metrics.Family]:
        return snapshot(workers[own._own].registry)

    monkeypatch.setattr(SharedMetrics, "_own_counts", look)
    return workers


async def requests_seen(by: SharedMetrics) -> float:
    return values(await by.scraped())["requests_total[('model', 'm')]"]


def test_counters_do_not_fall_when_workers_end_or_are_killed(folder: Path, counting: dict[str, Counting]) -> None:
    shares = [SharedMetrics(folder, slot, slot + 1, os.getppid()) for slot in range(3)]

    async def main() -> None:
        first, second, third = shares
        async with AsyncExitStack() as last, AsyncExitStack() as soon:
            await last.enter_async_context(first.answering())
            await soon.enter_async_context(second.answering())
            await last.enter_async_context(third.answering())
            assert await requests_seen(first) == 30
            assert await requests_seen(third) == 30
            counting["1.2"].requests.labels("m").inc(5)
            await soon.aclose()  # It ends in order: what it counted last is not lost.
            assert await requests_seen(first) == 35
            assert await requests_seen(third) == 35
            # Killed: its socket is there, and nobody listens at it.
            (folder / "2.3.sock").unlink()
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(folder / "2.3.sock"))
            assert await requests_seen(first) == 35
            assert await requests_seen(first) == 35
        assert sorted(path.name for path in folder.iterdir() if path.suffix == ".sock") == []

    asyncio.run(main())


def test_one_that_is_too_slow_counts_with_what_it_told_last(
    folder: Path, counting: dict[str, Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_metrics, "ANSWER_TIMEOUT_S", 0.05)
    first, second = (SharedMetrics(folder, slot, slot + 1, os.getppid()) for slot in range(2))

    async def main() -> None:
        async with first.answering(), second.answering():
            assert await requests_seen(first) == 20

            async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read()
                writer.close()

            (folder / "1.2.sock").unlink()
            async with await asyncio.start_unix_server(hang, folder / "1.2.sock"):
                assert await requests_seen(first) == 20
                assert "1.2.counts" in {path.name for path in folder.iterdir()}

    asyncio.run(main())


@pytest.mark.parametrize("is_told", [False, True])
def test_the_last_worker_of_a_parent_that_was_killed_leaves_nothing(
    folder: Path, counting: dict[str, Counting], is_told: bool
) -> None:
    place = folder / "private"
    place.mkdir()

    async def main() -> None:
        # Its socket closes before it ceases to be the parent.
        parent = os.getppid() if is_told else os.getppid() + 1
        first, second = SharedMetrics(place, 0, 1, parent), SharedMetrics(place, 1, 2, parent)
        first.is_orphaned = second.is_orphaned = is_told
        async with first.answering():
            async with second.answering():
                pass
            assert place.exists()
        assert not place.exists()

    asyncio.run(main())


def test_a_worker_that_is_being_replaced_is_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Counting(1, 1, 1).registry
    monkeypatch.setattr(SharedMetrics, "_own_counts", lambda self: snapshot(registry))
    old, new = SharedMetrics(folder, 0, 2, os.getppid()), SharedMetrics(folder, 0, 10, os.getppid())

    async def main() -> None:
        async with old.answering(), new.answering():
            seen = values(await old.scraped())
        assert {name for name in seen if name.startswith("open")} == {
            "open[('worker', '0')]",
            "open[('worker', '0-2')]",
        }

    asyncio.run(main())
