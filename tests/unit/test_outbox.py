"""What became ready in one turn of the loop leaves together: one message for each ingress, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from serai.contracts.codec import frame_bytes
from serai.contracts.inference import FrameKind
from serai.worker_agent.outbox import TOKEN_GAP_S, Outbox
from unit.fakes import FakeBus


@dataclass(slots=True)
class Queue:
    """A source that hands out what it was given."""

    reply: str
    stream: int
    frames: list[bytes] = field(default_factory=list)

    def add(self, *payloads: bytes) -> Queue:
        for payload in payloads:
            self.frames.append(frame_bytes(FrameKind.DATA, self.stream, 1, 0, payload))
        return self

    def take_frames(self) -> list[bytes]:
        taken, self.frames = self.frames, []
        return taken


def in_loop(test: Callable[[FakeBus, Outbox], Awaitable[None]], bus: FakeBus) -> None:
    async def run() -> None:
        await test(bus, Outbox(bus))

    asyncio.run(run())


def test_frames_of_one_turn_share_a_message_for_each_ingress_and_leave_in_the_next() -> None:
    async def test(bus: FakeBus, outbox: Outbox) -> None:
        a1, a2, b = Queue("_INBOX_a.stream.1", 1), Queue("_INBOX_a.stream.2", 2), Queue("_INBOX_b.stream.9", 9)
        for source, payload in ((a1, b"x"), (b, b"y"), (a2, b"z"), (a1, b"w")):
            outbox.ready(source.add(payload))
        assert bus.published == []
        await asyncio.sleep(0)
        sent = {message.subject: [(f.stream, f.payload) for f in message.frames] for message in bus.take()}
        assert sent == {"_INBOX_a.stream.0": [(1, b"x"), (1, b"w"), (2, b"z")], "_INBOX_b.stream.0": [(9, b"y")]}
        await asyncio.sleep(0)
        assert bus.published == []

    in_loop(test, FakeBus())


def test_a_source_that_is_ready_again_is_sent_again() -> None:
    async def test(bus: FakeBus, outbox: Outbox) -> None:
        source = Queue("i.stream.1", 1)
        for payload in (b"1", b"2"):
            outbox.ready(source.add(payload))
            await asyncio.sleep(0)
            assert [frame.payload for frame in bus.take_frames()] == [payload]

    in_loop(test, FakeBus())


def test_a_source_whose_frames_were_withdrawn_sends_nothing() -> None:
    async def test(bus: FakeBus, outbox: Outbox) -> None:
        source = Queue("i.stream.1", 1).add(b"1")
        outbox.ready(source)
        source.take_frames()
        await asyncio.sleep(0)
        assert bus.published == []

    in_loop(test, FakeBus())


def test_more_than_a_message_holds_is_split_between_frames() -> None:
    async def test(bus: FakeBus, outbox: Outbox) -> None:
        outbox.ready(Queue("i.stream.1", 1).add(*(b"%d" % number * 40 for number in range(9))))
        await asyncio.sleep(0)
        messages = bus.take()
        assert len(messages) > 1
        payloads = [frame.payload for message in messages for frame in message.frames]
        assert payloads == [b"%d" % number * 40 for number in range(9)]

    in_loop(test, FakeBus(message_bytes_max=150))


def test_without_a_connection_frames_are_dropped_and_counted_and_nothing_is_kept_for_later() -> None:
    async def test(bus: FakeBus, outbox: Outbox) -> None:
        bus.connected = False
        outbox.ready(Queue("i.stream.1", 1).add(b"1", b"2"))
        await asyncio.sleep(0)
        assert outbox.frames_dropped == 2
        bus.connected = True
        outbox.ready(Queue("i.stream.1", 1).add(b"3"))
        await asyncio.sleep(0)
        assert [frame.payload for frame in bus.take_frames()] == [b"3"]

    in_loop(test, FakeBus())


def test_a_busy_outbox_joins_tokens_until_somebody_is_in_a_hurry() -> None:
    async def test(bus: FakeBus, outbox: Outbox) -> None:
        outbox.ready(Queue("i.stream.1", 1).add(b"first"), patient=True)
        await asyncio.sleep(0)
        assert [frame.payload for frame in bus.take_frames()] == [b"first"], "on an idle agent a token leaves at once"
        outbox.ready(Queue("i.stream.1", 1).add(b"a"), patient=True)
        outbox.ready(Queue("i.stream.2", 2).add(b"b"), patient=True)
        await asyncio.sleep(0)
        assert bus.published == []
        outbox.ready(Queue("i.stream.3", 3).add(b"end"), at_once=True)
        await asyncio.sleep(0)
        assert [frame.payload for frame in bus.take_frames()] == [b"a", b"b", b"end"]
        outbox.ready(Queue("i.stream.1", 1).add(b"c"), patient=True)
        while not bus.published:
            await asyncio.sleep(TOKEN_GAP_S / 4)
        assert [frame.payload for frame in bus.take_frames()] == [b"c"]

    in_loop(test, FakeBus())
