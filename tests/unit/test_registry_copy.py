"""A service's copy of the registry: what it hears, what it asks for, and whom it believes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from serai.contracts.codec import decode, encode
from serai.contracts.registry import (
    DigestAnswer,
    DigestRequest,
    Disconnected,
    Opinion,
    OpinionRequest,
    RegistryBeat,
    SnapshotPage,
    SnapshotRequest,
)
from serai.contracts.registry_digest import bucket_of
from serai.contracts.session_record import Lifecycle, SessionRecord, new_session_id
from serai.contracts.status import ProbeAnswer, SessionStatus
from serai.contracts.subjects import BEAT, DIGEST, DISCONNECTED, OPINION, PROBE, SESSION, SNAPSHOT, STATUS
from serai.runtime import refusals, registry_copy
from serai.runtime.bus import Loss, LossReason, Message, RequestTimeout
from serai.runtime.refusals import REFUSED
from serai.runtime.registry_copy import RegistryCopy
from serai.runtime.registry_replica import RegistryReplica
from unit.fakes import Clock, FakeBus, record_of


def sid(name: str, site: str = "local") -> str:
    return new_session_id(site, "a1", 0, name)


def record(name: str = "x", lifecycle: Lifecycle = Lifecycle.SERVING, version: int = 1, **said: Any) -> SessionRecord:
    site = said.get("site", "local")
    return record_of(sid(name, site), lifecycle, version, **({"allocation": "a1"} | said))


def status(name: str = "x", sequence: int = 1, **said: Any) -> SessionStatus:
    filled: dict[str, Any] = {"lifecycle": Lifecycle.SERVING, "version": 1, "interval_s": 1.0} | said
    return SessionStatus(session=sid(name), sequence=sequence, **filled)


class Registry:
    """A registry at the other end of a fake bus: it answers from a replica of its own."""

    def __init__(self, bus: FakeBus, clock: Clock) -> None:
        self.replica = RegistryReplica()
        self.page_records_max = 3
        self.complete_since_s = 0.0
        self.asked: list[str] = []
        self.epoch = "e1"
        self._clock = clock
        bus.answers[SNAPSHOT.of_site("local")] = self.page
        bus.answers[DIGEST.of_site("local")] = self.digest
        self.bus = bus

    def page(self, data: bytes) -> bytes:
        request = decode(SnapshotRequest, data)
        self.asked.append(f"snapshot {request.site or 'all'} {len(request.buckets)}")
        found = [
            one
            for one in self.replica.records()
            if one.session > request.after
            and request.site in ("", one.metadata.site)
            and (not request.buckets or bucket_of(one.session) in request.buckets)
        ]
        page = found[: self.page_records_max]
        silent_s = [self.replica.heard_ago_s(one.session, self._clock.now_s) for one in page]
        return encode(SnapshotPage(page, len(found) > len(page), silent_s, self.complete_since_s))

    def digest(self, data: bytes) -> bytes:
        site = decode(DigestRequest, data).site
        self.asked.append(f"digest {site}")
        return encode(DigestAnswer(site, self.replica.digest(site).buckets))

    def beat(self, copy: RegistryCopy, sequence: int = 0) -> None:
        roots = {site: self.replica.digest(site).root for site in self.replica.sites}
        copy.on_beat(Message(BEAT.of_site("local"), encode(RegistryBeat("local", self.epoch, sequence, 2.0, roots))))


class Stage:
    """A copy, its bus, its registry and its clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.bus = FakeBus()
        self.registry = Registry(self.bus, clock)
        self.copy = RegistryCopy(self.bus, "local")
        asyncio.run(self._start())

    async def _start(self) -> None:
        await self.copy.start()

    def snapshot(self) -> None:
        asyncio.run(self.copy.snapshot())

    def repair(self) -> list[str]:
        """What one turn of repair asks for."""
        self.registry.asked.clear()
        asyncio.run(self.copy.repair())
        return self.registry.asked

    def hear(self, one: SessionRecord) -> None:
        self.copy.on_session(Message(SESSION.of(one.session), encode(one)))

    def hear_status(self, one: SessionStatus) -> None:
        self.copy.on_status(Message(STATUS.of(one.session), encode(one)))

    def ask_after(self, name: str = "x") -> None:
        asyncio.run(self.copy.ask_after(sid(name)))

    @property
    def routable(self) -> list[str]:
        return [one.session for one in self.copy.replica.routable("m", self.clock.now_s)]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    clock = Clock()
    clock.put_into(monkeypatch, registry_copy, refusals)
    return Stage(clock)


