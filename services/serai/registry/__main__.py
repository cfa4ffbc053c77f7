"""The registry of a site: it knows which sessions there are, keeps their records in NATS, and judges who is alive.

One a site, beside its NATS server; it listens on no port. docs/architecture.md, docs/operating.md.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial

from serai.contracts.subjects import (
    BEAT,
    CLEARED,
    DIGEST,
    DISCONNECTED,
    ENDED,
    INFERENCE,
    OPINION,
    PROBE,
    SESSION,
    SESSIONS_BUCKET,
    SNAPSHOT,
    STATUS,
)
from serai.registry.service import Registry
from serai.registry.settings import RegistrySettings
from serai.runtime.disconnects import watch_disconnects
from serai.runtime.nats_bus import NatsBus
from serai.runtime.reconnect_curve import SPAN_FEW_S
from serai.runtime.service import run_service, serve_metrics, watch_bus
from serai.runtime.settings import add_settings, read_settings
from serai.runtime.telemetry import set_up_logs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, RegistrySettings)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(RegistrySettings, arguments)
    set_up_logs("registry", settings.log_level, json=settings.log_json)

    async def main(stop: asyncio.Event) -> None:
        bus = await NatsBus.connect(settings.nats, "registry", reconnect_span_s=SPAN_FEW_S)
        try:
            await bus.self_test(
                must_publish=[
                    *["_INBOX_ingress.self-test", SESSION.every, PROBE.every, BEAT.of_site(settings.site)],
                    *[f"$KV.{SESSIONS_BUCKET}.>", f"$JS.API.STREAM.INFO.KV_{SESSIONS_BUCKET}"],
                ],
                must_subscribe=[
                    *[SESSION.every, STATUS.every, BEAT.every, DISCONNECTED.every],
                    *[subject.of_site(settings.site) for subject in (SNAPSHOT, DIGEST, OPINION, ENDED, CLEARED)],
                ],
                must_not_subscribe=[INFERENCE.every, "_INBOX_ingress.>"],
            )
            async with serve_metrics(settings.metrics_host, settings.metrics_port), watch_bus(bus.closed):
                watching = partial(watch_disconnects, settings.system_nats)
                await Registry(settings, bus, watching).run(stop)
        finally:
            await bus.aclose()

    return run_service("registry", main)


def main() -> int:
    parser = argparse.ArgumentParser(prog="serai registry", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
