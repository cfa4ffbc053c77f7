"""Decides which model runs on which GPUs of the site's pool agents, from what is asked of each, and has it carried out.

docs/operating.md, docs/placement.md.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from serai.contracts.subjects import (
    ASSIGN,
    BEAT,
    DISCONNECTED,
    INFERENCE,
    LAUNCHER_SCALE,
    MACRO_WISH,
    PLACEMENT_APPLY,
    PLACEMENT_BUCKET,
    PLACEMENT_EXPLAIN,
    PLACEMENT_KNOCK,
    PLACEMENT_STARTABLE,
    POOL,
    POOLS_BUCKET,
    SESSION,
    STATUS,
    USAGE_DEMAND,
)
from serai.placer.launchers.base import Launcher
from serai.placer.launchers.kubernetes import KubernetesLauncher
from serai.placer.launchers.slurm import SlurmLauncher
from serai.placer.placement_file import PlacementFile, read_placement
from serai.placer.service import Placer
from serai.placer.settings import PlacerSettings
from serai.runtime.fields import BadInput
from serai.runtime.nats_bus import NatsBus
from serai.runtime.reconnect_curve import SPAN_FEW_S
from serai.runtime.service import run_service, serve_metrics, watch_bus
from serai.runtime.settings import add_settings, read_settings, refuse
from serai.runtime.telemetry import set_up_logs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, PlacerSettings)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(PlacerSettings, arguments)
    read_file = file_reader(settings.placement_file)
    try:
        read_file()
    except BadInput as error:
        refuse(str(error))
    set_up_logs("placer", settings.log_level, json=settings.log_json)

    async def main(stop: asyncio.Event) -> None:
        bus = await NatsBus.connect(settings.nats, "placer", reconnect_span_s=SPAN_FEW_S)
        try:
            await _self_test(bus, settings)
            placement, pools = bus.bucket(PLACEMENT_BUCKET), bus.bucket(POOLS_BUCKET)
            async with serve_metrics(settings.metrics_host, settings.metrics_port), watch_bus(bus.closed):
                launchers: dict[str, Launcher] = {
                    "slurm": SlurmLauncher(bus, settings.site),
                    "kubernetes": KubernetesLauncher(settings.kubectl),
                }
                await Placer(settings, read_file, bus, placement, pools, launchers).run(stop)
        finally:
            await bus.aclose()

    return run_service("placer", main)


def file_reader(path: Path) -> Callable[[], PlacementFile]:
    """Reads the file when it has changed; else gives what was read last. Raises BadInput."""
    last: tuple[object, PlacementFile] | None = None

    def read() -> PlacementFile:
        nonlocal last
        try:
            facts = path.stat()
            stamp = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if last is None or last[0] != stamp:
                last = (stamp, read_placement(path.read_text(), str(path)))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise BadInput(str(path), f"cannot be read: {why}", "name a text file") from error
        return last[1]

    return read


async def _self_test(bus: NatsBus, settings: PlacerSettings) -> None:
    buckets = (PLACEMENT_BUCKET, POOLS_BUCKET)
    asked = (PLACEMENT_EXPLAIN, PLACEMENT_APPLY, PLACEMENT_KNOCK, MACRO_WISH)
    own = [subject.of_site(settings.site) for subject in asked]
    await bus.self_test(
        must_publish=[
            *["_INBOX_tools.self-test", ASSIGN.every, USAGE_DEMAND.of_site(settings.site)],
            *[LAUNCHER_SCALE.of_site(settings.site), PLACEMENT_STARTABLE.of_site(settings.site)],
            *[f"$KV.{bucket}.*" for bucket in buckets],
            *[f"$JS.API.STREAM.MSG.GET.KV_{bucket}" for bucket in buckets],
        ],
        must_subscribe=[SESSION.every, STATUS.every, BEAT.of_site(settings.site), DISCONNECTED.every, POOL.every, *own],
        must_not_subscribe=[INFERENCE.every, "_INBOX_ingress.>"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="serai placer", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