# -- snapshot and repair ---------------------------------------------------------------------------------------------


@given(st.integers(0, 10), st.integers(1, 4))
def test_a_snapshot_brings_every_record_whatever_the_pages(count: int, page: int) -> None:
    stage = Stage(Clock())
    stage.registry.page_records_max = page
    for number in range(count):
        stage.registry.replica.merge(record(f"{number:02}"), 0.0)
    stage.snapshot()
    assert stage.copy.replica.records() == stage.registry.replica.records()
    assert stage.copy.synced


def test_a_snapshot_takes_nothing_back(stage: Stage) -> None:
    for one in (record("1"), record("2", version=5)):
        stage.registry.replica.merge(one, 0.0)
    left, mine = record("1", Lifecycle.LEFT), record("3")
    for one in (left, record("2"), mine):
        stage.copy.replica.merge(one, 0.0)
    stage.snapshot()
    assert stage.copy.replica.records() == [left, record("2", version=5), mine]


def test_a_new_copy_routes_to_what_the_registry_has_just_heard_and_to_nothing_else(stage: Stage) -> None:
    now = stage.clock.now_s
    for name, heard_s in (("heard", now - 0.4), ("silent", now - 60), ("left", now)):
        lifecycle = Lifecycle.LEFT if name == "left" else Lifecycle.SERVING
        stage.registry.replica.merge(record(name, lifecycle), heard_s, heard=True)
    stage.registry.replica.merge(record("unheard"), now)
    stage.snapshot()
    assert stage.routable == [sid("heard")]
    assert stage.copy.replica.heard_ago_s(sid("heard"), now) == pytest.approx(0.4)
    stage.clock.advance(3)  # The registry's silence counts, not only ours.
    assert stage.routable == []


def silent(_: bytes) -> bytes:
    raise RequestTimeout("no answer in time")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        silent,
        lambda _: b"",
        lambda _: b'{"records": "none"}',
        lambda _: encode(SnapshotPage([record("1"), record("2")]))[:-20],
    ],
    ids=["nobody there", "silent", "empty", "no list", "cut short"],
)
def test_without_a_page_that_can_be_read_the_copy_stays_as_it_was(
    stage: Stage, answer: Callable[[bytes], bytes] | None
) -> None:
    del stage.bus.answers[SNAPSHOT.of_site("local")]
    if answer is not None:
        stage.bus.answers[SNAPSHOT.of_site("local")] = answer
    stage.copy.replica.merge(record(), 0.0)
    with capture_logs() as logs:
        for _ in range(5):
            stage.snapshot()
    assert stage.copy.replica.records() == [record()]
    assert not stage.copy.synced
    assert [entry["event"] for entry in logs] == ["registry_copy.no_answer"]


def test_a_snapshot_that_breaks_off_is_no_whole_one_and_an_empty_page_ends_it(stage: Stage) -> None:
    stage.registry.page_records_max = 1
    for name in "123":
        stage.registry.replica.merge(record(name), 0.0)
    whole, asked = stage.registry.page, []

    def breaks_off_once(data: bytes) -> bytes:
        asked.append(decode(SnapshotRequest, data).after)
        return b"{" if len(asked) == 2 else whole(data)

    stage.bus.answers[SNAPSHOT.of_site("local")] = breaks_off_once
    stage.snapshot()
    assert not stage.copy.synced
    stage.snapshot()
    assert stage.copy.synced
    assert asked == ["", sid("1"), "", sid("1"), sid("2")]
    stage.bus.answers[SNAPSHOT.of_site("local")] = lambda _: encode(SnapshotPage([], more=True))
    stage.snapshot()


def test_a_copy_without_a_snapshot_asks_again_each_second_and_at_once_when_the_registry_speaks(stage: Stage) -> None:
    page = stage.bus.answers.pop(SNAPSHOT.of_site("local"))
    assert stage.repair() == []
    stage.bus.answers[SNAPSHOT.of_site("local")] = page
    stage.clock.advance(0.5)
    assert stage.repair() == []
    stage.registry.beat(stage.copy)
    assert stage.repair() == ["snapshot all 0"]
    assert stage.copy.synced


