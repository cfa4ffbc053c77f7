"""Registries on real NATS servers: two sites joined as leaf nodes, cut and healed; KV that goes away; disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from integration.nats_parts import Cable, Server
from serai.cli.embedded_nats import EmbeddedNats
from serai.contracts.codec import decode, encode
from serai.contracts.session_record import Lifecycle, SessionMetadata, SessionRecord, new_session_id
from serai.contracts.status import ProbeAnswer, SessionStatus
from serai.contracts.subjects import PROBE, SESSION, SESSIONS_BUCKET, STATUS
from serai.registry import storing
from serai.registry.service import Registry
from serai.registry.settings import RegistrySettings
from serai.runtime.bus import BusError
from serai.runtime.disconnects import DisconnectedClient, watch_disconnects
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.worker_agent.engine.process import free_port

PATIENCE_S = 20.0
HEAL_S_MAX = 5.0


async def until(there: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> float:
    """Seconds until `there()` is true; fails with `what`."""
    began_s = time.monotonic()
    while not there():
        assert time.monotonic() - began_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - began_s


class Agent:
    """What others see of an agent: a record, a status ten times a second, answers to probes."""

    def __init__(self, bus: NatsBus, site: str, allocation: str) -> None:
        self.bus = bus
        session = new_session_id(site, allocation, 0, "r")
        data = SessionMetadata("m", "m", "emulated", site=site, allocation=allocation, connection=bus.name)
        self.record = SessionRecord(session, Lifecycle.SERVING, 1, data)
        self.acknowledged: SessionRecord | None = None
        self._living: asyncio.Task[None] | None = None

    async def join(self) -> None:
        await self.bus.subscribe(PROBE.of(self.record.session), self._on_probe)
        await self.bus.barrier()
        await self.say(self.record)
        self._living = asyncio.ensure_future(self._live())

    async def say(self, record: SessionRecord) -> None:
        self.record = record
        answer = await self.bus.request(SESSION.of(record.session), encode(record), 2.0)
        self.acknowledged = decode(SessionRecord, answer.data)

    async def leave(self) -> None:
        await self.say(self.record.advanced(Lifecycle.LEFT))
        self.stop()

    def stop(self) -> None:
        if self._living is not None:
            self._living.cancel()

    async def _live(self) -> None:
        for sequence in range(1, 10**6):
            record = self.record
            status = SessionStatus(record.session, sequence, record.lifecycle, record.version, 0.5)
            with suppress(BusError):
                self.bus.publish(STATUS.of(record.session), encode(status))
            await asyncio.sleep(0.1)

    def _on_probe(self, message: object) -> None:
        reply = getattr(message, "reply", "")
        with suppress(BusError):
            self.bus.publish(reply, encode(ProbeAnswer(self.record.session)))


@asynccontextmanager
async def registry_on(bus: NatsBus, site: str, **options: object) -> AsyncIterator[Registry]:
    registry = Registry(RegistrySettings(site=site), bus, **options)  # type: ignore[arg-type]
    stop = asyncio.Event()
    running = asyncio.ensure_future(registry.run(stop))
    await until(lambda: registry.membership.listening_since_s is not None, "the registry listens")
    await asyncio.sleep(0.2)
    try:
        yield registry
    finally:
        stop.set()
        await running


def view(registry: Registry) -> list[SessionRecord]:
    return [record for record in registry.replica.records() if record.lifecycle is not Lifecycle.LEFT]


@dataclass
class Side:
    registry: Registry
    buses: list[NatsBus]
    server: Server
    site: str

    async def agent(self, allocation: str) -> Agent:
        bus = await NatsBus.connect(NatsAddress(self.server.url), "agent", name=f"{self.site}-{allocation}")
        self.buses.append(bus)
        agent = Agent(bus, self.site, allocation)
        await agent.join()
        return agent


def configured(folder: Path, site: str, port: int, leafnodes: str) -> Server:
    """A server of one site, open to all, with JetStream in its own domain."""
    config = folder / f"{site}.conf"
    config.write_text(
        f"""server_name: "{site}"
