"""Who is taken to be there and who to have left: events in, effects out; and what no run of events may ever do."""

from __future__ import annotations

import ast
from pathlib import Path as FilePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.session_record import Lifecycle, SessionRecord, new_session_id
from serai.registry import membership as module
from serai.registry.membership import (
    ASK_AGAIN_S,
    PAUSE_MAX_S,
    SETTLE_S,
    SILENT_STANDINGS,
    TABLE,
    AllocationOver,
    Answered,
    Ask,
    BusBack,
    BusCut,
    Cause,
    CloseRecord,
    Disconnected,
    Effect,
    Event,
    ForgetRecord,
    Heard,
    IllegalTransition,
    Known,
    Look,
    Membership,
    NobodyReceives,
    NotReached,
    OwnerDoesNotKnow,
    Path,
    Standing,
    Trigger,
    grace_s,
    shortened_s,
    table_text,
)
from unit.fakes import record_of

GRACE_S, RETENTION_S = 120.0, 1000.0
ARCHITECTURE = FilePath(__file__).parents[2] / "docs" / "state-machines.md"


def record_named(
    allocation: str, *, site: str = "here", restart_count: int = 0, lifecycle: Lifecycle = Lifecycle.SERVING
) -> SessionRecord:
    session = new_session_id(site, allocation, restart_count, "r")
    return record_of(session, lifecycle, site=site, allocation=allocation, restart_count=restart_count)


