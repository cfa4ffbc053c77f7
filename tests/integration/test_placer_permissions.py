"""Who may say what a pool runs: the placer alone. Pool agents read it, and write nothing of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from integration.nats_parts import closing, embedded, running
from serai.contracts.subjects import ASSIGN, INFERENCE, PLACEMENT_BUCKET, POOLS_BUCKET
from serai.runtime.bus import Bus, BusError


async def may_write(bus: Bus, bucket: str) -> bool:
    try:
        return bool(await bus.bucket(bucket, timeout_s=1.0).update("p", b"{}", 0))  # type: ignore[attr-defined]
    except BusError:
        return False


def test_only_the_placer_assigns_and_it_sees_no_request(tmp_path: Path) -> None:
    async def main() -> None:
        with running(embedded(tmp_path)) as server:
            placer, agent, tools = [await server.bus(role) for role in ("placer", "agent", "tools")]
            try:
                for bus in (agent, tools):
                    assert not await may_write(bus, POOLS_BUCKET)
                    assert not await may_write(bus, PLACEMENT_BUCKET)
                assert await may_write(placer, POOLS_BUCKET)
                assert await may_write(placer, PLACEMENT_BUCKET)
                assert await agent.bucket(POOLS_BUCKET).get("p") == (b"{}", 1)
                with pytest.raises(BusError):
                    await agent.bucket(POOLS_BUCKET, timeout_s=1.0).delete("p")
                assert await placer.bucket(POOLS_BUCKET).entries() == {"p": b"{}"}
                await placer.bucket(POOLS_BUCKET).delete("p")
                assert await placer.bucket(POOLS_BUCKET).entries() == {}
                for bus, forbidden in ((agent, ASSIGN.every), (tools, ASSIGN.every), (placer, INFERENCE.every)):
                    with pytest.raises(Exception, match="publish"):
                        await bus.self_test(must_publish=[forbidden], must_subscribe=[], must_not_subscribe=[])
                with pytest.raises(Exception, match="subscribe"):
                    await placer.self_test(must_publish=[], must_subscribe=[INFERENCE.every], must_not_subscribe=[])
            finally:
                await closing(placer, agent, tools)

    asyncio.run(main())
