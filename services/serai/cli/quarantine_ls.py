"""Lists the hosts of a site that should get no new jobs: engines died there twice, or a GPU is broken.

Judged from the session records of the last day (docs/operating.md); the launcher excludes the same hosts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

import orjson

from serai.cli.registry_reader import DONE, Reader, add_reader_arguments, run_reader
from serai.runtime.quarantine_list import quarantined


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reader_arguments(parser)
    parser.add_argument("--names", action="store_true", help="only names, with commas between: for sbatch --exclude")


def run(arguments: argparse.Namespace) -> int:
    async def main(reader: Reader) -> int:
        found = quarantined(reader.copy.replica.records(), reader.settings.site, time.time())
        if arguments.json:
            print(orjson.dumps([{**asdict(one), "until": one.until} for one in found]).decode())
        elif arguments.names:
            print(",".join([one.host for one in found]))
        elif not found:
            print("no host is in quarantine")
        else:
            width = max(len(one.host) for one in found)
            for one in found:
                print(f"{one.host:<{width}}  until {one.until}  {one.reason}")
        return DONE

    return run_reader("registry quarantine ls", arguments, main)
