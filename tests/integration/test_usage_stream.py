"""The stream of usage records and its consumer on a real nats-server: nothing unacknowledged is lost, a full stream
refuses, what is deleted is made again."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable

import pytest

from integration.system import System, wait_for
from serai.contracts.codec import decode, encode
from serai.contracts.subjects import USAGE, USAGE_CONSUMER, USAGE_SPENT, USAGE_STREAM
from serai.contracts.usage import Outcome, SpentAnswer, SpentRequest, UsageRecord
from serai.runtime.bus import BusError, NoResponders
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.runtime.nats_stream import NatsStream, PullConsumer, StreamLimits

SITE = "local"
LIMITS = StreamLimits(1024 * 1024, ack_wait_s=2.0)  # Longer than a busy machine needs for an acknowledgement.


def record(number: int, **fields: str) -> UsageRecord:
    known = {"started": "2026-11-30T12:00:00.000Z", "endpoint": "/v1/x", "project": "climate", "model": "m"} | fields
    return UsageRecord(id=f"r{number}", outcome=Outcome.COMPLETE, status=200, output_tokens=5, **known)


class Ends:
    """Both ends of the stream, with the permissions that they have."""

    def __init__(self, ingress: NatsBus, ledger: NatsBus) -> None:
        self.ingress = ingress
        self.ledger = ledger
        subject = USAGE.of_site(SITE)
        self.puts = NatsStream(ingress.request, USAGE_STREAM, subject)
        self.makes = NatsStream(ledger.request, USAGE_STREAM, subject)
        self.takes = PullConsumer(ledger, USAGE_STREAM, USAGE_CONSUMER, 8)

    async def next(self) -> list[bytes]:
        """What comes within some seconds, acknowledged."""
        messages = await self.takes.take()
        for message in messages:
            self.ledger.publish(message.reply, b"+ACK")
        return [message.data for message in messages]


def run(system: System, talk: Callable[[Ends], Awaitable[None]]) -> None:
    async def main() -> None:
        buses = [
            await NatsBus.connect(NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file(role)), role)
            for role in ("ingress", "ledger")
        ]
        ends = Ends(*buses)
        await ends.takes.start()
        await ends.ledger.barrier()
        try:
            async with asyncio.timeout(60):
                await talk(ends)
            for bus in buses:
                await bus.barrier()  # Nothing that was done was forbidden.
        finally:
            for bus in buses:
                await bus.aclose()

    asyncio.run(main())


def test_a_stream_that_is_missing_is_told_and_made_once(system: System) -> None:
    async def talk(ends: Ends) -> None:
        with pytest.raises(NoResponders, match="the ledger has not made it yet"):
            await ends.puts.publish(b"early", "0")
        with pytest.raises(NoResponders):
            await ends.takes.take()
        for _ in range(2):
            await ends.makes.make(USAGE_CONSUMER, LIMITS)
        await ends.puts.publish(b"one", "1")
        assert await ends.next() == [b"one"]

    run(system, talk)


def test_what_is_sent_twice_is_stored_once_and_what_is_not_acknowledged_comes_again(system: System) -> None:
    async def talk(ends: Ends) -> None:
        await ends.makes.make(USAGE_CONSUMER, LIMITS)
        for _ in range(2):
            await ends.puts.publish(b"one", "1")
        await ends.puts.publish(b"two", "2")
        taken = await ends.takes.take()
        while len(taken) < 2:
            taken += await ends.takes.take()
        assert sorted(message.data for message in taken) == [b"one", b"two"]
        again: list[bytes] = []
        while len(again) < 2:
            again += await ends.next()
        assert sorted(again) == [b"one", b"two"]
        assert await ends.next() == []

    run(system, talk)


def test_a_full_stream_refuses_and_has_room_again_when_something_was_taken(system: System) -> None:
    async def talk(ends: Ends) -> None:
        await ends.makes.make(USAGE_CONSUMER, LIMITS)
        sent = 5
        for number in range(sent):
            await ends.puts.publish(bytes([number]) * 200_000, str(number))
        with pytest.raises(BusError, match="maximum bytes exceeded"):
            await ends.puts.publish(b"x" * 200_000, "x")
        taken = 0
        while taken < sent:
            taken += len(await ends.next())
        await ends.puts.publish(b"room", "room")
        assert await ends.next() == [b"room"]

    run(system, talk)


def test_a_stream_of_another_site_is_not_taken_for_ours(system: System) -> None:
    async def talk(ends: Ends) -> None:
        await ends.makes.make(USAGE_CONSUMER, LIMITS)
        other = NatsStream(ends.ledger.request, USAGE_STREAM, USAGE.of_site("other"))
        with pytest.raises(BusError, match=r"domain of its own"):
            await other.make(USAGE_CONSUMER, LIMITS)

    run(system, talk)


def test_the_ledger_counts_each_record_once_survives_what_is_none_and_says_what_was_spent(system: System) -> None:
    database = system.folder / "usage.sqlite"
    ledger = system.service("ledger", "--ledger", f"sqlite:///{database}")
    wait_for(lambda: "ledger.ready" in ledger.log, "ledger ready")

    async def talk(ends: Ends) -> None:
        lines = [encode(record(number)) for number in (1, 2, 2)]
        await ends.puts.publish(b"\n".join([*lines, b"{no record", encode({"id": 7})]), "a")
        await ends.puts.publish(b"\n".join([*lines, encode(record(3, model="n"))]), "b")
        asked = encode(SpentRequest(["project:climate"], "2026-11-30T00:00:00Z"))
        answer = SpentAnswer()
        while sum(one.requests for one in answer.spent) < 3:
            answer = decode(SpentAnswer, (await ends.ingress.request(USAGE_SPENT.of_site(SITE), asked, 10)).data)
            assert not answer.problem
        assert [(one.model, one.requests, one.output_tokens) for one in answer.spent] == [("m", 2, 10), ("n", 1, 5)]
        for asked in (encode(SpentRequest(["house:x"], "")), b"[]"):
            answer = decode(SpentAnswer, (await ends.ingress.request(USAGE_SPENT.of_site(SITE), asked, 10)).data)
            assert answer.problem

    run(system, talk)
    assert "ledger.malformed" in ledger.log
    assert ledger.terminate() == 0
    connection = sqlite3.connect(database)
    assert connection.execute("SELECT count(*) FROM usage_records").fetchone() == (3,)
    connection.close()


def test_a_ledger_whose_database_cannot_be_used_says_so_and_ends(system: System) -> None:
    (system.folder / "file").write_text("")
    ledger = system.service("ledger", "--ledger", f"sqlite:///{system.folder / 'file' / 'usage.sqlite'}")
    assert ledger.popen.wait(30) == 2
    assert "is --ledger right?" in ledger.log
    assert len([line for line in ledger.log.splitlines() if not line.startswith("{")]) == 1, json.dumps(ledger.log)
