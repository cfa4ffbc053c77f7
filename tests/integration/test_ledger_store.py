"""Records in SQL: each once, summed up as asked, in SQLite and, where it is installed, in a real PostgreSQL."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serai.contracts.usage import DemandRequest, Outcome, Spent, UsageRecord
from serai.ledger.schema import COLUMNS, STEPS, row
from serai.ledger.sql_store import BadLedgerUrl, SqlStore, StoreError, parsed_url


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A private server that listens on a Unix socket only."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    folder = tmp_path_factory.mktemp("postgres")
    initdb, server = _postgres_programs()
    as_user: dict[str, Any] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root.
        try:
            import pwd

            nobody = pwd.getpwnam("nobody")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user nobody")
        as_user = {"user": nobody.pw_uid, "group": nobody.pw_gid}
        for one in (folder, *folder.parents):  # Those of pytest are ours alone, one more where it has several workers.
            if one.stat().st_uid == 0 and not one.stat().st_mode & 0o001:
                one.chmod(0o755)
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    data = folder / "data"
    command = [initdb, "-D", str(data), "-U", "serai", "-A", "trust", "--no-sync"]
    made = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False, **as_user)
    if made.returncode:
        pytest.skip(f"initdb failed: {made.stderr[-300:]}")
    flags = ["-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-F"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([server, *flags], stdout=log, stderr=log, cwd="/", **as_user)
    url = f"postgresql://serai@/postgres?host={folder}"
    try:
        _wait_for(url)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def _postgres_programs() -> tuple[str, str]:
    folders = [None, *sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)]
    for folder in folders:
        initdb, server = shutil.which("initdb", path=folder), shutil.which("postgres", path=folder)
        if initdb and server:
            return initdb, server
    pytest.skip("PostgreSQL is not installed")


def _wait_for(url: str) -> None:
    import time

    give_up_at_s = time.monotonic() + 60
    while True:
        store = SqlStore(parsed_url(url))
        try:
            store.open()
            return
        except StoreError:
            if time.monotonic() > give_up_at_s:
                raise
            time.sleep(0.05)
        finally:
            store.close()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'usage.sqlite'}"
    url = str(request.getfixturevalue("postgres"))
    store = SqlStore(parsed_url(url))
    while store.forget_before("9999"):
        pass
    store.close()
    return url


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    made = SqlStore(parsed_url(url))
    yield made
    made.close()


def record(number: int, **fields: Any) -> UsageRecord:
    usual = {
        "started": f"2026-11-{number:02}T12:00:00.000Z",
        "project": "climate",
        "key": "alice",
        "model": "m",
        "prompt_tokens": 10,
        "output_tokens": 5,
        "gpu_seconds": 0.5,
        "energy_j": 300.0,
    }
    return UsageRecord(
        **{"id": f"r{number}", "outcome": Outcome.COMPLETE, "status": 200, "endpoint": "/v1/x"} | usual | fields
    )


def test_a_column_for_each_field() -> None:
    assert list(COLUMNS) != []
    assert set(COLUMNS) == set(UsageRecord.__struct_fields__)


def test_a_record_counts_once(store: SqlStore) -> None:
    assert store.insert([record(1), record(2)]) == 2
    assert store.insert([record(2), record(3), record(3)]) == 1
    (line,) = store.usage("project")
    assert (line.name, line.requests, line.prompt_tokens, line.output_tokens) == ("climate", 3, 30, 15)
    assert line.gpu_seconds == pytest.approx(1.5)
    assert line.energy_j == pytest.approx(900)


def test_sums_by_what_was_asked_and_between_moments(store: SqlStore) -> None:
    store.insert(
        [
            record(1, model="a", outcome=Outcome.CANCELLED, tokens_estimated=True),
            record(2, model="b", key="bob", provider="cscs"),
            record(3, model="b", project="ocean", outcome=Outcome.REFUSED, ttft_s=0.1, sessions=["s1", "s2"]),
        ]
    )
    assert [(line.name, line.requests) for line in store.usage("model")] == [("a", 1), ("b", 2)]
    assert [line.name for line in store.usage("day")] == ["2026-11-01", "2026-11-02", "2026-11-03"]
    assert [line.name for line in store.usage("key")] == ["climate/alice", "climate/bob", "ocean/alice"]
    assert [(line.name, line.requests) for line in store.usage("provider")] == [("", 2), ("cscs", 1)]
    since, until = "2026-11-02T00:00:00.000Z", "2026-11-03T12:00:00.000Z"
    (line,) = store.usage("project", since, until)
    assert (line.name, line.requests, line.complete, line.refused) == ("climate", 1, 1, 0)
    (of_a,) = [line for line in store.usage("model") if line.name == "a"]
    assert (of_a.cancelled, of_a.estimated) == (1, 1)


def test_what_scopes_have_spent_leaves_out_who_is_not_tracked(store: SqlStore) -> None:
    store.insert([record(1), record(2, model="n"), record(3, project="", key="", tracked=False)])
    spent = store.spent(["project:climate", "key:alice", "project:nobody"], "2026-11-02T00:00:00Z")
    assert spent == [
        Spent("project:climate", "n", 1, 10, 0, 5, 0.5),
        Spent("key:alice", "n", 1, 10, 0, 5, 0.5),
    ]
    with pytest.raises(StoreError, match="no scope"):
        store.spent(["house:x"], "")
    assert store.insert([record(9)]) == 1, "a bad question leaves the connection as it was"


def test_odd_text_is_kept_as_text(store: SqlStore) -> None:
    store.insert([record(1, project="o'Brien; DROP TABLE x", model_asked="\x00 駱駝 %s ?")])
    assert [line.name for line in store.usage("project")] == ["o'Brien; DROP TABLE x"]


def test_old_records_are_forgotten(store: SqlStore) -> None:
    store.insert([record(number) for number in range(1, 6)])
    assert store.forget_before("2026-11-03") == 2
    assert store.forget_before("2026-11-03") == 0
    assert [line.name for line in store.usage("day")] == ["2026-11-03", "2026-11-04", "2026-11-05"]


def test_two_openers_and_a_reader_share_it(url: str, store: SqlStore) -> None:
    store.insert([record(1)])
    other, reader = SqlStore(parsed_url(url)), SqlStore(parsed_url(url), only_read=True)
    try:
        assert other.insert([record(1), record(2)]) == 1
        assert [line.requests for line in reader.usage("project")] == [2]
    finally:
        other.close()
        reader.close()


def test_tables_of_an_older_version_are_brought_up_to_date(tmp_path: Path) -> None:
    """Those of the first version had no energy."""
    file = tmp_path / "old.db"
    with sqlite3.connect(file) as old:
        old.execute("CREATE TABLE serai_schema (version INTEGER NOT NULL)")
        for statement in STEPS[0]:
            old.execute(statement.format(integer="INTEGER", real="REAL"))
        old.execute("INSERT INTO serai_schema (version) VALUES (1)")
        columns = [name for name in COLUMNS if name != "energy_j"]
        values = dict(zip(COLUMNS, row(record(1)), strict=True))
        marks = ", ".join("?" * len(columns))
        old.execute(
            f"INSERT INTO usage_records ({', '.join(columns)}) VALUES ({marks})", [values[name] for name in columns]
        )
    old.close()
    store = SqlStore(parsed_url(f"sqlite:///{file}"))
    assert store.insert([record(1), record(2)]) == 1
    (line,) = store.usage("project")
    assert (line.requests, line.energy_j) == (2, 300.0)
    store.close()


def test_tables_of_a_newer_version_are_left_alone(tmp_path: Path) -> None:
    store = SqlStore(parsed_url(f"sqlite:///{tmp_path / 'usage.sqlite'}"))
    store.open()
    store._connection.execute("INSERT INTO serai_schema VALUES (99)")
    store._connection.commit()
    store.close()
    with pytest.raises(StoreError, match="too old"):
        store.open()
    store.close()


def test_errors_are_one_line_and_the_next_call_connects_anew(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    path.write_bytes(b"this is no database, " * 100)
    store = SqlStore(parsed_url(f"sqlite:///{path}"))
    with pytest.raises(StoreError, match="not a database"):
        store.open()
    path.unlink()
    assert store.insert([record(1)]) == 1
    store.close()
    with pytest.raises(StoreError, match="there is no ledger at"):
        SqlStore(parsed_url(f"sqlite:///{tmp_path / 'none'}"), only_read=True).usage("day")


@pytest.mark.parametrize("url", ["", "usage.sqlite", "sqlite://x", "sqlite:///", "mysql://x/y"])
def test_bad_addresses_are_told_what_is_expected(url: str) -> None:
    with pytest.raises(BadLedgerUrl, match="must be sqlite:///FILE"):
        parsed_url(url)


def test_a_password_is_not_shown() -> None:
    assert "secret" not in parsed_url("postgresql://me:secret@db.example.org/usage").shown


def test_how_much_of_each_model_was_asked_for(store: SqlStore) -> None:
    def at(second: int, id: str, **fields: Any) -> UsageRecord:
        return record(1, id=id, started=f"2026-11-01T12:00:{second:02}.500Z", **fields)

    unknown = {"model": "", "model_asked": "cold", "outcome": Outcome.REFUSED, "prompt_tokens": 0, "output_tokens": 0}
    store.insert(
        [
            *[at(0, f"a{number}", prompt_tokens=number + 1, cached_tokens=1) for number in range(10)],
            at(19, "b", prompt_tokens=100),
            at(25, "c", **unknown, status=503),
            at(26, "d", **unknown, status=429),
            at(27, "e", model="other"),
            record(1, id="f", started="2026-11-01T12"),
        ]
    )
    request = DemandRequest("2026-11-01T12:00:00.000Z", 10.0, 3, ["m", "cold"])
    cold, known = store.demand(request)
    assert (cold.model, cold.arrivals, cold.refused, cold.prompt.mean) == ("cold", [0, 0, 1], 1, 0.0)
    assert (known.model, known.arrivals, known.refused) == ("m", [10, 1, 0], 0)
    assert (known.prompt.p50, known.prompt.p90, known.prompt.p99) == (6, 10, 100)
    assert known.output.mean == pytest.approx(5)
    assert known.cached_share == pytest.approx(10 / 155)
    assert [use.model for use in store.demand(DemandRequest("2026-11-01T12:00:27Z", 10.0, 1))] == ["other"]
    day = store.demand(DemandRequest("2026-11-01T00:00:00Z", 1800.0, 48, ["m"]))
    assert [place for place, count in enumerate(day[0].arrivals) if count] == [24]