class Observer:
    """A membership with a clock that the test moves; it collects the effects."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.machine = Membership("here", self.now, silence_grace_s=GRACE_S, retention_s=RETENTION_S)
        self.effects: list[Effect] = []

    def tell(self, *events: Event) -> list[Effect]:
        found = [effect for event in events for effect in self.machine.handle(event, self.now)]
        self.effects += found
        return found

    def join(self, *records: SessionRecord, heard: bool = True) -> list[str]:
        for record in records:
            self.tell(Known(record), *([Heard(record.session, 1.0)] if heard else []))
        return [record.session for record in records]

    def live(self, seconds: float, speaking: list[str] | None = None, every_s: float = 1.0) -> list[Effect]:
        """Time goes on with looks, while `speaking` speak; the effects meanwhile."""
        found: list[Effect] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + every_s)
            for session in speaking or []:
                found += self.tell(Heard(session, 1.0))
            found += self.tell(Look())
        return found

    @property
    def closed(self) -> list[tuple[str, Cause]]:
        return [(effect.session, effect.cause) for effect in self.effects if isinstance(effect, CloseRecord)]


@pytest.fixture
def observer() -> Observer:
    return Observer()


def fleet(count: int, **fields: Any) -> list[SessionRecord]:
    return [record_named(f"a{number}", **fields) for number in range(count)]


# -- silence ---------------------------------------------------------------------------------------------------------


def test_a_silent_session_is_asked_by_both_paths_then_suspected_then_closed_after_the_grace(observer: Observer) -> None:
    quiet, *others = observer.join(*fleet(3))
    assert observer.live(2.0, others, 0.25) == []
    assert observer.live(0.5, others, 0.25) == [Ask(quiet, Path.DIRECT), Ask(quiet, Path.PEER)]
    assert observer.machine.standing(quiet) is Standing.DOUBTED
    assert observer.live(1.0, others, 0.25) == []
    assert observer.machine.standing(quiet) is Standing.SUSPECTED
    observer.live(GRACE_S - 3.5, others, 0.25)
    assert observer.closed == []
    observer.live(0.5, others, 0.25)
    assert observer.closed == [(quiet, Cause.SILENT)]
    assert observer.machine.standing(quiet) is Standing.LEFT


def test_each_interval_is_the_sessions_own(observer: Observer) -> None:
    slow, *_ = observer.join(*fleet(3))
    observer.tell(Heard(slow, 10.0))
    observer.live(22.0, every_s=0.5)
    assert observer.machine.standing(slow) is Standing.HEARD
    observer.live(1.0, every_s=0.5)
    assert observer.machine.standing(slow) is Standing.DOUBTED


def test_an_answer_on_any_path_lifts_the_doubt_and_the_suspicion(observer: Observer) -> None:
    quiet, *others = observer.join(*fleet(3))
    observer.live(2.5, others, 0.25)
    observer.tell(Answered(quiet))
    assert observer.machine.standing(quiet) is Standing.HEARD
    observer.live(4, others, 0.25)
    assert observer.machine.standing(quiet) is Standing.SUSPECTED
    observer.tell(Answered(quiet, silent_s=0.5))
    assert observer.machine.standing(quiet) is Standing.HEARD


def test_a_session_that_answers_probes_but_is_not_heard_is_never_closed(observer: Observer) -> None:
    quiet, *others = observer.join(*fleet(3))
    for _ in range(100):
        if Ask(quiet, Path.DIRECT) in observer.live(2.5, others, 0.25):
            observer.tell(Answered(quiet), NotReached(quiet, Path.PEER, others[0]))
    assert observer.closed == []


def test_a_silent_session_is_asked_again_now_and_then(observer: Observer) -> None:
    quiet, *others = observer.join(*fleet(3))
    asked = [effect for effect in observer.live(100, others, 0.5) if effect == Ask(quiet, Path.PEER)]
    assert len(asked) == 1 + int((100 - 3.5) / ASK_AGAIN_S)


def test_when_the_bus_says_that_it_is_gone_only_its_own_word_brings_it_back_and_nothing_ends(
    observer: Observer,
) -> None:
    one, other, *rest = observer.join(*fleet(6))
    observer.tell(Disconnected(one), NobodyReceives(other))
    assert observer.machine.standing(one) is observer.machine.standing(other) is Standing.UNREACHABLE
    observer.tell(Answered(one))
    assert observer.machine.standing(one) is Standing.UNREACHABLE
    observer.tell(Heard(one, 1.0))
    assert observer.machine.standing(one) is Standing.HEARD
    observer.live(GRACE_S - 1, [one, *rest])
    assert observer.closed == []
    observer.live(3, [one, *rest])
    assert observer.closed == [(other, Cause.SILENT)]


# -- Lifeguard -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confirmations", "elapsed_s", "remaining_s"),
    [(0, 0, 30), (1, 2, 14), (2, 3, 4.81), (3, 4, -2), (4, 5, -3), (5, 10, -8)],
)
def test_confirmations_shorten_the_grace_as_memberlist_does(
    confirmations: int, elapsed_s: float, remaining_s: float
) -> None:
    """The table of hashicorp/memberlist `suspicion_test.go`: k = 3, min 2 s, max 30 s; it cuts to milliseconds."""
    assert shortened_s(2, 30, confirmations, 3) - elapsed_s == pytest.approx(remaining_s, abs=0.001)


def test_the_grace_ends_sooner_when_peers_could_not_reach_it_either(observer: Observer) -> None:
    quiet, *others = observer.join(*fleet(5))
    observer.live(4, others)
    observer.tell(*(NotReached(quiet, Path.PEER, peer) for peer in others[:2]))
    observer.tell(NotReached(quiet, Path.PEER, others[0]), NotReached(quiet, Path.DIRECT), NotReached(quiet, Path.PEER))
    assert observer.machine.confirmations(quiet) == 2  # The same one twice, and our own failures, are none.
    limit_s = grace_s(GRACE_S, 2)
    assert limit_s == pytest.approx(40.75, abs=0.01)
    observer.live(limit_s - 5, others, 0.25)
    assert observer.closed == []
    observer.live(1.5, others, 0.25)
    assert observer.closed == [(quiet, Cause.SILENT)]


def test_a_confirmation_counts_for_one_silence_only(observer: Observer) -> None:
    quiet, *others = observer.join(*fleet(5))
    observer.live(4, others)
    observer.tell(*(NotReached(quiet, Path.PEER, peer) for peer in others[:3]), Heard(quiet, 1.0))
    assert observer.machine.confirmations(quiet) == 0
    observer.tell(NotReached(quiet, Path.PEER, others[0]))  # Late: of the silence before.
    assert observer.machine.confirmations(quiet) == 0
    observer.live(GRACE_S - 1, others)
    assert observer.closed == []


# -- positive evidence -----------------------------------------------------------------------------------------------


def test_its_own_word_ends_it_at_once(observer: Observer) -> None:
    record = record_named("a1")
    observer.join(record)
    assert observer.tell(Known(record.advanced(Lifecycle.LEFT))) == []
    assert observer.machine.standing(record.session) is Standing.LEFT


def test_the_batch_systems_word_ends_all_sessions_of_the_allocation_up_to_that_run(observer: Observer) -> None:
    first, second, other = observer.join(
        record_named("job"), record_named("job", restart_count=1), record_named("another"), heard=False
    )
    assert observer.tell(AllocationOver("job", 0)) == [CloseRecord(first, Cause.ALLOCATION_OVER)]
    assert observer.tell(AllocationOver("job")) == [CloseRecord(second, Cause.ALLOCATION_OVER)]
    assert observer.tell(AllocationOver("job")) == []
    assert observer.machine.standing(other) is Standing.UNHEARD


def test_another_run_that_speaks_ends_the_earlier_ones_of_its_allocation(observer: Observer) -> None:
    first, beside = observer.join(record_named("job"), record_named("another"))
    later = record_named("job", restart_count=1)
    observer.join(later, heard=False)
    assert observer.closed == []  # A record is no voice.
    assert observer.tell(Heard(later.session, 1.0)) == [CloseRecord(first, Cause.REPLACED)]
    assert observer.tell(Heard(beside, 1.0), Heard(later.session, 1.0)) == []


def test_the_word_of_an_earlier_run_ends_nothing(observer: Observer) -> None:
    later = record_named("job", restart_count=1)
    observer.join(later, record_named("job"))
    assert observer.closed == []


def test_what_left_never_stands_otherwise_again(observer: Observer) -> None:
    record = record_named("a1")
    observer.join(record.advanced(Lifecycle.LEFT))
    session = record.session
    observer.tell(Known(record), Heard(session, 1.0), Answered(session), Disconnected(session), NobodyReceives(session))
    assert observer.machine.standing(session) is Standing.LEFT


# -- the cases of HPC sites ------------------------------------------------------------------------------------------


def test_h01_a_batch_system_that_does_not_answer_ends_nothing(observer: Observer) -> None:
    """Empty or failed `squeue`: UNKNOWN is no event at all, and an allocation without a name is nobody's."""
    sessions = observer.join(*fleet(5), record_of(new_session_id("here", "", 0, "r"), site="here", allocation=""))
    assert observer.tell(AllocationOver(""), AllocationOver("", 3), AllocationOver("unknown-job")) == []
    observer.live(1000, sessions)
    assert observer.closed == []


