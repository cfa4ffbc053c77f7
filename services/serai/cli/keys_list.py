"""Lists the names of API keys, one a line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from serai.ingress.access import BadKeysFile, read_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys-file", type=Path, required=True)


def run(arguments: argparse.Namespace) -> int:
    try:
        for key in read_keys(arguments.keys_file):
            print(key.name)
    except BadKeysFile as error:
        sys.stderr.write(f"serai keys list: {error}\n")
        return 2
    return 0
