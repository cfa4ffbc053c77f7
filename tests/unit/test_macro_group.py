"""A group with instances that answer, late or never: leases, pending asks, refusals, epochs, fairness."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAsk,
    Decision,
    GateMode,
    InstanceReport,
    InstanceState,
    Spread,
)
from serai.macro_scheduler.admission import Request
from serai.macro_scheduler.group import (
    Answer,
    Asked,
    Gone,
    Group,
    GroupEffect,
    GroupEvent,
    GroupSettings,
    Joined,
    Own,
    Owned,
    Reported,
    Take,
    Tick,
    TookOver,
    Withdrawn,
)
from serai.macro_scheduler.instance_view import StepPredictor
from serai.macro_scheduler.pending import PendingLine

PREDICT = StepPredictor(lambda tokens: tokens / 1000, lambda sequences, context: 0.05)
BUSY = Spread(4, 0.5, 0.1, 0.1, 1.0)


class Stand:
    """A group whose shell carries everything out."""

    def __init__(self, sessions: Sequence[str] = ("a", "b"), **options: float | str) -> None:
        self.now_s = 0.0
        self.group = Group(GroupSettings(**options))  # type: ignore[arg-type]
        self.answers: list[AdmissionAnswer] = []
        self.epoch = 0
        self.sequence = dict.fromkeys(sessions, 0)
        for session in sessions:
            self.tell(Joined(session, 10_000, PREDICT))

    def tell(self, event: GroupEvent) -> Sequence[GroupEffect]:
        effects = self.group.handle(event, self.now_s)
        for effect in effects:
            if isinstance(effect, Answer):
                self.answers.append(effect.answer)
            elif isinstance(effect, Own):
                self.epoch += 1
                self.tell(Owned(effect.session, self.epoch, effect.owner))
            elif isinstance(effect, Take) and self.group.views[effect.session].epoch != effect.take.epoch:
                self.tell(TookOver(InstanceState(self.blank(effect.session, effect.take.epoch), [], True)))
        return effects

    def ask(self, request_id: str, tokens: int = 500, **fields: object) -> AdmissionAnswer:
        self.tell(Asked(AdmissionAsk(request_id, tokens, **fields), None))  # type: ignore[arg-type]
        return self.answers[-1]

    def blank(self, session: str, epoch: int) -> InstanceReport:
        self.sequence[session] += 1
        number = self.sequence[session]
        idle = Spread(0)
        return InstanceReport(session, number, epoch, 0, GateMode.PADG, False, 0.0, idle, 0, 0.0, 1e9, 10_000, 10_000)

    def report(self, session: str, **fields: object) -> None:
        report = self.blank(session, self.group.views[session].epoch)
        self.tell(Reported(msgspec.structs.replace(report, **fields)))


def test_each_admission_is_debited_at_once() -> None:
    stand = Stand()
    sessions = [stand.ask(str(number)).session for number in range(4)]
    assert sorted(sessions) == ["a", "a", "b", "b"]
    leases = [answer.lease for answer in stand.answers]
    assert sorted((answer.session, answer.lease.sequence) for answer in stand.answers if answer.lease) == [
        ("a", 1),
        ("a", 2),
        ("b", 1),
        ("b", 2),
    ]
    assert all(lease is not None and lease.epoch for lease in leases)


def test_who_fits_nowhere_waits_and_is_answered_when_that_changes() -> None:
    stand = Stand(("a",))
    stand.report("a", decoding=BUSY, waiting=3, waiting_prefill_s=4.9, step_s=0.09)
    assert stand.ask("r").decision is Decision.WAIT
    stand.now_s = 0.1
    stand.report("a", decoding=msgspec.structs.replace(BUSY, low_s=0.9))
    assert (stand.answers[-1].request_id, stand.answers[-1].decision) == ("r", Decision.ADMIT)


def test_an_ask_that_comes_again_while_it_waits_waits_once() -> None:
    stand = Stand(("a",))
    stand.report("a", decoding=BUSY, waiting=3, waiting_prefill_s=4.9, step_s=0.09)
    assert [stand.ask("r").decision, stand.ask("r").decision] == [Decision.WAIT, Decision.WAIT]
    assert len(stand.group.pending) == 1
    stand.tell(Withdrawn("r"))
    assert len(stand.group.pending) == 0


def test_a_refused_lease_is_given_back_and_goes_elsewhere() -> None:
    stand = Stand()
    first = stand.ask("r").session
    again = stand.ask("r", excluded=[first])
    assert again.session not in ("", first)
    assert not stand.group.views[first].leases


def test_who_refused_the_promise_may_serve_it_late() -> None:
    stand = Stand(("a",))
    stand.ask("r")
    late = stand.ask("r", excluded=["a"])
    assert (late.decision, late.session) == (Decision.BEST_EFFORT, "a")
    assert stand.ask("s", excluded=["a"], best_effort=False).decision is not Decision.BEST_EFFORT


def test_a_withdrawn_request_gives_its_lease_back() -> None:
    stand = Stand(("a",))
    stand.ask("r")
    stand.tell(Withdrawn("r"))
    assert (stand.group.views["a"].leased_prefill_s, stand.group.views["a"].leased_kv_tokens) == (0.0, 0)


def test_a_lease_that_nobody_acknowledges_is_given_back_after_a_while() -> None:
    stand = Stand(("a",), lease_s=2.0)
    stand.ask("r")
    stand.now_s = 2.5
    stand.tell(Tick())
    assert not stand.group.views["a"].leases


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tokens": 0}, "at least 1"),
        ({"slo_ttft_s": 0.0}, "above 0"),
        ({"slo_tpot_s": float("nan")}, "above 0"),
        ({"slo_tpot_s": -1.0}, "above 0"),
        ({"waited_s": -1.0}, "below 0"),
        ({"tokens": 10_000}, "KV cache"),
    ],
)
def test_what_can_never_be_served_is_refused_with_a_reason(fields: dict[str, float], word: str) -> None:
    answer = Stand().ask("r", **fields)  # type: ignore[arg-type]
    assert answer.decision is Decision.REFUSE
    assert word in answer.reason


def test_a_target_that_can_never_be_met_is_best_effort_or_refused_as_its_caller_chose() -> None:
    stand = Stand()
    late = stand.ask("late", 6000)
    assert (late.decision, late.lease is not None and late.lease.best_effort) == (Decision.BEST_EFFORT, True)
    refused = stand.ask("refused", 6000, best_effort=False)
    assert (refused.decision, refused.retry_after_s >= 1.0) == (Decision.REFUSE, True)
    assert "left" in refused.reason


def test_who_waits_too_long_is_told_so() -> None:
    stand = Stand(("a",))
    stand.report("a", decoding=BUSY, waiting=3, waiting_prefill_s=4.9, step_s=0.09, kv_tokens_free=0)
    assert stand.ask("r").decision is Decision.WAIT
    stand.now_s = 4.9
    stand.tell(Tick())
    assert stand.answers[-1].decision is Decision.BEST_EFFORT


def test_no_more_wait_than_may() -> None:
    stand = Stand(("a",), pending_max=1)
    stand.report("a", decoding=BUSY, waiting=3, waiting_prefill_s=4.9, step_s=0.09)
    assert stand.ask("r").decision is Decision.WAIT
    refused = stand.ask("s")
    assert (refused.decision, refused.retry_after_s > 0) == (Decision.REFUSE, True)


def test_reports_of_strangers_and_of_other_epochs_change_nothing() -> None:
    stand = Stand(("a",))
    stand.report("a", epoch=99, waiting=7)
    report = stand.group.views["a"].report
    assert report is not None
    assert report.waiting == 0
    stand.tell(Reported(InstanceReport("z", 1, 1, 0, GateMode.PADG, False, 0.0, Spread(0), 0, 0.0, 1e9, 1, 1)))
    assert stand.group.refused_reports == 2
    assert "not a member" in "\n".join(stand.group.explain(""))


def test_an_instance_that_has_gone_gets_nothing_more() -> None:
    stand = Stand()
    stand.tell(Gone("a"))
    assert {stand.ask(str(number)).session for number in range(3)} == {"b"}


def test_a_decision_can_be_explained() -> None:
    stand = Stand(("a",))
    stand.report("a", decoding=BUSY, waiting=3, waiting_prefill_s=4.9, step_s=0.09)
    stand.ask("r")
    lines = stand.group.explain("r")
    assert lines[0].endswith("wait (500 prompt tokens, 5.000 s left to its first decode step)")
    assert "a: fails by ttft" in lines[1]


@pytest.mark.parametrize("fields", [{"slo_tpot_s": 0.0}, {"slo_ttft_s": -1.0}, {"attainment": 1.0}, {"policy": "x"}])
def test_settings_that_cannot_be_are_refused(fields: dict[str, float | str]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields)).replace("policy", "use serai, paper or author_code")):
        GroupSettings(**fields)  # type: ignore[arg-type]


# Laws


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 4000), st.sampled_from(["x", "y"])),
        st.tuples(st.just("report"), st.integers(0, 3), st.sampled_from(["a", "b"])),
        st.tuples(st.just("again"), st.integers(0, 30), st.sampled_from(["a", "b"])),
        st.tuples(st.just("withdraw"), st.integers(0, 30), st.just("")),
        st.tuples(st.just("wait"), st.integers(1, 3000), st.just("")),
    ),
    max_size=40,
)


@settings(max_examples=30, deadline=None)
@given(STEPS)
def test_the_ledger_is_never_negative_and_kv_is_never_promised_twice(steps: list[tuple[str, int, str]]) -> None:
    stand, asked = Stand(), 0
    for action, number, word in steps:
        if action == "ask":
            stand.ask(str(asked), number, project=word)
            asked += 1
        elif action == "report":
            view = stand.group.views[word]
            stand.report(word, applied=max(0, view.sequence - number), kv_tokens_free=10_000 - 1000 * number)
        elif action == "again" and number < asked:
            stand.ask(str(number), 100, excluded=[word])
        elif action == "withdraw":
            stand.tell(Withdrawn(str(number)))
        elif action == "wait":
            stand.now_s += number / 1000
            stand.tell(Tick())
        for view in stand.group.views.values():
            assert view.leased_prefill_s == pytest.approx(sum(one.debit_s for one in view.leases.values()))
            assert view.leased_kv_tokens == sum(one.lease.kv_tokens for one in view.leases.values()) >= 0
            if not any(one.lease.best_effort for one in view.leases.values()) and action == "ask":
                assert view.report is not None
                free = view.report.kv_tokens_free
                newest = [one for one in view.leases.values() if one.request_id == str(asked - 1)]
                assert not newest or view.leased_kv_tokens <= free
    stand.now_s += 60.0
    stand.tell(Tick())
    while len(stand.group.pending):
        before = len(stand.group.pending)
        stand.tell(Tick())
        assert len(stand.group.pending) < before
    final = {answer.request_id for answer in stand.answers if answer.decision is not Decision.WAIT}
    withdrawn = {str(number) for action, number, _ in steps if action == "withdraw"}
    assert {str(number) for number in range(asked)} - withdrawn <= final


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 500)), min_size=6, max_size=60))
def test_projects_that_wait_are_served_alike(asks: list[tuple[str, int]]) -> None:
    """All with about the same deadline: who has been served least goes first, so no project gets ahead of another that
    waits by more than one request."""
    line = PendingLine(5.0)
    for number, (project, tokens) in enumerate(asks):
        ask = AdmissionAsk(str(number), tokens, project=project)
        line.add(Request(ask, number * 1e-4, 5.0, 0.1), None)
    served = dict.fromkeys("xyz", 0.0)
    while len(line):
        waiting = {project for number, (project, _) in enumerate(asks) if str(number) in line}
        entry = next(iter(line.in_turn(1)))
        project = entry.request.ask.project
        assert served[project] <= min(served[other] for other in waiting)
        line.remove(entry.request.ask.request_id)
        line.serve(project, entry.request.ask.prompt_tokens)
        served[project] += entry.request.ask.prompt_tokens
