"""The registry's shell: whose records are acknowledged, what ends a session, what others are told; KV's troubles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from serai.contracts.codec import decode, encode
from serai.contracts.registry import AllocationEnded, Disconnected, Opinion, RegistryBeat, SnapshotPage
from serai.contracts.session_record import Lifecycle, SessionRecord, new_session_id
from serai.contracts.status import ProbeAnswer, ProbeRequest, SessionStatus
from serai.contracts.subjects import BEAT, DIGEST, DISCONNECTED, ENDED, OPINION, PROBE, SESSION, SNAPSHOT, STATUS
from serai.registry import federation, probing, service
from serai.registry.membership import Answered, Event, NobodyReceives, NotReached, Path, Standing
from serai.registry.probing import Probing
from serai.registry.service import Registry
from serai.registry.settings import RegistrySettings
from serai.registry.storing import Storing
from serai.runtime.bus import BucketState, BusError, Message
from serai.runtime.disconnects import DisconnectedClient
from serai.runtime.registry_replica import RegistryReplica
from unit.fakes import Clock, FakeBus, record_of

SETTINGS = RegistrySettings(site="here", silence_grace_s=100.0)


def named(allocation: str, *, site: str = "here", restart_count: int = 0, **fields: Any) -> SessionRecord:
    session = new_session_id(site, allocation, restart_count, "r")
    return record_of(session, site=site, allocation=allocation, restart_count=restart_count, **fields)


class Desk:
    """A registry on a bus whose other end the test plays."""

    def __init__(self) -> None:
        self.bus = FakeBus()
        self.registry = Registry(SETTINGS, self.bus)
        self.replica = self.registry.replica

    def say(self, record: SessionRecord, reply: str = "") -> None:
        self.registry.on_session(Message(SESSION.of(record.session), encode(record), reply))

    def sent(self) -> list[tuple[str, Any]]:
        kinds = {SESSION.hop: SessionRecord, DISCONNECTED.hop: Disconnected, "inbox": SessionRecord}
        return [
            (one.subject, decode(kinds[one.subject.rpartition(".")[0] or one.subject], one.payload))
            for one in self.bus.take()
        ]

    def standing(self, record: SessionRecord) -> Standing | None:
        return self.registry.membership.standing(record.session)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_only_sessions_of_the_own_site_are_acknowledged_and_all_are_known(desk: Desk) -> None:
    mine, theirs = named("a1"), named("a1", site="there")
    desk.say(mine, "inbox")
    desk.say(theirs, "inbox")
    assert desk.sent() == [("inbox", mine)]
    assert {record.session for record in desk.replica.records()} == {mine.session, theirs.session}


def test_a_session_that_was_closed_and_speaks_is_told_so_and_stays_closed(desk: Desk) -> None:
    record = named("a1")
    desk.say(record)
    desk.registry.on_ended(Message(ENDED.of_site("here"), encode(AllocationEnded("here", "a1"))))
    left = record.advanced(Lifecycle.LEFT)
    assert desk.sent() == [(SESSION.of(record.session), left)]
    desk.say(record.advanced(Lifecycle.SERVING), "inbox")
    assert [subject for subject, _ in desk.sent()] == ["inbox", SESSION.of(record.session)]
    assert desk.replica.get(record.session) == left


def test_the_registry_does_not_answer_its_own_word_that_a_session_left(desk: Desk) -> None:
    left = named("a1", lifecycle=Lifecycle.LEFT)
    desk.say(left)
    desk.say(left)
    assert desk.sent() == []
    assert desk.standing(left) is Standing.LEFT


def test_bad_records_change_nothing(desk: Desk) -> None:
    good = named("a1")
    desk.say(good)
    before = desk.replica.records()
    for data in (b"{", encode(named("a2"))[:-3], b"x" * 20_000):
        desk.registry.on_session(Message(SESSION.of("s"), data, "inbox"))
    desk.registry.on_session(Message(SESSION.of(good.session), encode(named("a2")), "inbox"))
    for status in (
        SessionStatus(good.session, 1, Lifecycle.SERVING, 1, -1.0),
        SessionStatus("x", 1, Lifecycle.JOIN, 1, 1),
    ):
        desk.registry.on_status(Message(STATUS.of(good.session), encode(status)))
    desk.registry.on_status(Message(STATUS.of(good.session), b""))
    assert desk.replica.records() == before
    assert desk.replica.status(good.session) is None
    assert desk.sent() == []


@pytest.mark.parametrize(("site", "allocation"), [("there", "a1"), ("here", ""), ("here", "unknown")])
def test_the_end_of_what_is_not_ours_ends_nothing(desk: Desk, site: str, allocation: str) -> None:
    desk.say(named("a1"))
    desk.say(named(""))
    desk.registry.on_ended(Message(ENDED.of_site("here"), encode(AllocationEnded(site, allocation))))
    assert all(record.lifecycle is Lifecycle.SERVING for record in desk.replica.records())


def test_a_later_run_of_an_allocation_ends_the_earlier_one(desk: Desk) -> None:
    first, second = named("job"), named("job", restart_count=1)
    desk.say(first)
    desk.say(second)
    assert desk.replica.get(first.session) == first.advanced(Lifecycle.LEFT)


# -- disconnects -----------------------------------------------------------------------------------------------------


def test_closed_connections_stop_routing_and_everybody_is_told_in_one_message(desk: Desk) -> None:
    sessions = [named(f"a{n}", connection=f"agent-{n}") for n in range(3)]
    beside = named("a0b", connection="agent-0")

    async def main() -> None:
        for record in (*sessions, beside):
            desk.say(record)
        desk.bus.take()
        for name in ("agent-0", "agent-1", "ingress-7", ""):
            desk.registry.on_connection_closed(DisconnectedClient(name, "U", "Read Error"))
        await asyncio.sleep(0)

    asyncio.run(main())
    gone = [sessions[0].session, beside.session, sessions[1].session]
    assert desk.sent() == [(DISCONNECTED.of_site("here"), Disconnected(gone))]
    assert [desk.replica.is_unreachable(session) for session in gone] == [True] * 3
    assert desk.standing(sessions[0]) is Standing.UNREACHABLE
    assert all(record.lifecycle is Lifecycle.SERVING for record in desk.replica.records())
    desk.say(sessions[0].advanced(Lifecycle.SERVING))
    assert not desk.replica.is_unreachable(sessions[0].session)


def test_another_sites_word_counts_for_its_own_sessions_only(desk: Desk) -> None:
    mine, theirs = named("a1"), named("a1", site="there")
    desk.say(mine)
    desk.say(theirs)
    said = encode(Disconnected([mine.session, theirs.session, "unknown"]))
    desk.registry.on_disconnected(Message(DISCONNECTED.of_site("there"), said))
    assert (desk.replica.is_unreachable(mine.session), desk.replica.is_unreachable(theirs.session)) == (False, True)


# -- probing ---------------------------------------------------------------------------------------------------------


class Asker:
    """Probing with recorded events, on a bus whose answers the test gives."""

    def __init__(self, *records: SessionRecord, sites: tuple[str, ...] = ()) -> None:
        self.bus = FakeBus()
        self.replica = RegistryReplica()
        self.events: list[Event] = []
        now = probing.time.monotonic()
        for record in records:
            self.replica.merge(record, now, heard=True)
        self.probing = Probing(self.bus, "here", self.replica, self.events.append, lambda: list(sites))

    def ask(self, session: str, path: Path) -> list[Event]:
        async def main() -> None:
            running = asyncio.ensure_future(self.probing.run())
            self.probing.ask(session, path)
            async with asyncio.timeout(5):
                while not self.events:
                    await asyncio.sleep(0.001)
            running.cancel()

        asyncio.run(main())
        return self.events


S1, PEER, BESIDE = named("a1"), named("a2"), named("a1", restart_count=1)


def test_a_direct_probe_tells_an_answer_from_nobody_there() -> None:
    asker = Asker(S1)
    assert asker.ask(S1.session, Path.DIRECT) == [NobodyReceives(S1.session)]
    asker = Asker(S1)
    asker.bus.answers[PROBE.of(S1.session)] = lambda data: encode(ProbeAnswer(S1.session))
    assert asker.ask(S1.session, Path.DIRECT) == [Answered(S1.session)]
    asker = Asker(S1)
    asker.bus.answers[PROBE.of(S1.session)] = lambda data: encode(ProbeAnswer("another"))
    assert asker.ask(S1.session, Path.DIRECT) == [NotReached(S1.session, Path.DIRECT)]


@pytest.mark.parametrize("reached", [True, False])
def test_a_peer_in_another_allocation_is_asked_and_its_failure_is_a_confirmation(reached: bool) -> None:
    asker = Asker(S1, PEER)

    def answer(data: bytes) -> bytes:
        assert decode(ProbeRequest, data) == ProbeRequest(about=S1.session)
        return encode(ProbeAnswer(S1.session, reached=reached))

    asker.bus.answers[PROBE.of(PEER.session)] = answer
    expected = Answered(S1.session) if reached else NotReached(S1.session, Path.PEER, PEER.session)
    assert asker.ask(S1.session, Path.PEER) == [expected]


def test_a_peer_that_does_not_answer_itself_confirms_nothing_nor_does_one_of_the_same_allocation() -> None:
    assert Asker(S1, PEER).ask(S1.session, Path.PEER) == [NotReached(S1.session, Path.PEER, "")]
    assert Asker(S1, named("a1")).ask(S1.session, Path.PEER) == [NotReached(S1.session, Path.PEER, "")]


@pytest.mark.parametrize(
    ("alive", "event"),
    [
        (True, Answered(S1.session)),
        (False, NotReached(S1.session, Path.PEER, "there")),
        (None, NotReached(S1.session, Path.PEER, "")),
    ],
)
def test_without_a_peer_another_sites_registry_is_asked(alive: bool | None, event: Event) -> None:
    asker = Asker(S1, sites=("there",))
    asker.bus.answers[OPINION.of_site("there")] = lambda data: encode(Opinion(S1.session, alive))
    assert asker.ask(S1.session, Path.PEER) == [event]


# -- other sites -----------------------------------------------------------------------------------------------------


def two_registries(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> tuple[Desk, Registry]:
    """Ours, and the owner of site `there`, which answers ours."""
    clock.put_into(monkeypatch, federation, service, probing)
    here = Desk()
    owner = Registry(RegistrySettings(site="there"), FakeBus())

    def ask(handler: Any) -> Any:
        def answer(data: bytes) -> bytes:
            handler(Message("", data, "inbox"))
            payload: bytes = owner._bus.take()[-1].payload
            return payload

        return answer

    here.bus.answers[DIGEST.of_site("there")] = ask(owner.on_digest)
    here.bus.answers[SNAPSHOT.of_site("there")] = ask(owner.on_snapshot)
    return here, owner


def hear_beat(desk: Desk, owner: Registry) -> None:
    beat = owner.federation.beat()
    desk.registry.on_beat(Message(BEAT.of_site(beat.site), encode(beat)))


def say_to(registry: Registry, record: SessionRecord) -> None:
    registry.on_session(Message(SESSION.of(record.session), encode(record)))


def test_what_was_missed_of_another_site_is_fetched_from_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    here, owner = two_registries(monkeypatch, clock)
    kept, changed, left = (named(name, site="there") for name in ("k", "c", "l"))
    for record in (kept, changed, left):
        here.say(record)
        say_to(owner, record)
    new = named("new", site="there")
    for record in (changed.advanced(Lifecycle.DOWN), left.advanced(Lifecycle.LEFT), new):
        say_to(owner, record)
    hear_beat(here, owner)
    asyncio.run(here.registry.federation.repair("there"))
    assert here.replica.records() == owner.replica.records()
    assert here.replica.heard_ago_s(new.session, clock.now_s) == 0.0
    assert here.sent() == []


def test_records_of_third_sites_and_of_our_own_are_not_taken_from_another_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, owner = two_registries(monkeypatch, Clock())
    forged = [named("a1"), named("a1", site="third")]
    page = SnapshotPage([*forged, record_of("forged-id", site="there")])
    here.bus.answers[SNAPSHOT.of_site("there")] = lambda data: encode(page)
    say_to(owner, named("a1", site="there"))
    hear_beat(here, owner)
    asyncio.run(here.registry.federation.repair("there"))
    assert here.replica.records() == []


def test_an_owner_that_missed_that_a_session_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here, owner = two_registries(monkeypatch, Clock())
    record = named("a1", site="there")
    say_to(owner, record)
    left = record.advanced(Lifecycle.LEFT)
    here.say(left)
    hear_beat(here, owner)
    asyncio.run(here.registry.federation.repair("there"))
    assert here.sent() == [(SESSION.of(record.session), left)]
    assert here.replica.get(record.session) == left


def test_what_its_owner_has_not_known_for_a_minute_is_forgotten_but_not_called_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    here, owner = two_registries(monkeypatch, clock)
    ghost, kept = named("g", site="there"), named("k", site="there")
    here.say(ghost)
    for registry in (here.registry, owner):
        say_to(registry, kept)
    hear_beat(here, owner)
    for seconds, known in ((59.0, 2), (2.0, 1)):
        clock.advance(seconds)
        asyncio.run(here.registry.federation.repair("there"))
        assert len(here.replica) == known
    assert here.replica.records() == [kept]
    assert here.sent() == []


def test_a_beat_on_anothers_subject_or_with_nonsense_is_refused(desk: Desk) -> None:
    beat = encode(RegistryBeat("there", "e", 1, 2.0))
    desk.registry.on_beat(Message(BEAT.of_site("elsewhere"), beat))
    desk.registry.on_beat(Message(BEAT.of_site("there"), encode(RegistryBeat("there", "e", 1, 1e9))))
    desk.registry.on_beat(Message(BEAT.of_site("there"), b"{"))
    assert desk.registry.federation.other_sites == []
    desk.registry.on_beat(Message(BEAT.of_site("there"), beat))
    assert desk.registry.federation.other_sites == ["there"]


# -- KV --------------------------------------------------------------------------------------------------------------


class FakeBucket:
    """A KV that may fail, hang or lose."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.created = "1"
        self.fails = False
        self.writes = 0

    async def put(self, key: str, value: bytes) -> None:
        self.writes += 1
        if self.fails:
            raise BusError("no answer")
        self.kept[key] = value

    async def delete(self, key: str) -> None:
        self.kept.pop(key, None)

    async def entries(self) -> dict[str, bytes]:
        if self.fails:
            raise BusError("no answer")
        return dict(self.kept)

    async def state(self) -> BucketState | None:
        if self.fails:
            raise BusError("no answer")
        return BucketState(self.created, len(self.kept)) if self.kept or self.created else None


