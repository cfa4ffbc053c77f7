"""Makes an API key and stores its hash. The key is printed once, on standard output; nobody can read it again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from serai.ingress.access import BadKeysFile, StoredKey, hashed, new_key, read_keys, write_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="whose key it is; shown in lists and logs")
    parser.add_argument("--keys-file", type=Path, required=True, help="made when it does not exist")


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.keys_file
    try:
        keys = read_keys(path) if path.exists() else []
        if any(key.name == arguments.name for key in keys):
            sys.stderr.write(f"serai keys add: {path} has a key named {arguments.name!r}; remove it first\n")
            return 2
        secret = new_key()
        write_keys(path, [*keys, StoredKey(arguments.name, hashed(secret))])
    except (BadKeysFile, OSError) as error:
        sys.stderr.write(f"serai keys add: {error}\n")
        return 2
    print(secret)
    return 0
