"""One site in virtual time: nothing that lives is closed while grace or brake protects it, whatever fails; no clock but
the registry's own counts; copies agree again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from serai.contracts.session_record import Lifecycle
from serai.registry.membership import Standing
from serai.registry.service import Registry
from serai.simulator.whole.system import Scene, SimulatedSystem, simulate

GRACE_S = 60.0
SCENE = Scene(agents=5, ingresses=2, silence_grace_s=GRACE_S)


def story(
    seed: int, main: Callable[[SimulatedSystem], Coroutine[Any, Any, None]], scene: Scene = SCENE
) -> SimulatedSystem:
    async def whole(system: SimulatedSystem) -> None:
        system.start()
        assert await system.until_serving(30.0)
        await main(system)
        await system.stop()

    _, system = simulate(seed, whole, scene, limit_s=3600.0)
    assert not [failure for node in system.nodes for failure in node.failures]
    assert not system.nats.handler_failures
    return system


def registry_of(system: SimulatedSystem) -> Registry:
    assert isinstance(system.registry.service, Registry)
    return system.registry.service


def sessions_of(system: SimulatedSystem) -> list[str]:
    return [getattr(node.service, "record").session for node in system.agents]  # noqa: B009 - of three types


def left(system: SimulatedSystem) -> list[str]:
    return [r.session for r in registry_of(system).replica.records() if r.lifecycle is Lifecycle.LEFT]


def test_h17_a_registry_that_starts_anew_without_kv_closes_nobody_and_knows_all_within_a_quarter_minute() -> None:
    async def main(system: SimulatedSystem) -> None:
        before = sessions_of(system)
        await system.registry.kill()
        system.nats.kv.clear()
        await asyncio.sleep(3.0)
        system.registry.start()
        await asyncio.sleep(15.0)
        known = [record.session for record in registry_of(system).replica.records()]
        assert sorted(before) == known
        assert left(system) == []
        assert sessions_of(system) == before

    story(1, main)


def test_a_silent_agent_is_suspected_within_its_time_and_closed_only_beyond_the_grace() -> None:
    async def main(system: SimulatedSystem) -> None:
        await asyncio.sleep(20.0)
        quiet = sessions_of(system)[0]
        bus = system.agents[0].bus
        assert bus is not None
        bus.partition()
        silent_since_s = system.loop.time()
        registry = registry_of(system)
        while registry.membership.standing(quiet) is not Standing.SUSPECTED:
            await asyncio.sleep(0.05)
        assert system.loop.time() - silent_since_s <= 3.25 + 1.1 + 0.5  # Its last word was up to an interval before.
        while quiet not in left(system):
            await asyncio.sleep(0.05)
        waited_s = system.loop.time() - silent_since_s
        assert GRACE_S / 6 <= waited_s <= GRACE_S + 2.0
        bus.heal()

    story(2, main)


def test_while_most_are_cut_off_nobody_is_closed_and_all_serve_again_under_their_names() -> None:
    async def main(system: SimulatedSystem) -> None:
        before = sessions_of(system)
        await asyncio.sleep(20.0)
        for node in system.agents[:3]:
            assert node.bus is not None
            node.bus.partition()
        await asyncio.sleep(3 * GRACE_S)
        registry = registry_of(system)
        assert registry.membership.braked
        assert left(system) == []
        for node in system.agents[:3]:
            assert node.bus is not None
            node.bus.heal()
        assert await system.until_serving(30.0)
        assert sessions_of(system) == before
        assert not registry.membership.braked

    story(3, main)


def test_a_registry_that_is_cut_off_itself_judges_nobody() -> None:
    async def main(system: SimulatedSystem) -> None:
        before = sessions_of(system)
        bus = system.registry.bus
        assert bus is not None
        bus.partition()
        await asyncio.sleep(5 * GRACE_S)
        bus.heal()
        await asyncio.sleep(30.0)
        assert left(system) == []
        assert sessions_of(system) == before

    story(4, main)


def test_a_registry_that_was_stopped_for_long_and_goes_on_judges_nobody_by_what_it_missed() -> None:
    """As SIGSTOP: nothing is read, timers do not run, and then all comes at once."""

    async def main(system: SimulatedSystem) -> None:
        before = sessions_of(system)
        bus = system.registry.bus
        assert bus is not None
        bus.stall()
        await asyncio.sleep(GRACE_S / 2)
        bus.resume()
        await asyncio.sleep(5.0)
        assert left(system) == []
        assert sessions_of(system) == before

    story(5, main)


@pytest.mark.parametrize("seed", range(3))
def test_copies_agree_after_records_were_lost_doubled_late_and_out_of_order(seed: int) -> None:
    async def main(system: SimulatedSystem) -> None:
        chance = Random(f"{seed}/test")
        stress = system.nats.stress
        stress.lost = stress.doubled = stress.reordered = 0.1
        for _ in range(6):
            agent = system.agents[chance.randrange(len(system.agents))]
            await agent.terminate()
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            agent.start()
            await asyncio.sleep(chance.uniform(0.0, 4.0))
        stress.end()
        assert await system.until_serving(30.0)
        # A last word that was lost is made up for by the grace; everything else is right at once.
        await asyncio.sleep(GRACE_S + 5.0)
        views = [
            [(r.session, r.lifecycle, r.version) for r in node.replica.records() if r.lifecycle < Lifecycle.LEFT]
            for node in (system.registry, *system.ingresses)
            if node.replica is not None
        ]
        assert views[0] == views[1] == views[2]
        assert sorted(sessions_of(system)) == [session for session, *_ in views[0]]

    story(10 + seed, main)


def test_records_that_kv_loses_are_there_again_soon() -> None:
    async def main(system: SimulatedSystem) -> None:
        await asyncio.sleep(6.0)
        (bucket,) = system.nats.kv.values()
        expected = dict(bucket)
        assert len(expected) == len(system.agents)
        bucket.popitem()
        await asyncio.sleep(7.0)
        assert system.nats.kv == {next(iter(system.nats.kv)): expected}
        system.nats.kv.clear()
        await asyncio.sleep(7.0)
        assert list(system.nats.kv.values()) == [expected]

    story(20, main)