def test_h17_a_restarted_registry_sees_no_mass_loss(observer: Observer) -> None:
    """200 records are read from the store; the agents' voices are missing for three seconds, or for long."""
    sessions = observer.join(*fleet(200), heard=False)
    assert observer.machine.braked
    observer.live(3)
    for session in sessions[:120]:
        observer.tell(Heard(session, 1.0))
    assert not observer.machine.braked
    observer.live(GRACE_S - 4, sessions[:120])
    assert observer.closed == []
    observer.live(2, sessions[:120])
    assert sorted(session for session, _ in observer.closed) == sorted(sessions[120:])


def test_h17_while_most_of_a_site_is_silent_nothing_is_closed_for_however_long(observer: Observer) -> None:
    sessions = observer.join(*fleet(10))
    observer.live(100 * GRACE_S, sessions[:4], 4.0)
    assert observer.closed == []
    assert observer.machine.braked
    observer.live(4, sessions[:5], 1.0)
    assert len(observer.closed) == 5


def test_a_loss_of_thousands_is_judged_in_turns_and_nothing_is_closed_before_all_have_had_theirs(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DUE_AT_ONCE", 3)
    sessions = observer.join(*fleet(10))
    observer.live(GRACE_S * 2, sessions[:8], 1.0)
    assert sorted(session for session, _ in observer.closed) == sessions[8:]
    observer.now += PAUSE_MAX_S - 0.5
    asked = [effect for effect in observer.tell(Look()) if effect == Ask(sessions[0], Path.DIRECT)]
    assert len(asked) <= 1
    observer.live(GRACE_S * 3, every_s=0.25)
    assert len(observer.closed) == 2


def test_h26_clocks_of_other_machines_cannot_matter() -> None:
    """No event carries a time of its sender, and the machine reads no clock."""
    imported = {
        name
        for node in ast.walk(ast.parse(FilePath(module.__file__).read_text()))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
    }
    assert not imported & {"time", "datetime", "asyncio"}


@given(st.floats(-1e6, 1e6), st.lists(st.floats(0.1, 4.0), max_size=60))
def test_h26_the_same_steps_lead_to_the_same_ends_from_any_start_of_the_clock(
    skew_s: float, steps: list[float]
) -> None:
    ends = []
    for start_s in (0.0, round(skew_s)):
        machine = Membership("here", start_s, silence_grace_s=GRACE_S, retention_s=RETENTION_S)
        effects: list[Effect] = []
        now = start_s
        for record in fleet(3):
            effects += machine.handle(Known(record), now) + machine.handle(Heard(record.session, 1.0), now)
        for number, step in enumerate(steps):
            now += round(step, 1)
            if number % 2:
                effects += machine.handle(Heard(fleet(3)[1].session, 1.0), now)
            effects += machine.handle(Look(), round(now, 3))
        ends.append((effects, [machine.standing(record.session) for record in fleet(3)]))
    assert ends[0] == ends[1]


# -- the observer's own troubles -------------------------------------------------------------------------------------


def test_while_the_bus_is_away_nothing_is_judged_and_afterwards_what_was_missed_is_no_silence(
    observer: Observer,
) -> None:
    (quiet,) = observer.join(record_named("a1"))
    observer.tell(BusCut())
    assert observer.live(10 * GRACE_S) == []
    assert observer.machine.standing(quiet) is Standing.HEARD
    observer.tell(BusBack())
    observer.live(GRACE_S - 1)
    assert observer.closed == []
    observer.live(2)
    assert observer.closed == [(quiet, Cause.SILENT)]


def test_a_process_that_was_stopped_for_a_while_takes_nobodys_silence_for_granted(observer: Observer) -> None:
    observer.join(record_named("a1"))
    observer.live(GRACE_S - 10)
    observer.now += PAUSE_MAX_S + 3600.0  # SIGSTOP, or a laptop's lid.
    assert [effect for effect in observer.tell(Look()) if not isinstance(effect, Ask)] == []
    observer.live(GRACE_S - 1)
    assert observer.closed == []


def test_a_short_grace_does_not_end_before_agents_had_time_to_come_back() -> None:
    machine = Membership("here", 0.0, silence_grace_s=60.0, retention_s=100.0)
    machine.handle(Known(record_named("a1")), 0.0)
    for peer in ("p", "q", "r"):
        machine.handle(NotReached(record_named("a1").session, Path.PEER, peer), 0.0)
    found = []
    for now in range(1, 30):
        found += [(now, effect) for effect in machine.handle(Look(), float(now)) if isinstance(effect, CloseRecord)]
    assert [now for now, _ in found] == [SETTLE_S]


# -- other sites -----------------------------------------------------------------------------------------------------


def test_sessions_of_other_sites_are_neither_asked_nor_closed_nor_counted(observer: Observer) -> None:
    abroad = observer.join(*fleet(10, site="there"))
    near = observer.join(record_named("job", site="there"), *fleet(3))
    observer.live(10 * GRACE_S, near[1:])
    observer.tell(AllocationOver("job"), AllocationOver("a5"))
    observer.join(record_named("job", site="there", restart_count=1))
    assert observer.effects == []
    assert not observer.machine.braked
    assert {observer.machine.standing(session) for session in abroad} == {Standing.HEARD}


def test_a_session_that_its_own_registry_does_not_know_is_forgotten_when_it_is_silent_here_too(
    observer: Observer,
) -> None:
    (abroad,) = observer.join(record_named("a1", site="there"))
    (near,) = observer.join(record_named("a1"))
    observer.live(30, [near])
    observer.tell(OwnerDoesNotKnow(abroad, 3600.0))
    observer.live(40, [near])
    observer.tell(OwnerDoesNotKnow(abroad, 30.0), OwnerDoesNotKnow(near, 3600.0))
    assert observer.effects == []
    assert observer.tell(OwnerDoesNotKnow(abroad, 61.0)) == [ForgetRecord(abroad)]
    assert observer.machine.standing(abroad) is None


# -- retention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["here", "there"])
def test_a_session_that_left_is_forgotten_after_the_retention(observer: Observer, site: str) -> None:
    (left,) = observer.join(record_named("a1", site=site, lifecycle=Lifecycle.LEFT))
    assert observer.live(RETENTION_S) == []
    assert observer.live(2) == [ForgetRecord(left)]
    assert observer.machine.standing(left) is None


def test_one_that_left_and_still_speaks_is_not_forgotten(observer: Observer) -> None:
    """Else its next record would make it new."""
    (left,) = observer.join(record_named("a1", lifecycle=Lifecycle.LEFT))
    observer.live(RETENTION_S - 1)
    observer.tell(Heard(left, 1.0))
    assert observer.live(RETENTION_S) == []
    assert observer.live(2) == [ForgetRecord(left)]


# -- the table -------------------------------------------------------------------------------------------------------


def test_nothing_leads_out_of_left_and_everything_leads_into_it() -> None:
    assert set(TABLE) == set(Standing)
    assert set(TABLE[Standing.LEFT].values()) == {Standing.LEFT}
    assert all(moves[Trigger.CLOSED] is Standing.LEFT for moves in TABLE.values())
    assert all(set(moves) >= {Trigger.SPOKE, Trigger.REACHED, Trigger.BUS_SAYS_GONE} for moves in TABLE.values())


def test_an_impossible_move_raises_with_what_happened_before(observer: Observer) -> None:
    (session,) = observer.join(record_named("a1"))
    with pytest.raises(IllegalTransition, match=rf"{session} is heard: no SILENCE then. Last: .*SPOKE"):
        observer.machine._move(observer.machine._sessions[session], Trigger.SILENCE, observer.now)


def test_the_picture_in_the_docs_is_the_table() -> None:
    assert table_text() in ARCHITECTURE.read_text()


# -- whatever happens ------------------------------------------------------------------------------------------------

RECORDS = [
    record_named(allocation, site=site, restart_count=restart_count)
    for site in ("here", "there")
    for allocation in ("a", "b", "c", "")
    for restart_count in (0, 1)
]
sessions = st.sampled_from([record.session for record in RECORDS])
events = st.one_of(
    st.sampled_from(RECORDS).map(Known),
    st.sampled_from(RECORDS).map(lambda record: Known(record.advanced(Lifecycle.LEFT))),
    st.builds(Heard, sessions, st.sampled_from([None, 0.5, 1.0, 10.0])),
    st.builds(Answered, sessions, st.floats(0, 10)),
    st.builds(NotReached, sessions, st.sampled_from(Path), st.sampled_from(["", "p", "q", "r"])),
    st.builds(Disconnected, sessions),
    st.builds(NobodyReceives, sessions),
    st.builds(AllocationOver, st.sampled_from(["a", "b", "", "d"]), st.sampled_from([None, 0, 1])),
    st.builds(OwnerDoesNotKnow, sessions, st.floats(0, 200)),
    st.builds(BusCut),
    st.builds(BusBack),
    *[st.builds(Look)] * 4,
)
steps = st.lists(
    st.tuples(st.one_of(st.floats(0, 4), st.floats(0, 60), st.floats(0, 500)), events), min_size=1, max_size=80
)


class Oracle:
    """What is true of a run, kept in the plainest way."""

    def __init__(self, now: float) -> None:
        self.listening_since: float | None = now
        self.looked = now
        self.records: dict[str, SessionRecord] = {}
        self.last_word: dict[str, float] = {}
        self.left: set[str] = set()

    def note(self, event: Event, now: float) -> None:
        match event:
            case Known(record):
                self.records.setdefault(record.session, record)
                self.last_word.setdefault(record.session, now)
            case Heard(session, _):
                if session in self.records:
                    self.last_word[session] = now
            case BusCut():
                self.listening_since = None
            case BusBack():
                self.listening_since = self.looked = now
            case Look():
                if self.listening_since is not None and now - self.looked > PAUSE_MAX_S:
                    self.listening_since = now
                self.looked = now

    def allows(self, close: CloseRecord, event: Event, now: float, machine: Membership) -> bool:
        data = self.records[close.session].metadata
        if data.site != "here" or close.session in self.left:
            return False
        match close.cause:
            case Cause.ALLOCATION_OVER:
                assert isinstance(event, AllocationOver)
                limit = event.restart_count
                return data.allocation == event.allocation != "" and (limit is None or data.restart_count <= limit)
            case Cause.REPLACED:
                assert isinstance(event, Heard)
                speaking = self.records[event.session].metadata
                same = (speaking.site, speaking.allocation) == (data.site, data.allocation)
                return same and data.allocation != "" and speaking.restart_count > data.restart_count
            case Cause.SILENT:
                assert isinstance(event, Look)
                assert self.listening_since is not None
                missed_s = now - max(self.last_word[close.session], self.listening_since)
                return missed_s > GRACE_S / 6 and now - self.listening_since >= SETTLE_S


@given(steps)
def test_only_evidence_or_grace_closes_and_never_a_session_of_another_site_and_nothing_goes_back(
    run: list[tuple[float, Event]],
) -> None:
    now = 1000.0
    machine = Membership("here", now, silence_grace_s=GRACE_S, retention_s=RETENTION_S)
    oracle = Oracle(now)
    for pause_s, event in run:
        now += pause_s
        oracle.note(event, now)
        silent_before = {s: machine.standing(s) for s in oracle.records}
        effects = machine.handle(event, now)
        closed = [effect for effect in effects if isinstance(effect, CloseRecord)]
        by_silence = [close for close in closed if close.cause is Cause.SILENT]
        for close in closed:
            assert oracle.allows(close, event, now, machine)
            oracle.left.add(close.session)
        if isinstance(event, Known) and event.record.lifecycle is Lifecycle.LEFT:
            oracle.left.add(event.record.session)
        for effect in effects:
            if isinstance(effect, ForgetRecord):
                data = oracle.records.pop(effect.session).metadata
                assert effect.session in oracle.left or (data.site == "there" and isinstance(event, OwnerDoesNotKnow))
                oracle.left.discard(effect.session)
            if isinstance(effect, Ask):
                assert oracle.records[effect.session].metadata.site == "here"
        for session in oracle.left:
            assert machine.standing(session) is Standing.LEFT
        check_brake(machine, oracle, by_silence, silent_before)


def check_brake(
    machine: Membership,
    oracle: Oracle,
    by_silence: list[CloseRecord],
    before: dict[str, Standing | None],
) -> None:
    """The counts are those of the standings; and at most half of three or more open sessions is closed by silence."""
    ours = [session for session, record in oracle.records.items() if record.metadata.site == "here"]
    for standing in Standing:
        assert machine.count(standing) == sum(machine.standing(session) is standing for session in ours)
    open_before = [session for session in ours if before.get(session) not in (None, Standing.LEFT)]
    silent_now = sum(machine.standing(session) in SILENT_STANDINGS for session in open_before) + len(by_silence)
    if by_silence and len(open_before) >= 3:
        assert silent_now * 2 <= len(open_before)
