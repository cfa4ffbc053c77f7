"""Sums up what was used: requests, tokens and GPU-seconds, by project, model, provider, day or key.

Read from the ledger's database, of `serai up` unless --ledger names another. Days are days in UTC.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import orjson

from serai.ledger.settings import LEDGER_HELP, default_url
from serai.ledger.sql_store import GROUPS, BadLedgerUrl, SqlStore, StoreError, Usage, parsed_url
from serai.runtime.settings import refuse

NAMELESS = {"model": "(no model of ours)", "provider": "(no provider)"}
"""What was refused before a session had it."""
_NUMBERS = tuple(field.name for field in dataclasses.fields(Usage) if field.name != "name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", choices=tuple(GROUPS), default="project", help="one line for each (default: project)")
    parser.add_argument("--since", default="", metavar="WHEN", help="a date or ISO 8601 time; UTC unless it says more")
    parser.add_argument("--until", default="", metavar="WHEN", help="the same; this moment itself does not count")
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="how it is printed (default: table)"
    )
    parser.add_argument(
        "--ledger", default="", metavar="URL", help=f"where records are kept: {LEDGER_HELP} (SERAI_LEDGER_URL)"
    )
    parser.epilog = "Exit codes: 0 done, 1 the database does not answer, 2 wrong usage."


def run(arguments: argparse.Namespace) -> int:
    since, until = _moment("--since", arguments.since), _moment("--until", arguments.until)
    url = arguments.ledger or os.environ.get("SERAI_LEDGER_URL") or default_url()
    try:
        store = SqlStore(parsed_url(url), only_read=True)
    except BadLedgerUrl as error:
        refuse(f"--ledger: {error}")
    try:
        lines = store.usage(arguments.by, since, until)
    except StoreError as error:
        sys.stderr.write(f"serai usage: {error}; is `serai ledger` running, and is --ledger right?\n")
        return 1
    finally:
        store.close()
    match arguments.format:
        case "json":
            print(orjson.dumps([_named(arguments.by, line) for line in lines]).decode())
        case "csv":
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow([arguments.by, *_NUMBERS])
            writer.writerows([line.name, *[getattr(line, name) for name in _NUMBERS]] for line in lines)
        case _:
            _print_table(arguments.by, lines)
    return 0


def _named(by: str, line: Usage) -> dict[str, object]:
    return {by: line.name} | {name: getattr(line, name) for name in _NUMBERS}


def _print_table(by: str, lines: Sequence[Usage]) -> None:
    head = [by, "requests", "not complete", "prompt", "cached", "output", "GPU-seconds", "kWh"]
    rows = [
        [
            line.name.strip("/") or NAMELESS.get(by, "(nobody named)"),
            f"{line.requests:,}",
            f"{line.requests - line.complete:,}",
            f"{line.prompt_tokens:,}",
            f"{line.cached_tokens:,}",
            f"{line.output_tokens:,}" + ("~" if line.estimated else ""),
            f"{line.gpu_seconds:,.1f}",
            f"{line.energy_j / 3.6e6:,.4f}",
        ]
        for line in lines
    ]
    widths = [max(len(row[index]) for row in [head, *rows]) for index in range(len(head))]
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0]), *[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]]
        print("  ".join(cells).rstrip())
    if any(line.estimated for line in lines):
        print("~ some of the tokens are guessed: streams that ended before their engine told them")


def _moment(flag: str, text: str) -> str:
    """As records have it, so that texts can be compared."""
    if not text:
        return ""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        refuse(f"{flag} {text[:40]!r}: must be a date like 2026-11-30 or a time like 2026-11-30T12:00:00Z")
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
