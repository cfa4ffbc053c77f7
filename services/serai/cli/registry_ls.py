"""Lists the sessions of all sites that this site's registry knows, and why those that get no requests get none."""

from __future__ import annotations

import argparse
import sys
import time

import orjson

from serai.cli.registry_reader import (
    DONE,
    Reader,
    SeenSession,
    add_reader_arguments,
    age_text,
    knowledge_text,
    run_reader,
    seen,
)
from serai.runtime.session_state import SessionState

_HEADS = ("SESSION", "MODEL", "STATE", "SITE", "ALLOCATION", "HEARD", "IN FLIGHT", "WHY NOT ROUTED")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reader_arguments(parser)
    parser.add_argument("--model", help="only sessions of this model")
    parser.add_argument("--site", dest="of_site", metavar="SITE", help="only sessions of this site")
    parser.add_argument("--state", choices=[str(state) for state in SessionState], help="only sessions in this state")
    parser.add_argument("--all", action="store_true", help="those that left, too")


def run(arguments: argparse.Namespace) -> int:
    async def main(reader: Reader) -> int:
        await reader.listen()
        now = time.monotonic()
        rows = [
            row for record in reader.copy.replica.records() if _asked(row := seen(reader.copy, record, now), arguments)
        ]
        if arguments.json:
            age_s = reader.copy.knowledge_age_s(now)
            print(orjson.dumps({"sessions": rows, "knowledge_age_s": age_s}, option=orjson.OPT_INDENT_2).decode())
            return DONE
        print(_table(rows))
        sys.stderr.write(f"{len(rows)} sessions; {knowledge_text(reader.copy, now)}\n")
        return DONE

    return run_reader("registry ls", arguments, main)


def _asked(row: SeenSession, arguments: argparse.Namespace) -> bool:
    if row.state is SessionState.LEFT and not arguments.all and arguments.state != SessionState.LEFT:
        return False
    wanted = ((arguments.model, row.model), (arguments.of_site, row.site), (arguments.state, row.state))
    return all(asked is None or asked == there for asked, there in wanted)


def _table(rows: list[SeenSession]) -> str:
    lines = [_HEADS, *[_cells(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(row: SeenSession) -> tuple[str, ...]:
    return (
        row.session,
        row.model,
        row.state,
        row.site,
        row.allocation or "–",
        age_text(row.age_s),
        "–" if row.in_flight is None else str(row.in_flight),
        row.why_not_routed or "",
    )
