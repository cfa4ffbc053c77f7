"""What a launcher believes of its jobs, from answers that are late, partial, or none."""

from __future__ import annotations

from typing import Any

import pytest

from serai.launcher.deployments import Deployment, picture_of
from serai.launcher.job_book import BookRules, JobBook
from serai.launcher.jobs import JobId, JobName, Jobs, JobState, ObservedJob, RefusalKind, Refused, Unknown
from serai.launcher.runs import Ended, Event, Requeued, SeenSession, Served, Started
from serai.launcher.slots import Slot, SlotNames, slot_name
from serai.launcher.trouble import BACK_OFF_MAX_S
from serai.runtime.session_state import SessionState

NAMES = SlotNames("alps", ["chat"])


def name(slot: int = 0, generation: int = 1, random_part: str = "a") -> JobName:
    return slot_name("alps", Slot("chat", slot), generation, "qwen2.5:7b", random_part)


class Story:
    """A book, and a clock that each answer moves by 30 s."""

    def __init__(self) -> None:
        self.book = JobBook(BookRules(), NAMES, {"chat": "v1"})
        self.now = 1000.0
        self.number = 0

    def submitted(self, given: JobName, answer: Any = None, job: str = "7") -> None:
        self.book.submitting(given, 3600.0, self.now)
        self.book.submitted(given, JobId("", job) if answer is None else answer, self.now)

    def answer(self, *jobs: ObservedJob) -> list[Event]:
        self.now += 30
        self.number += 1
        return self.book.hear_jobs(Jobs(jobs, self.number, 0.0), self.now)

    def sessions(self, *sessions: SeenSession) -> list[Event]:
        return self.book.hear_sessions(sessions, self.now)

    @property
    def count(self) -> int:
        return len(self.book.runs)


def job(given: JobName, state: JobState = JobState.RUNNING, number: str = "7", **changes: Any) -> ObservedJob:
    facts = {"time_limit_s": 3600.0, "time_left_s": 3590.0 if state is JobState.RUNNING else 3600.0}
    return ObservedJob(
        id=JobId("", number, 5, "me"),
        state=state,
        word=state.upper(),
        number=number,
        name=str(given),
        **facts | changes,
    )


def session(state: SessionState, allocation: str = "slurm-7", **changes: Any) -> SeenSession:
    return SeenSession(session="s", allocation=allocation, state=state, **changes)


def serving() -> Story:
    story = Story()
    story.submitted(name())
    story.answer(job(name()))
    story.sessions(session(SessionState.SERVING))
    return story


def test_a_job_s_life_is_measured() -> None:
    story = Story()
    story.submitted(name())
    assert story.answer(job(name(), JobState.PENDING)) == []
    story.now += 60
    (started,) = story.answer(job(name(), time_left_s=3580.0))
    assert isinstance(started, Started)
    assert started.wait_s == 100  # 120 s since the submission, and it has run for 20 of them.
    story.now += 40
    assert story.sessions(session(SessionState.LOADING)) == []
    (served,) = story.sessions(session(SessionState.SERVING))
    assert isinstance(served, Served)
    assert served.load_s == 60
    assert story.book.waits("chat").seen == [100]
    assert story.book.loads("chat").seen == [60]
    (ended,) = story.answer(job(name(), JobState.TIMED_OUT))
    assert isinstance(ended, Ended)
    assert not ended.failed
    assert story.count == 0


@pytest.mark.parametrize("reason", ["squeue: no answer in 30 s", "slurm_load_jobs error: Unable to contact"])
def test_h01_h15_an_answer_that_is_none_changes_nothing(reason: str) -> None:
    story = serving()
    before = story.book.runs
    for _ in range(50):
        story.now += 30
        assert story.book.hear_jobs(Unknown(reason), story.now) == []
    assert story.book.unknown == reason
    assert story.book.runs == before


def test_h01_an_empty_queue_ends_nothing_that_lives() -> None:
    story = serving()
    for _ in range(50):
        assert story.answer() == []
        story.sessions(session(SessionState.SERVING))
    assert story.count == 1


def test_h01_gone_needs_several_answers_and_no_sign_of_life() -> None:
    """The answers show another job of ours: they are whole."""
    story = serving()
    other = name(1)
    story.submitted(other, job="8")
    there = job(other, JobState.PENDING, "8")
    story.answer(there, job(name()))
    story.sessions(session(SessionState.SUSPECTED))
    assert story.answer(there) == []
    assert story.answer(there) == []
    (ended,) = story.answer(there)
    assert isinstance(ended, Ended)
    assert ended.state is None
    assert not ended.failed


