"""Cases H35 and H58–H72: what NATS and its client do at their edges; one small test a case, a server for each.

Elsewhere: H58 is also what every test that subscribes relies on; H65's splitting is `tests/unit/test_outbox.py`; H68's
gaps within a stream are `tests/unit/test_calls.py`; the curve of H67 is `tests/unit/test_reconnect_curve.py`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.nats_parts import (
    PATIENCE_S,
    FakeServer,
    Server,
    cable,
    closing,
    crosses,
    embedded,
    plain,
    run,
    running,
    until,
)
from serai.cli.embedded_nats import LeafRemote
from serai.contracts.subjects import CANCEL, INFERENCE, SESSION, SESSIONS_BUCKET, STATUS
from serai.runtime.bus import (
    BusError,
    Loss,
    LossReason,
    Message,
    MessageTooLarge,
    NoResponders,
    RequestTimeout,
    split_by_size,
)
from serai.runtime.disconnects import DisconnectedClient, watch_disconnects
from serai.runtime.nats_bus import EJECTIONS_MAX, NatsAddress, NatsBus
from serai.runtime.reconnect_curve import SPAN_FEW_S
from serai.worker_agent.engine.process import free_port

KEY = "local-a0-0-1"


def nothing(message: Message) -> None:
    """A handler that does nothing."""


# -- connections -----------------------------------------------------------------------------------------------------


def test_h35_a_connection_that_is_cut_silently_is_noticed_and_made_again(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            async with cable(server.port) as wire:
                address = NatsAddress(f"nats://127.0.0.1:{wire.port}", server.address("agent").nkey_file)
                agent = await NatsBus.connect(address, "agent", ping_interval_s=0.3, timeout_s=PATIENCE_S)
                losses: list[Loss] = []
                back = asyncio.Event()
                agent.on_loss(losses.append)
                agent.on_reconnect(back.set)
                wire.freeze()
                began_s = time.monotonic()
                await until(lambda: losses, "the loss is noticed")
                assert time.monotonic() - began_s < 3, "two to three intervals: 45 s at most with the real ones"
                assert losses[0].reason is LossReason.DISCONNECTED
                wire.thaw()
                async with asyncio.timeout(PATIENCE_S):
                    await back.wait()
                await closing(agent)

        run(main)


def test_a_lone_client_is_back_soon_after_a_blip(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            async with cable(server.port) as wire:
                address = NatsAddress(f"nats://127.0.0.1:{wire.port}", server.address("agent").nkey_file)
                agent = await NatsBus.connect(address, "agent", timeout_s=PATIENCE_S)
                back = asyncio.Event()
                agent.on_reconnect(back.set)
                took_s: list[float] = []
                while len(took_s) < 3 and not (took_s and took_s[-1] < 2.5):  # A busy machine may hold it up once.
                    back.clear()
                    await wire.cut()
                    await wire.connect()
                    began_s = time.monotonic()
                    async with asyncio.timeout(PATIENCE_S):
                        await back.wait()
                    took_s.append(time.monotonic() - began_s)
                # Which number the server gives depends on how many have looked whether it listens; five at most.
                assert min(took_s) < 2.5, took_s
                await closing(agent)

        run(main)


def test_h58_after_a_barrier_not_one_message_is_lost(tmp_path: Path) -> None:
    """Sixty times, since one flush alone loses a message now and then."""
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            agent, ingress = await server.bus("agent"), await server.bus("ingress")
            for number in range(60):
                came = asyncio.Event()
                subscription = await agent.subscribe(f"inference.s{number}", lambda message, came=came: came.set())
                await agent.barrier()
                ingress.publish(f"inference.s{number}", b"x")
                async with asyncio.timeout(PATIENCE_S):
                    await came.wait()
                await subscription.unsubscribe()
            await closing(agent, ingress)

        run(main)


def test_h58_a_subscription_is_on_the_wire_before_the_last_ping_of_a_barrier() -> None:
    async def main() -> None:
        async with FakeServer() as server:
            bus = await NatsBus.connect(server.address, "agent")
            await bus.subscribe("inference.s", nothing)
            await bus.barrier()
            words = [line.split()[0] for line in server.lines]
            assert words.index(b"SUB") < len(words) - 1 - words[::-1].index(b"PING")
            await closing(bus)

    run(main)


def test_a_barrier_without_a_connection_fails(tmp_path: Path) -> None:
    """nats-py's flush returns at once then, having asked nobody."""
    with running(plain(tmp_path)) as server:

        async def main() -> None:
            bus = await server.bus()
            server.kill()
            await until(lambda: not bus.connected, "the loss is noticed")
            with pytest.raises(BusError):
                await bus.barrier()
            await closing(bus)

        run(main)


