"""What the end of an engine means, and what its agent does then."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.worker_agent.supervision import (
    EXIT_ACCIDENT,
    EXIT_CONFIG,
    EXIT_NODE,
    HEALTHY_AFTER_S,
    PAUSE_MAX_S,
    RULES,
    WINDOW_S,
    Cause,
    EngineEnd,
    FailureClass,
    GiveUp,
    Restart,
    Supervision,
    story_of,
)

OOM = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",)


def exited(code: int, *, phase: str = "load", served_s: float = 0.0, lines: tuple[str, ...] = ()) -> EngineEnd:
    text = f"the engine ended with exit code {code}"
    return EngineEnd(Cause.EXITED, text, "" if served_s else phase, code, served_s, lines)


def kinds(*ends: EngineEnd, every_s: float = 1000.0) -> list[str]:
    supervision = Supervision(1000)
    return [str(supervision.ended(end, at * every_s).kind) for at, end in enumerate(ends)]


def test_h43_memory_that_does_not_suffice_at_load_is_not_tried_again() -> None:
    decided = Supervision(5).ended(exited(1, lines=OOM), 0.0)
    assert isinstance(decided, GiveUp)
    assert (decided.exit_code, decided.kind) == (EXIT_CONFIG, FailureClass.CONFIG)
    story = story_of(exited(1, lines=OOM), decided)
    assert "config" in story
    assert OOM[0] in story


def test_h43_the_words_alone_decide_nothing_for_an_engine_that_has_served() -> None:
    assert kinds(exited(1, served_s=300, lines=OOM)) == ["accident"]
    # Its next load meets what the crash left behind; the command was good before.
    assert kinds(exited(1, served_s=300), exited(1, lines=OOM), exited(1, lines=OOM)) == ["accident"] * 3


@pytest.mark.parametrize("code", [2, 126, 127])
def test_exit_codes_for_wrong_usage_are_believed_at_once(code: int) -> None:
    assert kinds(exited(code, phase="import")) == ["config"]
    assert kinds(exited(code, served_s=5)) == ["accident"]


def test_the_same_point_twice_is_no_accident() -> None:
    assert kinds(exited(1), exited(1)) == ["accident", "config"]
    assert kinds(exited(1), exited(3), exited(1, phase="import")) == ["accident"] * 3
    assert kinds(exited(0), exited(0)) == ["accident", "config"]
    slow = EngineEnd(Cause.TOO_SLOW, "nothing moves", "compile")
    assert kinds(slow, slow) == ["accident", "config"]


def test_a_signal_at_the_same_point_is_believed_the_third_time() -> None:
    assert kinds(*[exited(-9)] * 3) == ["accident", "accident", "config"]


def test_h18_h31_a_busy_node_is_the_node_s_fault_not_the_model_s() -> None:
    for cause in (Cause.NODE_BUSY, Cause.DEVICE_LOST):
        decided = Supervision(5).ended(EngineEnd(cause, "20 GiB are held", "queued", 1, 0.0, OOM), 0.0)
        assert isinstance(decided, GiveUp)
        assert (decided.exit_code, decided.kind) == (EXIT_NODE, FailureClass.NODE)


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_time_of_health() -> None:
    supervision = Supervision(1000)
    ends = [exited(-11, served_s=1.0)] * 8 + [exited(-11, served_s=HEALTHY_AFTER_S)]
    decided = [supervision.ended(end, at * 100.0) for at, end in enumerate(ends)]
    assert [one.after_s for one in decided if isinstance(one, Restart)] == [1, 2, 4, 8, 16, 32, 60, 60, 1]


def test_h21_a_port_that_another_took_is_tried_elsewhere_at_once() -> None:
    taken = EngineEnd(Cause.PORT_TAKEN, "another process listens", "import")
    supervision = Supervision(3)
    assert [supervision.ended(taken, 0.0) for _ in range(3)] == [Restart(0.0, FailureClass.ACCIDENT)] * 3
    assert isinstance(supervision.ended(taken, 0.0), GiveUp)


def test_restarts_are_limited_by_the_hour() -> None:
    supervision = Supervision(2)
    crash = exited(-11, served_s=300)
    assert isinstance(supervision.ended(crash, 0), Restart)
    assert isinstance(supervision.ended(crash, 400), Restart)
    decided = supervision.ended(crash, 800)
    assert isinstance(decided, GiveUp)
    assert decided.exit_code == EXIT_ACCIDENT
    assert "--engine-restarts" in decided.why
    assert isinstance(supervision.ended(crash, WINDOW_S + 401), Restart)
    assert isinstance(Supervision(0).ended(crash, 0), GiveUp)


ENDS = st.builds(
    EngineEnd,
    st.sampled_from(Cause),
    st.just("x"),
    st.sampled_from(["", "import", "load"]),
    st.sampled_from([None, 0, 1, 2, -9]),
    st.sampled_from([0.0, 1.0, 100.0]),
    st.sampled_from([(), OOM]),
)


@given(st.lists(st.tuples(ENDS, st.floats(0, 2000)), max_size=40), st.integers(0, 6))
def test_whatever_happens_there_are_never_more_restarts_an_hour_than_allowed(
    story: list[tuple[EngineEnd, float]], limit: int
) -> None:
    supervision, now, restarted_at_s = Supervision(limit), 0.0, []
    for end, after_s in story:
        now += after_s
        decided = supervision.ended(end, now)
        if isinstance(decided, GiveUp):
            continue  # The real agent ends; if it did not, it would still be bound.
        assert 0 <= decided.after_s <= PAUSE_MAX_S
        restarted_at_s.append(now)
        assert sum(now - at <= WINDOW_S for at in restarted_at_s) <= limit


def test_the_table_in_the_documents_is_this_one() -> None:
    page = (Path(__file__).parents[2] / "docs/state-machines.md").read_text()
    rows = [f"| {text} | **{kind}** |" for text, _, kind in RULES]
    assert "\n".join(rows) in page
