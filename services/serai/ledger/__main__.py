"""The ledger of a site: takes usage records from NATS and keeps each once, in SQLite or PostgreSQL. docs/usage.md."""

from __future__ import annotations

import argparse
import asyncio

from serai.contracts.subjects import INFERENCE, USAGE, USAGE_CONSUMER, USAGE_DEMAND, USAGE_SPENT, USAGE_STREAM
from serai.ledger.service import Ledger
from serai.ledger.settings import LedgerSettings
from serai.ledger.sql_store import SqlStore, parsed_url
from serai.runtime.nats_bus import NatsBus
from serai.runtime.reconnect_curve import SPAN_FEW_S
from serai.runtime.service import run_service, serve_metrics, watch_bus
from serai.runtime.settings import add_settings, read_settings
from serai.runtime.telemetry import set_up_logs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, LedgerSettings)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(LedgerSettings, arguments)
    set_up_logs("ledger", settings.log_level, json=settings.log_json)

    async def main(stop: asyncio.Event) -> None:
        bus = await NatsBus.connect(settings.nats, "ledger", reconnect_span_s=SPAN_FEW_S)
        try:
            await bus.self_test(
                must_publish=[
                    *["_INBOX_ingress.self-test", f"$JS.ACK.{USAGE_STREAM}.{USAGE_CONSUMER}.>"],
                    *[f"$JS.API.STREAM.{what}.{USAGE_STREAM}" for what in ("INFO", "CREATE")],
                    *[
                        f"$JS.API.CONSUMER.{what}.{USAGE_STREAM}.{USAGE_CONSUMER}"
                        for what in ("INFO", "DURABLE.CREATE", "MSG.NEXT")
                    ],
                    *[f"$JS.ACK.{USAGE_STREAM}.{USAGE_CONSUMER}.>", "_INBOX_ingress.self-test"],
                ],
                must_subscribe=[USAGE_SPENT.of_site(settings.site), USAGE_DEMAND.of_site(settings.site)],
                must_not_subscribe=[INFERENCE.every, "_INBOX_ingress.>"],
            )
            stream = bus.stream(USAGE_STREAM, USAGE.of_site(settings.site))
            async with serve_metrics(settings.metrics_host, settings.metrics_port), watch_bus(bus.closed):
                await Ledger(settings, bus, stream, SqlStore(parsed_url(settings.url))).run(stop)
        finally:
            await bus.aclose()

    return run_service("ledger", main)


def main() -> int:
    parser = argparse.ArgumentParser(prog="serai ledger", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