def test_h59_a_rolling_restart_loses_no_request(tmp_path: Path) -> None:
    """Forty rounds under sixteen requests at a time. Nobody there is an answer: the caller goes elsewhere at once."""
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            ingress = await server.bus("ingress")
            seen: Counter[str] = Counter()
            rolling = True

            async def ask() -> None:
                while rolling:
                    try:
                        await ingress.request("inference.s", b"?", PATIENCE_S)
                        seen["answered"] += 1
                    except NoResponders:
                        seen["nobody"] += 1
                        await asyncio.sleep(0.001)
                    except RequestTimeout:
                        seen["lost"] += 1

            asking = [asyncio.ensure_future(ask()) for _ in range(16)]
            for _ in range(40):
                agent = await server.bus("agent")
                working: set[asyncio.Task[None]] = set()

                async def answer(message: Message, agent: NatsBus = agent) -> None:
                    await asyncio.sleep(0.002)
                    agent.publish(message.reply, b"!")

                def on_request(message: Message, working: set[asyncio.Task[None]] = working) -> None:
                    task = asyncio.ensure_future(answer(message))
                    working.add(task)
                    task.add_done_callback(working.discard)

                subscription = await agent.subscribe("inference.s", on_request)
                await agent.barrier()
                await asyncio.sleep(0.02)
                await subscription.unsubscribe()
                await agent.barrier()
                while working:
                    await asyncio.gather(*working)
                await agent.aclose()
            rolling = False
            await asyncio.gather(*asking)
            assert seen["lost"] == 0
            assert seen["answered"] > 100
            await closing(ingress)

        run(main)


# -- KV --------------------------------------------------------------------------------------------------------------


def test_h60_no_key_expires_and_a_deleted_one_can_be_written_at_once(tmp_path: Path) -> None:
    """Leases by `create` and a TTL are refused until a marker expires; we use neither."""
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            registry = await server.bus("registry")
            bucket = registry.bucket(SESSIONS_BUCKET)
            await bucket.put(KEY, b"1")
            info = json.loads((await registry.request(f"$JS.API.STREAM.INFO.KV_{SESSIONS_BUCKET}", b"", 5)).data)
            config = info["config"]
            assert (config["max_age"], config["max_msgs_per_subject"]) == (0, 1)
            assert not config.get("allow_msg_ttl")
            await bucket.delete(KEY)
            assert await bucket.entries() == {}
            state = await bucket.state()
            assert state is not None
            assert state.keys == 0, "no tombstone is left"
            await bucket.put(KEY, b"2")
            assert await bucket.entries() == {KEY: b"2"}
            await closing(registry)

        run(main)


@pytest.mark.parametrize("in_memory", [True, False], ids=["h61_memory", "h62_file"])
def test_h61_h62_after_a_restart_the_bucket_says_whether_it_is_the_same_at_once(
    tmp_path: Path, in_memory: bool
) -> None:
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            registry = await server.bus("registry", reconnect_span_s=SPAN_FEW_S)
            back = asyncio.Event()
            registry.on_reconnect(back.set)
            bucket = registry.bucket(SESSIONS_BUCKET, in_memory=in_memory)
            assert await bucket.state() is None
            for number in range(20):
                await bucket.put(f"k{number}", b"x")
            before = await bucket.state()
            server.kill()
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(PATIENCE_S):
                await back.wait()
            asked_s = time.monotonic()
            after, kept = await bucket.state(), await bucket.entries()
            assert time.monotonic() - asked_s < 5, "no watch that finds out after 16 s, or never"
            if in_memory:
                assert kept == {}
                assert after != before
                await bucket.put("new", b"y")
                assert await bucket.entries() == {"new": b"y"}
            else:
                assert (after, len(kept)) == (before, 20)
                await bucket.put("k0", b"y")
                assert (await bucket.entries())["k0"] == b"y"
            await closing(registry)

        run(main)


