"""What a benchmark hands out: one JSON object, or a table; raw results as text in a folder."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serai.bench.machine import describe_machine, folder_name

_BEGAN_AT_S = time.monotonic()


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one benchmark. `figures` are flat, named with their unit; `raw` is what they were made from."""

    name: str
    config: Mapping[str, Any]
    figures: Mapping[str, float]
    table: Sequence[Sequence[str]]
    notes: Sequence[str]
    raw: Any


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every benchmark has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    parser.add_argument("--quick", action="store_true", help="a minute or less, with noisier figures")
    parser.add_argument("--raw", type=folder, metavar="DIR", help="keep raw results as text in DIR/<machine>-<date>/")


def folder(text: str) -> Path:
    """`type=` of a flag that names a folder for results: made now, and not after an hour of work. Raises what argparse
    tells."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: this user may not write there")
    return path


def hand_out(report: Report, arguments: argparse.Namespace) -> None:
    """Write the raw results if asked to, then print the report as JSON or as a table."""
    machine = describe_machine()
    raw_file = _write_raw(report, machine, arguments.raw) if arguments.raw is not None else None
    if arguments.json:
        print(json.dumps(_json_object(report, machine, raw_file)))
        return
    print(f"{report.name} on {machine['cores']} cores of {machine['cpu']}")
    print(_columns(report.table))
    for note in report.notes:
        print(f"note: {note}")
    if raw_file is not None:
        print(f"raw results: {raw_file}")


def say(text: str) -> None:
    """A line of progress, with the seconds since the benchmark began."""
    print(f"[{time.monotonic() - _BEGAN_AT_S:6.1f} s] {text}", file=sys.stderr, flush=True)


def rounded(value: float) -> float:
    """Four significant digits: more would only be noise."""
    return value if value == 0 or not math.isfinite(value) else round(value, 3 - math.floor(math.log10(abs(value))))


def _json_object(report: Report, machine: dict[str, object], raw_file: Path | None) -> dict[str, Any]:
    # A figure without a value is left out: JSON has no NaN, and null is no number.
    figures = {name: rounded(value) for name, value in report.figures.items() if math.isfinite(value)}
    return {
        "name": report.name,
        "machine": machine,
        "config": {**report.config, "notes": list(report.notes)},
        "figures": figures,
        "raw": None if raw_file is None else str(raw_file),
    }


def _write_raw(report: Report, machine: dict[str, object], folder: Path) -> Path:
    place = folder / folder_name(machine)
    place.mkdir(parents=True, exist_ok=True)
    clock = str(machine["date"])[11:19].replace(":", "")
    file = place / f"{report.name.replace(' ', '-')}-{clock}.json"
    file.write_text(json.dumps({**_json_object(report, machine, file), "samples": report.raw}, indent=1) + "\n")
    return file


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]]
        )
        for row in rows
    )