def synced(stage: Stage) -> None:
    """Both know `x` of two sites; the first beat has been heard."""
    for one in (record(), record(site="far")):
        stage.registry.replica.merge(one, stage.clock.now_s, heard=True)
    stage.snapshot()
    stage.registry.beat(stage.copy)
    assert stage.repair() == []


def test_equal_copies_ask_nothing_and_a_lasting_difference_is_fetched_by_bucket(stage: Stage) -> None:
    synced(stage)
    stage.registry.replica.merge(record("missed", site="far"), stage.clock.now_s)
    stage.registry.beat(stage.copy, 1)
    stage.clock.advance(0.3)
    assert stage.repair() == []  # It may be on its way still.
    stage.clock.advance(0.3)
    assert stage.repair() == ["digest far", "snapshot far 1"]
    assert stage.copy.replica.records() == stage.registry.replica.records()
    stage.clock.advance(0.6)
    assert stage.repair() == []


def test_a_message_that_was_only_late_is_not_asked_for(stage: Stage) -> None:
    synced(stage)
    stage.registry.replica.merge(record("late"), stage.clock.now_s)
    stage.registry.beat(stage.copy, 1)
    stage.clock.advance(0.3)
    stage.hear(record("late"))
    stage.clock.advance(0.3)
    assert stage.repair() == []


def test_under_constant_change_each_difference_is_given_its_time(stage: Stage) -> None:
    synced(stage)
    for number in range(5):
        one = record("busy", version=number + 1)
        stage.registry.replica.merge(one, stage.clock.now_s)
        stage.registry.beat(stage.copy, number * 2 + 1)
        stage.clock.advance(0.2)
        stage.hear(one)
        stage.registry.beat(stage.copy, number * 2 + 2)
    stage.registry.replica.merge(record("busy", version=9), stage.clock.now_s)
    stage.registry.beat(stage.copy, 11)
    assert stage.repair() == []


@pytest.mark.parametrize("sign", ["epoch", "missed beat"])
def test_after_a_new_epoch_or_a_missed_beat_nothing_is_waited_for(stage: Stage, sign: str) -> None:
    synced(stage)
    stage.registry.replica.merge(record("missed"), stage.clock.now_s)
    if sign == "epoch":
        stage.registry.epoch = "e2"
    else:
        stage.clock.advance(4)
    stage.registry.beat(stage.copy, 1)
    assert stage.repair() == ["digest local", "snapshot local 1"]


def test_a_difference_that_asking_does_not_settle_is_not_asked_about_for_ever(stage: Stage) -> None:
    synced(stage)
    stage.hear(record("only-here"))
    stage.registry.beat(stage.copy, 1)
    stage.clock.advance(0.6)
    assert stage.repair() == ["digest local", "snapshot local 1"]
    for _ in range(8):
        stage.clock.advance(1)
        stage.registry.beat(stage.copy, 1)
        assert stage.repair() == []
    stage.clock.advance(3)
    assert stage.repair() == ["digest local", "snapshot local 1"]
    assert stage.copy.replica.get(sid("only-here")) is not None


def test_what_the_registry_does_not_know_after_long_listening_is_dropped_when_it_is_silent_here_too(
    stage: Stage,
) -> None:
    synced(stage)
    for name in ("gone", "spoke"):
        stage.hear(record(name))
    stage.hear(record("left", Lifecycle.LEFT))
    stage.clock.advance(61)
    stage.hear(record("spoke"))
    stage.registry.complete_since_s = 59.0
    stage.registry.beat(stage.copy, 1)
    stage.repair()
    assert stage.copy.replica.get(sid("gone")) is not None  # The registry has not listened for long enough.
    stage.registry.complete_since_s = 61.0
    stage.clock.advance(11)
    stage.registry.beat(stage.copy, 1)
    stage.repair()
    known = {one.session for one in stage.copy.replica.records()}
    assert known == {sid("x"), sid("x", "far"), sid("spoke"), sid("left")}


