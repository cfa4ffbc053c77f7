"""Runs an engine's command in this allocation, and brings the model into the service: `serai agent --model NAME --
COMMAND…`. It dials NATS; nothing has to reach it. SIGUSR1 or SIGTERM make it finish what it has and leave.

With --engine-url it attaches to an engine that runs already; with --pool it offers the GPUs, and the placer says what
runs. docs/operating.md, docs/engines.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Sequence

from serai.contracts.session_record import GpuDevice
from serai.contracts.subjects import CANCEL, DRAIN, INFERENCE, INSTANCE, PROBE, SESSION, SLEEP, STATUS, TAKE
from serai.runtime.nats_bus import NatsBus
from serai.runtime.service import ServiceFailure, run_service, serve_metrics, watch_bus
from serai.runtime.settings import add_settings, read_settings, refuse
from serai.runtime.telemetry import set_up_logs, set_up_traces
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.command_line import parallelism_of
from serai.worker_agent.engine.clearance import NodeClearance
from serai.worker_agent.engine.kinds import engine_of
from serai.worker_agent.engine.own_gpus import with_own_gpus
from serai.worker_agent.gpu_shares import shares
from serai.worker_agent.gpus import visible_gpus
from serai.worker_agent.nodes import own_place, run_other_rank, starter_for
from serai.worker_agent.pool_run import run_pool
from serai.worker_agent.pool_settings import PoolSettings
from serai.worker_agent.service import NodeAgent
from serai.worker_agent.settings import AgentSettings
from serai.worker_agent.side_by_side import SideBySide
from serai.worker_agent.site_starter import starter_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, PoolSettings)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND…", help="the engine's command")


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(PoolSettings, arguments)
    command = [word for index, word in enumerate(arguments.command) if index or word != "--"]
    if settings.pool:
        return run_pool(settings, command)
    if bool(command) == bool(settings.engine_url):
        refuse("give the engine's command after `--`, or --engine-url for one that runs already (one of the two)")
    engine = engine_of(settings.engine, command)
    start_engine = starter_of(settings)
    set_up_logs("agent", settings.log_level, json=settings.log_json)

    warned = asyncio.Event()

    async def main(stop: asyncio.Event) -> None:
        place = await own_place(settings)
        if place is not None and place.rank:
            await run_other_rank(settings, place, start_engine.address, start_engine, engine, command, stop)
            return
        # A name of its own: the server's word that a connection has closed is all that tells whose it was.
        connection = f"agent-{os.urandom(6).hex()}"
        bus = await NatsBus.connect(settings.nats, "agent", name=connection)
        tracing = set_up_traces("agent")
        try:
            await bus.self_test(
                must_publish=["_INBOX_ingress.self-test", *[s.every for s in (SESSION, STATUS, PROBE, INSTANCE)]],
                must_subscribe=[s.every for s in (INFERENCE, CANCEL, PROBE, DRAIN, SLEEP, TAKE)],
                must_not_subscribe=["_INBOX_ingress.>"],
            )
            async with (
                serve_metrics(settings.metrics_host, settings.metrics_port),
                watch_bus(bus.closed),
                starter_for(settings, place, start_engine.address, start_engine) as starter,
            ):
                end = AllocationEnd(total_s=settings.allocation_s)
                hosts = [
                    NodeAgent(
                        settings,
                        engine,
                        command,
                        bus,
                        tracing,
                        with_own_gpus(start_engine, gpus) if gpus and settings.engines > 1 else starter,
                        connection=connection,
                        gpus=gpus,
                        clearance=NodeClearance(gpus, wait_s=settings.gpu_wait_s, borne_bytes=settings.gpu_borne_bytes),
                        allocation_end=end,
                    )
                    for gpus in await _shares(settings, command)
                ]
                await SideBySide(hosts, settings, bus, end).run(stop, warned)
        finally:
            await bus.aclose()
            tracing.close()

    return run_service("agent", main, {signal.SIGUSR1: warned.set})


async def _shares(settings: AgentSettings, command: Sequence[str]) -> list[list[GpuDevice]]:
    """The GPUs of each engine. Raises ServiceFailure."""
    degrees = parallelism_of(command)
    try:
        return shares(await visible_gpus(), settings.engines, degrees.tensor * degrees.pipeline * degrees.data)
    except ValueError as error:
        raise ServiceFailure(str(error), exit_code=2) from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="serai agent", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
