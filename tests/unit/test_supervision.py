"""Which workers there are, seen from outside: a fake parent that obeys at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress.supervision import (
    ALIVE_EVERY_S,
    FAILED_STARTS_MAX,
    PAUSE_FIRST_S,
    PAUSE_MAX_S,
    SILENT_S,
    START_S,
    STEADY_AFTER_S,
    Kill,
    Retire,
    Start,
    Supervision,
    Terminate,
)
from serai.ingress.workers import Plan
from serai.worker_agent.engine.process import free_port

STOP_S = 40.0


@dataclass
class Fake:
    """Processes by number; `told` are those that were told to end."""

    supervision: Supervision
    now: float = 0.0
    running: dict[int, int] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)

    def look(self) -> None:
        for effect in self.supervision.due(self.now):
            match effect:
                case Start():
                    self.running[effect.worker] = effect.slot
                case Retire() | Terminate():
                    self.told.add(effect.worker)
                case Kill():
                    self.killed.add(effect.worker)

    def make_ready(self, *workers: int) -> None:
        for worker in workers or tuple(self.running):
            self.supervision.ready(worker)
            self.ready.add(worker)
        self.look()

    def end(self, worker: int, code: int = 0) -> None:
        del self.running[worker]
        self.supervision.ended(worker, code, self.now)
        self.look()

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.look()


def started(slots: int) -> Fake:
    fake = Fake(Supervision(slots, STOP_S))
    fake.look()
    return fake


def up(slots: int) -> Fake:
    fake = started(slots)
    fake.make_ready()
    fake.make_ready()
    return fake


def test_the_first_worker_starts_alone_and_the_others_when_it_is_ready() -> None:
    fake = started(3)
    assert fake.running == {1: 0}
    fake.make_ready(1)
    assert fake.running == {1: 0, 2: 1, 3: 2}


@pytest.mark.parametrize(("code", "exit_code"), [(2, 2), (1, 1), (137, 137), (0, 1)])
def test_a_death_before_all_were_ready_once_ends_the_ingress_with_its_code(code: int, exit_code: int) -> None:
    fake = started(2)
    fake.make_ready(1)
    fake.end(2, code)
    assert fake.told == {1}
    fake.end(1)
    assert fake.supervision.is_over
    assert fake.supervision.exit_code == exit_code
    assert "giving up" in fake.supervision.notices[0]


def test_a_worker_that_dies_is_started_again_at_once_and_then_ever_later() -> None:
    fake = up(2)
    pauses = []
    for _ in range(8):
        (worker,) = [number for number, slot in fake.running.items() if slot == 1]
        died_s = fake.now
        fake.end(worker, 139)
        while 1 not in fake.running.values():
            fake.later(0.01)
        pauses.append(round(fake.now - died_s, 3))
        fake.make_ready()
    assert pauses[0] == 0
    assert pauses[1] == pytest.approx(PAUSE_FIRST_S, abs=0.02)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(PAUSE_MAX_S, abs=0.02)
    fake.later(STEADY_AFTER_S)
    (worker,) = [number for number, slot in fake.running.items() if slot == 1]
    fake.end(worker, 139)
    assert 1 in fake.running.values()


def test_it_gives_up_when_nobody_serves_and_starts_keep_failing() -> None:
    fake = up(1)
    fake.end(1, 1)
    for _ in range(FAILED_STARTS_MAX - 1):
        assert not fake.supervision.is_over
        fake.later(PAUSE_MAX_S)
        (worker,) = fake.running
        fake.end(worker, 1)
    assert fake.supervision.is_over
    assert fake.supervision.exit_code == 1


def test_it_does_not_give_up_while_another_serves() -> None:
    fake = up(2)
    fake.end(2, 1)
    for _ in range(10):
        fake.later(PAUSE_MAX_S)
        (worker,) = [number for number, slot in fake.running.items() if slot == 1]
        fake.end(worker, 1)
    assert not fake.supervision.is_over
    assert not fake.told


def test_each_is_replaced_by_one_that_is_ready_before_it_goes() -> None:
    fake = up(2)
    fake.supervision.replace_all()
    fake.look()
    assert (fake.running, fake.told) == ({1: 0, 2: 1, 3: 0}, set())
    fake.make_ready(3)
    assert (fake.running, fake.told) == ({1: 0, 2: 1, 3: 0, 4: 1}, {1})
    fake.make_ready(4)
    assert fake.told == {1, 2}
    fake.end(1)
    fake.end(2)
    assert fake.running == {3: 0, 4: 1}
    assert not fake.supervision.notices


def test_a_replacement_that_does_not_come_up_costs_nothing() -> None:
    fake = up(2)
    fake.supervision.replace_all()
    fake.look()
    fake.end(3, 2)
    fake.later(100)
    assert (fake.running, fake.told) == ({1: 0, 2: 1}, set())
    assert "the present ones stay" in fake.supervision.notices[0]


def test_who_is_never_ready_or_does_not_end_is_killed() -> None:
    fake = up(1)
    fake.supervision.replace_all()
    fake.look()
    assert fake.supervision.next_s(fake.now) == START_S
    fake.later(START_S + 0.1)
    assert fake.killed == {2}
    fake.end(2, 137)
    fake.supervision.stop(fake.now)
    fake.look()
    assert fake.told == {1}
    fake.later(STOP_S + 0.1)
    assert fake.killed == {2, 1}


def test_a_second_wish_to_stop_ends_at_once_but_not_the_same_one_heard_twice() -> None:
    fake = up(1)
    fake.supervision.stop(0.0)
    fake.supervision.stop(0.5)
    fake.later(0.5)
    assert not fake.killed
    fake.supervision.stop(2.0)
    fake.look()
    assert fake.killed == {1}


actions = st.lists(
    st.one_of(
        st.tuples(st.just("ready"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("replace"), st.just(0)),
        st.tuples(st.just("later"), st.integers(1, 30)),
    ),
    max_size=60,
)


@given(slots=st.integers(1, 4), actions=actions)
def test_a_ready_worker_goes_only_when_another_of_its_slot_is_ready(slots: int, actions: list[tuple[str, int]]) -> None:
    fake = up(slots)
    for action, number in actions:
        served = {fake.running[one] for one in fake.ready & set(fake.running) - fake.told}
        names = sorted(fake.running)
        match action:
            case "ready":
                fake.make_ready(names[number % len(names)])
            case "later":
                fake.later(number)
            case "replace":
                fake.supervision.replace_all()
                fake.look()
            case _:
                told = [name for name in names if name in fake.told]
                if not told:
                    continue
                fake.end(told[number % len(told)])
        assert served <= {fake.running[one] for one in fake.ready & set(fake.running) - fake.told}
        assert not fake.supervision.is_over
    fake.supervision.stop(fake.now)
    fake.look()
    assert set(fake.running) <= fake.told
    for worker in tuple(fake.running):
        fake.end(worker)
    assert fake.supervision.is_over
    assert fake.supervision.exit_code == 0


def say_alive(fake: Fake, *workers: int) -> None:
    for worker in workers:
        fake.supervision.alive(worker, fake.now)


def test_a_worker_that_hangs_is_killed_and_another_one_started() -> None:
    fake = up(2)
    say_alive(fake, 1, 2)
    for _ in range(int(SILENT_S / ALIVE_EVERY_S)):
        assert fake.supervision.next_s(fake.now) <= ALIVE_EVERY_S  # type: ignore[operator]
        fake.later(ALIVE_EVERY_S)
        say_alive(fake, 2)
        assert not fake.killed
    fake.later(ALIVE_EVERY_S)
    assert fake.killed == {1}
    fake.end(1, 137)
    assert fake.running == {2: 1, 3: 0}


def test_a_parent_that_was_stopped_itself_kills_nobody_for_it() -> None:
    fake = up(2)
    say_alive(fake, 1, 2)
    for _ in range(2):
        fake.later(SILENT_S + 100)
        assert not fake.killed


def test_a_worker_that_was_told_to_end_may_be_silent_as_long_as_it_may_take() -> None:
    fake = up(1)
    say_alive(fake, 1)
    fake.supervision.stop(fake.now)
    while fake.now < STOP_S:
        fake.later(ALIVE_EVERY_S)
        assert not fake.killed


PARENT = """
from serai.ingress import supervision, workers
supervision.ALIVE_EVERY_S, supervision.SILENT_S = 0.1, 0.5
raise SystemExit(workers.main())
"""
WORKER = """
import json, os, socket, time
place = json.loads(os.environ["SERAI_INGRESS_PLACE"])
control = socket.socket(fileno=place["control"])
control.send(b"r")
while place["worker"] == 2:
    control.send(b"a")
    time.sleep(0.1)
time.sleep(60)
"""


def parent(command: list[str]) -> subprocess.Popen[str]:
    plan = Plan(1, "127.0.0.1", free_port(), "127.0.0.1", 0, 1.0, False, command)
    words = [sys.executable, "-c", PARENT, json.dumps(asdict(plan))]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def test_the_parent_finds_the_worker_that_hangs() -> None:
    with parent([sys.executable, "-c", WORKER]) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        process.terminate()
    assert "worker 1 has hung for 0.5 s and is killed" in lines[0]
    assert "exit code 137; another is started now" in lines[1]


def test_a_worker_that_cannot_be_started_is_said_and_ends_nothing_else() -> None:
    with parent(["/nonexistent/python"]) as process:
        _, said = process.communicate(timeout=20)
    assert process.returncode == os.EX_OSERR
    assert "worker 1 cannot be started" in said
    assert "giving up" in said
    assert "Traceback" not in said
