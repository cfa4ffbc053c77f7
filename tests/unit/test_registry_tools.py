"""`serai registry …`: what the tools say of a copy of the registry. What they do over NATS: integration tests."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import pytest

from serai.cli import main as command
from serai.cli import registry_explain, registry_ls, registry_reader, registry_show, registry_watch
from serai.cli.registry_reader import Failed, Reader, ReaderSettings, age_text, seen
from serai.contracts.codec import encode
from serai.contracts.registry import Opinion
from serai.contracts.session_record import Draining, Lifecycle, SessionRecord, new_session_id
from serai.contracts.status import ProbeAnswer, SessionStatus
from serai.contracts.subjects import OPINION, PROBE
from serai.runtime.bus import RequestTimeout
from serai.runtime.registry_copy import RegistryCopy
from serai.runtime.session_state import SessionState
from unit.fakes import FakeBus, record_of


def sid(name: str, site: str = "local") -> str:
    return new_session_id(site, "a1", 0, name)


def record(name: str, lifecycle: Lifecycle = Lifecycle.SERVING, version: int = 1, **said: Any) -> SessionRecord:
    return record_of(sid(name, said.get("site", "local")), lifecycle, version, **({"allocation": "a1"} | said))


@pytest.fixture
def reader() -> Reader:
    """Has heard of a serving, a draining, a silent and a left session, of two models at two sites."""
    bus = FakeBus()
    copy = RegistryCopy(bus, "local")
    now = time.monotonic()
    for one in (
        record("serving"),
        record("drains", model="n", site="far", draining=Draining("the job ends", 60.0)),
        record("left", Lifecycle.LEFT),
    ):
        copy.replica.merge(one, now, heard=True)
    copy.replica.merge(record("silent"), now)
    copy.replica.hear(SessionStatus(sid("serving"), 1, Lifecycle.SERVING, 1, 30.0, in_flight=3), now)
    copy.synced = True
    return Reader(bus, copy, ReaderSettings())


def run(tool: Any, reader: Reader, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Runs one of the tools on `reader` in place of a connection."""
    parser = argparse.ArgumentParser()
    tool.add_arguments(parser)

    def run_reader(name: str, arguments: argparse.Namespace, main: Any) -> int:
        return int(asyncio.run(main(reader)))

    monkeypatch.setattr(tool, "run_reader", run_reader)
    monkeypatch.setattr(registry_reader, "LISTEN_S", 0.0)
    return int(tool.run(parser.parse_args(words)))


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], ["drains", "serving", "silent"]),
        (["--all"], ["drains", "serving", "silent", "left"]),
        (["--state", "left"], ["left"]),
        (["--state", "suspected"], ["silent"]),
        (["--model", "n"], ["drains"]),
        (["--site", "local", "--state", "serving"], ["serving"]),
        (["--site", "nowhere"], []),
    ],
)
def test_ls_shows_what_is_asked_for(
    reader: Reader,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    shown: list[str],
) -> None:
    assert run(registry_ls, reader, monkeypatch, "--json", *flags) == 0
    said = json.loads(capsys.readouterr().out)
    assert {row["session"].rpartition("-")[2] for row in said["sessions"]} == set(shown)
    assert run(registry_ls, reader, monkeypatch, *flags) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 + len(shown)
    assert f"{len(shown)} sessions" in printed.err