def test_h01_an_empty_queue_is_believed_late() -> None:
    """A job that waits has no session to speak for it."""
    story = Story()
    story.submitted(name())
    story.answer(job(name(), JobState.PENDING))
    told = [story.answer() for _ in range(BookRules().gone_empty_answers)]
    assert told[:-1] == [[]] * (len(told) - 1)
    assert isinstance(told[-1][0], Ended)


def test_h01_a_job_that_is_back_was_never_gone() -> None:
    story = serving()
    story.sessions(session(SessionState.SUSPECTED))
    for _ in range(4):
        story.answer()
        story.answer()
        story.answer(job(name()))
    assert story.count == 1
    assert story.book.runs[0].absent == 0


def test_a_session_that_left_and_a_job_that_is_missing_agree() -> None:
    story = serving()
    story.sessions(session(SessionState.LEFT))
    (ended,) = story.answer()
    assert isinstance(ended, Ended)
    assert not ended.failed


def test_h03_a_requeue_is_another_run_of_the_same_job() -> None:
    story = serving()
    (requeued,) = story.answer(job(name(), JobState.PENDING))
    assert isinstance(requeued, Requeued)
    (run,) = story.book.runs
    assert (run.served_at_s, run.started_at_s, run.ends_at_s, run.generation) == (None, None, None, 1)
    story.now += 600
    # The old run's session has left; the new one has none yet: that says nothing of the new run.
    events = story.answer(job(name()))
    assert isinstance(events[0], Started)
    story.sessions(session(SessionState.LEFT))
    assert story.book.runs[0].left_since_s is None


def test_h13_a_refused_submission_leaves_the_others_alone() -> None:
    story = Story()
    story.submitted(name(0), job="1")
    story.submitted(name(1), Refused(RefusalKind.QUOTA, "QOSMaxSubmitJobPerUserLimit", "wait"))
    story.submitted(name(2), job="3")
    assert [run.slot.number for run in story.book.runs] == [0, 2]
    trouble = story.book.trouble(Slot("chat", 1))
    assert trouble is not None
    assert trouble.alert


def test_h13_a_submission_without_an_answer_is_looked_for_by_name() -> None:
    found, lost = Story(), Story()
    for story in (found, lost):
        story.submitted(name(), Unknown("no answer in 30 s"))
        assert story.count == 1
    found.answer(job(name(), JobState.PENDING, "42"))
    assert str(found.book.runs[0].id) == "42"
    for _ in range(BookRules().gone_empty_answers - 1):
        assert lost.answer() == []
    (ended,) = lost.answer()
    assert isinstance(ended, Ended)
    assert ended.failed


def test_h17_most_jobs_missing_at_once_is_doubted_and_then_believed() -> None:
    story = Story()
    for number in range(4):
        story.submitted(name(number), job=str(number))
    jobs = [job(name(number), number=str(number)) for number in range(4)]
    story.answer(*jobs)
    assert story.answer(jobs[0]) == []
    assert story.book.braked(story.now)
    for _ in range(9):
        assert story.answer(jobs[0]) == []
    assert len(story.answer(jobs[0], jobs[1])) == 2, "two of four are not most"
    assert not story.book.braked(story.now)


def test_h18_completing_is_not_over() -> None:
    story = serving()
    assert story.answer(job(name(), JobState.COMPLETING)) == []
    assert story.count == 1
    assert len(story.answer(job(name(), JobState.COMPLETED))) == 1


def test_h19_failed_births_back_off_and_a_good_one_forgives() -> None:
    story = Story()
    waits = []
    for generation in range(1, 9):
        story.submitted(name(0, generation))
        (ended,) = story.answer(job(name(0, generation), JobState.FAILED))
        assert isinstance(ended, Ended)
        assert ended.failed
        trouble = story.book.trouble(Slot("chat", 0))
        assert trouble is not None
        waits.append(trouble.wait_s(story.now))
        assert trouble.alert == (generation >= 3)
    assert waits[:3] == [60, 120, 240]
    assert waits[-1] == BACK_OFF_MAX_S
    story.submitted(name(0, 9))
    story.answer(job(name(0, 9)))
    story.sessions(session(SessionState.SERVING))
    assert story.book.trouble(Slot("chat", 0)) is not None
    story.now += BookRules().short_life_s
    story.sessions(session(SessionState.SERVING))
    assert story.book.trouble(Slot("chat", 0)) is None


def test_a_job_that_dies_soon_after_its_first_token_has_failed() -> None:
    story = serving()
    (ended,) = story.answer(job(name(), JobState.FAILED))
    assert isinstance(ended, Ended)
    assert ended.failed


def test_numbers_are_used_again_and_names_are_not() -> None:
    """Another job under the number of one of ours is not ours, and does not keep ours alive."""
    story = serving()
    story.sessions(session(SessionState.LEFT))
    stranger = ObservedJob(id=JobId("", "7", 99, "me"), state=JobState.RUNNING, word="RUNNING", number="7", name="mine")
    (ended,) = story.answer(stranger)
    assert isinstance(ended, Ended)
    assert story.count == 0


