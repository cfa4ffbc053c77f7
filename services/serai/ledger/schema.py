"""The tables, step by step: each step is done once, in order, and never changed when it has been released. Pure text,
in the part of SQL that SQLite and PostgreSQL have in common but for the names of types."""

from __future__ import annotations

from msgspec.structs import astuple

from serai.contracts.usage import UsageRecord

_TEXT, _INTEGER, _REAL, _FLAG = "TEXT", "{integer}", "{real}", "INTEGER"

COLUMNS: dict[str, str] = {
    "id": "TEXT PRIMARY KEY",
    "started": f"{_TEXT} NOT NULL",
    "outcome": f"{_TEXT} NOT NULL",
    "status": f"{_INTEGER} NOT NULL",
    "endpoint": f"{_TEXT} NOT NULL",
    "model": f"{_TEXT} NOT NULL",
    "model_asked": f"{_TEXT} NOT NULL",
    "request_id": f"{_TEXT} NOT NULL",
    "project": f"{_TEXT} NOT NULL",
    "key": f"{_TEXT} NOT NULL",
    "tracked": f"{_FLAG} NOT NULL",
    "error_code": f"{_TEXT} NOT NULL",
    "stream": f"{_FLAG} NOT NULL",
    "queued_s": f"{_REAL} NOT NULL",
    "ttft_s": _REAL,
    "duration_s": f"{_REAL} NOT NULL",
    "attempts": f"{_INTEGER} NOT NULL",
    "resumed": f"{_INTEGER} NOT NULL",
    "sessions": f"{_TEXT} NOT NULL",
    "provider": f"{_TEXT} NOT NULL",
    "site": f"{_TEXT} NOT NULL",
    "engine": f"{_TEXT} NOT NULL",
    "gpu": f"{_TEXT} NOT NULL",
    "gpus": f"{_INTEGER} NOT NULL",
    "gpu_seconds": f"{_REAL} NOT NULL",
    "energy_j": f"{_REAL} NOT NULL",
    "prompt_tokens": f"{_INTEGER} NOT NULL",
    "cached_tokens": f"{_INTEGER} NOT NULL",
    "output_tokens": f"{_INTEGER} NOT NULL",
    "tokens_estimated": f"{_FLAG} NOT NULL",
}
"""One for each field of a record, in its order."""

_LATER = {"energy_j"}
"""Those that the first step does not make."""
_FIRST = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items() if name not in _LATER)

STEPS: tuple[tuple[str, ...], ...] = (
    (
        f"CREATE TABLE usage_records ({_FIRST})",
        "CREATE INDEX usage_records_by_start ON usage_records (started)",
        "CREATE INDEX usage_records_by_project ON usage_records (project, started)",
    ),
    (f"ALTER TABLE usage_records ADD COLUMN energy_j {_REAL} NOT NULL DEFAULT 0",),
)


def row(record: UsageRecord) -> tuple[object, ...]:
    """The values of `COLUMNS`, in types that databases take as they are."""
    values = list(astuple(record))
    values[_SESSIONS] = " ".join(values[_SESSIONS])
    values[_OUTCOME] = values[_OUTCOME].value
    for place in _FLAGS:
        values[place] = int(values[place])
    for place in _TEXTS:
        if "\x00" in values[place]:
            values[place] = values[place].replace("\x00", "\ufffd")  # PostgreSQL takes no NUL.
    return tuple(values)


_PLACES = {name: place for place, name in enumerate(COLUMNS)}
_SESSIONS, _OUTCOME = _PLACES["sessions"], _PLACES["outcome"]
_FLAGS = [place for name, place in _PLACES.items() if COLUMNS[name].startswith(_FLAG)]
_TEXTS = [place for name, place in _PLACES.items() if COLUMNS[name].startswith(_TEXT)]
