"""What a phase gate hears of an engine: its own word where it tells its steps, what can be worked out where not."""

from __future__ import annotations

from serai.worker_agent.engine_pulse import STEP_LOST_S, EnginePulse, EngineStep
from serai.worker_agent.phase_gate import EngineSays, FirstToken, Stepped
from serai.worker_agent.prefill_rate import PrefillRate

STEP = EngineStep(0.1, 100, 0, 50, 20, 900, 1000)


def pulse(*, told: bool) -> EnginePulse:
    return EnginePulse(PrefillRate(0.001), told=told)


def test_an_engine_that_tells_is_believed() -> None:
    one = pulse(told=True)
    one.released("a", 100, 1.0)
    assert one.first("a", 100, 2.0, shows=True) == (FirstToken("a"),)
    says, stepped = one.stepped(STEP, 30, 2.0)
    assert says == EngineSays(900, 1000)
    assert isinstance(stepped, Stepped)
    assert (stepped.backlog_tokens, stepped.prompt_tokens, stepped.decoded) == (80, 100, False)
    assert len(one.stepped(STEP, 0, 2.1)) == 1, "its KV cache is as large as before"
    assert one.load(1, 2) == (), "steps say it better"


def test_a_lost_word_and_the_end_of_work_are_made_up_for() -> None:
    one = pulse(told=True)
    assert one.look({}, 1.0, waits=True, works=True) == (), "it has not said anything yet"
    one.stepped(STEP, 0, 1.0)
    assert one.look({}, 1.5, waits=True, works=True) == ()
    assert len(one.look({}, 1.1 + STEP_LOST_S, waits=True, works=True)) == 1
    one.stepped(STEP, 0, 5.0)
    assert len(one.look({}, 5.01, waits=False, works=False)) == 1, "its window is closed"
    assert one.look({}, 5.02, waits=False, works=False) == ()


def test_of_an_engine_that_does_not_tell_steps_are_worked_out() -> None:
    one = pulse(told=False)
    assert one.stepped(STEP, 0, 1.0) == ()
    one.released("a", 100, 1.0)
    (first,) = one.first("a", 100, 1.2, shows=True)
    assert isinstance(first, Stepped)
    assert first.first == ("a",)
    assert (
        sum(step.decoded for step in one.look({"a": 4}, 1.3, waits=False, works=True) if isinstance(step, Stepped)) == 3
    )
    assert one.look({}, 1.4, waits=False, works=True) == ()
    assert one.load(400, 1000) == (EngineSays(400, 1000),)
    assert one.load(400, 1000) == ()
    assert one.load(400, 1000, 64) == (EngineSays(400, 1000, 64),)
    one.ended("a", unanswered=False)


def test_predictions_are_said_to_have_changed_when_they_have() -> None:
    rate = PrefillRate(0.001)
    one = EnginePulse(rate, told=False)
    assert not one.relearnt()
    one.released("a", 1000, 0.0)
    one.first("a", 1000, 3.0, shows=True)
    assert one.relearnt()
    assert not one.relearnt()
    one.released("b", 1000, 5.0)
    one.ended("b", unanswered=True)
    assert not one.relearnt()