def test_h14_a_launcher_that_starts_anew_knows_what_was_begun() -> None:
    story = serving()
    story.submitted(name(1), Unknown("no answer"), job="8")
    story.submitted(name(2), Refused(RefusalKind.INVALID, "Invalid account", "write another"))
    story.book.asleep.add("night")
    kept = story.book.kept("me", 3, story.now)
    again = Story()
    again.now = 50.0  # Another machine's clock.
    again.book.restore(kept, again.now)
    assert [(run.slot.number, run.served_at_s is not None) for run in again.book.runs] == [(0, True), (1, False)]
    assert again.book.answers == 0
    trouble = again.book.trouble(Slot("chat", 2))
    assert trouble is not None
    assert trouble.until_s is None
    assert again.book.next_generation(Slot("chat", 2)) == 2
    assert again.book.asleep == {"night"}
    assert again.book.waits("chat").seen == story.book.waits("chat").seen


def test_h14_jobs_are_known_by_their_names_when_all_state_is_lost() -> None:
    story = Story()
    stranger = JobName.for_model("m", "abcd1234")
    events = story.answer(job(name(1, 6)), job(stranger, number="9"), job(name(0, 2), JobState.COMPLETED, "8"))
    assert [type(event) for event in events] == [Started], "what was over before says nothing of now"
    assert [(run.slot.number, run.generation) for run in story.book.runs] == [(1, 6)]
    assert story.book.foreign == (str(stranger),)
    assert story.book.next_generation(Slot("chat", 1)) == 7


def test_a_trouble_belongs_to_the_deployment_as_it_was() -> None:
    story = Story()
    story.submitted(name(), Refused(RefusalKind.INVALID, "Invalid account", "write another"))
    kept = story.book.kept("me", 1, story.now)
    changed = JobBook(BookRules(), NAMES, {"chat": "v2"})
    changed.restore(kept, 0.0)
    assert story.book.trouble(Slot("chat", 0)) is not None
    assert changed.trouble(Slot("chat", 0)) is None


def test_h20_idle_is_counted_while_somebody_could_take_a_request() -> None:
    story = serving()
    began_s = story.now
    story.now += 500
    story.sessions(session(SessionState.SERVING, requests_total=3, in_flight=0))
    assert story.book.active_at_s["chat"] == story.now
    story.now += 500
    story.sessions(session(SessionState.SERVING, requests_total=3, in_flight=0))
    assert story.book.active_at_s["chat"] == began_s + 500
    story.sessions(session(SessionState.SERVING, requests_total=3, in_flight=1))
    assert story.book.active_at_s["chat"] == story.now
    story.now += 500
    story.sessions(session(SessionState.LOADING))
    assert story.book.active_at_s["chat"] == story.now


def test_a_job_name_says_which_slot_it_fills() -> None:
    named = NAMES.read(str(name(17, 123_456, "c0ffee12")))
    assert named is not None
    assert (named.slot, named.generation) == (Slot("chat", 17), 123_456)
    assert SlotNames("lugano", ["chat"]).read(str(name())) is None
    assert NAMES.read("serai.m.abcd1234") is None
    assert NAMES.read("bash") is None


@pytest.mark.parametrize(
    ("seen", "estimate_s", "expected_s"),
    [
        pytest.param([], 0.0, 600.0, id="the site file's word"),
        pytest.param([], 1000.0, 1000.0, id="a longer estimate"),
        pytest.param([], 90_000.0, 2400.0, id="one that cannot be believed"),
        pytest.param([10.0] * 4, 0.0, 600.0, id="too few to know better"),
        pytest.param([10.0] * 5, 0.0, 10.0, id="enough"),
        pytest.param([10.0] * 5, 90_000.0, 1200.0, id="enough, and an estimate"),
        pytest.param([10.0] * 18 + [5000.0] * 2, 0.0, 10.0, id="nine in ten"),
        pytest.param([10.0] * 17 + [5000.0] * 3, 0.0, 5000.0, id="not nine in ten"),
        pytest.param([9000.0] * 40 + [10.0] * 32, 0.0, 10.0, id="what was long ago is forgotten"),
    ],
)
def test_h08_how_long_a_queue_is(seen: list[float], estimate_s: float, expected_s: float) -> None:
    book = Story().book
    for wait_s in seen:
        book.waits("chat").add(wait_s)
    deployment = Deployment(name="chat", model="m", queue_wait_s=600.0)
    (wanted,) = picture_of(book, [deployment], 0.0, estimates_s={"chat": estimate_s}).wanted
    assert wanted.wait_s == expected_s
