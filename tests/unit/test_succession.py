"""What a launcher does about each picture, and that it does no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serai.launcher.jobs import JobId, JobState
from serai.launcher.picture import Picture, Plan, Rules, Wanted
from serai.launcher.runs import Run, SeenSession
from serai.launcher.slots import Slot
from serai.launcher.succession import plan
from serai.launcher.trouble import Trouble
from serai.runtime.session_state import SessionState

NOW = 100_000.0
RULES = Rules()
CHAT = Wanted(
    deployment="chat",
    model="m",
    count=1,
    time_limit_s=28_800,
    wait_s=600,
    load_s=300,
    leaves_s=180,
    load_s_max=1800,
)
LEAD_S = 1.25 * 900 + 120 + 180


def run(
    generation: int = 1,
    *,
    number: int = 0,
    left_s: float = 20_000,
    state: JobState | None = JobState.RUNNING,
    session: SessionState | None = SessionState.SERVING,
    in_flight: int | None = 5,
    **changes: Any,
) -> Run:
    """A job that serves and has time, unless told otherwise."""
    has_nodes = state is not None and state is not JobState.PENDING
    sessions = (
        ()
        if session is None
        else (SeenSession(session=f"s{number}-{generation}", allocation="a", state=session, in_flight=in_flight),)
    )
    facts: dict[str, Any] = {
        "name": f"n{number}-{generation}",
        "slot": Slot("chat", number),
        "generation": generation,
        "id": JobId("", f"{number}{generation}"),
        "state": state,
        "submitted_at_s": NOW - 9000,
        "started_at_s": NOW - 8000 if has_nodes else None,
        "served_at_s": NOW - 7000 if session is SessionState.SERVING else None,
        "ends_at_s": NOW + left_s if has_nodes else None,
        "time_limit_s": 28_800.0,
        "sessions": sessions,
        "joined": bool(sessions),
    }
    return Run(**(facts | changes))


def waiting(generation: int, **changes: Any) -> Run:
    return run(generation, state=JobState.PENDING, session=None, **changes)


def loading(generation: int, **changes: Any) -> Run:
    return run(generation, **({"session": SessionState.LOADING, "in_flight": 0, "started_at_s": NOW - 100} | changes))


def planned(*runs: Run, wanted: Wanted = CHAT, **changes: Any) -> Plan:
    return plan(Picture(**({"now": NOW, "wanted": (wanted,), "runs": runs} | changes)), RULES)


def did(made: Plan) -> list[str]:
    """In short."""
    return [
        *[f"drain {one.session}" for one in made.drain],
        *[f"cancel {one.job}" for one in made.cancel],
        *[f"submit {one.slot}" for one in made.submit],
        *[f"sleep {one.deployment}" for one in made.sleep],
    ]


SUBMITS = ["submit chat/0"]


@pytest.mark.parametrize(
    ("runs", "does", "verdict"),
    [
        pytest.param([], SUBMITS, "birth", id="H08 an empty slot is filled"),
        pytest.param([waiting(1)], [], "waits", id="a job waits"),
        pytest.param([waiting(1, id=None)], [], "waits", id="H13 a submission without an answer counts as a job"),
        pytest.param([run(1, left_s=LEAD_S + 5)], [], "holds", id="H08 not before it is due"),
        pytest.param([run(1, left_s=LEAD_S - 5)], SUBMITS, "successor", id="H08 in time for wait, load and drain"),
        pytest.param([run(1, left_s=10), waiting(2)], [], "waits", id="H08 at most one successor"),
        pytest.param([run(1, ends_at_s=None)], [], "holds", id="a job without an end needs none"),
        pytest.param([run(1, left_s=900), loading(2)], [], "holds", id="H06 loading is not serving: nothing drains"),
        pytest.param([run(1, left_s=900), run(2)], ["drain s0-1"], "holds", id="H06 drained when the new one serves"),
        pytest.param([run(1, left_s=14_401), run(2)], [], "holds", id="not while more than half of its time is left"),
        pytest.param(
            [run(1, left_s=900), run(2, served_at_s=NOW - 1)], [], "holds", id="H06 … and has served for a moment"
        ),
        pytest.param(
            [run(1, session=SessionState.DRAINING, draining_since_s=NOW - 900, left_s=900), run(2)],
            [],
            "holds",
            id="H06 with requests in it, it is never cancelled",
        ),
        pytest.param(
            [run(1, session=SessionState.DRAINING, draining_since_s=NOW - 900, in_flight=None, left_s=900), run(2)],
            [],
            "holds",
            id="H06 nor when nobody knows whether there are",
        ),
        pytest.param(
            [run(1, session=SessionState.DRAINING, draining_since_s=NOW - 900, in_flight=0), run(2)],
            ["cancel 01"],
            "holds",
            id="H06 drained and empty, and yet there: cancelled",
        ),
        pytest.param(
            [run(1, session=None, joined=True, left_since_s=NOW - 301), run(2)],
            ["cancel 01"],
            "holds",
            id="H06 left, and yet there: cancelled",
        ),
        pytest.param(
            [run(1, session=SessionState.SUSPECTED, silent_since_s=NOW - 300), run(2)],
            [],
            "holds",
            id="H01 silent is not empty",
        ),
        pytest.param(
            [run(1, session=SessionState.SUSPECTED, silent_since_s=NOW - 300)], [], "holds", id="H01 nor gone"
        ),
        pytest.param(
            [run(1, session=SessionState.SUSPECTED, silent_since_s=NOW - 700, served_at_s=NOW - 7000)],
            SUBMITS,
            "birth",
            id="silent for long: another one beside it, and it stays",
        ),
        pytest.param(
            [waiting(1), run(2)], ["cancel 01"], "holds", id="H03 requeued, while its successor serves: not needed"
        ),
        pytest.param([waiting(1), waiting(2)], [], "waits", id="H03 requeued, nobody serves: both are kept"),
        pytest.param(
            [run(1, state=JobState.COMPLETING, session=None, served_at_s=NOW - 7000)],
            SUBMITS,
            "birth",
            id="H18 completing is no service",
        ),
        pytest.param(
            [
                run(1, state=JobState.COMPLETING, session=None, served_at_s=NOW - 7000),
                run(2, state=JobState.COMPLETING, session=None, served_at_s=NOW - 7000),
            ],
            [],
            "full",
            id="H18 and not free either",
        ),
        pytest.param(
            [run(1, state=JobState.COMPLETING, session=None, served_at_s=None)],
            [],
            "holds",
            id="H19 one that never served has to be seen to end",
        ),
        pytest.param(
            [run(1), run(2, session=None, started_at_s=NOW - 1900)],
            ["cancel 02"],
            "holds",
            id="H19 a successor of which nothing is heard is given up, its predecessor stays",
        ),
        pytest.param(
            [run(1), loading(2, started_at_s=NOW - 9000)], [], "holds", id="H37 who loads for long is not dead"
        ),
        pytest.param([run(1, number=7)], ["drain s7-1", *SUBMITS], "birth", id="a slot that is not wanted is drained"),
        pytest.param(
            [waiting(1, number=7)], ["cancel 71", *SUBMITS], "birth", id="or cancelled, when nothing runs yet"
        ),
    ],
)
def test_a_slot(runs: list[Run], does: list[str], verdict: str) -> None:
    made = planned(*runs)
    assert did(made) == does
    word = next(word for word in made.says if word.slot == "chat/0")
    assert word.verdict == verdict, word
    assert word.text
    assert len(word.jobs) == len([one for one in runs if one.slot.number == 0])


@pytest.mark.parametrize("runs", [[], [run(1, left_s=1), run(2)], [run(1, number=7)], [run(1, left_s=1)]])
def test_h01_h17_nothing_is_done_on_half_a_picture(runs: list[Run]) -> None:
    made = planned(*runs, blind="squeue: no answer in 30 s")
    assert made.idle
    assert {word.verdict for word in made.says} == {"blind"}
    assert {word.text for word in made.says} == {"squeue: no answer in 30 s"}


def test_h06_a_drain_ends_before_the_allocation_does() -> None:
    assert planned(run(1, left_s=900), run(2)).drain[0].within_s == 880
    assert planned(run(1, left_s=3), run(2)).drain[0].within_s == 0
    assert planned(run(1, ends_at_s=None), run(2)).drain[0].within_s == RULES.drain_s_max


def test_h08_first_lifetimes_are_staggered() -> None:
    made = planned(wanted=replace(CHAT, count=4))
    assert [one.time_limit_s for one in made.submit] == [28_800, 25_200, 21_600, 18_000]


def test_h08_who_would_end_with_another_gets_less_time() -> None:
    other = run(1, number=1, left_s=CHAT.wait_s + CHAT.time_limit_s + 10)
    made = planned(run(1, left_s=100), other, wanted=replace(CHAT, count=2))
    assert [(str(one.slot), one.time_limit_s) for one in made.submit] == [("chat/0", 28_800 - 120)]


def test_h08_who_is_due_together_comes_one_after_the_other_and_sooner() -> None:
    wanted = replace(CHAT, count=3)
    runs = [run(1, number=number, left_s=LEAD_S + 100) for number in range(3)]
    due = sorted(word.facts["successor_due_in_s"] for word in planned(*runs, wanted=wanted).says)
    assert due == [-20, 40, 100]
    made = planned(*runs, wanted=wanted, succeeded_at_s={"chat": NOW - 59})
    assert did(made) == []
    assert "spaced" in {word.verdict for word in made.says}
    assert len(planned(*runs, wanted=wanted, succeeded_at_s={"chat": NOW - 61}).submit) == 1


@pytest.mark.parametrize(
    ("kind", "until_s", "alert", "text"),
    [
        ("failed", NOW + 60, False, "next try in 60 s"),
        ("quota", NOW + 900, True, "next try in 900 s"),
        ("invalid", None, True, "stopped until the deployment changes"),
    ],
)
def test_h19_a_trouble_stops_successors_and_nothing_else(
    kind: str, until_s: float | None, alert: bool, text: str
) -> None:
    trouble = Trouble(kind, "sbatch: error: no", 1, until_s)
    made = planned(run(1, left_s=60), troubles={Slot("chat", 0): trouble})
    assert did(made) == []
    assert (made.says[0].verdict, made.says[0].alert) == ("stopped", alert)
    assert text in made.says[0].text
    over = replace(trouble, until_s=NOW - 1)
    assert did(planned(run(1, left_s=60), troubles={Slot("chat", 0): over})) == SUBMITS


def test_h13_what_is_refused_for_one_slot_is_not_tried_for_another() -> None:
    invalid = Trouble("invalid", "Invalid account", 1, None)
    wanted = replace(CHAT, count=3)
    assert did(planned(wanted=wanted, troubles={Slot("chat", 2): invalid})) == []
    failed = Trouble("failed", "out of memory", 1, NOW + 60)
    assert did(planned(wanted=wanted, troubles={Slot("chat", 2): failed})) == ["submit chat/0", "submit chat/1"]


@pytest.mark.parametrize(("idle_for_s", "sleeps"), [(None, False), (3599.0, False), (3600.0, True)])
def test_h20_an_idle_deployment_is_let_go(idle_for_s: float | None, sleeps: bool) -> None:
    made = planned(run(1), wanted=replace(CHAT, idle_s=3600, idle_for_s=idle_for_s))
    assert did(made) == (["sleep chat"] if sleeps else [])


def test_h20_asleep_it_drains_and_is_not_filled_again() -> None:
    asleep = replace(CHAT, idle_s=3600, idle_for_s=9999, asleep=True)
    assert did(planned(run(1, left_s=60), wanted=asleep)) == ["drain s0-1"]
    made = planned(wanted=asleep)
    assert did(made) == []
    assert "serai launcher wake chat" in made.says[0].text


def test_h17_when_most_sessions_are_silent_it_is_not_theirs() -> None:
    wanted = replace(CHAT, count=3)
    silent = [
        run(1, number=number, session=SessionState.SUSPECTED, silent_since_s=NOW - 700, served_at_s=NOW - 7000)
        for number in range(3)
    ]
    assert did(planned(*silent, wanted=wanted)) == []
    assert did(planned(silent[0], run(1, number=1), run(1, number=2), wanted=wanted)) == SUBMITS


def test_the_same_picture_gives_the_same_plan() -> None:
    runs = [run(1, left_s=900), run(2), waiting(1, number=1)]
    assert planned(*runs, wanted=replace(CHAT, count=2)) == planned(*runs, wanted=replace(CHAT, count=2))
