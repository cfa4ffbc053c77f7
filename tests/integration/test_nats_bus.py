"""The bus against a real server: what nats-py and NATS do at their edges, and what we make of it."""

from __future__ import annotations

import asyncio
import signal

import pytest

from integration.system import System, wait_for
from serai.contracts.subjects import SESSIONS_BUCKET, SNAPSHOT
from serai.runtime.bus import BusDisconnected, Message, MessageTooLarge, NoResponders
from serai.runtime.nats_bus import NatsAddress, NatsBus


def address(system: System, role: str) -> NatsAddress:
    return NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file(role))


def test_after_a_barrier_not_one_message_is_lost(system: System) -> None:
    """H58: sixty times, since one flush alone loses a message now and then."""

    async def main() -> None:
        agent = await NatsBus.connect(address(system, "agent"), "agent")
        ingress = await NatsBus.connect(address(system, "ingress"), "ingress")
        for number in range(60):
            came = asyncio.Event()
            subscription = await agent.subscribe(f"inference.s{number}", lambda message, came=came: came.set())
            await agent.barrier()
            ingress.publish(f"inference.s{number}", b"x")
            async with asyncio.timeout(2):
                await came.wait()
            await subscription.unsubscribe()
        await agent.aclose()
        await ingress.aclose()

    asyncio.run(main())


def test_large_messages_pass_and_too_large_ones_are_refused_here(system: System) -> None:
    """H64: the server would close the connection for good."""

    async def main() -> None:
        agent = await NatsBus.connect(address(system, "agent"), "agent")
        ingress = await NatsBus.connect(address(system, "ingress"), "ingress")
        received: asyncio.Queue[Message] = asyncio.Queue()
        await agent.subscribe("inference.s", received.put_nowait)
        await agent.barrier()
        largest = b"x" * ingress.message_bytes_max
        assert len(largest) == int(8 * 1024 * 1024 * 0.9)
        with pytest.raises(MessageTooLarge):
            ingress.publish("inference.s", largest + b"x")
        for payload in (largest, b"", b"after"):
            ingress.publish("inference.s", payload, f"{ingress.inbox_prefix}.stream.1")
        async with asyncio.timeout(5):
            assert [(await received.get()).data for _ in range(3)] == [largest, b"", b"after"]
        await agent.aclose()
        await ingress.aclose()

    asyncio.run(main())


def test_nobody_there_is_told_at_once_for_requests_and_for_publishes_with_a_reply(system: System) -> None:
    async def main() -> None:
        ingress = await NatsBus.connect(address(system, "ingress"), "ingress")
        received: asyncio.Queue[Message] = asyncio.Queue()
        await ingress.subscribe(f"{ingress.inbox_prefix}.stream.*", received.put_nowait)
        await ingress.barrier()
        with pytest.raises(NoResponders):
            await ingress.request(SNAPSHOT.of_site("local"), b"{}", 2)
        ingress.publish("inference.nobody", b"x", f"{ingress.inbox_prefix}.stream.7")
        async with asyncio.timeout(2):
            message = await received.get()
        assert message.no_responders
        assert message.subject.endswith(".stream.7")
        await ingress.aclose()

    asyncio.run(main())


def test_a_handler_that_fails_ends_neither_its_subscription_nor_the_connection(system: System) -> None:
    async def main() -> None:
        agent = await NatsBus.connect(address(system, "agent"), "agent")
        ingress = await NatsBus.connect(address(system, "ingress"), "ingress")
        seen: asyncio.Queue[bytes] = asyncio.Queue()

        def handler(message: Message) -> None:
            seen.put_nowait(message.data)
            if message.data == b"bad":
                raise ValueError("a bug in a handler")

        await agent.subscribe("inference.s", handler)
        await agent.barrier()
        for payload in (b"bad", b"good"):
            ingress.publish("inference.s", payload)
        async with asyncio.timeout(2):
            assert [await seen.get(), await seen.get()] == [b"bad", b"good"]
        await agent.aclose()
        await ingress.aclose()

    asyncio.run(main())


def test_nothing_is_kept_while_disconnected_and_subscriptions_come_back(system: System) -> None:
    async def main() -> None:
        agent = await NatsBus.connect(address(system, "agent"), "agent")
        received: asyncio.Queue[bytes] = asyncio.Queue()
        await agent.subscribe("inference.s", lambda message: received.put_nowait(message.data))
        lost, back = asyncio.Event(), asyncio.Event()
        agent.on_disconnect(lost.set)
        agent.on_reconnect(back.set)
        system.processes[0].kill()
        await lost.wait()
        with pytest.raises(BusDisconnected):
            agent.publish("status.s", b"stale")
        await asyncio.to_thread(system.start_nats)
        async with asyncio.timeout(15):
            await back.wait()
        ingress = await NatsBus.connect(address(system, "ingress"), "ingress")
        ingress.publish("inference.s", b"fresh")
        async with asyncio.timeout(2):
            assert await received.get() == b"fresh"
        await agent.aclose()
        await ingress.aclose()

    asyncio.run(main())


def test_a_bucket_that_vanishes_is_made_again(system: System) -> None:
    async def main() -> None:
        registry = await NatsBus.connect(address(system, "registry"), "registry")
        bucket = registry.bucket(SESSIONS_BUCKET)
        assert await bucket.entries() == {}
        await bucket.put("a", b"1")
        await bucket.put("b", b"2")
        await bucket.delete("a")
        assert await bucket.entries() == {"b": b"2"}
        await registry.request(f"$JS.API.STREAM.DELETE.KV_{SESSIONS_BUCKET}", b"", 2)
        assert await bucket.entries() == {}
        await bucket.put("c", b"3")
        assert await bucket.entries() == {"c": b"3"}
        await registry.aclose()

    asyncio.run(main())


def test_a_service_whose_credentials_are_refused_for_good_ends_loudly(system: System) -> None:
    """H66: with other keys on the server, nats-py would try for ever, and the service would only look alive."""
    registry = system.start_registry()
    for path in system.nats.folder.glob("*.nk"):
        path.unlink()
    system.nats.prepare(system.nats_port)
    system.processes[0].popen.send_signal(signal.SIGHUP)
    wait_for(lambda: registry.popen.poll() is not None, "the registry ends", 30)
    assert registry.popen.returncode == 1
    assert "refuses this service's credentials now" in registry.log.splitlines()[-1]
