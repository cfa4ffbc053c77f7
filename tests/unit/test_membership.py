"""When a silence closes a record, when a closed record is forgotten, and when the observer doubts itself instead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.session_record import Lifecycle
from serai.registry.membership import CloseRecord, ForgetRecord, Observation, due
from unit.fakes import record_of

GRACE_S, RETENTION_S = 100.0, 1000.0


def seen(
    session: str, silent_s: float, lifecycle: Lifecycle = Lifecycle.SERVING, *, suspected: bool | None = None
) -> Observation:
    return Observation(record_of(session, lifecycle), silent_s, silent_s > 4 if suspected is None else suspected)


def decide(*observations: Observation, observed_for_s: float = 1e6) -> list[str]:
    """The effects, as `close s1` or `forget s1`."""
    effects = due(observations, observed_for_s=observed_for_s, silence_grace_s=GRACE_S, retention_s=RETENTION_S)
    return [
        f"close {effect.record.session}" if isinstance(effect, CloseRecord) else f"forget {effect.session}"
        for effect in effects
    ]


def test_a_record_is_closed_after_the_grace_and_not_before() -> None:
    assert decide(seen("s1", GRACE_S)) == []
    assert decide(seen("s1", GRACE_S + 1)) == ["close s1"]


def test_closing_is_the_next_version_of_the_record_as_left() -> None:
    (effect,) = due([seen("s1", 200)], observed_for_s=1e6, silence_grace_s=GRACE_S, retention_s=RETENTION_S)
    assert effect == CloseRecord(record_of("s1").advanced(Lifecycle.LEFT))


def test_only_a_silence_that_the_observer_heard_itself_counts() -> None:
    assert decide(seen("s1", 1e6), observed_for_s=GRACE_S) == []
    assert decide(seen("s1", 1e6), observed_for_s=GRACE_S + 1) == ["close s1"]
    assert decide(seen("s1", 1e6, Lifecycle.LEFT), observed_for_s=RETENTION_S) == []


def test_a_session_that_left_is_forgotten_after_the_retention_and_not_before() -> None:
    assert decide(seen("s1", RETENTION_S, Lifecycle.LEFT)) == []
    assert decide(seen("s1", RETENTION_S + 1, Lifecycle.LEFT)) == ["forget s1"]


def test_when_most_sessions_vanish_together_nothing_is_closed() -> None:
    silent, heard = [seen(f"a{n}", 200) for n in range(3)], [seen(f"b{n}", 0) for n in range(3)]
    assert decide(*silent, *heard) == ["close a0", "close a1", "close a2"]
    assert decide(*silent, *heard[:2]) == []


def test_the_brake_looks_at_all_who_are_silent_now_not_only_at_those_who_are_due() -> None:
    assert decide(seen("s1", 200), seen("s2", 5), seen("s3", 0)) == []


def test_a_small_site_has_no_brake() -> None:
    assert decide(seen("s1", 200), seen("s2", 200)) == ["close s1", "close s2"]


def test_those_that_left_are_no_sign_of_a_mass_loss_and_are_forgotten_even_then() -> None:
    left = [seen(f"l{n}", 2000, Lifecycle.LEFT) for n in range(5)]
    assert decide(*left, seen("s1", 200), seen("s2", 0)) == [*(f"forget l{n}" for n in range(5)), "close s1"]
    assert decide(left[0], *(seen(f"s{n}", 200) for n in range(3))) == ["forget l0"]


observations = st.lists(
    st.builds(
        seen,
        st.integers(0, 30).map(lambda number: f"s{number}"),
        st.floats(0, 2000),
        st.sampled_from(Lifecycle),
    ),
    unique_by=lambda one: one.record.session,
    max_size=10,
)


@given(observations, st.floats(0, 2000))
def test_no_more_than_half_of_a_site_is_ever_closed_at_once_and_nobody_who_was_heard(
    looked: list[Observation], observed_for_s: float
) -> None:
    by_session = {one.record.session: one for one in looked}
    open_ones = [one for one in looked if one.record.lifecycle is not Lifecycle.LEFT]
    effects = due(looked, observed_for_s=observed_for_s, silence_grace_s=GRACE_S, retention_s=RETENTION_S)
    closed = [effect.record.session for effect in effects if isinstance(effect, CloseRecord)]
    forgotten = [effect.session for effect in effects if isinstance(effect, ForgetRecord)]
    assert len(open_ones) < 3 or len(closed) * 2 <= len(open_ones)
    for session in closed:
        assert by_session[session].record.lifecycle is not Lifecycle.LEFT
        assert min(by_session[session].silent_s, observed_for_s) > GRACE_S
    for session in forgotten:
        assert by_session[session].record.lifecycle is Lifecycle.LEFT
        assert min(by_session[session].silent_s, observed_for_s) > RETENTION_S