listen: 127.0.0.1:{port}
jetstream {{ store_dir: "{folder / site}", domain: "{site}" }}
leafnodes {{ {leafnodes} }}
"""
    )
    return Server(config, port)


@asynccontextmanager
async def two_sites(folder: Path) -> AsyncIterator[tuple[Side, Side, Cable]]:
    leaf_port, cable_port = free_port(), free_port()
    hub = configured(folder, "hub", free_port(), f"listen: 127.0.0.1:{leaf_port}, no_advertise: true")
    remote = f'{{ url: "nats-leaf://127.0.0.1:{cable_port}", ignore_discovered_servers: true }}'
    leaf = configured(folder, "leaf", free_port(), f'reconnect: "500ms", remotes: [{remote}]')
    cable = Cable(cable_port, leaf_port)
    await cable.connect()
    buses: list[NatsBus] = []
    try:
        for server in (hub, leaf):
            server.start()
            buses.append(await NatsBus.connect(NatsAddress(server.url), "registry"))
        async with registry_on(buses[0], "hub") as first, registry_on(buses[1], "leaf") as second:
            yield Side(first, buses, hub, "hub"), Side(second, buses, leaf, "leaf"), cable
    finally:
        for bus in buses:
            await bus.aclose()
        hub.kill()
        leaf.kill()
        await cable.cut()


def test_h69_two_sites_are_cut_change_and_agree_again_and_what_left_stays_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_sites(tmp_path) as (hub, leaf, cable):
            there = {name: await leaf.agent(name) for name in ("stays", "leaves", "changes")}
            here = {name: await hub.agent(name) for name in ("stays", "leaves")}
            await until(lambda: len(view(hub.registry)) == len(view(leaf.registry)) == 5, "both know all")

            await cable.cut()
            await until(lambda: hub.registry.federation.other_sites == [], "the hub notices that the leaf is away")
            await there["leaves"].leave()
            await here["leaves"].leave()
            await there["changes"].say(there["changes"].record.advanced(Lifecycle.DOWN))
            new = [await leaf.agent("new"), await hub.agent("new")]
            assert view(hub.registry) != view(leaf.registry)
            assert all(agent.acknowledged == agent.record for agent in (*there.values(), *here.values(), *new))

            await cable.connect()
            heal_s = await until(lambda: view(hub.registry) == view(leaf.registry), "equal views")
            assert heal_s <= HEAL_S_MAX
            assert len(view(hub.registry)) == 5
            for _ in range(30):  # Nothing brings them back.
                for registry in (hub.registry, leaf.registry):
                    for agent in (there["leaves"], here["leaves"]):
                        left = registry.replica.get(agent.record.session)
                        assert left is not None
                        assert left.lifecycle is Lifecycle.LEFT
                await asyncio.sleep(0.1)
            now = time.monotonic()
            assert sorted(r.session for r in hub.registry.replica.routable("m", now)) == sorted(
                agent.record.session for agent in (there["stays"], here["stays"], *new)
            )
            for agent in (*there.values(), *here.values(), *new):
                agent.stop()

    asyncio.run(main())


def test_an_agent_is_acknowledged_by_its_own_sites_registry_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_sites(tmp_path) as (hub, leaf, _):
            agent = await leaf.agent("a")
            await until(lambda: len(view(hub.registry)) == 1, "the hub knows it")
            answers: list[object] = []
            await agent.bus.subscribe(f"{agent.bus.inbox_prefix}.x", answers.append)
            await agent.bus.barrier()
            agent.bus.publish(SESSION.of(agent.record.session), encode(agent.record), f"{agent.bus.inbox_prefix}.x")
            await asyncio.sleep(0.5)
            assert len(answers) == 1
            agent.stop()

    asyncio.run(main())


def test_kv_is_filled_again_when_its_bucket_vanishes_and_read_by_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = configured(tmp_path, "one", free_port(), "")
    monkeypatch.setattr(storing, "SUPERVISE_EVERY_S", 0.2)

    async def main() -> None:
        server.start()
        address = NatsAddress(server.url)
        bus = await NatsBus.connect(address, "registry")
        stored = bus.bucket(SESSIONS_BUCKET)

        async def keys() -> int:
            state = await stored.state()
            return state.keys if state else 0

        async def until_keys(count: int) -> None:
            give_up_at_s = time.monotonic() + PATIENCE_S
            while await keys() != count:
                assert time.monotonic() < give_up_at_s, f"{await keys()} keys, expected {count}"
                await asyncio.sleep(0.05)

        async with registry_on(bus, "one") as registry:
            agent = Agent(await NatsBus.connect(address, "agent"), "one", "a")
            await agent.join()
            agent.stop()
            await until_keys(1)
            await asyncio.sleep(0.5)  # A look at the bucket as it should be.
            await bus.request(f"$JS.API.STREAM.DELETE.KV_{SESSIONS_BUCKET}", b"", 5.0)
            await until_keys(1)
            assert len(view(registry)) == 1
        async with registry_on(bus, "one") as registry:
            await until(lambda: view(registry) == [agent.record], "the next life reads KV")
            assert not registry.replica.routable("m", time.monotonic())  # Written, not heard.
        await agent.bus.aclose()
        await bus.aclose()

    try:
        asyncio.run(main())
    finally:
        server.kill()


def test_a_closed_connection_stops_routing_at_once_and_ends_nothing(tmp_path: Path) -> None:
    nats = EmbeddedNats(tmp_path / "nats")
    port = free_port()
    nats.prepare(port)
    server = Server(nats.config_file, port, nats)

    async def main() -> None:
        server.start()
        bus = await NatsBus.connect(server.address("registry"), "registry")
        gone: list[DisconnectedClient] = []

        async def watching(tell: Callable[[DisconnectedClient], None]) -> None:
            def both(client: DisconnectedClient) -> None:
                gone.append(client)
                tell(client)

            await watch_disconnects(server.address("system"), both)

        async with registry_on(bus, "local", watch_disconnects=watching) as registry:
            agents = [
                Agent(await NatsBus.connect(server.address("agent"), "agent", name=f"agent-{n}"), "local", f"a{n}")
                for n in range(4)
            ]
            for agent in agents:
                await agent.join()
            await until(lambda: len(registry.replica.routable("m", time.monotonic())) == 4, "all are routed to")
            while not gone:  # Until the watch of disconnects has its connection.
                await (await NatsBus.connect(server.address("agent"), "agent", name="agent-passes")).aclose()
                await asyncio.sleep(0.1)
            noticed_s: list[float] = []
            while len(noticed_s) < 3 and not (noticed_s and min(noticed_s) < 0.3):  # A busy machine may hold one up.
                agent = agents.pop()
                session = agent.record.session
                agent.stop()
                await agent.bus.aclose()
                noticed_s.append(await until(partial(registry.replica.is_unreachable, session), "noticed", 2.0))
                routed = registry.replica.routable("m", time.monotonic())
                assert sorted(r.session for r in routed) == sorted(other.record.session for other in agents)
                record = registry.replica.get(session)
                assert record is not None
                assert record.lifecycle is Lifecycle.SERVING
            assert min(noticed_s) < 0.3, noticed_s
            for agent in agents:
                agent.stop()
                await agent.bus.aclose()
        await bus.aclose()

    try:
        asyncio.run(main())
    finally:
        server.kill()
