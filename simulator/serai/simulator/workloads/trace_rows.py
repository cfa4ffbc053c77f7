"""Single lines of recorded traces, read strictly: a value that cannot be right is refused with file, line and field."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from serai.runtime.fields import BadInput

NS = 1_000_000_000
_TOKENS_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `blocks` are keys of `block_tokens` tokens each, chained, as the trace has them."""

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 16
    model: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file with named fields."""

    file: Path
    number: int
    fields: Mapping[str, Any]

    def bad(self, field: str, problem: str, remedy: str) -> BadInput:
        """An error about `field` of this line."""
        return BadInput(f"{self.file}, line {self.number}, field `{field}`", problem, remedy)

    def value(self, field: str) -> Any:
        """What stands in `field`."""
        value = self.fields.get(field)
        if value is None or value == "":
            raise self.bad(field, "is missing", "mend the line or take it out")
        return value

    def tokens(self, field: str) -> int:
        """A length: a whole number of at least 1."""
        number = self._number(field)
        if number != number.to_integral_value() or not 1 <= number <= _TOKENS_MAX:
            raise self.bad(field, f"is {number}", f"a length is a whole number from 1 to {_TOKENS_MAX:,}")
        return int(number)

    def time_ns(self, field: str, unit_ns: int = NS) -> int:
        """A time: a number of `unit_ns`, or a date and time in ISO 8601 (UTC without a zone), to the nanosecond."""
        value = self.value(field)
        if isinstance(value, str) and value[:4].isdigit() and value[4:5] == "-":
            return self._date_ns(field, value)
        at_ns = int(self._number(field) * unit_ns)
        if at_ns < 0:
            raise self.bad(field, f"is {value}", "a time is 0 or more")
        return at_ns

    def whole_numbers(self, field: str) -> tuple[int, ...]:
        """A list of whole numbers, 0 or more."""
        values = self.value(field)
        if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
            raise self.bad(field, "is no list of whole numbers", "give [0, 1, …]")
        return tuple(values)

    def text(self, field: str | None) -> str:
        """Text, "" where there is none."""
        value = None if field is None else self.fields.get(field)
        return "" if value is None else str(value)

    def _number(self, field: str) -> Decimal:
        value = self.value(field)
        try:
            number = Decimal(str(value).strip()) if not isinstance(value, bool) else Decimal("NaN")
        except InvalidOperation:
            number = Decimal("NaN")
        if not number.is_finite():
            raise self.bad(field, f"is {json.dumps(value, ensure_ascii=False)}", "write a number")
        return number

    def _date_ns(self, field: str, value: str) -> int:
        # Digits of a second are counted apart: datetime ends at microseconds.
        head, point, tail = value.strip().partition(".")
        digits = tail[: len(tail) - len(tail.lstrip("0123456789"))]
        try:
            moment = datetime.fromisoformat(head + tail[len(digits) :])
        except ValueError as error:
            raise self.bad(field, f"is `{value}`", "write seconds, or a time like 2023-11-16 18:17:03.97") from error
        if point and not digits:
            raise self.bad(field, f"is `{value}`", "write digits after the point")
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return round(moment.timestamp()) * NS + int(digits[:9].ljust(9, "0"))


def csv_lines(file: Path, needed: tuple[str, ...]) -> Iterator[Line]:
    """The lines of a CSV file with a header that has at least the columns `needed`."""
    with _opened(file) as text:
        reader = csv.DictReader(text, strict=True)
        try:
            _need(file, needed, reader.fieldnames or ())
            for fields in reader:
                if None in fields:
                    raise BadInput(f"{file}, line {reader.line_num}", "has more values than columns", "mend the line")
                yield Line(file, reader.line_num, fields)
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadInput(f"{file}, line {reader.line_num + 1}", f"is no CSV ({error})", "mend the line") from error


def jsonl_lines(file: Path, needed: tuple[str, ...]) -> Iterator[Line]:
    """The lines of a file with one JSON object a line; empty lines are passed over."""
    number = 0
    with _opened(file) as text:
        try:
            for number, line in enumerate(text, start=1):
                if line.strip():
                    yield Line(file, number, _object(file, number, line, needed))
        except UnicodeDecodeError as error:
            raise BadInput(f"{file}, line {number + 1}", "is no UTF-8 text", "name a text file") from error


def lines(file: Path, needed: tuple[str, ...] = ()) -> Iterator[Line]:
    """The lines of a file, by its ending: .csv, else JSON lines."""
    return csv_lines(file, needed) if file.suffix.lower() == ".csv" else jsonl_lines(file, needed)


def in_order(rows: Iterator[tuple[Line, str, TraceRow]]) -> Iterator[TraceRow]:
    """The rows, refusing one that is earlier than the one before it (equal times are in order) and a file without any.
    Each comes with its line and the field of its time."""
    before: int | None = None
    for line, field, row in rows:
        if before is not None and row.at_ns < before:
            raise line.bad(field, "is earlier than the line before", "sort the file by time")
        before = row.at_ns
        yield row


def _opened(file: Path) -> Any:
    try:
        return file.open(encoding="utf-8", newline="")
    except OSError as error:
        raise BadInput(str(file), f"cannot be read ({error.strerror})", "check the name and the rights") from error


def _need(file: Path, needed: tuple[str, ...], present: Any) -> None:
    lacking = [name for name in needed if name not in present]
    if not present:
        raise BadInput(f"{file}, line 1", "the file is empty", "name a file with a header and requests")
    if lacking:
        raise BadInput(
            f"{file}, line 1, field `{lacking[0]}`",
            f"is not among the columns {', '.join(present)}",
            "check the format, or map the columns",
        )


def _object(file: Path, number: int, line: str, needed: tuple[str, ...]) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{file}, line {number}", f"is no JSON ({error})", "mend the line or take it out") from error
    if not isinstance(found, dict):
        raise BadInput(f"{file}, line {number}", "is no JSON object", "write {…} on each line")
    for name in needed:
        if name not in found:
            known = ", ".join(found) or "none"
            raise BadInput(
                f"{file}, line {number}, field `{name}`",
                f"is missing; there are: {known}",
                "check the format, or map the columns",
            )
    return found
