"""Outcomes and curves as CSV and JSON. Times stay integers in nanoseconds; what did not happen is empty, or null."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from serai.simulator.goodput import GoodputScan
from serai.simulator.outcomes import Outcome, Outcomes, in_columns
from serai.simulator.reports.pictures import PolicyCurve

_FIELDS = tuple(field.name for field in fields(Outcome))


def write_outcomes_csv(file: Path, outcomes: Outcomes | Iterable[Outcome]) -> None:
    """A line a request."""
    table = in_columns(outcomes)
    with _opened(file) as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_FIELDS)
        for outcome in table:
            row = (getattr(outcome, name) for name in _FIELDS)
            writer.writerow([int(value) if isinstance(value, bool) else value for value in row])


def write_outcomes_json(file: Path, outcomes: Outcomes | Iterable[Outcome]) -> None:
    """One object, a list a field."""
    table = list(in_columns(outcomes))
    write_json(file, {name: [getattr(outcome, name) for outcome in table] for name in _FIELDS})


def write_curves_csv(file: Path, curves: Sequence[PolicyCurve]) -> None:
    """A line for each policy, definition and rate."""
    with _opened(file) as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["policy", "definition", "rate_per_s", "attainment", "spread", "seeds"])
        for curve in curves:
            for point in curve.curve:
                writer.writerow(
                    [
                        curve.policy,
                        curve.definition,
                        f"{point.rate_per_s:g}",
                        f"{point.attainment:.6f}",
                        f"{point.spread:.6f}",
                        len(point.by_seed),
                    ]
                )


def write_table_csv(file: Path, rows: Iterable[Sequence[str]]) -> None:
    """A table as it is shown, the head first."""
    with _opened(file) as text:
        csv.writer(text, lineterminator="\n").writerows(rows)


def curves_object(curves: Sequence[PolicyCurve]) -> list[dict[str, Any]]:
    """The same, for JSON, with every seed's value."""
    return [
        {
            "policy": curve.policy,
            "definition": str(curve.definition),
            "points": [
                {"rate_per_s": point.rate_per_s, "attainment": point.attainment, "by_seed": list(point.by_seed)}
                for point in curve.curve
            ],
        }
        for curve in curves
    ]


def scan_object(scan: GoodputScan) -> dict[str, Any]:
    """A scan's figures, for JSON; its curve is told once, by `curves_object`."""
    return {
        "level": scan.level,
        "highest_held_per_s": scan.highest_held_per_s,
        "lowest_failing_per_s": scan.lowest_failing_per_s,
        "unbroken_per_s": scan.unbroken_per_s,
        "monotone": scan.monotone,
        "open_ended": scan.open_ended,
        "highest_held_by_seed": list(scan.highest_held_by_seed),
    }


def write_json(file: Path, value: Any) -> None:
    """Any of our results. JSON has no NaN and no infinity: they become null."""
    with _opened(file) as text:
        json.dump(_plain(value), text, ensure_ascii=False, indent=1)
        text.write("\n")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _opened(file: Path) -> Any:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.open("w", encoding="utf-8", newline="")
