"""Shows all that is known of one session: its record, its last status, and how this reader sees it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

from serai.cli.registry_reader import DONE, Reader, add_reader_arguments, run_reader, seen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reader_arguments(parser)
    parser.add_argument("session", metavar="SESSION", help="a session's id, or a beginning that only one has")


def run(arguments: argparse.Namespace) -> int:
    async def main(reader: Reader) -> int:
        record = reader.found(arguments.session)
        await reader.listen()
        record = reader.found(record.session)
        shown: dict[str, Any] = {
            "seen": msgspec.to_builtins(seen(reader.copy, record, time.monotonic())),
            "record": msgspec.to_builtins(record) | {"lifecycle": record.lifecycle.name},
            "status": msgspec.to_builtins(reader.copy.replica.status(record.session)),
        }
        if arguments.json:
            print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
        else:
            print("\n".join(_lines(shown)))
        return DONE

    return run_reader("registry show", arguments, main)


def _lines(value: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, one in value.items():
        if isinstance(one, dict) and one:
            yield f"{indent}{name}"
            yield from _lines(one, indent + "  ")
        elif isinstance(one, list) and one:
            for number, item in enumerate(one):
                yield f"{indent}{name}[{number}]"
                yield from _lines(item, indent + "  ") if isinstance(item, dict) else [f"{indent}  {item}"]
        else:
            text = "–" if one in (None, "", {}, []) else one
            yield f"{indent}{name:<{max(1, 26 - len(indent))}} {text}"
