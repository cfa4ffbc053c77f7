"""The bus against a real server: its everyday. Its edges are in `test_nats_cases.py`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from integration.nats_parts import certificate, plain, running
from integration.system import System
from serai.contracts.subjects import SNAPSHOT
from serai.runtime.bus import BusDisconnected, BusError, Message, NoResponders
from serai.runtime.nats_bus import WRITE_MESSAGES, NatsAddress, NatsBus


def address(system: System, role: str) -> NatsAddress:
    return NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file(role))


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


def test_many_messages_of_one_turn_do_not_wait_for_its_end_and_keep_their_order(system: System) -> None:
    async def main() -> None:
        ingress = await NatsBus.connect(address(system, "ingress"), "ingress")
        agent = await NatsBus.connect(address(system, "agent"), "agent")
        received: list[bytes] = []
        await ingress.subscribe(f"{ingress.inbox_prefix}.stream.*", lambda message: received.append(message.data))
        await ingress.barrier()
        sent = [b"%d" % number for number in range(5 * WRITE_MESSAGES + 3)]
        for one in sent:
            agent.publish(f"{ingress.inbox_prefix}.stream.7", one)
            assert agent._client.waiting < WRITE_MESSAGES
        await agent.barrier()
        await ingress.barrier()
        assert received == sent
        await agent.aclose()
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


def test_tls_in_an_address_means_tls(system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has none, or whoever answers in its place, is not talked to in the clear."""

    async def main() -> None:
        clear = address(system, "ingress")
        with pytest.raises(BusError, match=r"the server has no TLS, and the address says tls://"):
            await NatsBus.connect(replace(clear, url=clear.url.replace("nats://", "tls://")), "ingress", timeout_s=2)
        cert_file, key_file = certificate(tmp_path)
        server = plain(tmp_path / "tls", f'tls {{ cert_file: "{cert_file}", key_file: "{key_file}" }}')
        with running(server):
            private = NatsAddress(f"tls://127.0.0.1:{server.port}")
            with pytest.raises(BusError, match="CERTIFICATE_VERIFY_FAILED"):
                await NatsBus.connect(private, "plain", timeout_s=2)
            monkeypatch.setenv("SSL_CERT_FILE", str(cert_file))
            for one in (private, NatsAddress(server.url)):  # Who does not ask for it gets it all the same.
                bus = await NatsBus.connect(one, "plain")
                await bus.barrier()
                await bus.aclose()

    asyncio.run(main())
