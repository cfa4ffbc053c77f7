"""Records reach JetStream in messages, again and again until it has them; nothing of that holds up a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from serai.contracts.codec import decode_lines
from serai.contracts.usage import Outcome, UsageRecord
from serai.ingress import usage_sender
from serai.ingress.usage_sender import UsageSender
from serai.ingress.usage_spool import MemorySpool
from serai.runtime.bus import BusError, NoResponders


def record(number: int) -> UsageRecord:
    return UsageRecord(id=f"r{number}", started="", outcome=Outcome.COMPLETE, status=200, endpoint="/v1/x")


class JetStream:
    """Stores what it is sent, except when `problems` says otherwise: each entry is for one message."""

    def __init__(self) -> None:
        self.problems: list[BusError | None] = []
        self.stored: list[tuple[str, list[str]]] = []
        self.tries = 0
        self.came = asyncio.Event()

    async def publish(self, payload: bytes, message_id: str) -> None:
        self.tries += 1
        problem = self.problems.pop(0) if self.problems else None
        if problem is not None:
            raise problem
        records, malformed = decode_lines(UsageRecord, payload)
        assert not malformed
        self.stored.append((message_id, [one.id for one in records]))
        self.came.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_sender, "GATHER_S", 0.0)
    monkeypatch.setattr(usage_sender, "BACK_OFF_S", 0.001)


def run(talk: Callable[[UsageSender, MemorySpool, JetStream], Awaitable[None]], bytes_max: int = 100_000) -> None:
    async def main() -> None:
        spool, stream = MemorySpool(bytes_max), JetStream()
        async with asyncio.timeout(20):
            await talk(UsageSender(spool, stream.publish), spool, stream)

    asyncio.run(main())


def test_records_that_come_together_go_together_and_leave_when_they_are_stored() -> None:
    async def talk(sender: UsageSender, spool: MemorySpool, stream: JetStream) -> None:
        for number in range(3):
            sender.add(record(number))
        running = asyncio.create_task(sender.run())
        await stream.came.wait()
        running.cancel()
        assert [ids for _, ids in stream.stored] == [["r0", "r1", "r2"]]
        assert spool.pending_bytes == 0

    run(talk)


def test_what_is_refused_is_sent_again_under_the_same_id() -> None:
    async def talk(sender: UsageSender, spool: MemorySpool, stream: JetStream) -> None:
        stream.problems = [NoResponders("no stream"), BusError("full"), None]
        sender.add(record(1))
        running = asyncio.create_task(sender.run())
        await stream.came.wait()
        running.cancel()
        assert stream.tries == 3
        assert [ids for _, ids in stream.stored] == [["r1"]]

    run(talk)


def test_the_id_of_a_message_tells_of_its_content() -> None:
    """So that the same is stored once, and other records never pass for a duplicate."""

    async def talk(sender: UsageSender, spool: MemorySpool, stream: JetStream) -> None:
        for number in (1, 2, 1):
            sender.add(record(number))
            await sender.flush(1.0)
        first, second, again = [message_id for message_id, _ in stream.stored]
        assert first == again != second

    run(talk)


def test_records_for_which_there_is_no_room_are_counted_and_hold_up_nobody() -> None:
    async def talk(sender: UsageSender, spool: MemorySpool, stream: JetStream) -> None:
        dropped = usage_sender.RECORDS.of("dropped").value
        for number in range(40):
            sender.add(record(number))
        assert usage_sender.RECORDS.of("dropped").value > dropped
        assert spool.pending_bytes <= 2_000

    run(talk, bytes_max=2_000)


def test_at_the_end_what_cannot_be_sent_stays() -> None:
    async def talk(sender: UsageSender, spool: MemorySpool, stream: JetStream) -> None:
        stream.problems = [BusError("away")]
        sender.add(record(1))
        await sender.flush(1.0)
        assert spool.pending_bytes > 0
        await sender.flush(1.0)
        assert spool.pending_bytes == 0

    run(talk)


def test_a_record_that_no_message_can_hold_is_dropped_and_the_others_go() -> None:
    async def talk(sender: UsageSender, spool: MemorySpool, stream: JetStream) -> None:
        sender.add(
            UsageRecord(
                id="big", started="", outcome=Outcome.FAILED, status=502, endpoint="/v1/x", error_code="x" * 300_000
            )
        )
        sender.add(record(1))
        await sender.flush(1.0)
        assert [names for _, names in stream.stored] == [["r1"]]

    run(talk, bytes_max=1_000_000)
