"""`serai agent --pool`: where a pool agent's real collaborators are made."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from serai.contracts.session_record import GpuDevice
from serai.contracts.subjects import (
    ASSIGN,
    CANCEL,
    DRAIN,
    INFERENCE,
    INSTANCE,
    POOL,
    POOLS_BUCKET,
    PROBE,
    SESSION,
    SLEEP,
    STATUS,
    TAKE,
)
from serai.runtime.fields import BadInput
from serai.runtime.nats_bus import NatsBus
from serai.runtime.service import run_service, serve_metrics, watch_bus
from serai.runtime.settings import refuse
from serai.runtime.telemetry import Tracing, set_up_logs, set_up_traces
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.engine.clearance import Clearance, NodeClearance, NothingInTheWay
from serai.worker_agent.engine.kinds import engine_of
from serai.worker_agent.engine.own_gpus import with_own_gpus
from serai.worker_agent.engine.process import LoopbackStarter
from serai.worker_agent.gpus import visible_gpus
from serai.worker_agent.pool import SAID_UUID, HostMaker, Pool
from serai.worker_agent.pool_settings import PoolSettings
from serai.worker_agent.pool_templates import Template
from serai.worker_agent.service import NodeAgent
from serai.worker_agent.settings import AgentSettings
from serai.worker_agent.site_starter import starter_of


def run_pool(settings: PoolSettings, command: Sequence[str]) -> int:
    """Until it is told to end; the exit code."""
    if command:
        refuse(f"--pool: a pool agent has no engine's command; leave out `-- {command[0]} …` or --pool")
    try:
        templates = settings.templates()
    except BadInput as error:
        refuse(f"--pool-templates: {error}")
    at_site = starter_of(settings)
    set_up_logs("agent", settings.log_level, json=settings.log_json)
    warned = asyncio.Event()

    async def main(stop: asyncio.Event) -> None:
        gpus = await _gpus(settings)
        connection = f"agent-{os.urandom(6).hex()}"
        bus = await NatsBus.connect(settings.nats, "agent", name=connection)
        tracing = set_up_traces("agent")
        try:
            await bus.self_test(
                must_publish=["_INBOX_ingress.self-test", *[s.every for s in (SESSION, STATUS, PROBE, INSTANCE, POOL)]],
                must_subscribe=[s.every for s in (INFERENCE, CANCEL, PROBE, DRAIN, SLEEP, TAKE, ASSIGN)],
                must_not_subscribe=["_INBOX_ingress.>"],
            )
            end = AllocationEnd(total_s=settings.allocation_s)
            async with serve_metrics(settings.metrics_host, settings.metrics_port), watch_bus(bus.closed):
                make = _host_maker(settings, at_site, bus, tracing, connection, end)
                await Pool(settings, bus, bus.bucket(POOLS_BUCKET), templates, gpus, make, end).run(stop, warned)
        finally:
            await bus.aclose()
            tracing.close()

    return run_service("agent", main, {signal.SIGUSR1: warned.set})


async def _gpus(settings: PoolSettings) -> list[GpuDevice]:
    there = await visible_gpus()
    if there and settings.pool_gpus:
        refuse(
            f"--pool-gpus {settings.pool_gpus!r}: this machine has {len(there)} GPUs of its own; leave it out, and "
            "choose among them by CUDA_VISIBLE_DEVICES"
        )
    if not there and not settings.pool_gpus:
        refuse("--pool: this machine has no GPUs that nvidia-smi shows; say what to offer with --pool-gpus KIND:COUNT")
    kinds = sorted({gpu.name for gpu in there})
    if len(kinds) > 1:
        refuse(f"--pool: GPUs of several kinds ({', '.join(kinds)}); choose those of one by CUDA_VISIBLE_DEVICES")
    return there or settings.said_gpus


def _host_maker(
    pool: PoolSettings, at_site: LoopbackStarter, bus: NatsBus, tracing: Tracing, connection: str, end: AllocationEnd
) -> HostMaker:
    def make(
        settings: AgentSettings, template: Template, command: list[str], devices: Sequence[GpuDevice]
    ) -> NodeAgent:
        real = [device for device in devices if not device.uuid.startswith(SAID_UUID)]
        starter = with_own_gpus(at_site, real)
        clearance: Clearance = NothingInTheWay()
        if real:
            clearance = NodeClearance(real, wait_s=pool.gpu_wait_s, borne_bytes=pool.gpu_borne_bytes)
        return NodeAgent(
            settings,
            engine_of(template.kind, command),
            command,
            bus,
            tracing,
            starter,
            connection=connection,
            gpus=devices,
            allocation_end=end,
            clearance=clearance,
        )

    return make
