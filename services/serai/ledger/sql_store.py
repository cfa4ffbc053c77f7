"""The records in SQL. The only module that knows SQLite or PostgreSQL; both are spoken to by Python's DB-API.

Blocking: the service calls it in a thread of its own, tools call it as it is. Whatever goes wrong is a StoreError, and
the next call connects anew.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serai.contracts.usage import DemandRequest, LengthQuantiles, ModelUse, Spent, UsageRecord
from serai.ledger.demand import ASKED_MODEL, QUANTILES, counted, demand_conditions, moment_column
from serai.ledger.schema import COLUMNS, STEPS, row

BUSY_S = 5.0
_POSTGRES_ALONE = "SELECT pg_advisory_xact_lock(7355608)"
FORGOTTEN_AT_ONCE = 5_000

GROUPS = {
    "project": "project",
    "model": "model",
    "provider": "provider",
    "day": "substr(started, 1, 10)",
    "key": "project || '/' || key",
}
"""What usage can be summed up by."""
_OUTCOMES = ("complete", "cancelled", "truncated", "failed", "refused")


class StoreError(Exception):
    """The database could not do it. The text is one line."""


class BadLedgerUrl(ValueError):
    """The text says what was expected."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One line of a report."""

    name: str
    requests: int
    complete: int
    cancelled: int
    truncated: int
    failed: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    estimated: int
    """Requests whose tokens are guessed."""
    gpu_seconds: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where the records are, and how that place is spoken to."""

    shown: str
    """For people: without a password."""
    connect: Callable[[bool], Any]
    """Takes whether only to read."""
    mark: str
    """Stands for a value."""
    types: dict[str, str]
    begin: str
    """Opens a transaction in which nobody else changes the tables."""


def parsed_url(url: str) -> Place:
    """Raises BadLedgerUrl."""
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        path = Path(url.removeprefix("sqlite:///")).expanduser()
        types = {"integer": "INTEGER", "real": "REAL"}
        return Place(str(path), lambda only_read: _sqlite(path, only_read=only_read), "?", types, "BEGIN IMMEDIATE")
    if url.startswith(("postgresql://", "postgres://")):
        try:
            parts = urlsplit(url)
            shown = f"postgresql://{parts.hostname or ''}{parts.path}"
        except ValueError as error:
            raise BadLedgerUrl(f"cannot read the address of PostgreSQL: {error}") from error
        types = {"integer": "BIGINT", "real": "DOUBLE PRECISION"}
        return Place(shown, lambda only_read: _postgres(url), "%s", types, _POSTGRES_ALONE)
    scheme = url.partition(":")[0]
    raise BadLedgerUrl(
        f"{scheme[:20]!r}: must be sqlite:///FILE (sqlite:////absolute/FILE) or postgresql://USER@HOST/NAME"
    )


class SqlStore:
    """One connection, made when it is needed."""

    def __init__(self, place: Place, *, only_read: bool = False) -> None:
        self._place = place
        self._only_read = only_read
        self._connection: Any = None

    def open(self) -> None:
        """Connects, and brings the tables up to date."""
        with self._working():
            pass

    def insert(self, records: Sequence[UsageRecord]) -> int:
        """Keeps those that are not there yet, all or none; how many they were."""
        values = ", ".join([self._place.mark] * len(COLUMNS))
        with self._working() as cursor:
            cursor.executemany(
                f"INSERT INTO usage_records ({', '.join(COLUMNS)}) VALUES ({values}) ON CONFLICT (id) DO NOTHING",
                [row(record) for record in records],
            )
            return max(0, int(cursor.rowcount))

    def spent(self, scopes: Sequence[str], since: str) -> list[Spent]:
        """What each scope has used of each model since then."""
        found: list[Spent] = []
        with self._working() as cursor:
            for scope in scopes:
                column, _, name = scope.partition(":")
                if column not in ("project", "key"):
                    raise StoreError(f"{scope[:40]!r} is no scope: must begin with `project:` or `key:`")
                cursor.execute(
                    "SELECT model, count(*), sum(prompt_tokens), sum(cached_tokens), sum(output_tokens), "
                    f"sum(gpu_seconds) FROM usage_records WHERE {column} = {self._place.mark} AND tracked = 1 "
                    f"AND started >= {self._place.mark} GROUP BY model ORDER BY model",
                    (name, since),
                )
                found += [
                    Spent(scope, model, int(count), int(prompt), int(cached), int(output), float(seconds))
                    for model, count, prompt, cached, output, seconds in cursor.fetchall()
                ]
        return found

    def demand(self, request: DemandRequest) -> list[ModelUse]:
        """What was asked of each model: by the second in SQL, or the minute, and from there by the spans wanted."""
        where, values = demand_conditions(request, self._place.mark)
        with self._working() as cursor:
            cursor.execute(
                f"SELECT {ASKED_MODEL}, {moment_column(request)}, count(*), "
                "sum(CASE outcome WHEN 'refused' THEN 1 ELSE 0 END), sum(prompt_tokens), sum(cached_tokens) "
                f"FROM usage_records WHERE {where} GROUP BY 1, 2",
                values,
            )
            uses = counted(cursor.fetchall(), request)
            lengths = {column: self._lengths(cursor, column, where, values) for column in QUANTILES}
        return [
            replace(
                use,
                prompt=lengths["prompt_tokens"].get(use.model, LengthQuantiles()),
                output=lengths["output_tokens"].get(use.model, LengthQuantiles()),
            )
            for use in uses
        ]

    @staticmethod
    def _lengths(cursor: Any, column: str, where: str, values: tuple[object, ...]) -> dict[str, LengthQuantiles]:
        """Of requests whose tokens are known, by the nearest rank."""
        ranks = ", ".join(f"max(CASE WHEN r = (n * {percent} + 99) / 100 THEN tokens END)" for percent in (50, 90, 99))
        cursor.execute(
            f"SELECT name, avg(tokens), {ranks} FROM (SELECT {ASKED_MODEL} AS name, {column} AS tokens, "
            f"row_number() OVER (PARTITION BY {ASKED_MODEL} ORDER BY {column}) AS r, "
            f"count(*) OVER (PARTITION BY {ASKED_MODEL}) AS n "
            f"FROM usage_records WHERE {where} AND {column} > 0) AS ranked GROUP BY name",
            values,
        )
        return {name: LengthQuantiles(*[float(one) for one in found]) for name, *found in cursor.fetchall()}

    def usage(self, by: str, since: str = "", until: str = "") -> list[Usage]:
        """Sums by one of `GROUPS`, of requests that arrived from `since` on and before `until`; empty = no bound."""
        group, mark = GROUPS[by], self._place.mark
        outcomes = ", ".join(f"sum(CASE outcome WHEN '{one}' THEN 1 ELSE 0 END)" for one in _OUTCOMES)
        conditions, values = ["1 = 1"], []
        for sign, bound in ((">=", since), ("<", until)):
            if bound:
                conditions.append(f"started {sign} {mark}")
                values.append(bound)
        with self._working() as cursor:
            cursor.execute(
                f"SELECT {group}, count(*), {outcomes}, sum(prompt_tokens), sum(cached_tokens), sum(output_tokens), "
                f"sum(tokens_estimated), sum(gpu_seconds), sum(energy_j) FROM usage_records "
                f"WHERE {' AND '.join(conditions)} "
                f"GROUP BY {group} ORDER BY {group}",
                tuple(values),
            )
            return [_usage(*found) for found in cursor.fetchall()]

    def forget_before(self, moment: str) -> int:
        """Deletes some of the records that arrived before; how many. To be called until there are none."""
        with self._working() as cursor:
            cursor.execute(
                "DELETE FROM usage_records WHERE id IN (SELECT id FROM usage_records WHERE started < "
                f"{self._place.mark} LIMIT {FORGOTTEN_AT_ONCE})",
                (moment,),
            )
            return max(0, int(cursor.rowcount))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except Exception:
                pass

    @contextmanager
    def _working(self) -> Iterator[Any]:
        """A cursor in a transaction, which is committed at the end. Raises StoreError; then nothing was done."""
        try:
            if self._connection is None:
                self._connection = self._place.connect(self._only_read)
                if not self._only_read:
                    self._bring_up_to_date()
            cursor = self._connection.cursor()
            yield cursor
            self._connection.commit()
            cursor.close()
        except StoreError:
            if self._connection is not None:
                self._connection.rollback()
            raise
        except Exception as error:
            self.close()  # Whatever state it is in; an open transaction ends with it.
            raise StoreError(f"{self._place.shown}: {' '.join(str(error).split()) or repr(error)}") from error

    def _bring_up_to_date(self) -> None:
        cursor = self._connection.cursor()
        cursor.execute(self._place.begin)
        cursor.execute("CREATE TABLE IF NOT EXISTS serai_schema (version INTEGER NOT NULL)")
        cursor.execute("SELECT max(version) FROM serai_schema")
        version = cursor.fetchone()[0] or 0
        if version > len(STEPS):
            self._connection.rollback()
            raise StoreError(
                f"{self._place.shown} has tables of version {version}; this Serai knows {len(STEPS)}: it is too old"
            )
        for number, step in enumerate(STEPS[version:], version + 1):
            for statement in step:
                cursor.execute(statement.format(**self._place.types))
            cursor.execute(f"INSERT INTO serai_schema (version) VALUES ({number})")
        self._connection.commit()


def _usage(name: str, *sums: Any) -> Usage:
    """PostgreSQL's sums are decimals."""
    *counts, gpu_seconds, energy_j = sums
    return Usage(name, *map(int, counts), gpu_seconds=float(gpu_seconds), energy_j=float(energy_j))  # type: ignore[misc]


def _sqlite(path: Path, *, only_read: bool) -> sqlite3.Connection:
    if only_read:
        if not path.exists():
            raise StoreError(f"there is no ledger at {path}")
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S, check_same_thread=False)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    path.chmod(0o600)
    connection.execute("PRAGMA journal_mode = WAL")  # Readers do not hold up the writer.
    connection.execute("PRAGMA synchronous = FULL")  # What is acknowledged survives a power cut.
    return connection


def _postgres(url: str) -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise StoreError("PostgreSQL needs psycopg; install it with: pip install 'serai[postgres]'") from error
    return psycopg.connect(url, connect_timeout=10, application_name="serai-ledger")
