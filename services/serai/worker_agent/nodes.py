"""`--nodes auto`: one engine over all nodes of the allocation, one agent on each. That of rank 0 is the session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from serai.runtime.bounded_command import output_of
from serai.runtime.connection_settings import host_name
from serai.runtime.service import ServiceFailure
from serai.worker_agent.engine.base import Engine, EngineMisconfigured
from serai.worker_agent.engine.multi_node import Address, Place, hosts_in, meeting_port, node_list, place_in
from serai.worker_agent.engine.other_rank import OtherRank
from serai.worker_agent.engine.process import EngineStarter
from serai.worker_agent.engine.rank_zero import RankZero
from serai.worker_agent.settings import AgentSettings

SCONTROL_TIMEOUT_S = 10.0
_NODE_FILE_BYTES_MAX = 1_000_000


async def find_place(environment: Mapping[str, str], own_name: str) -> Place:
    """This node among those of the allocation. Raises EngineMisconfigured."""
    if nodes := node_list(environment):
        text = await output_of(["scontrol", "show", "hostnames", nodes], SCONTROL_TIMEOUT_S)
        if text is None:
            raise EngineMisconfigured(
                f"--nodes auto: `scontrol show hostnames {nodes[:60]}` failed, or did not answer "
                f"within {SCONTROL_TIMEOUT_S:g} s"
            )
    elif file := environment.get("PBS_NODEFILE", ""):
        try:
            text = await asyncio.to_thread(_read, file)
        except OSError as error:
            raise EngineMisconfigured(f"--nodes auto: PBS_NODEFILE {file}: {error.strerror}") from error
    else:
        raise EngineMisconfigured("--nodes auto: no Slurm and no PBS job (no SLURM_JOB_NODELIST, no PBS_NODEFILE)")
    return place_in(hosts_in(text), environment, own_name)


def _read(file: str) -> str:
    with open(file, encoding="utf-8", errors="replace") as lines:
        return lines.read(_NODE_FILE_BYTES_MAX)


async def own_place(settings: AgentSettings) -> Place | None:
    """None when the engine is of one node. Raises ServiceFailure."""
    if not settings.nodes:
        return None
    try:
        place = await find_place(os.environ, host_name())
    except EngineMisconfigured as error:
        raise ServiceFailure(str(error), exit_code=2) from error
    return place if len(place.hosts) > 1 else None


async def run_other_rank(
    settings: AgentSettings,
    place: Place,
    address: str,
    start: EngineStarter,
    engine: Engine,
    command: Sequence[str],
    stop: asyncio.Event,
) -> None:
    """Until rank 0 has gone. `address`: ours in the network to be used, empty = whichever. Raises ServiceFailure."""
    other = OtherRank(
        place,
        Address(settings.nodes_address or place.hosts[0], _port(settings, place)),
        address,
        start,
        deadline_s=settings.start_timeout_s,
        stop_s=settings.engine_stop_s,
        leave_s=settings.drain_s + settings.engine_stop_s,
    )
    try:
        await other.run(engine, command, stop)
    except EngineMisconfigured as error:
        raise ServiceFailure(str(error), exit_code=2) from error
    except ConnectionError as error:
        raise ServiceFailure(f"rank 0 was lost while this part of the engine ran: {error}") from error


@asynccontextmanager
async def starter_for(
    settings: AgentSettings, place: Place | None, address: str, start: EngineStarter
) -> AsyncIterator[EngineStarter]:
    """What starts the engine: `start` itself, or rank 0, which has it started on all nodes. Raises ServiceFailure."""
    if place is None:
        yield start
        return
    zero = RankZero(place, _port(settings, place), address, settings.start_timeout_s, start)
    try:
        await zero.open()
    except EngineMisconfigured as error:
        raise ServiceFailure(str(error), exit_code=2) from error
    try:
        yield zero
    finally:
        await zero.aclose()


def _port(settings: AgentSettings, place: Place) -> int:
    return settings.nodes_port or meeting_port(place.allocation)