def test_a_status_newer_than_the_record_asks_for_it_at_once(stage: Stage) -> None:
    synced(stage)
    stage.registry.replica.merge(record(version=2), stage.clock.now_s)
    stage.hear_status(status(version=2))
    assert stage.repair() == ["digest local", "snapshot local 1"]
    assert stage.copy.replica.get(sid("x")) == record(version=2)


def test_without_beats_the_registry_is_asked_now_and_then(stage: Stage) -> None:
    synced(stage)
    stage.clock.advance(11)
    assert stage.repair() == ["digest far", "digest local"]
    assert stage.repair() == []


def test_a_registry_that_does_not_answer_is_asked_once_a_second_and_at_once_when_it_speaks(stage: Stage) -> None:
    synced(stage)
    for site in ("local", "far"):
        stage.registry.replica.merge(record("missed", site=site), stage.clock.now_s)
    stage.registry.beat(stage.copy, 1)
    stage.clock.advance(0.6)
    asked = 0

    def silent_once_more(_: bytes) -> bytes:
        nonlocal asked
        asked += 1
        raise RequestTimeout("no answer in time")

    stage.bus.answers[DIGEST.of_site("local")] = silent_once_more
    for _ in range(12):
        stage.clock.advance(0.25)
        stage.repair()
    assert asked == 3
    stage.bus.answers[DIGEST.of_site("local")] = stage.registry.digest
    assert stage.repair() == []
    stage.registry.beat(stage.copy, 1)
    assert stage.repair() == ["digest far", "snapshot far 1", "digest local", "snapshot local 1"]
    assert stage.copy.problem == ""


def test_a_digest_of_the_wrong_size_changes_nothing(stage: Stage) -> None:
    synced(stage)
    stage.bus.answers[DIGEST.of_site("local")] = lambda _: encode(DigestAnswer("local", [1, 2]))
    stage.clock.advance(11)
    stage.repair()
    assert stage.copy.replica.records() == stage.registry.replica.records()


# -- liveness --------------------------------------------------------------------------------------------------------


def test_time_without_a_connection_is_nobodys_silence(stage: Stage) -> None:
    stage.hear(record())
    stage.clock.advance(1)
    stage.bus.lose_connection()
    stage.clock.advance(30)
    assert stage.copy.judged_at_s(stage.clock.now_s) == stage.clock.now_s - 30
    stage.bus.reconnect()
    assert stage.copy.replica.heard_ago_s(sid("x"), stage.clock.now_s) == pytest.approx(1)
    assert stage.routable == [sid("x")]


def test_a_reconnect_compares_everything_at_once(stage: Stage) -> None:
    synced(stage)
    stage.registry.replica.merge(record("missed"), stage.clock.now_s)
    stage.bus.lose_connection()
    stage.bus.reconnect()
    assert stage.repair() == ["digest far", "digest local", "snapshot local 1"]


def test_dropped_messages_compare_everything_at_once(stage: Stage) -> None:
    synced(stage)
    stage.bus.lose(Loss(LossReason.DROPPED))
    assert stage.repair() == ["digest far", "digest local"]
    stage.bus.lose(Loss(LossReason.REFUSED))
    assert stage.repair() == []


def test_a_closed_connection_stops_routing_until_the_session_speaks(stage: Stage) -> None:
    stage.hear(record())
    stage.copy.on_disconnected(Message(DISCONNECTED.of_site("far"), encode(Disconnected([sid("x")]))))
    assert stage.routable == [sid("x")]  # Another site's server knows nothing of this connection.
    stage.copy.on_disconnected(Message(DISCONNECTED.of_site("local"), encode(Disconnected([sid("x"), "unknown"]))))
    assert stage.routable == []
    stage.hear_status(status())
    assert stage.routable == [sid("x")]


def silent_for(stage: Stage, seconds: float) -> None:
    stage.hear(record())
    stage.clock.advance(seconds)
    assert stage.copy.replica.doubtful(stage.clock.now_s) == [sid("x")]


def look_for(stage: Stage, seconds: float) -> list[str]:
    """Looks four times a second; who was asked after."""
    asked = []
    for _ in range(round(seconds / registry_copy.LOOK_EVERY_S)):
        stage.clock.advance(registry_copy.LOOK_EVERY_S)
        asked += stage.copy.look(stage.clock.now_s)
    return asked


