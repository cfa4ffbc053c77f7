"""Decides which instance of a model takes a request next, and when it prefills, so that times to first and per further
token hold (PaDG). For models whose routing policy at the ingress is macro-scheduled.

docs/scheduling.md, docs/operating.md.
"""

from __future__ import annotations

import argparse
import asyncio

from serai.contracts.subjects import (
    ADMISSION,
    BEAT,
    DISCONNECTED,
    GROUPS_BUCKET,
    INFERENCE,
    INSTANCE,
    MACRO_EXPLAIN,
    MACRO_PRESENCE,
    MACRO_WISH,
    OWNERS_BUCKET,
    SESSION,
    SLEEP,
    STATUS,
    TAKE,
)
from serai.macro_scheduler.service import MacroScheduler
from serai.macro_scheduler.settings import MacroSchedulerSettings
from serai.runtime.nats_bus import NatsBus
from serai.runtime.reconnect_curve import SPAN_FEW_S
from serai.runtime.service import run_service, serve_metrics, watch_bus
from serai.runtime.settings import add_settings, read_settings
from serai.runtime.telemetry import set_up_logs

ROLE = "macro-scheduler"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, MacroSchedulerSettings)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(MacroSchedulerSettings, arguments)
    set_up_logs(ROLE, settings.log_level, json=settings.log_json)

    async def main(stop: asyncio.Event) -> None:
        bus = await NatsBus.connect(settings.nats, ROLE, reconnect_span_s=SPAN_FEW_S)
        try:
            await _self_test(bus, settings)
            # A lease must be lost in time, not after five seconds of waiting for an answer.
            groups, owners = (
                bus.bucket(name, timeout_s=settings.lease_s / 2) for name in (GROUPS_BUCKET, OWNERS_BUCKET)
            )
            async with serve_metrics(settings.metrics_host, settings.metrics_port), watch_bus(bus.closed):
                await MacroScheduler(settings, bus, groups, owners).run(stop)
        finally:
            await bus.aclose()

    return run_service(ROLE, main)


async def _self_test(bus: NatsBus, settings: MacroSchedulerSettings) -> None:
    buckets = (GROUPS_BUCKET, OWNERS_BUCKET)
    await bus.self_test(
        must_publish=[
            *["_INBOX_ingress.self-test", "_INBOX_tools.self-test", TAKE.every, SLEEP.every, MACRO_PRESENCE.every],
            MACRO_WISH.of_site(settings.site),
            *[f"$KV.{bucket}.*" for bucket in buckets],
            *[f"$JS.API.STREAM.MSG.GET.KV_{bucket}" for bucket in buckets],
        ],
        must_subscribe=[
            *[SESSION.every, STATUS.every, BEAT.of_site(settings.site), DISCONNECTED.every],
            *[INSTANCE.every, ADMISSION.every, MACRO_EXPLAIN.of_site(settings.site), MACRO_PRESENCE.every],
        ],
        must_not_subscribe=[INFERENCE.every, "_INBOX_ingress.>"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="serai macro-scheduler", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
