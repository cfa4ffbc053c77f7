"""Keeps what a site file names served: it submits Slurm jobs, lets successors take over in time, and says why.

docs/launcher.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import replace

from serai.contracts.launcher import LauncherWord
from serai.contracts.subjects import (
    BEAT,
    DISCONNECTED,
    DRAIN,
    ENDED,
    INFERENCE,
    LAUNCHER_EXPLAIN,
    LAUNCHER_SCALE,
    LAUNCHER_WAKE,
    LAUNCHERS_BUCKET,
    MACRO_WISH,
    POOL,
    SESSION,
    STATUS,
)
from serai.launcher.deployments import Deployment
from serai.launcher.service import Launcher
from serai.launcher.settings import LauncherSettings
from serai.launcher.site import Site
from serai.launcher.site_deployments import deployments_of
from serai.launcher.site_file import read_site
from serai.launcher.slurm_commands import SlurmCommands
from serai.launcher.words import word_text
from serai.runtime.fields import BadInput
from serai.runtime.nats_bus import NatsBus
from serai.runtime.reconnect_curve import SPAN_FEW_S
from serai.runtime.service import ServiceFailure, run_service, serve_metrics, watch_bus
from serai.runtime.settings import add_settings, read_settings, refuse
from serai.runtime.telemetry import set_up_logs

PATIENCE_S = 60.0
"""How long `--dry-run` waits for the whole picture."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, LauncherSettings)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(LauncherSettings, arguments)
    try:
        site = read_site(settings.site_file)
        deployments = deployments_of(site, settings.counts, time.time())
    except BadInput as error:
        refuse(str(error))
    settings = replace(settings, site=settings.site or site.name, nats_url=nats_url_of(arguments, settings, site))
    set_up_logs("launcher", settings.log_level, json=settings.log_json)

    async def main(stop: asyncio.Event) -> None:
        bus = await NatsBus.connect(settings.nats, "launcher", reconnect_span_s=SPAN_FEW_S)
        try:
            await _self_test(bus, settings)
            launcher = _launcher(bus, settings, site, deployments)
            async with watch_bus(bus.closed):
                if settings.dry_run:
                    _show(await launcher.rehearse(PATIENCE_S))
                    return
                async with serve_metrics(settings.metrics_host, settings.metrics_port):
                    await launcher.run(stop)
        finally:
            await bus.aclose()

    return run_service("launcher", main)


def nats_url_of(arguments: argparse.Namespace, settings: LauncherSettings, site: Site) -> str:
    """The site file's, unless another is given."""
    return (
        settings.nats_url
        if arguments.nats_url or os.environ.get("SERAI_NATS_URL")
        else site.nats.tools_url or site.nats.url
    )


def _launcher(bus: NatsBus, settings: LauncherSettings, site: Site, deployments: list[Deployment]) -> Launcher:
    slurm = SlurmCommands(site.commands)
    keys = bus.bucket(LAUNCHERS_BUCKET)
    return Launcher(settings, deployments, bus, slurm, keys, site.commands.query_every_s, calendar=slurm)


async def _self_test(bus: NatsBus, settings: LauncherSettings) -> None:
    own = [subject.of_site(settings.site) for subject in (LAUNCHER_EXPLAIN, LAUNCHER_WAKE, LAUNCHER_SCALE, MACRO_WISH)]
    await bus.self_test(
        must_publish=[
            *["_INBOX_tools.self-test", DRAIN.every, ENDED.of_site(settings.site)],
            *[f"$KV.{LAUNCHERS_BUCKET}.*", f"$JS.API.STREAM.MSG.GET.KV_{LAUNCHERS_BUCKET}"],
        ],
        must_subscribe=[SESSION.every, STATUS.every, BEAT.of_site(settings.site), DISCONNECTED.every, POOL.every, *own],
        must_not_subscribe=[INFERENCE.every, "_INBOX_ingress.>"],
    )


def _show(word: LauncherWord) -> None:
    if word.blind:
        raise ServiceFailure(f"not within {PATIENCE_S:g} s: {word.blind}")
    print(word_text(word))  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="serai launcher", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
