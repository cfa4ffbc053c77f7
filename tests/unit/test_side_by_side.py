"""`--engines N`: how GPUs are shared out, and how engines side by side end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serai.contracts.session_record import GpuDevice
from serai.runtime.service import ServiceFailure
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.drain_shell import Notice
from serai.worker_agent.engine.own_gpus import with_own_gpus
from serai.worker_agent.engine.process import LoopbackStarter
from serai.worker_agent.gpu_shares import shares
from serai.worker_agent.pool_settings import PoolSettings
from serai.worker_agent.settings import AgentSettings
from serai.worker_agent.side_by_side import SideBySide
from unit.fakes import FakeBus

GPUS = [GpuDevice(f"GPU-{letter}") for letter in "abcdefgh"]

# -- shares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", [1, 2, 4, 8])
def test_each_engine_gets_as_many_neighbours_and_all_are_used(engines: int) -> None:
    got = shares(GPUS, engines)
    assert [len(share) for share in got] == [8 // engines] * engines
    assert [gpu for share in got for gpu in share] == GPUS


def test_without_gpus_each_engine_gets_none() -> None:
    assert shares([], 3, 4) == [[], [], []]


@pytest.mark.parametrize("engines", [3, 5, 16])
def test_what_does_not_come_out_even_is_refused_with_what_would(engines: int) -> None:
    with pytest.raises(
        ValueError, match=f"--engines {engines}: 8 GPUs cannot be shared out evenly; give 1 or 2 or 4 or 8"
    ):
        shares(GPUS, engines)


def test_a_command_for_more_gpus_than_its_share_is_refused() -> None:
    assert len(shares(GPUS, 2, 4)) == 2
    with pytest.raises(ValueError, match="--engines 4: each gets 2 of 8 GPUs, and its command is for 4"):
        shares(GPUS, 4, 4)
    assert shares(GPUS[:1], 1, 4) == [GPUS[:1]], "one engine is left to say so itself"


def test_an_engine_sees_its_own_gpus_only() -> None:
    starter = LoopbackStarter(scratch="/local")
    assert with_own_gpus(starter, GPUS[2:4]).variables == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d"}
    assert with_own_gpus(starter, []).variables == {"CUDA_VISIBLE_DEVICES": ""}
    assert with_own_gpus(starter, GPUS).scratch == "/local"


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"engines": 0}, "--engines 0: must be 1 to 64"),
        ({"engines": 65}, "--engines 65: must be 1 to 64"),
        ({"engines": 2, "nodes": "auto"}, "--engines 2: excludes --nodes and --engine-url"),
        ({"engines": 2, "engine_url": "http://127.0.0.1:1"}, "--engines 2: excludes --nodes and --engine-url"),
        ({"engines": 2, "model": "", "pool": True, "pool_gpus": "H100:2"}, "--pool: excludes .* --engines"),
    ],
)
def test_what_does_not_go_together_is_refused(said: dict[str, Any], refused: str) -> None:
    with pytest.raises(ValueError, match=refused):
        PoolSettings(**{"model": "m"} | said)


def test_wrong_ports_are_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERAI_PORTS", "high")
    with pytest.raises(ValueError, match="SERAI_PORTS=high: write FIRST-LAST"):
        AgentSettings(model="m")


# -- side by side ------------------------------------------------------------------------------------------------------


class Host:
    """Serves until it is told to end, or until the test breaks it."""

    def __init__(self) -> None:
        self.session: Any = self
        self.heard: list[str] = []
        self.failure: ServiceFailure | None = None
        self.broken = asyncio.Event()
        self.notice: Notice | None = None

    @property
    def serves(self) -> bool:
        return self.notice is not None and not self.notice.given.is_set() and not self.broken.is_set()

    def break_down(self, why: str, exit_code: int = 1) -> None:
        self.failure = ServiceFailure(why, exit_code)
        self.broken.set()

    def on_disconnect(self) -> None:
        self.heard.append("disconnect")

    def on_reconnect(self) -> None:
        self.heard.append("reconnect")

    def allocation_ends(self, at: str) -> None:
        self.heard.append("allocation ends")

    async def host_sessions(self, notice: Notice) -> None:
        self.notice = notice
        ends = [asyncio.ensure_future(event.wait()) for event in (notice.given, self.broken)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self.failure is not None:
            raise self.failure


Work = Callable[[list[Host], asyncio.Event, FakeBus], Awaitable[None]]


def run(count: int, work: Work, end: AllocationEnd | None = None) -> None:
    async def main() -> None:
        bus, stop, hosts = FakeBus(), asyncio.Event(), [Host() for _ in range(count)]
        agent = SideBySide(hosts, AgentSettings(model="m", engines=count, drain_s=0.1), bus, end)  # type: ignore[arg-type]
        running = asyncio.ensure_future(agent.run(stop))
        async with asyncio.timeout(5):
            while not all(host.serves for host in hosts):
                await asyncio.sleep(0)
            await work(hosts, stop, bus)
            await running

    asyncio.run(main())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_all_hear_what_befalls_the_process_and_all_are_told_to_end() -> None:
    async def work(hosts: list[Host], stop: asyncio.Event, bus: FakeBus) -> None:
        bus.lose_connection()
        bus.reconnect()
        assert [host.heard[-2:] for host in hosts] == [["disconnect", "reconnect"]] * 3
        assert all("allocation ends" in host.heard for host in hosts)
        stop.set()
        await settle()
        assert not any(host.serves for host in hosts)

    run(3, work, AllocationEnd({}, 3600.0))


def test_one_that_fails_leaves_the_others_alone_and_the_end_is_a_good_one() -> None:
    async def work(hosts: list[Host], stop: asyncio.Event, bus: FakeBus) -> None:
        hosts[1].break_down("the engine ended with exit code 1", 2)
        await settle()
        assert [host.serves for host in hosts] == [True, False, True]
        stop.set()

    run(3, work)


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        ([("a bad flag", 2), ("a bad flag", 2)], "each of 2 engines: a bad flag"),
        (
            [("a bad flag", 2), ("a GPU is gone", 75)],
            "none of 2 engines is left:\nengine 1: a bad flag\nengine 2: a GPU is gone",
        ),
        ([("a bad flag", 2)], "a bad flag"),
    ],
)
def test_when_all_have_failed_the_process_ends_as_the_last_did(reasons: list[tuple[str, int]], told: str) -> None:
    async def work(hosts: list[Host], stop: asyncio.Event, bus: FakeBus) -> None:
        for host, (why, exit_code) in zip(hosts, reasons, strict=True):
            host.break_down(why, exit_code)
            await settle()

    with pytest.raises(ServiceFailure) as failed:
        run(len(reasons), work)
    assert str(failed.value) == told
    assert failed.value.exit_code == reasons[-1][1]