def test_a_silent_session_is_asked_after_once_and_in_time(stage: Stage) -> None:
    stage.hear(record())
    assert look_for(stage, 2.25) == []
    assert look_for(stage, 0.25) == [sid("x")]
    assert stage.routable == [sid("x")]
    assert look_for(stage, 1.0) == []
    assert stage.routable == []  # 3.5 s after its last word.


def test_time_in_which_this_process_was_held_up_is_nobodys_silence(stage: Stage) -> None:
    stage.hear(record())
    look_for(stage, 1)
    stage.clock.advance(20)
    with capture_logs() as logs:
        assert stage.copy.look(stage.clock.now_s) == []
    assert [entry["event"] for entry in logs] == ["registry_copy.held_up"]
    assert stage.routable == [sid("x")]
    assert look_for(stage, 3) == [sid("x")]


def test_nobody_is_judged_while_there_is_no_connection(stage: Stage) -> None:
    stage.hear(record())
    stage.bus.connected = False
    assert look_for(stage, 10) == []


def test_those_that_left_are_forgotten_after_a_day_and_nobody_else_is(stage: Stage) -> None:
    stage.hear(record("left", Lifecycle.LEFT))
    stage.hear(record("silent"))
    known = []
    for passed_s in (registry_copy.LEFT_RETENTION_S - 30, 61):
        stage.clock.advance(passed_s)
        stage.copy._looked_at_s = stage.clock.now_s  # All that time was watched.
        stage.copy.look(stage.clock.now_s)
        known.append(sorted(stage.copy.replica.sessions))
    assert known == [[sid("left"), sid("silent")], [sid("silent")]]


def test_an_answer_on_either_other_path_is_a_sign_of_life(stage: Stage) -> None:
    silent_for(stage, 3)
    stage.bus.answers[PROBE.of(sid("x"))] = lambda _: encode(ProbeAnswer(sid("x")))
    stage.ask_after()
    assert stage.copy.replica.heard_ago_s(sid("x"), stage.clock.now_s) == 0
    stage.clock.advance(3)
    assert stage.copy.replica.doubtful(stage.clock.now_s) == [sid("x")]
    stage.bus.answers[PROBE.of(sid("x"))] = silent
    stage.bus.answers[OPINION.of_site("local")] = lambda data: encode(
        Opinion(decode(OpinionRequest, data).session, True, 0.5)
    )
    stage.ask_after()
    assert stage.copy.replica.heard_ago_s(sid("x"), stage.clock.now_s) == 0.5


@pytest.mark.parametrize(
    ("probe", "opinion"),
    [
        (ProbeAnswer(sid("y")), None),
        (ProbeAnswer(sid("x"), reached=False), None),
        (None, Opinion(sid("x"), False)),
        (None, Opinion(sid("x"), None)),
        (None, Opinion(sid("y"), True)),
    ],
)
def test_no_other_answer_is(stage: Stage, probe: ProbeAnswer | None, opinion: Opinion | None) -> None:
    silent_for(stage, 3)
    stage.bus.answers[PROBE.of(sid("x"))] = silent if probe is None else lambda _: encode(probe)
    if opinion is not None:
        stage.bus.answers[OPINION.of_site("local")] = lambda _: encode(opinion)
    stage.ask_after()
    assert stage.copy.replica.heard_ago_s(sid("x"), stage.clock.now_s) == 3
    stage.clock.advance(0.5)
    assert stage.routable == []


def test_that_nobody_receives_probes_stops_routing_at_once(stage: Stage) -> None:
    silent_for(stage, 2.5)
    assert stage.routable == [sid("x")]
    stage.ask_after()
    assert stage.routable == []


def test_many_doubtful_sessions_are_not_asked_after_all_at_once(stage: Stage) -> None:
    running = most = 0

    async def request(subject: str, payload: bytes, timeout_s: float) -> Message:
        nonlocal running, most
        if subject.startswith("probe."):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
        raise RequestTimeout("no answer")

    stage.bus.request = request  # type: ignore[method-assign]

    async def ask() -> None:
        await asyncio.gather(*[stage.copy.ask_after(sid(str(n))) for n in range(1000)])

    asyncio.run(ask())
    assert 0 < most <= registry_copy.ASKED_AT_ONCE


