"""Who gets no requests for a while, for how long, and that it is never too many."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.inference import FailureCode, InferenceFailure
from serai.contracts.session_record import SessionRecord
from serai.ingress.routing import Ask, Candidate, LeastLoaded
from serai.ingress.session_health import (
    PENALTY_MAX,
    Circuit,
    HealthSettings,
    Outcome,
    SessionHealth,
    of_failure,
    of_status,
)
from unit.fakes import record_of

SETTINGS = HealthSettings()
FLEET = [record_of(f"s{n}") for n in range(6)]


def tried(health: SessionHealth, session: str, outcome: Outcome, now: float, times: int = 1) -> None:
    for _ in range(times):
        health.on_start(session, now)
        health.on_outcome(session, outcome, now)


def broken(health: SessionHealth, session: str, now: float) -> None:
    tried(health, session, Outcome.FAILURE, now, SETTINGS.consecutive_max)


def usable(health: SessionHealth, records: list[SessionRecord], now: float) -> list[str]:
    return [record.session for record in health.usable(records, now)]


# -- classes ---------------------------------------------------------------------------------------------------------


@given(st.integers(100, 599))
def test_a_status_speaks_for_the_session_unless_it_is_busy_or_a_servers_fault(status: int) -> None:
    expected = Outcome.BUSY if status in (429, 503) else Outcome.FAILURE if status >= 500 else Outcome.SUCCESS
    assert of_status(status) is expected


@pytest.mark.parametrize("code", FailureCode)
def test_a_session_is_blamed_for_what_lies_with_it(code: FailureCode) -> None:
    busy = {FailureCode.BUSY, FailureCode.DRAINING}
    elsewhere = {
        FailureCode.BODY_TOO_LARGE,
        FailureCode.BAD_REQUEST_FRAME,
        FailureCode.DEADLINE,
        FailureCode.CREDIT_STARVED,
        FailureCode.CANCELLED,
        FailureCode.BUS_LOST,
        FailureCode.STOPPED,
        FailureCode.LEASE_REFUSED,
    }
    expected = Outcome.BUSY if code in busy else Outcome.NOTHING if code in elsewhere else Outcome.FAILURE
    if code is FailureCode.ENGINE_UNREACHABLE:
        expected = Outcome.ABSENT
    assert of_failure(InferenceFailure(code, "x")) is expected


# -- circuit ---------------------------------------------------------------------------------------------------------


def test_failures_in_a_row_open_the_circuit_and_a_success_in_between_does_not() -> None:
    health = SessionHealth()
    tried(health, "s0", Outcome.FAILURE, 0, SETTINGS.consecutive_max - 1)
    assert health.allowed("s0", 0)
    tried(health, "s0", Outcome.SUCCESS, 0)
    tried(health, "s0", Outcome.FAILURE, 0, SETTINGS.consecutive_max - 1)
    assert health.allowed("s0", 0)
    tried(health, "s0", Outcome.FAILURE, 0)
    assert not health.allowed("s0", 0)
    assert usable(health, FLEET, 0) == ["s1", "s2", "s3", "s4", "s5"]


def test_a_rate_of_failures_within_the_window_opens_it_too() -> None:
    health, pattern = SessionHealth(), [Outcome.FAILURE, Outcome.FAILURE, Outcome.SUCCESS]
    for number in range(9):
        tried(health, "s0", pattern[number % 3], number * 0.1)
    assert health.allowed("s0", 1)  # Nine are no rate.
    tried(health, "s0", Outcome.FAILURE, 1)
    assert not health.allowed("s0", 1)


def test_failures_that_are_long_ago_do_not_count() -> None:
    health, pattern = SessionHealth(), [Outcome.FAILURE, Outcome.FAILURE, Outcome.SUCCESS]
    for number in range(100):
        tried(health, "s0", pattern[number % 3], number * SETTINGS.window_s / 8)
    assert health.allowed("s0", 1e9)


def test_after_its_time_one_request_at_a_time_is_let_through_and_good_ones_close_it() -> None:
    health = SessionHealth()
    broken(health, "s0", 0)
    later = SETTINGS.open_s
    assert not health.allowed("s0", later - 0.01)
    for _ in range(SETTINGS.trials_needed):
        assert health.circuit("s0", later) is Circuit.HALF_OPEN
        assert health.allowed("s0", later)
        health.on_start("s0", later)
        assert not health.allowed("s0", later)
        assert "s0" not in usable(health, FLEET, later)
        health.on_outcome("s0", Outcome.SUCCESS, later)
    assert health.circuit("s0", later) is Circuit.CLOSED
    health.on_start("s0", later)
    assert health.allowed("s0", later)


def test_a_bad_trial_opens_it_for_twice_as_long_up_to_a_limit() -> None:
    health, now, spans = SessionHealth(), 0.0, []
    broken(health, "s0", now)
    for _ in range(8):
        opened = now
        while not health.allowed("s0", now):
            now += 0.5
        spans.append(now - opened)
        tried(health, "s0", Outcome.FAILURE, now)
    assert spans == [5, 10, 20, 40, 80, 120, 120, 120]


def test_who_takes_no_connection_is_out_at_once_asked_every_second_and_forgiven_when_back() -> None:
    health = SessionHealth()
    tried(health, "s0", Outcome.ABSENT, 0)
    for second in range(1, 30):
        assert "s0" not in usable(health, FLEET, second - 0.01)
        assert "s0" in usable(health, FLEET, second)
        tried(health, "s0", Outcome.ABSENT, second)
    tried(health, "s0", Outcome.SUCCESS, 30, SETTINGS.trials_needed)
    assert health.circuit("s0", 30) is Circuit.CLOSED
    assert health.load_penalty("s0", 30) == 0


def test_the_next_trial_waits_for_the_first_byte_of_the_one_before_and_not_for_its_end() -> None:
    health = SessionHealth()
    health.on_first_byte("s0")
    broken(health, "s0", 0)
    health.on_start("s0", 10)
    assert not health.allowed("s0", 10)
    health.on_first_byte("s0")
    assert health.allowed("s0", 11)
    health.on_start("s0", 11)
    health.on_outcome("s0", Outcome.SUCCESS, 12)
    assert health.circuit("s0", 12) is Circuit.HALF_OPEN
    health.on_outcome("s0", Outcome.SUCCESS, 13)
    assert health.circuit("s0", 13) is Circuit.CLOSED


def test_a_trial_that_says_nothing_or_never_ends_does_not_keep_the_session_out() -> None:
    health = SessionHealth()
    broken(health, "s0", 0)
    health.on_start("s0", 10)
    health.on_outcome("s0", Outcome.NOTHING, 11)
    assert health.allowed("s0", 11)
    health.on_start("s0", 12)
    assert not health.allowed("s0", 12 + SETTINGS.trial_s - 0.1)
    assert health.allowed("s0", 12 + SETTINGS.trial_s)


def test_failures_of_requests_that_had_begun_before_do_not_keep_it_out_for_longer() -> None:
    health = SessionHealth()
    broken(health, "s0", 0)
    tried(health, "s0", Outcome.FAILURE, SETTINGS.open_s - 1, 50)
    assert health.allowed("s0", SETTINGS.open_s)


def test_a_circuit_that_was_closed_again_starts_anew() -> None:
    health = SessionHealth()
    tried(health, "s0", Outcome.FAILURE, 0, 12)
    tried(health, "s0", Outcome.SUCCESS, SETTINGS.open_s, SETTINGS.trials_needed)
    tried(health, "s0", Outcome.FAILURE, SETTINGS.open_s)
    assert health.allowed("s0", SETTINGS.open_s)


def test_good_trials_before_a_bad_one_do_not_count() -> None:
    health = SessionHealth()
    broken(health, "s0", 0)
    tried(health, "s0", Outcome.SUCCESS, 5, SETTINGS.trials_needed - 1)
    tried(health, "s0", Outcome.FAILURE, 5)
    tried(health, "s0", Outcome.SUCCESS, 15, SETTINGS.trials_needed - 1)
    assert health.circuit("s0", 15) is Circuit.HALF_OPEN


@given(st.integers(1, 7), st.sets(st.integers(0, 6)), st.floats(0, 200))
def test_never_more_than_half_of_a_models_sessions_are_out(count: int, ill: set[int], later: float) -> None:
    health, fleet = SessionHealth(), [record_of(f"s{n}") for n in range(count)]
    for number in ill:
        broken(health, f"s{number}", float(number))
    found = usable(health, fleet, later)
    assert len(found) >= count - count // 2
    assert found == sorted(found)
    healthy = [record.session for record in fleet if int(record.session[1:]) not in ill]
    assert set(healthy) <= set(found)


def test_those_that_have_been_out_for_longest_come_back_first() -> None:
    health = SessionHealth()
    for number in range(4):
        broken(health, f"s{number}", number * 0.1)
    assert usable(health, FLEET[:4], 1) == ["s0", "s1"]


# -- busy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "rest"), [(7.0, 7.0), (0.0, 0.0), (9999.0, 30.0), (None, 1.0), (-3.0, 1.0), (float("nan"), 1.0)]
)
def test_a_busy_session_rests_as_long_as_it_says_within_bounds(told: float | None, rest: float) -> None:
    health = SessionHealth()
    health.on_outcome("s0", Outcome.BUSY, 100, told)
    assert health.cooling_s("s0", 100) == rest
    assert health.allowed("s0", 100 + rest)
    assert health.circuit("s0", 100) is Circuit.CLOSED
    assert health.load_penalty("s0", 100) == 0


def test_a_session_that_is_busy_again_and_again_rests_longer_each_time() -> None:
    health = SessionHealth()
    rests = []
    for number in range(7):
        health.on_outcome("s0", Outcome.BUSY, number * 100)
        rests.append(health.cooling_s("s0", number * 100))
    assert rests == [1, 2, 4, 8, 16, 30, 30]
    health.on_outcome("s0", Outcome.SUCCESS, 900)
    health.on_outcome("s0", Outcome.BUSY, 900)
    assert health.cooling_s("s0", 900) == 1


def test_being_busy_never_counts_as_a_failure() -> None:
    health = SessionHealth()
    for number in range(100):
        tried(health, "s0", Outcome.BUSY, number)
    assert health.circuit("s0", 100) is Circuit.CLOSED


def test_who_is_busy_is_spared_while_another_is_there_and_asked_when_nobody_is() -> None:
    health = SessionHealth()
    for record in FLEET[:5]:
        health.on_outcome(record.session, Outcome.BUSY, 0, 9 - int(record.session[1:]))
    assert usable(health, FLEET, 0) == ["s5"]
    assert usable(health, FLEET[:5], 0) == ["s0", "s1", "s2", "s3", "s4"]
    assert health.rested(FLEET, 0)
    assert not health.rested(FLEET[:5], 0)
    assert health.retry_after_s(FLEET[:5], 0) == 5
    assert health.retry_after_s(FLEET, 0) == health.retry_after_s([], 0) == 0


# -- the replica that fails fastest ----------------------------------------------------------------------------------


def test_failures_count_as_load_and_fade() -> None:
    health = SessionHealth()
    assert health.load_penalty("s0", 0) == 0
    tried(health, "s0", Outcome.FAILURE, 0)
    tried(health, "s0", Outcome.SUCCESS, 0)
    assert health.load_penalty("s0", 0) == SETTINGS.penalty_requests
    assert health.load_penalty("s0", SETTINGS.penalty_half_life_s) == SETTINGS.penalty_requests / 2
    assert health.load_penalty("s0", 20 * SETTINGS.penalty_half_life_s) == 0
    tried(health, "s1", Outcome.FAILURE, 0, 1000)
    assert health.load_penalty("s1", 0) == PENALTY_MAX


def share_of_the_replica_that_fails(penalised: bool) -> float:
    """Four replicas; three take 0.5 s for a request, one fails two of three at once (never enough in a row for its
    circuit). Twenty requests a second for a minute."""
    rng, counts = random.Random(3), Counter[str]()
    health = SessionHealth(HealthSettings(rate_max=1.0))
    policy, fleet = LeastLoaded(), FLEET[:4]
    running: list[tuple[float, str]] = []
    for step in range(1200):
        now = step * 0.05
        ended = [pair for pair in running if pair[0] <= now]
        running = [pair for pair in running if pair[0] > now]
        for _, session in ended:
            health.on_outcome(session, Outcome.SUCCESS, now)
        held = Counter(session for _, session in running)
        candidates = [
            Candidate(r, held[r.session], 0, health.load_penalty(r.session, now) if penalised else 0.0) for r in fleet
        ]
        session = policy.pick(Ask("m"), candidates).record.session
        counts[session] += 1
        if session == "s0" and rng.random() < 0.66:
            health.on_outcome(session, Outcome.FAILURE, now)
        else:
            running.append((now + 0.5, session))
    return counts["s0"] / counts.total()


def test_a_replica_that_fails_fast_gets_less_than_its_share_not_most() -> None:
    assert share_of_the_replica_that_fails(penalised=False) > 0.4
    assert share_of_the_replica_that_fails(penalised=True) < 0.1


# -- forgetting ------------------------------------------------------------------------------------------------------


def test_sessions_that_left_are_forgotten_and_a_new_id_starts_clean() -> None:
    health = SessionHealth()
    broken(health, "s0", 0)
    health.on_outcome("s1", Outcome.BUSY, 0, 20)
    assert health.allowed("s0-again", 0)
    health.retain(["s1"], 1)
    assert len(health) == 1
    assert health.allowed("s0", 1)
    assert not health.allowed("s1", 1)
    health.retain(["s1"], 20)
    assert health.allowed("s1", 20)
    assert not health._noted


def test_sessions_that_were_only_cancelled_are_not_remembered() -> None:
    health = SessionHealth()
    tried(health, "s0", Outcome.NOTHING, 0)
    assert len(health) == 0


events = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(Outcome), st.floats(0, 20), st.none() | st.floats(0, 50)), max_size=60
)


@given(events)
def test_whatever_happens_every_session_comes_back_and_somebody_is_always_there(
    history: list[tuple[int, Outcome, float, float | None]],
) -> None:
    health, fleet, now = SessionHealth(), FLEET[:4], 0.0
    for number, outcome, pause, retry_after_s in history:
        now += pause
        found = health.usable(fleet, now)
        assert found
        assert set(usable(health, fleet, now)) <= {record.session for record in fleet}
        health.on_start(f"s{number}", now)
        health.on_outcome(f"s{number}", outcome, now, retry_after_s)
    later = now + SETTINGS.open_max_s + SETTINGS.cool_max_s
    assert usable(health, fleet, later) == [record.session for record in fleet]