def storing_of(values: dict[str, bytes]) -> tuple[Storing, FakeBucket]:
    bucket = FakeBucket()
    return Storing(bucket, values.get, lambda: list(values)), bucket


async def store_all(storing: Storing, values: dict[str, bytes]) -> None:
    for key in values:
        storing.changed(key)
    assert await storing.store_once()


def test_changes_are_coalesced_per_session_and_the_last_one_is_written() -> None:
    values = {f"s{n}": b"1" for n in range(40)}
    storing, bucket = storing_of(values)
    for key in values:
        for _ in range(10):
            storing.changed(key)
    values["s1"] = b"2"
    asyncio.run(store_all(storing, values))
    assert bucket.kept == values
    assert bucket.writes == 40


def test_what_could_not_be_written_is_written_later_and_said_once() -> None:
    values = {f"s{n}": b"1" for n in range(40)}
    storing, bucket = storing_of(values)

    async def main() -> None:
        bucket.fails = True
        for key in values:
            storing.changed(key)
        for _ in range(3):
            assert not await storing.store_once()
        bucket.fails = False
        assert await storing.store_once()

    with capture_logs() as logs:
        asyncio.run(main())
    assert bucket.kept == values
    assert [entry["event"] for entry in logs] == ["registry.kv_fails", "registry.kv_works_again"]


