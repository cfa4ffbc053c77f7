"""Instances that come and go during a run of the fast simulator, and requests that are moved from one to another."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from serai.engine_emulator.batching.settings import BatchMode, BatchSettings
from serai.ingress.routing import LeastLoaded
from serai.performance.latency_model import Step
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.dispatch import (
    Arrived,
    BadDispatch,
    Effect,
    Ended,
    Event,
    Joined,
    Left,
    Move,
    Retire,
    Send,
    SetTimer,
    Start,
    TimerFired,
)
from serai.simulator.fast.instance import InstanceSpec
from serai.simulator.fast.routed import Routed
from serai.simulator.fast.run import NS, Run
from serai.simulator.workloads.workload import Arrival


class Tenth:
    """Every step takes 0.1 s."""

    def step_s(self, step: Step) -> float:
        return 0.1

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        return 0.1

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        return 0.1

    def kv_capacity_tokens(self) -> int:
        return 4096

    def kv_bytes_per_token(self) -> float:
        return 1.0


SPEC = InstanceSpec(Tenth(), BatchSettings(kv_tokens=4096, mode=BatchMode.PREFILL_FIRST))


class Script:
    """Sends each request to the lowest instance that serves, and does what it was told to at each time."""

    watches_steps = False

    def __init__(self, first: int, steps: dict[float, list[Effect]]) -> None:
        self.serving = set(range(first))
        self.events: list[tuple[float, Event]] = []
        self._steps = {round(at_s * NS): effects for at_s, effects in steps.items()}
        self._set = False

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        effects: list[Effect] = []
        if not self._set:
            self._set = True
            effects += [SetTimer(at_ns, at_ns) for at_ns in self._steps]
        match event:
            case Arrived(request):
                effects.append(Send(request.number, min(self.serving)))
            case Joined(instance):
                self.serving.add(instance)
            case TimerFired(key):
                effects += self._steps[key]
                self.serving -= {effect.instance for effect in self._steps[key] if isinstance(effect, Retire)}
        if not isinstance(event, Arrived | TimerFired):
            self.events.append((now_ns / NS, event))
        return effects


def _run(script: Script, *arrivals: Arrival, specs: int = 2, **settings: float) -> Run:
    return simulate([SPEC] * specs, arrivals, script, ClusterSettings(**settings))  # type: ignore[arg-type]


def _request(at_s: float = 0.0, prompt: int = 50, output: int = 10) -> Arrival:
    return Arrival(round(at_s * NS), prompt, output)


def test_an_instance_serves_from_when_it_has_started() -> None:
    script = Script(0, {0.5: [Start(0, 2 * NS)], 3.0: [Send(0, 1)]})
    script.serving = {0}
    spec_later = InstanceSpec(SPEC.model, SPEC.settings, joins_at_s=1.0)
    result = simulate([SPEC, spec_later], [_request(), _request(4.0)], _Only(script, 2))
    assert [(at_s, event) for at_s, event in script.events if isinstance(event, Joined)] == [
        (1.0, Joined(1)),
        (2.0, Joined(2)),
    ]
    assert result.unfinished == 0


class _Only:
    """As `Script`, but everything goes where it is told, by number of the arrival."""

    watches_steps = False

    def __init__(self, script: Script, last: int) -> None:
        self._script, self._last = script, last

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        effects = [effect for effect in self._script.handle(event, now_ns) if not isinstance(effect, Send)]
        match event:
            case Arrived(request):
                effects.append(Send(request.number, 0 if request.number == 0 else self._last))
        return effects


def test_a_move_computes_what_was_said_as_part_of_the_prompt_and_loses_no_token() -> None:
    """Prefill until 0.1 (1 token), steps until 0.5 (5 tokens); moved at 0.55, whose step is lost: prefill there until
    0.65 (6), four more steps."""
    script = Script(1, {0.55: [Move(0, 1)]})
    result = _run(script, _request())
    (outcome,) = result.outcomes
    assert (outcome.first_token_ns, outcome.decode_began_ns) == (NS // 10, NS // 10)
    assert outcome.finished_ns == round(1.05 * NS)
    assert outcome.itl_max_ns == round(0.15 * NS)
    assert outcome.instance == 1
    assert [instance.kv_tokens_held for instance in result.instances] == [0, 0]
    assert script.events[-1][1] == Ended(script.events[-1][1].request, 1, True)  # type: ignore[union-attr]


@pytest.mark.parametrize("at_s", [0.05, 0.101, 0.15, 0.95])
def test_a_move_at_any_moment(at_s: float) -> None:
    (outcome,) = _run(Script(1, {at_s: [Move(0, 1)]}), _request()).outcomes
    assert outcome.finished_ns is not None
    assert outcome.first_token_ns is not None
    said = int(at_s / 0.1 + 1e-9)
    # What is left is said in as many steps, beginning when it was moved.
    assert outcome.finished_ns == round((at_s + (10 - said) * 0.1) * NS)


def test_a_request_that_has_ended_is_not_moved() -> None:
    result = _run(Script(1, {5.0: [Move(0, 1)]}), _request(), _request(6.0))
    assert [outcome.instance for outcome in result.outcomes] == [0, 0]


def test_a_retired_instance_ends_what_it_has_and_is_gone() -> None:
    script = Script(2, {0.35: [Retire(0)]})
    result = _run(script, _request(), _request(0.6))
    assert [outcome.instance for outcome in result.outcomes] == [0, 1]
    assert [(at_s, event) for at_s, event in script.events if isinstance(event, Left)] == [(1.0, Left(0))]
    assert [round(figures.held_s, 3) for figures in result.instances] == [1.0, 1.6]
    assert result.figures()["gpu_s"] == pytest.approx(2.6)
    assert result.instances[0].busy_share == pytest.approx(1.0)


def test_one_that_has_nothing_is_gone_at_once_and_one_that_is_emptied_by_a_move_too() -> None:
    script = Script(3, {0.2: [Retire(2)], 0.35: [Retire(0), Move(0, 1)]})
    _run(script, _request(), specs=3)
    assert [(at_s, event) for at_s, event in script.events if isinstance(event, Left)] == [
        (0.2, Left(2)),
        (0.4, Left(0)),
    ]


def test_what_is_on_its_way_to_a_retired_instance_is_served() -> None:
    script = Script(2, {0.1: [Retire(0)]})
    result = _run(script, _request(), send_delay_s=0.3)
    assert result.unfinished == 0
    assert [event for _, event in script.events if isinstance(event, Left)] == [Left(0)]


def test_a_started_instance_costs_from_its_start() -> None:
    script = Script(1, {1.0: [Start(0, 4 * NS)], 6.0: [Retire(1)]})
    result = _run(script, _request(), _request(8.0), specs=1)
    assert [round(figures.held_s, 3) for figures in result.instances] == [9.0, 5.0]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ({0.1: [Start(0, 3 * NS)], 0.2: [Move(0, 2)]}, "does not serve yet"),
        ({0.1: [Retire(1)], 0.2: [Move(0, 1)]}, "does not serve any more"),
        ({0.2: [Start(0, 0)]}, "before now"),
    ],
)
def test_what_cannot_be_is_refused(steps: dict[float, list[Effect]], says: str) -> None:
    with pytest.raises(BadDispatch, match=says):
        _run(Script(1, steps), _request(), _request(1.0))


def test_what_is_still_on_its_way_cannot_be_moved() -> None:
    with pytest.raises(BadDispatch, match="still on its way to instance 0"):
        _run(Script(1, {0.1: [Move(0, 1)]}), _request(), send_delay_s=0.2)


def test_a_time_to_join_must_be_one() -> None:
    with pytest.raises(ValueError, match="joins_at_s is -1"):
        InstanceSpec(SPEC.model, SPEC.settings, joins_at_s=-1.0)


def test_a_router_uses_those_that_come() -> None:
    specs = [SPEC, InstanceSpec(SPEC.model, SPEC.settings, joins_at_s=1.0)]
    work = [_request(at_s / 10) for at_s in range(40)]
    result = simulate(specs, work, Routed(LeastLoaded, range(1)))
    assert {outcome.instance for outcome in result.outcomes} == {0, 1}
    early = [outcome for outcome in result.outcomes if outcome.arrival_ns < NS]
    assert {outcome.instance for outcome in early} == {0}


class Restless:
    """Starts, retires and moves at random, all the time."""

    watches_steps = True

    def __init__(self, seed: int, first: int) -> None:
        self._random = Random(seed)
        self.serving = set(range(first))
        self.where: dict[int, int] = {}
        self.left: list[int] = []
        self.moves = 0

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        effects: list[Effect] = []
        match event:
            case Arrived(request):
                self.where[request.number] = self._pick()
                effects.append(Send(request.number, self.where[request.number]))
            case Joined(instance):
                self.serving.add(instance)
            case Left(instance):
                assert instance not in self.serving
                assert instance not in self.where.values()
                self.left.append(instance)
            case Ended(request, instance, whole):
                assert whole
                assert self.where.pop(request.number) == instance
        draw = self._random.random()
        if draw < 0.02:
            effects.append(Start(0, now_ns + self._random.randrange(NS)))
        elif draw < 0.04 and len(self.serving) > 1:
            retired = self._pick()
            self.serving.discard(retired)
            effects.append(Retire(retired))
        elif draw < 0.3 and self.where:
            number = self._random.choice(sorted(self.where))
            self.where[number] = self._pick()
            self.moves += 1
            effects.append(Move(number, self.where[number]))
        return effects

    def _pick(self) -> int:
        return self._random.choice(sorted(self.serving))


@pytest.mark.parametrize("mode", [BatchMode.PREFILL_FIRST, BatchMode.MIXED, BatchMode.PHASE_GATED], ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_comes_goes_and_moves_every_request_ends_once_and_all_memory_comes_back(
    seed: int, mode: BatchMode
) -> None:
    random = Random(seed)
    at_s, work = 0.0, []
    for _ in range(300):
        at_s += random.expovariate(8)
        work.append(_request(at_s, random.randint(1, 300), random.randint(1, 30)))
    spec = InstanceSpec(Tenth(), BatchSettings(kv_tokens=1024, mode=mode))
    dispatch = Restless(seed, 3)
    result = simulate([spec] * 3, work, dispatch)
    assert result.unfinished == 0
    assert not dispatch.where
    assert dispatch.left
    assert dispatch.moves > 50
    for outcome, arrival in zip(result.outcomes, work, strict=True):
        assert outcome.first_token_ns is not None
        assert outcome.finished_ns is not None
        assert arrival.at_ns < outcome.first_token_ns <= outcome.finished_ns
        # A step says one token: fewer steps than tokens cannot be.
        assert outcome.finished_ns - arrival.at_ns >= arrival.output_tokens * NS // 10
    assert all(figures.kv_tokens_held == 0 for figures in result.instances)
