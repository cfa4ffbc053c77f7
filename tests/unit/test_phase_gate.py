"""The phase gate: who is released when, and what a scheduler is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.contracts.admission import GateMode, Lease
from serai.worker_agent.phase_gate import (
    FOREVER_S,
    Ended,
    EngineSays,
    FirstToken,
    GateEffect,
    GateEvent,
    GateSettings,
    Offered,
    PhaseGate,
    Position,
    RefuseLease,
    Release,
    Said,
    Stepped,
    Taken,
    Tick,
    Turn,
)

STEP_S = 0.02


def predict_s(tokens: int) -> float:
    """20 ms a step, and 1 ms for every ten tokens."""
    return STEP_S + tokens / 10_000


def lease(
    sequence: int = 1, *, ttft_s: float = 5.0, best_effort: bool = False, epoch: int = 3, window: int = 0
) -> Lease:
    return Lease(epoch, sequence, 0.1, 100, ttft_s, ttft_s, 0.1, best_effort, 100, window)


class Instance:
    """A gate in front of an engine that obeys it: prompts as it is told, else decoding."""

    def __init__(self, mode: GateMode = GateMode.PADG, **settings: float | bool | str) -> None:
        self.now_s = 0.0
        self.gate = PhaseGate(
            GateSettings(session="a", tells_steps=True, **settings),  # type: ignore[arg-type]
            predict_s,
        )
        self.tokens: dict[str, int] = {}
        self.queue: list[str] = []
        self.computed = 0
        self.entering: list[str] = []
        self.decoding: list[str] = []
        self.turn = Turn(Position.PREFILL)
        self.refused: dict[str, str] = {}
        self.gaps: dict[str, list[float]] = {}
        self.tell(Taken("macro-0", 3, mode, 0.01, 1e9))

    def tell(self, event: GateEvent) -> Sequence[GateEffect]:
        effects = self.gate.handle(event, self.now_s)
        for effect in effects:
            if isinstance(effect, Release):
                self.queue.append(effect.key)
            elif isinstance(effect, Turn):
                self.turn = effect
            elif isinstance(effect, RefuseLease):
                self.refused[effect.key] = effect.why
        return effects

    def offer(self, key: str, tokens: int, given: Lease | None = None) -> Sequence[GateEffect]:
        self.tokens[key] = tokens
        return self.tell(Offered(key, tokens, given))

    def backlog(self) -> int:
        return sum(self.tokens[key] for key in self.queue) - self.computed

    def step(self) -> bool:
        """One step of the engine. Whether there was anything to do."""
        most = self.turn.prompt_tokens_max or 8192
        work = 0 if self.turn.position is Position.DECODE else min(most, self.backlog())
        decodes = (self.turn.position is Position.MIXED or not work) and bool(self.decoding or self.entering)
        if not work and not decodes:
            return False
        duration_s = STEP_S + work / 10_000
        self.now_s += duration_s
        if decodes:
            self.decoding += self.entering
            self.entering = []
        first = []
        self.computed += work
        while self.queue and self.computed >= self.tokens[self.queue[0]]:
            first.append(self.queue.pop(0))
            self.computed -= self.tokens[first[-1]]
        for key in self.decoding if decodes else ():
            self.gaps.setdefault(key, []).append(self.now_s)
        self.tell(Stepped(duration_s, decodes, work, self.backlog(), first, kv_tokens_free=10_000))
        self.entering += first
        return True

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def released(effects: Sequence[GateEffect]) -> list[str]:
    return [effect.key for effect in effects if isinstance(effect, Release)]


def test_an_idle_instance_prefills_at_once() -> None:
    one = Instance()
    assert released(one.offer("r", 100, lease())) == ["r"]


def test_nobody_is_stalled_for_longer_than_its_slack() -> None:
    one = Instance()
    one.offer("old", 10, lease(1))
    one.run(3)
    for number in range(6):
        one.offer(f"new-{number}", 400, lease(number + 2))
    slack_s = []
    for _ in range(200):
        one.step()
        said = len(one.gaps["old"])
        slack_s.append(one.gaps["old"][0] - STEP_S + said * 0.1 - one.now_s)
    assert not one.queue
    assert min(slack_s) >= -1e-9


def test_waiting_is_bounded_by_the_deadline_even_without_slack() -> None:
    """A stream whose decode step is as long as its target never has slack; a prompt comes all the same, before its
    deadline, when little is lost by it."""
    one = Instance(slo_tpot_s=STEP_S)
    one.offer("old", 10, None)
    one.run(5)
    one.offer("new", 10, Lease(3, 1, 0.1, 100, 1.0, 1.0, STEP_S, False, 10))
    while "new" not in one.decoding and one.now_s < 3:
        one.step()
    assert one.now_s <= 1.2


def test_who_cannot_meet_its_deadline_comes_after_those_who_can() -> None:
    one = Instance()
    one.offer("old", 10, lease(1))
    one.run(2)
    one.offer("giant", 8000, lease(2, ttft_s=0.86))
    for number in range(5):
        one.offer(f"small-{number}", 50, lease(3 + number, ttft_s=0.88))
    while one.now_s < 0.9:
        one.step()
    assert {f"small-{number}" for number in range(5)} <= {*one.decoding}
    assert "giant" not in one.gaps
    one.run(300)
    assert "giant" in one.gaps


def most_at_once(**settings: str) -> tuple[int, set[Position]]:
    """Of forty requests, how many prompt tokens one step took while somebody decoded, and what steps there were."""
    one, most, positions = Instance(**settings), 0, set()
    for number in range(40):
        one.offer(f"r{number}", 400, lease(number + 1))
        for _ in range(3):
            before, decoding = one.backlog(), bool(one.decoding)
            one.step()
            done = before - one.backlog()
            if done and decoding:
                most = max(most, done)
                positions.add(one.turn.position)
    return most, positions


def test_parts_of_the_policy_can_be_switched_off() -> None:
    assert Position.MIXED in most_at_once()[1]
    assert Position.MIXED not in most_at_once(without="mixed-steps")[1]
    assert most_at_once(without="expected-misses")[0] <= most_at_once()[0]


def test_late_requests_are_served_in_the_end() -> None:
    one = Instance()
    one.offer("late", 4000, lease(1, best_effort=True))
    for number in range(2, 60):
        one.offer(f"r-{number}", 300, lease(number))
        one.run(3)
        if len(one.decoding) > 5:
            one.tell(Ended(one.decoding.pop(0)))
    one.run(300)
    assert "late" in [*one.decoding, *one.entering] or "late" in one.gaps


def test_ordinary_mode_releases_everything_at_once_and_mixes() -> None:
    one = Instance(GateMode.ORDINARY)
    effects = one.offer("a", 100, lease())
    assert released(effects) == ["a"]
    assert Turn(Position.MIXED, 512) in effects
    assert released(one.offer("b", 100, lease(2))) == ["b"]


def test_an_instance_that_hears_nothing_for_two_beats_admits_by_itself() -> None:
    one = Instance()
    one.tell(Taken("macro-0", 3, GateMode.PADG, 0.01, 1.0))
    one.offer("old", 10, lease(1))
    one.run(1)
    one.offer("held", 7000, lease(2))
    one.run(2)
    held = [key for key in ("held",) if key not in one.queue]
    one.now_s += 2.5
    one.tell(Tick())
    one.run(1)
    assert one.gate.report(one.now_s).mode is GateMode.ORDINARY
    assert held == [] or "held" in one.queue or "held" in [*one.entering, *one.decoding]


def test_a_lease_of_another_epoch_is_refused_and_a_lower_epoch_is_not_obeyed() -> None:
    one = Instance()
    one.offer("r", 100, lease(epoch=2))
    assert "epoch 2" in one.refused["r"]
    one.tell(Taken("macro-9", 2, GateMode.ORDINARY, 0.01, 1.0))
    report = one.gate.report(0.0)
    assert (report.epoch, report.mode) == (3, GateMode.PADG)


def test_a_new_owner_counts_leases_anew() -> None:
    one = Instance()
    one.offer("r", 100, lease(7))
    assert one.gate.report(0.0).applied == 7
    one.tell(Taken("macro-1", 4, GateMode.PADG, 0.01, 1e9))
    assert (one.gate.report(0.0).epoch, one.gate.report(0.0).applied) == (4, 0)
    assert [held.request_id for held in one.gate.state(0.0, accepted=True).requests] == ["r"]


@pytest.mark.parametrize(
    ("tokens", "given", "word"),
    [(500_000, None, "KV cache"), (90_000, lease(ttft_s=0.5), "left")],
)
def test_what_cannot_be_kept_is_refused_with_a_reason(tokens: int, given: Lease | None, word: str) -> None:
    one = Instance(kv_tokens_total=100_000)
    one.offer("old", 10, lease(1))
    one.run(1)
    one.offer("r", tokens, given)
    assert word in one.refused["r"]


def test_what_comes_by_places_given_in_advance_is_counted_by_epoch() -> None:
    one = Instance()
    one.offer("a", 100, lease(0))
    one.offer("b", 100, lease(0))
    one.offer("c", 100, lease(0, epoch=2))
    assert (one.gate.report(0.0).granted_total, one.gate.report(0.0).applied) == (2, 0)
    one.tell(Taken("macro-1", 4, GateMode.PADG, 0.01, 1e9))
    assert one.gate.report(0.0).granted_total == 0


def test_a_refused_lease_counts_as_applied() -> None:
    one = Instance(kv_tokens_total=1000)
    one.offer("r", 5000, lease(4))
    assert one.gate.report(0.0).applied == 4


def test_no_more_are_released_than_the_engine_runs_at_once() -> None:
    one = Instance(sequences_max=2)
    for number in range(3):
        one.offer(f"r{number}", 10, lease(number + 1))
    one.run(5)
    assert sorted(one.decoding) == ["r0", "r1"]
    assert (one.queue, one.gate.report(one.now_s).slots_free) == ([], -1)
    one.decoding.remove("r0")
    one.tell(Ended("r0"))
    one.run(2)
    assert sorted([*one.entering, *one.decoding]) == ["r1", "r2"]


def test_a_slot_goes_to_who_can_still_be_served_in_time() -> None:
    one = Instance(sequences_max=1)
    one.offer("long", 10, lease(1))
    one.run(1)
    one.offer("too late", 10, lease(2, ttft_s=0.5))
    one.run(30)
    one.offer("in time", 10, lease(3))
    one.decoding.remove("long")
    one.tell(Ended("long"))
    one.run(2)
    assert [*one.entering, *one.decoding] == ["in time"]


def test_while_no_slot_is_free_nobody_stops_decoding_for_who_waits() -> None:
    one = Instance(sequences_max=1)
    one.offer("old", 10, lease(1))
    one.run(1)
    one.offer("new", 10, lease(2, ttft_s=0.2))
    one.run(20)
    gaps = [later - earlier for earlier, later in zip(one.gaps["old"], one.gaps["old"][1:], strict=False)]
    assert max(gaps) == pytest.approx(STEP_S)


def test_how_many_an_engine_runs_at_once_may_be_told_later() -> None:
    one = Instance()
    assert one.gate.report(0.0).slots_free is None
    one.tell(EngineSays(10_000, 10_000, 2))
    one.tell(EngineSays(9_000, 10_000))
    for number in range(3):
        one.offer(f"r{number}", 10, lease(number + 1))
    one.run(5)
    assert len(one.decoding) == 2


def test_streams_without_steps_are_known_by_what_they_said() -> None:
    gate = PhaseGate(GateSettings(session="a"), predict_s)
    gate.handle(Taken("m", 1, GateMode.PADG, 0.01, 1e9), 0.0)
    gate.handle(Offered("r", 100, None), 0.0)
    gate.handle(FirstToken("r"), 1.0)
    gate.handle(Said("r", 21), 2.0)
    assert gate.report(2.0).decoding.least_s == pytest.approx(20 * 0.1 - 1.0)
    gate.handle(Ended("r"), 3.0)
    assert gate.report(3.0).decoding.count == 0


def test_a_clock_that_goes_back_stands_still() -> None:
    one = Instance()
    one.offer("old", 10, lease(1))
    one.run(5)
    one.now_s -= 3.0
    one.offer("new", 10, lease(2))
    assert one.gate.report(one.now_s).laxity_s <= FOREVER_S


def test_streams_of_earlier_windows_are_told_apart() -> None:
    one = Instance(GateMode.ORDINARY, slack_from_first_token=True)
    one.offer("a", 10, lease(1, window=1))
    one.run(2)
    one.offer("b", 10, lease(2, window=2))
    one.run(2)
    report = one.gate.report(one.now_s)
    assert (report.window, report.older.count, report.decoding.count) == (2, 1, 2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(0.3, 6), st.integers(0, 4), st.booleans()), max_size=25))
def test_everybody_is_released_or_refused_and_tokens_are_never_negative(
    offers: list[tuple[int, float, int, bool]],
) -> None:
    one = Instance(kv_tokens_total=50_000)
    for number, (tokens, ttft_s, steps, best_effort) in enumerate(offers):
        one.offer(str(number), tokens, lease(number + 1, ttft_s=ttft_s, best_effort=best_effort))
        one.run(steps)
        report = one.gate.report(one.now_s)
        assert report.waiting >= 0
        assert report.waiting_prefill_s >= 0.0
        assert report.kv_tokens_promised >= 0
    for _ in range(4000):
        if not one.step():
            break
        if len(one.decoding) > 3:
            one.tell(Ended(one.decoding.pop(0)))
    seen = {*one.gaps, *one.entering, *one.refused}
    assert seen >= {str(number) for number in range(len(offers))}
