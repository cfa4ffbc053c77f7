"""`serai ingress`: the one place where the ingress's real collaborators are made."""

from __future__ import annotations

import argparse
import asyncio

from serai.contracts.subjects import (
    BEAT,
    CANCEL,
    DIGEST,
    DISCONNECTED,
    INFERENCE,
    OPINION,
    PROBE,
    SESSION,
    SNAPSHOT,
    STATUS,
)
from serai.ingress.access import Access, BadKeysFile
from serai.ingress.service import Ingress
from serai.ingress.settings import IngressSettings
from serai.runtime.nats_bus import NatsBus
from serai.runtime.reconnect_curve import SPAN_FEW_S
from serai.runtime.service import run_service, serve_metrics, watch_bus
from serai.runtime.settings import add_settings, read_settings, refuse
from serai.runtime.telemetry import set_up_logs, set_up_traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, IngressSettings)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(IngressSettings, arguments)
    set_up_logs("ingress", settings.log_level, json=settings.log_json)
    try:
        access = Access(settings.keys_file)
    except BadKeysFile as error:
        refuse(str(error))

    async def main(stop: asyncio.Event) -> None:
        bus = await NatsBus.connect(settings.nats, "ingress", reconnect_span_s=SPAN_FEW_S)
        tracing = set_up_traces("ingress")
        try:
            await bus.self_test(
                must_publish=[
                    *[INFERENCE.every, CANCEL.every, PROBE.every],
                    *[SNAPSHOT.every, DIGEST.every, OPINION.every],
                ],
                must_subscribe=[SESSION.every, STATUS.every, BEAT.every, DISCONNECTED.every],
                must_not_subscribe=[INFERENCE.every, "_INBOX_agent.>"],
            )
            async with serve_metrics(settings.metrics_host, settings.metrics_port), watch_bus(bus.closed):
                await Ingress(settings, bus, access, tracing).run(stop)
        finally:
            await bus.aclose()
            tracing.close()

    return run_service("ingress", main)


def main() -> int:
    parser = argparse.ArgumentParser(prog="serai ingress", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
