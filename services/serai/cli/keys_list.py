"""Lists API keys: whose they are, what they may do and until when. The keys themselves are nowhere."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime

import msgspec

from serai.cli.keys_file_flag import add_keys_file
from serai.ingress.access import BadKeysFile, StoredKey, read_keys

_HEADER = ("NAME", "PROJECT", "MODELS", "PROVIDERS", "EXPIRES", "LIMITS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_keys_file(parser)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")


def run(arguments: argparse.Namespace) -> int:
    try:
        keys = read_keys(arguments.keys_file)
    except BadKeysFile as error:
        sys.stderr.write(f"serai keys list: {error}\n")
        return 2
    if arguments.json:
        print(json.dumps([_shown(key) for key in keys], indent=2))
        return 0
    rows = [_HEADER, *[_row(key) for key in keys]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _shown(key: StoredKey) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(key)
    del fields["sha256"]
    return {"project": key.project} | fields


def _row(key: StoredKey) -> tuple[str, ...]:
    limits = {
        "rpm": key.requests_per_minute,
        "tpm": key.tokens_per_minute,
        "concurrent": key.concurrent_max,
        "budget": None if key.budget_micros is None else f"{key.budget_micros / 1e6:g}",
        "priority": key.priority,
    }
    return (
        key.name,
        key.project,
        "all" if key.models is None else ",".join(key.models) or "none",
        ",".join(key.providers) or "all",
        _expiry(key),
        " ".join(f"{name}={value}" for name, value in limits.items() if value is not None) or "-",
    )


def _expiry(key: StoredKey) -> str:
    if key.expires is None:
        return "never"
    over = " (over)" if key.expires <= datetime.now(UTC) else ""
    return f"{key.expires.astimezone(UTC):%Y-%m-%d %H:%M}Z{over}"