def test_ls_tells_load_and_why_a_session_gets_nothing(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(registry_ls, reader, monkeypatch, "--json")
    rows = {row["session"]: row for row in json.loads(capsys.readouterr().out)["sessions"]}
    assert (rows[sid("serving")]["in_flight"], rows[sid("serving")]["why_not_routed"]) == (3, None)
    assert rows[sid("drains", "far")]["why_not_routed"] == "it is draining: the job ends"
    assert "no sign of life" in rows[sid("silent")]["why_not_routed"]


def test_a_session_is_found_by_its_id_or_a_beginning_that_only_one_has(reader: Reader) -> None:
    reader.copy.replica.merge(record("serving-more"), 0.0)
    assert reader.found(sid("serving")).session == sid("serving")
    assert reader.found(sid("si")).session == sid("silent")
    for text, problem in (
        ("s", "is known at site"),
        ("", "is known at site"),
        (sid("s"), "the beginning of 3 sessions"),
    ):
        with pytest.raises(Failed, match=problem) as failed:
            reader.found(text)
        assert failed.value.exit_code == registry_reader.NOT_FOUND


def test_show_prints_the_whole_record(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(registry_show, reader, monkeypatch, sid("ser")) == 0
    printed = capsys.readouterr().out
    assert "in_flight" in printed
    assert "SERVING" in printed
    assert run(registry_show, reader, monkeypatch, sid("ser"), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["record"]["metadata"]["allocation"] == "a1"
    assert said["seen"]["state"] == "serving"


def test_explain_says_what_each_of_the_three_thinks(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bus = reader.bus
    assert isinstance(bus, FakeBus)
    bus.answers[PROBE.of(sid("silent"))] = lambda _: encode(ProbeAnswer(sid("silent"), stalled_s=7.0))
    bus.answers[OPINION.of_site("local")] = lambda _: encode(Opinion(sid("silent"), False, 12.0, "it is silent"))
    assert run(registry_explain, reader, monkeypatch, sid("si"), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert "no sign of life has come yet" in said["here"]
    assert "no progress for 7.0 s" in said["probe"]
    assert said["registry"] == "the session does not answer, heard 12 s ago; it is silent"
    assert "its next sign of life" in said["remedy"]
    del bus.answers[PROBE.of(sid("silent"))]
    bus.answers[OPINION.of_site("local")] = lambda _: encode(Opinion(sid("silent"), None))
    assert run(registry_explain, reader, monkeypatch, sid("si")) == 0
    printed = capsys.readouterr().out
    assert "nobody receives what is sent to it" in printed
    assert "it does not know the session" in printed


def test_explain_without_a_registry_says_so(reader: Reader) -> None:
    def silent(_: bytes) -> bytes:
        raise RequestTimeout("no answer in time")

    bus = reader.bus
    assert isinstance(bus, FakeBus)
    bus.answers[OPINION.of_site("local")] = silent
    bus.answers[PROBE.of(sid("x"))] = silent
    assert asyncio.run(registry_explain.opinion(bus, "local", sid("x"))) == "it gives no opinion: no answer in time"
    assert asyncio.run(registry_explain.probed(bus, sid("x"))) == "it does not answer a probe: no answer in time"


@pytest.mark.parametrize("state", SessionState)
def test_each_state_has_a_remedy(state: SessionState) -> None:
    said = record("x", loading_phase="weights", loading_progress=0.5).metadata
    assert len(registry_explain.remedy(state, said)) > 10
    if state is SessionState.LOADING:
        assert "(now: weights, 50% done)" in registry_explain.remedy(state, said)


def test_watch_tells_each_change_once(reader: Reader) -> None:
    now = time.monotonic()
    watch = registry_watch.Watch(reader.copy)
    assert {new.session for _, new in watch.changes(now)} == set(reader.copy.replica.sessions)
    assert list(watch.changes(now)) == []
    reader.copy.replica.merge(record("serving", Lifecycle.DOWN, 2), now)
    reader.copy.replica.merge(record("new", Lifecycle.JOIN), now, heard=True)
    reader.copy.replica.unreachable(sid("drains", "far"))
    changes = {new.session: (old.state if old else None, new.state) for old, new in watch.changes(now)}
    assert changes == {
        sid("serving"): ("serving", "down"),
        sid("new"): (None, "loading"),
        sid("drains", "far"): ("draining", "suspected"),
    }
    assert watch.wake.is_set() is False
    reader.copy.on_change()
    assert watch.wake.is_set()


def test_watch_lines_are_for_people_or_for_programs(reader: Reader) -> None:
    now = time.monotonic()
    new = seen(reader.copy, record("silent"), now)
    line = registry_watch._line("12:00", None, new)
    assert line.startswith(f"12:00  {sid('silent')}  m  new → suspected  its record is known")
    assert "\n" not in line
    assert json.loads(registry_watch._json_line("12:00", new, new))["now"]["session"] == sid("silent")


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0.42, "0.4 s"), (12, "12 s"), (180, "3 min"), (18_000, "5 h"), (-1, "0.0 s")]
)
def test_ages_are_short(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["registry"], "serai.registry.__main__"),
        (["registry", "--site", "x"], "serai.registry.__main__"),
        (["registry", "ls", "--json"], "serai.cli.registry_ls"),
        (["health"], "serai.cli.health"),
    ],
)
def test_the_service_and_its_tools_share_a_name(words: list[str], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Module:
        def __init__(self, name: str) -> None:
            self._name = name

        def add_arguments(self, parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--site")
            parser.add_argument("--json", action="store_true")

        def run(self, arguments: argparse.Namespace) -> int:
            ran.append(self._name)
            return 0

    monkeypatch.setattr(command.importlib, "import_module", Module)
    assert command.main(words) == 0
    assert ran == [module]


def test_a_tool_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["registry", "lss"]) == 2
    assert "there is no command `registry lss`" in capsys.readouterr().err
    assert command.main(["registry", ""]) == 2
