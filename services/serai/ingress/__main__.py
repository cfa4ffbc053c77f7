"""The gateway: one address with the APIs of OpenAI and Anthropic, from which requests go to the sessions of a model.

Who may ask is said by --keys-file, an `oidc` section in the file of --config, or --anonymous. SIGHUP reads the files
again, SIGTERM lets running requests finish. docs/configuration.md, docs/api.md.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from serai.contracts.subjects import (
    ADMISSION,
    BEAT,
    BUDGETS_BUCKET,
    CANCEL,
    DIGEST,
    DISCONNECTED,
    INFERENCE,
    LIMITS,
    OPINION,
    PROBE,
    SESSION,
    SNAPSHOT,
    STATUS,
    USAGE,
    USAGE_STREAM,
)
from serai.ingress.access import Access, BadKeysFile
from serai.ingress.configuration_file import BadConfiguration, Configured
from serai.ingress.service import Ingress
from serai.ingress.settings import IngressSettings
from serai.ingress.usage_sender import UsageSender
from serai.ingress.usage_spool import spool_in
from serai.ingress.worker_place import WorkerPlace
from serai.ingress.workers import Plan, hand_over, place_of
from serai.runtime.nats_bus import NatsBus
from serai.runtime.reconnect_curve import SPAN_FEW_S
from serai.runtime.service import run_service, watch_bus
from serai.runtime.settings import add_settings, refuse
from serai.runtime.telemetry import set_up_logs, set_up_traces

ACCOUNTS_TIMEOUT_S = 2.0
"""A request that needs a budget waits no longer for its account."""
STOP_SPARE_S = 5.0
"""What a worker may take to stop beside what its requests may take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, IngressSettings)


def run(arguments: argparse.Namespace) -> int:
    try:
        configured = Configured(arguments)
        settings = configured.settings
        set_up_logs("ingress", settings.log_level, json=settings.log_json)
        access = Access(settings.keys_file, anonymous=settings.anonymous)
    except (BadConfiguration, BadKeysFile) as error:
        refuse(str(error))
    taken = place_of()
    if taken is None and settings.workers > 1:
        hand_over(_plan(settings))
    place = WorkerPlace.take(taken) if taken is not None else None

    async def main(stop: asyncio.Event) -> None:
        bus = await NatsBus.connect(settings.nats, "ingress", reconnect_span_s=SPAN_FEW_S)
        tracing = set_up_traces("ingress")
        try:
            await bus.self_test(
                must_publish=[
                    *[INFERENCE.every, CANCEL.every, PROBE.every, ADMISSION.every],
                    *[SNAPSHOT.every, DIGEST.every, OPINION.every, USAGE.of_site(settings.site)],
                    *[LIMITS.every, f"$KV.{BUDGETS_BUCKET}.*"],
                ],
                must_subscribe=[SESSION.every, STATUS.every, BEAT.every, DISCONNECTED.every, LIMITS.every],
                must_not_subscribe=[INFERENCE.every, "_INBOX_agent.>"],
            )
            async with watch_bus(bus.closed):
                with spool_in(settings.usage_spool) as spool:
                    usage = UsageSender(spool, bus.stream(USAGE_STREAM, USAGE.of_site(settings.site)).publish)
                    accounts = bus.bucket(BUDGETS_BUCKET, timeout_s=ACCOUNTS_TIMEOUT_S)
                    ingress = Ingress(settings, bus, access, tracing, place, usage, configured, accounts)
                    if place is None:
                        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, ingress.reload)
                    await ingress.run(stop)
        finally:
            await bus.aclose()
            tracing.close()

    return run_service("ingress", main)


def _plan(settings: IngressSettings) -> Plan:
    """A worker is started by the command that started this process."""
    return Plan(
        workers=settings.workers,
        host=settings.host,
        port=settings.port,
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        stop_s=settings.drain_delay_s + settings.shutdown_s + STOP_SPARE_S,
        log_json=settings.log_json or not sys.stderr.isatty(),
        command=[sys.executable, *sys.orig_argv[1:]],
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="serai ingress", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
