"""Removes an API key. Running ingresses stop taking it within two seconds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from serai.cli.keys_file_flag import add_keys_file
from serai.ingress.access import BadKeysFile, read_keys, write_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="whose key, as `serai keys list` names it")
    add_keys_file(parser)


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.keys_file
    try:
        keys = read_keys(path)
        kept = [key for key in keys if key.name != arguments.name]
        if len(kept) == len(keys):
            sys.stderr.write(f"serai keys remove: {path} has no key named {arguments.name!r}\n")
            return 2
        write_keys(path, kept)
    except BadKeysFile as error:
        sys.stderr.write(f"serai keys remove: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"serai keys remove: cannot write the keys file {path}: {error.strerror}\n")
        return 2
    return 0