def test_the_copy_says_how_old_its_knowledge_is(stage: Stage) -> None:
    now = stage.clock.now_s
    assert stage.copy.knowledge_age_s(now) is None
    stage.snapshot()
    assert stage.copy.knowledge_age_s(now + 5) == 5
    stage.clock.advance(7)
    stage.registry.beat(stage.copy)
    assert stage.copy.knowledge_age_s(stage.clock.now_s + 1) == 1


# -- bad input -------------------------------------------------------------------------------------------------------


def changed(metadata: dict[str, Any] | None = None, **fields: Any) -> bytes:
    said = json.loads(encode(record("x", version=7))) | fields
    said["metadata"] |= metadata or {}
    return json.dumps(said).encode()


BAD_RECORDS = {
    "unknown lifecycle": (changed(lifecycle=9), "malformed"),
    "lower version": (encode(record("x", version=4)), "older-version"),
    "lower lifecycle": (encode(record("x", Lifecycle.JOIN, 9)), "older-version"),
    "foreign key": (changed(session=sid("y")), "foreign-subject"),
    "forged site": (changed({"site": "elsewhere"}), "forged-site"),
    "label of 1 MB": (changed({"labels": {"x": "x" * 1_000_000}}), "too-large"),
    "NaN": (changed({"loading_progress": float("nan")}), "malformed"),
    "id of 500 characters": (changed(session="s" * 500), "bad-field"),
    "not JSON": (b"\xff\xfe{", "malformed"),
    "nothing": (b"", "malformed"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_bad_record_is_refused_counted_logged_once_and_harmless(stage: Stage, name: str) -> None:
    data, reason = BAD_RECORDS[name]
    stage.hear(record("x", version=5))
    stage.clock.advance(2)
    before, counted = stage.copy.replica.records(), REFUSED.of(reason).value
    with capture_logs() as logs:
        for _ in range(100):
            stage.copy.on_session(Message(SESSION.of(sid("x")), data))
    assert stage.copy.replica.records() == before
    assert stage.copy.replica.heard_ago_s(sid("x"), stage.clock.now_s) == 2  # Nor is it a sign of life.
    assert REFUSED.of(reason).value == counted + 100
    assert [entry["reason"] for entry in logs] == [reason]


@pytest.mark.parametrize(
    ("subject", "said", "reason"),
    [
        (STATUS.of(sid("x")), b"{", "malformed"),
        (STATUS.of(sid("y")), encode(status()), "foreign-subject"),
        (STATUS.of(sid("x")), encode(status(interval_s=1e9)), "bad-field"),
        (STATUS.of(sid("x")), encode(status(interval_s=-1.0)), "bad-field"),
        (BEAT.of_site("local"), b"[]", "malformed"),
        (BEAT.of_site("local"), encode(RegistryBeat("far", "e", 1, 2.0)), "foreign-subject"),
        (BEAT.of_site("local"), encode(RegistryBeat("local", "e", 1, 0.0)), "bad-field"),
        (DISCONNECTED.of_site("local"), b"", "malformed"),
        (DISCONNECTED.of_site("far"), encode(Disconnected([sid("x")])), "foreign-subject"),
    ],
)
def test_other_bad_messages_are_refused_as_well(stage: Stage, subject: str, said: bytes, reason: str) -> None:
    stage.hear(record())
    stage.clock.advance(2)
    counted = REFUSED.of(reason).value
    handlers = {"status": stage.copy.on_status, "beat": stage.copy.on_beat, "disconnected": stage.copy.on_disconnected}
    handlers[subject.removeprefix("registry.").partition(".")[0]](Message(subject, said))
    assert REFUSED.of(reason).value == counted + 1
    assert stage.routable == [sid("x")]
    assert stage.copy.replica.heard_ago_s(sid("x"), stage.clock.now_s) == 2


def test_bad_records_of_a_snapshot_are_left_out(stage: Stage) -> None:
    bad = record_of("s1", site="forged")
    answer = encode(SnapshotPage([record("1"), bad, record("2")], False, [0.1, 0.1, -5.0]))
    stage.bus.answers[SNAPSHOT.of_site("local")] = lambda _: answer
    stage.snapshot()
    assert [one.session for one in stage.copy.replica.records()] == [sid("1"), sid("2")]
    assert stage.copy.replica.heard_ago_s(sid("2"), stage.clock.now_s) == 0