def test_what_was_being_written_when_the_registry_is_told_to_stop_is_written_last() -> None:
    values = {f"s{n}": b"LEFT" for n in range(40)}
    storing, bucket = storing_of(values)
    put = bucket.put

    async def hangs(key: str, value: bytes) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        bucket.put = hangs  # type: ignore[method-assign]
        for key in values:
            storing.changed(key)
        writing = asyncio.create_task(storing.storing())
        await asyncio.sleep(0.01)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        bucket.put = put  # type: ignore[method-assign]
        await storing.finish()

    asyncio.run(main())
    assert bucket.kept == values


def test_h61_a_bucket_that_vanished_was_made_anew_or_lost_keys_is_written_again() -> None:
    values = {f"s{n}": b"1" for n in range(5)}
    storing, bucket = storing_of(values)

    async def heals() -> bool:
        await storing.supervise()
        await storing.store_once()
        return bucket.kept == values

    async def main() -> None:
        await store_all(storing, values)
        assert await heals()
        writes = bucket.writes
        assert await heals()
        assert bucket.writes == writes  # Nothing is wrong, nothing is written.
        bucket.kept.clear()
        bucket.created = ""
        assert await heals()
        bucket.kept, bucket.created = {"other": b""}, "2"
        bucket.kept.pop("other")
        assert await heals()
        bucket.created = "3"
        assert await heals()
        bucket.kept.pop("s3")
        assert await heals()

    with capture_logs() as logs:
        asyncio.run(main())
    assert [entry["event"] for entry in logs].count("registry.kv_rewritten") >= 3


def test_a_forgotten_session_is_deleted_and_not_missed() -> None:
    values = {"s1": b"1", "s2": b"1"}
    storing, bucket = storing_of(values)

    async def main() -> None:
        await store_all(storing, dict(values))
        del values["s1"]
        storing.changed("s1")
        assert await storing.store_once()
        writes = bucket.writes
        await storing.supervise()
        await storing.store_once()
        assert bucket.writes == writes

    asyncio.run(main())
    assert bucket.kept == {"s2": b"1"}