def test_a_bucket_that_is_made_anew_by_others_shows_it(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            registry = await server.bus("registry")
            bucket = registry.bucket(SESSIONS_BUCKET)
            await bucket.put("a", b"1")
            before = await bucket.state()
            await registry.request(f"$JS.API.STREAM.DELETE.KV_{SESSIONS_BUCKET}", b"", PATIENCE_S)
            assert (await bucket.state(), await bucket.entries()) == (None, {})
            await bucket.delete("a")
            await bucket.put("a", b"1")
            after = await bucket.state()
            assert after is not None
            assert before is not None
            assert (after.keys, before.keys) == (1, 1)
            assert after.created != before.created
            await closing(registry)

        run(main)


def test_each_call_of_a_bucket_ends_in_time_and_says_why(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            registry = await server.bus("registry")
            bucket = registry.bucket(SESSIONS_BUCKET, timeout_s=0.3)
            await bucket.put("a", b"1")
            with pytest.raises(BusError, match="'a b' is no key"):
                await bucket.put("a b", b"1")
            with pytest.raises(BusError, match="at most"):
                await bucket.put("a", b"x" * (registry.message_bytes_max + 1))
            server.send(signal.SIGSTOP)
            began_s = time.monotonic()
            for call in (bucket.put("a", b"2"), bucket.delete("a"), bucket.entries(), bucket.state()):
                with pytest.raises(BusError, match=SESSIONS_BUCKET):
                    await call
            assert time.monotonic() - began_s < 5
            server.send(signal.SIGCONT)
            await closing(registry)
            # A server without JetStream: neither a hang nor a library's error.
            ingress = await server.bus("ingress")
            with pytest.raises(BusError):
                await ingress.bucket(SESSIONS_BUCKET, timeout_s=0.3).put("a", b"1")
            await closing(ingress)

        run(main)


def test_h63_new_ack_subjects_hurt_nothing_since_no_consumer_is_made(tmp_path: Path) -> None:
    """On such a server nats-py's read loop dies of an ordered consumer. INFO does not tell, so it cannot be refused at
    the start; what matters is that no call of ours makes a consumer."""

    def with_flag(text: str) -> str:
        return text + "\nfeature_flags { js_ack_fc_v2: true }\n"

    with running(embedded(tmp_path, with_flag)) as server:

        async def main() -> None:
            registry = await server.bus("registry")
            agent = await server.bus("agent")
            bucket = registry.bucket(SESSIONS_BUCKET)
            for number in range(50):
                await bucket.put(f"k{number}", b"x")
            assert len(await bucket.entries()) == 50
            await bucket.delete("k1")
            assert len(await bucket.entries()) == 49
            await bucket.state()
            answer = await registry.request(f"$JS.API.CONSUMER.NAMES.KV_{SESSIONS_BUCKET}", b"", PATIENCE_S)
            assert json.loads(answer.data)["total"] == 0
            heard: list[Message] = []
            await registry.subscribe(SESSION.every, heard.append)
            await registry.barrier()
            agent.publish(SESSION.of("s"), b"still heard")
            await until(lambda: heard, "the connection still reads")
            await closing(registry, agent)

        run(main)


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_h64_header_over_the_limit_is_refused_here(tmp_path: Path) -> None:
    """The server counts headers into its limit and closes the connection when it is passed. We send none but tiny
    ones; a tenth is kept free for what a proxy of the server may add."""
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            agent, ingress = await server.bus("agent"), await server.bus("ingress")
            received: asyncio.Queue[bytes] = asyncio.Queue()
            await agent.subscribe("inference.s", lambda message: received.put_nowait(message.data))
            await agent.barrier()
            most = 8 * 1024 * 1024
            largest = b"x" * ingress.message_bytes_max
            assert len(largest) == int(most * 0.9)
            for payload in (largest + b"x", b"x" * (most - 10), b"x" * (most + 10)):
                with pytest.raises(MessageTooLarge):
                    ingress.publish("inference.s", payload)
                with pytest.raises(MessageTooLarge):
                    await ingress.request("inference.s", payload, 1)
            for payload in (largest, b"", b"after"):
                ingress.publish("inference.s", payload, f"{ingress.inbox_prefix}.stream.1")
            async with asyncio.timeout(PATIENCE_S):
                assert [await received.get() for _ in range(3)] == [largest, b"", b"after"]
            assert not ingress.closed.done()
            await closing(agent, ingress)

        run(main)


def test_h65_an_answer_that_is_too_large_is_an_error_where_it_is_made_and_passes_in_parts(tmp_path: Path) -> None:
    with running(plain(tmp_path, "max_payload: 1MB")) as server:

        async def main() -> None:
            agent, ingress = await server.bus(), await server.bus()
            tokens = [b"logprobs" * 150] * 1000  # 1.2 MB
            refusals: list[str] = []

            def on_request(message: Message) -> None:
                try:
                    agent.publish(message.reply, b"".join(tokens))
                except MessageTooLarge as error:
                    refusals.append(str(error))
                for part in split_by_size(tokens, agent.message_bytes_max):
                    agent.publish(message.reply, part)

            await agent.subscribe("inference.s", on_request)
            await agent.barrier()
            parts: list[bytes] = []
            await ingress.subscribe(f"{ingress.inbox_prefix}.1", lambda message: parts.append(message.data))
            await ingress.barrier()
            ingress.publish("inference.s", b"?", f"{ingress.inbox_prefix}.1")
            await until(lambda: b"".join(parts) == b"".join(tokens), "the whole answer")
            assert len(parts) == 2
            assert "at most 943718" in refusals[0]
            await closing(agent, ingress)

        run(main)


# -- credentials and closed connections ------------------------------------------------------------------------------


def test_h66_a_key_that_is_renewed_on_disk_counts_without_a_restart(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            assert server.nats
            agent = await server.bus("agent")
            heard: list[Message] = []
            await agent.subscribe("inference.s", heard.append)
            losses: list[Loss] = []
            back = asyncio.Event()
            agent.on_loss(losses.append)
            agent.on_reconnect(back.set)
            for path in server.nats.folder.glob("*.nk"):
                path.unlink()
            server.nats.prepare(server.port)
            server.send(signal.SIGHUP)
            async with asyncio.timeout(PATIENCE_S):
                await back.wait()
            assert losses[0].reason is LossReason.DISCONNECTED, "streams in flight get an honest error"
            ingress = await server.bus("ingress")
            ingress.publish("inference.s", b"x")
            await until(lambda: heard, "the subscription is there again")
            await closing(agent, ingress)

        run(main)


def test_h66_a_key_that_is_refused_for_good_ends_the_process_loudly(tmp_path: Path) -> None:
    """nats-py would try for ever, and the service would only look alive."""
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            assert server.nats
            registry = await server.bus("registry", reconnect_span_s=SPAN_FEW_S)
            text = server.nats.config_file.read_text()
            key = registry._client._public_nkey
            others = "\n".join(line for line in text.splitlines() if key not in line)
            server.nats.config_file.write_text(others)
            server.send(signal.SIGHUP)
            with pytest.raises(BusError, match="refuses this service's credentials now"):
                async with asyncio.timeout(PATIENCE_S):
                    await registry.closed
            await closing(registry)

        run(main)


def test_h66_an_error_that_nats_py_takes_for_the_end_becomes_a_reconnect() -> None:
    async def main() -> None:
        async with FakeServer() as server:
            bus = await NatsBus.connect(server.address, "agent")
            await bus.subscribe("inference.s", nothing)
            await bus.barrier()
            losses: list[Loss] = []
            back = asyncio.Event()
            bus.on_loss(losses.append)
            bus.on_reconnect(back.set)
            server.lines.clear()
            server.say(b"-ERR 'User Authentication Expired'\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await back.wait()
            assert [loss.reason for loss in losses] == [LossReason.DISCONNECTED]
            assert any(line.startswith(b"SUB inference.s ") for line in server.lines)
            assert not bus.closed.done()
            await closing(bus)

    run(main)


def test_h66_a_server_that_throws_us_out_again_and_again_ends_the_process() -> None:
    async def main() -> None:
        async with FakeServer() as server:
            bus = await NatsBus.connect(server.address, "agent")
            for number in range(EJECTIONS_MAX):
                await until(lambda number=number: bus.connected and server.connections > number, "connected")
                await bus.barrier()
                server.say(b"-ERR 'maximum connections exceeded'\r\n")
                await until(lambda: not bus.connected, "thrown out")
            with pytest.raises(BusError, match="maximum connections exceeded"):
                async with asyncio.timeout(PATIENCE_S):
                    await bus.closed
            await closing(bus)

    run(main)


def test_bytes_that_kill_nats_pys_read_loop_do_not_leave_a_deaf_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with FakeServer() as server:
            bus = await NatsBus.connect(server.address, "agent")
            heard: list[Message] = []
            await bus.subscribe("inference.s", heard.append)
            await bus.barrier()
            back = asyncio.Event()
            bus.on_reconnect(back.set)
            server.say(b"-ERR \r\n", close=False)  # Its parser takes this for an error with a text.
            async with asyncio.timeout(PATIENCE_S):
                await back.wait()
            await closing(bus)

    run(main)


def test_an_old_server_is_refused() -> None:
    async def main() -> None:
        async with FakeServer(version="2.9.10") as server:
            with pytest.raises(BusError, match=r"is version 2\.9\.10; Serai needs nats-server 2\.12 or newer"):
                await NatsBus.connect(server.address, "agent")

    run(main)


@pytest.mark.parametrize("content", ["", "SUAINVALID", "\x00\xff"])
def test_a_file_that_holds_no_key_is_told_in_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.nk"
    file.write_text(content)
    with pytest.raises(BusError, match=r"bad\.nk holds no NATS key"):
        asyncio.run(NatsBus.connect(NatsAddress("nats://127.0.0.1:1", file), "agent"))


def test_h67_fifty_clients_come_back_spread_and_leave_no_consumers(tmp_path: Path) -> None:
    """Of five hundred the unit test tells; here the connection numbers are the server's, up to sixty."""
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            registry = await server.bus("registry", reconnect_span_s=SPAN_FEW_S)
            bucket = registry.bucket(SESSIONS_BUCKET)
            await bucket.put("a", b"1")
            agents = [await server.bus("agent", name=f"agent-{number}") for number in range(50)]
            back_s: list[float] = []
            for agent in agents:
                agent.on_reconnect(lambda: back_s.append(time.monotonic()))
            server.kill()
            await asyncio.to_thread(server.start)
            began_s = time.monotonic()
            await until(lambda: len(back_s) == len(agents) and registry.connected, "all are back", 2 * PATIENCE_S)
            assert max(back_s) - min(back_s) > 2
            in_one_second = max(sum(one <= other < one + 1 for other in back_s) for one in back_s)
            assert in_one_second < 40
            assert max(back_s) - began_s < 15
            assert await bucket.entries() == {"a": b"1"}
            answer = await registry.request(f"$JS.API.CONSUMER.NAMES.KV_{SESSIONS_BUCKET}", b"", PATIENCE_S)
            assert json.loads(answer.data)["total"] == 0
            await closing(registry, *agents)

        run(main)


SUBSCRIBER = """
import asyncio, sys
from pathlib import Path
from serai.runtime.nats_bus import NatsAddress, NatsBus

async def main():
    bus = await NatsBus.connect(NatsAddress(sys.argv[1], Path(sys.argv[2])), "agent")
    seen = set()
    done = asyncio.Event()
    def on_message(message):
        number = int(message.data[:8])
        seen.add(number)
        if number == 99999999:
            done.set()
    bus.on_loss(lambda loss: print("- loss", loss.reason, flush=True))
    bus.on_reconnect(lambda: print("- back", flush=True))
    await bus.subscribe("inference.slow", on_message)
    await bus.barrier()
    print("- ready", flush=True)
    await done.wait()
    print("- seen", len(seen), flush=True)
    await bus.aclose()

asyncio.run(main())
"""


def test_h68_a_slow_consumer_learns_that_it_lost_messages_and_harms_nobody_else(tmp_path: Path) -> None:
    """A process that is stopped while 60 MB come for it: the server cuts it off, and all it sees is the end of a file.
    That is told as a loss, whatever was lost; which streams have gaps, numbered frames tell."""

    def impatient(text: str) -> str:
        return text.replace('write_deadline: "5s"', 'write_deadline: "1s"\nmax_pending: 9MB')

    with running(embedded(tmp_path, impatient)) as server:
        key = server.address("agent").nkey_file
        command = [sys.executable, "-c", SUBSCRIBER, server.url, str(key)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as slow:
            output = slow.stdout
            assert output is not None
            try:
                assert output.readline().strip() == "- ready"
                slow.send_signal(signal.SIGSTOP)

                async def main() -> None:
                    ingress, other = await server.bus("ingress"), await server.bus("agent")
                    heard: list[int] = []
                    await other.subscribe("inference.other", lambda message: heard.append(len(message.data)))
                    await other.barrier()
                    for number in range(1000):
                        ingress.publish("inference.slow", f"{number:08}".encode() + b"x" * 60_000)
                        ingress.publish("inference.other", b"x" * 100)
                        if number % 20 == 0:
                            await ingress.barrier()
                    await until(lambda: len(heard) == 1000, "the other has them all")
                    await until(lambda: "Slow Consumer" in server.log, "the server gives up on it")
                    slow.send_signal(signal.SIGCONT)
                    # Among lines of its log.
                    told = (line.split() for line in iter(output.readline, "") if line.startswith("- "))
                    assert await asyncio.to_thread(next, told) == ["-", "loss", "disconnected"]
                    assert await asyncio.to_thread(next, told) == ["-", "back"]
                    ingress.publish("inference.slow", b"99999999")
                    seen = await asyncio.to_thread(next, told)
                    assert seen[1] == "seen"
                    assert int(seen[2]) < 1001, "none was lost: the test does not test"
                    await closing(ingress, other)

                run(main)
            finally:
                slow.send_signal(signal.SIGCONT)
                slow.kill()


# -- sites -----------------------------------------------------------------------------------------------------------


def two_sites(
    folder: Path, wire_port: int | None = None, change: Callable[[str], str] = lambda text: text
) -> tuple[Server, Server, int]:
    """A hub and a leaf that dials it at `wire_port`; not started. Third: where the hub listens for leaf nodes."""
    leaf_port = free_port()
    hub = embedded(folder / "hub", change, server_name="hub", domain="hub", leaf_port=leaf_port)
    assert hub.nats
    remote = LeafRemote(f"nats-leaf://127.0.0.1:{wire_port or leaf_port}", hub.nats.key_file("leaf"))
    leaf = embedded(folder / "leaf", change, server_name="leaf", domain="leaf", leaf_remotes=(remote,))
    return hub, leaf, leaf_port


def test_h69_two_sites_serve_on_while_cut_and_talk_again_within_seconds(tmp_path: Path) -> None:
    """What the registries make of it, merging and what LEFT stays LEFT, is tested with them."""
    wire_port = free_port()
    hub, leaf, leaf_port = two_sites(tmp_path, wire_port)
    with running(hub), running(leaf):

        async def main() -> None:
            async with cable(leaf_port, wire_port) as wire:
                here, there = await hub.bus("registry"), await leaf.bus("registry")
                agent_there, ingress = await leaf.bus("agent"), await hub.bus("ingress")
                at_hub: list[bytes] = []
                at_leaf: list[bytes] = []
                await here.subscribe(SESSION.every, lambda message: at_hub.append(message.data))
                await there.subscribe(SESSION.every, lambda message: at_leaf.append(message.data))
                await here.barrier()
                await there.barrier()
                await crosses(lambda: agent_there.publish(SESSION.of("a"), b"1"), lambda: b"1" in at_hub, PATIENCE_S)
                await crosses(lambda: here.publish(SESSION.of("b"), b"2"), lambda: b"2" in at_leaf, PATIENCE_S)

                kv_here, kv_there = here.bucket(SESSIONS_BUCKET), there.bucket(SESSIONS_BUCKET)
                await kv_here.put("h", b"1")
                assert await kv_there.state() is None, "KV belongs to its domain"
                await kv_there.put("l", b"1")

                await wire.cut()
                await until(lambda: "Leafnode connection closed" in leaf.log, "the leaf notices")
                began_s = time.monotonic()
                with pytest.raises(NoResponders):
                    await ingress.request(INFERENCE.of("far"), b"", PATIENCE_S)
                assert time.monotonic() - began_s < 5, "nobody there is known at once"
                agent_there.publish(SESSION.of("a"), b"while cut")
                await until(lambda: b"while cut" in at_leaf, "local messages go on")
                await kv_here.put("h", b"2")
                await kv_there.put("l", b"2")
                assert b"while cut" not in at_hub

                await wire.connect()
                healed_s = time.monotonic()
                await crosses(lambda: agent_there.publish(SESSION.of("a"), b"3"), lambda: b"3" in at_hub, PATIENCE_S)
                assert time.monotonic() - healed_s < 10, "5 s on an idle machine"
                assert (await kv_here.entries(), await kv_there.entries()) == ({"h": b"2"}, {"l": b"2"})
                await closing(here, there, agent_there, ingress)

        run(main)


def test_h69_a_link_that_is_cut_silently_is_noticed_by_pings_and_made_again(tmp_path: Path) -> None:
    wire_port = free_port()
    hub, leaf, leaf_port = two_sites(tmp_path, wire_port, lambda text: text.replace('"15s"', '"0.5s"'))
    with running(hub), running(leaf):

        async def main() -> None:
            async with cable(leaf_port, wire_port) as wire:
                here, there = await hub.bus("registry"), await leaf.bus("registry")
                heard: list[Message] = []
                await there.subscribe(SESSION.every, heard.append)
                await there.barrier()
                await crosses(lambda: here.publish(SESSION.of("b"), b""), lambda: heard, PATIENCE_S)
                wire.freeze()
                await until(lambda: "Stale Connection" in leaf.log, "the leaf notices")
                wire.thaw()
                heard.clear()
                await crosses(lambda: here.publish(SESSION.of("b"), b""), lambda: heard, PATIENCE_S)
                await closing(here, there)

        run(main)


def test_h70_a_leaf_dials_the_address_it_was_given_and_no_other(tmp_path: Path) -> None:
    """By gossip it would learn the hub's own address and get past the proxy."""
    wire_port = free_port()
    hub, leaf, leaf_port = two_sites(tmp_path, wire_port)
    assert hub.nats
    assert leaf.nats
    assert "no_advertise: true" in hub.nats.config_file.read_text()
    assert "ignore_discovered_servers: true" in leaf.nats.config_file.read_text()
    with running(hub), running(leaf):

        async def main() -> None:
            async with cable(leaf_port, wire_port) as wire:
                await until(lambda: "Leafnode connection created" in leaf.log, "linked")
                here, there = await hub.bus("registry"), await leaf.bus("registry")
                heard: list[Message] = []
                await there.subscribe(SESSION.every, heard.append)
                await there.barrier()
                await crosses(lambda: here.publish(SESSION.of("b"), b""), lambda: heard, PATIENCE_S)
                await wire.cut()
                await until(lambda: "Leafnode connection closed" in leaf.log, "the leaf notices")
                heard.clear()
                for _ in range(30):  # It tries every second.
                    here.publish(SESSION.of("b"), b"past the proxy")
                    await asyncio.sleep(0.1)
                assert not heard
                await closing(here, there)

        run(main)
        assert f":{leaf_port}" not in leaf.log


# -- permissions -----------------------------------------------------------------------------------------------------

MUST: dict[str, dict[str, Any]] = {
    "agent": {
        "must_publish": ["_INBOX_ingress.self-test", SESSION.every, STATUS.every],
        "must_subscribe": [INFERENCE.every, CANCEL.every],
        "must_not_subscribe": ["_INBOX_ingress.>", "$JS.>", ">"],
    },
    "ingress": {
        "must_publish": [INFERENCE.every, CANCEL.every],
        "must_subscribe": [SESSION.every, STATUS.every],
        "must_not_subscribe": [INFERENCE.every, "_INBOX_agent.>", ">"],
    },
    "registry": {
        "must_publish": ["_INBOX_ingress.self-test", SESSION.every, f"$KV.{SESSIONS_BUCKET}.>"],
        "must_subscribe": [SESSION.every, STATUS.every],
        "must_not_subscribe": [INFERENCE.every, "_INBOX_ingress.>", ">"],
    },
}


def test_h71_the_self_test_passes_with_our_permissions_quickly_and_nobody_hears_it(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            buses = {role: await server.bus(role) for role in MUST}
            heard: list[Message] = []
            for role in MUST:
                for subject in MUST[role]["must_subscribe"]:
                    await buses[role].subscribe(subject, heard.append)
                await buses[role].barrier()
            await buses["registry"].bucket(SESSIONS_BUCKET).put("a", b"1")
            took_s = []
            for role in MUST:
                for _ in range(3):
                    began_s = time.monotonic()
                    await buses[role].self_test(**MUST[role])
                    took_s.append(time.monotonic() - began_s)
            # Traces of the ingress go to an `inference` subject, which no agent but this test's hears.
            assert [one for one in heard if not one.subject.startswith("inference.self-test")] == []
            assert min(took_s) < 0.05
            assert await buses["registry"].bucket(SESSIONS_BUCKET).entries() == {"a": b"1"}
            await buses["registry"].barrier()
            await closing(*buses.values())

        run(main)


@pytest.mark.parametrize(
    ("role", "change", "told"),
    [
        ("agent", lambda text: text.replace('"cancel.*", ', ""), r"add 'cancel\.\*' to `subscribe`"),
        ("agent", lambda text: text.replace('"status.*", ', ""), r"add 'status\.\*' to `publish`"),
        ("ingress", lambda text: text.replace('"inference.*", ', ""), r"add 'inference\.\*' to `publish`"),
        (
            "agent",
            lambda text: text.replace('"_INBOX_agent.>"] } } }', '"_INBOX_agent.>", "_INBOX_ingress.>"] } } }'),
            r"take what allows '_INBOX_ingress\.>' out of `subscribe`",
        ),
    ],
    ids=["no cancel", "no status", "no inference", "reads other inboxes"],
)
def test_h71_a_permission_missing_or_too_wide_ends_the_start_with_one_line(
    tmp_path: Path, role: str, change: Any, told: str
) -> None:
    def changed(text: str) -> str:
        made = change(text)
        assert made != text
        return str(made)

    with running(embedded(tmp_path, changed)) as server:

        async def main() -> None:
            bus = await server.bus(role)
            with pytest.raises(BusError, match=told) as failure:
                await bus.self_test(**MUST[role])
            assert "\n" not in str(failure.value)
            assert str(bus._client._public_nkey) in str(failure.value)
            await closing(bus)

        run(main)


def test_h71_a_spy_hears_nothing_and_is_told_and_an_open_server_is_not_refused(tmp_path: Path) -> None:
    with running(embedded(tmp_path / "ours")) as server, running(plain(tmp_path / "open")) as anybody:

        async def main() -> None:
            spy, agent, ingress = await server.bus("agent"), await server.bus("agent"), await server.bus("ingress")
            heard: list[Message] = []
            losses: list[Loss] = []
            spy.on_loss(losses.append)
            await spy.subscribe("_INBOX_ingress.>", heard.append)
            with pytest.raises(BusError, match="_inbox_ingress"):
                await spy.barrier()
            assert [(loss.reason, loss.subject) for loss in losses] == [(LossReason.REFUSED, "_inbox_ingress.>")]
            received: list[Message] = []
            await ingress.subscribe(f"{ingress.inbox_prefix}.1", received.append)
            await ingress.barrier()
            agent.publish(f"{ingress.inbox_prefix}.1", b"for its eyes only")
            await until(lambda: received, "the answer")
            assert not heard
            bus = await anybody.bus()
            await bus.self_test(**MUST["agent"])
            await closing(spy, agent, ingress, bus)

        run(main)


def test_h72_an_answer_of_five_chunks_arrives_whole(tmp_path: Path) -> None:
    """`allow_responses: true` would let one through, and let the server walk its list of them every second."""
    with running(embedded(tmp_path)) as server:
        assert "allow_responses" not in server.config_file.read_text()

        async def main() -> None:
            agent, ingress = await server.bus("agent"), await server.bus("ingress")

            def on_request(message: Message) -> None:
                for number in range(5):
                    agent.publish(message.reply, str(number).encode(), at_once=True)

            await agent.subscribe("inference.s", on_request)
            await agent.barrier()
            chunks: list[bytes] = []
            await ingress.subscribe(f"{ingress.inbox_prefix}.1", lambda message: chunks.append(message.data))
            await ingress.barrier()
            ingress.publish("inference.s", b"?", f"{ingress.inbox_prefix}.1")
            await until(lambda: len(chunks) == 5, "five chunks")
            assert chunks == [b"0", b"1", b"2", b"3", b"4"]
            await agent.barrier()
            await closing(agent, ingress)

        run(main)


# -- the server's word on who goes ----------------------------------------------------------------------------------


def test_the_server_tells_whose_connection_has_closed_before_and_after_its_own_restart(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            gone: list[DisconnectedClient] = []
            watching = asyncio.ensure_future(watch_disconnects(server.address("system"), gone.append))
            for _ in range(2):

                def of_agent() -> list[DisconnectedClient]:
                    return [one for one in gone if one.name == "agent-47"]

                gone.clear()
                async with asyncio.timeout(PATIENCE_S):
                    while not of_agent():  # It may not watch yet.
                        agent = await server.bus("agent", name="agent-47")
                        public = agent._client._public_nkey
                        await agent.aclose()
                        await asyncio.sleep(0.1)
                assert of_agent()[0] == DisconnectedClient("agent-47", public, "Client Closed", "SERAI", "serai-local")
                server.kill()
                await asyncio.to_thread(server.start)
            assert not watching.done()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

        run(main)


def test_without_a_key_or_with_a_wrong_one_nobody_is_harmed(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as server:

        async def main() -> None:
            async with asyncio.timeout(5):
                await watch_disconnects(NatsAddress(server.url), lambda client: None)
            watching = asyncio.ensure_future(watch_disconnects(server.address("agent"), lambda client: None))
            await asyncio.sleep(1)
            assert not watching.done()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

        run(main)
