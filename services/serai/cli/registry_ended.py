"""Tells the registry that the batch system says an allocation is over: all its sessions have left.

For the batch system's own hook (a Slurm epilog). The registry takes it as positive evidence and waits for nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import orjson

from serai.cli.registry_reader import DONE, NO_ANSWER, ReaderSettings, add_reader_arguments
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.registry import AllocationEnded
from serai.contracts.subjects import ENDED
from serai.runtime.bus import BusError, NoResponders
from serai.runtime.nats_bus import NatsBus
from serai.runtime.settings import read_settings, refuse
from serai.runtime.telemetry import set_up_logs

TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reader_arguments(
        parser, "Exit codes: 0 the registry took it, 1 NATS or the registry does not answer, 2 wrong usage."
    )
    parser.add_argument(
        "allocation",
        metavar="ALLOCATION",
        help="as agents name it and `serai registry ls` shows it: slurm-JOB for a Slurm job",
    )
    parser.add_argument("--reason", default="", help="why, for people")
    parser.add_argument(
        "--run", type=int, metavar="N", help="only runs up to this restart count are over (default: all)"
    )


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(ReaderSettings, arguments)
    set_up_logs("tools", "error")
    if not arguments.allocation:
        refuse("ALLOCATION must not be empty: it would name every session without one")
    if arguments.run is not None and arguments.run < 0:
        refuse(f"--run {arguments.run}: must not be negative")
    ended = AllocationEnded(settings.site, arguments.allocation, arguments.reason, arguments.run)
    try:
        taken = asyncio.run(tell(settings, ended))
    except NoResponders:
        sys.stderr.write(f"serai registry ended: the registry of site {settings.site!r} does not answer\n")
        return NO_ANSWER
    except (BusError, MalformedMessage) as error:
        sys.stderr.write(f"serai registry ended: {error}\n")
        return NO_ANSWER
    if arguments.json:
        print(orjson.dumps(taken).decode())
    else:
        runs = "" if taken.restart_count is None else f", runs up to {taken.restart_count}"
        print(f"site {taken.site}: allocation {taken.allocation} is over{runs}")
    return DONE


async def tell(settings: ReaderSettings, ended: AllocationEnded) -> AllocationEnded:
    """The registry's acknowledgement. Raises BusError or MalformedMessage."""
    bus = await NatsBus.connect(settings.nats, "tools")
    try:
        answer = await bus.request(ENDED.of_site(ended.site), encode(ended), TIMEOUT_S)
        return decode(AllocationEnded, answer.data)
    finally:
        await bus.aclose()
