"""The macro-scheduler and one phase gate an instance behind the dispatch seam: the code that serves, not a copy of it.

Gates see their engine's steps at once, as agents on the same host do. What the scheduler knows of them are their
reports, which come late, or not at all (`ReportPath`); so delay and loss act where they do in production.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from serai.contracts.admission import AdmissionAnswer, AdmissionAsk, Decision, GateMode, InstanceReport
from serai.engine_emulator.batching.settings import Phase
from serai.macro_scheduler.group import (
    Answer,
    Asked,
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
    WakeAt,
)
from serai.macro_scheduler.instance_view import StepPredictor
from serai.performance.latency_model import LatencyModel, PrefillChunk, Step
from serai.simulator.fast.dispatch import (
    Arrived,
    Deliver,
    Effect,
    Ended,
    Event,
    Refuse,
    Request,
    Send,
    SetPhase,
    SetTimer,
    StepEnded,
    TimerFired,
)
from serai.simulator.fast.instance import InstanceSpec
from serai.worker_agent import phase_gate as gate
from serai.worker_agent.phase_gate import GateSettings, PhaseGate, Position

NS = 1_000_000_000
_GROUP_TIMER = -1


@dataclass(frozen=True, slots=True)
class ReportPath:
    """What happens to reports on their way from an instance to the scheduler."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of them that never arrive."""
    seed: int = 0
    interval_s: float = 0.05
    """An instance sends no more than one in this time."""

    def __post_init__(self) -> None:
        if self.delay_s < 0 or self.interval_s < 0:
            raise ValueError(f"delay_s and interval_s must be at least 0, not {self.delay_s} and {self.interval_s}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss must be in 0..1, not {self.loss}")


@dataclass(frozen=True, slots=True)
class MacroSettings:
    """One group, and the way of its reports."""

    group: GroupSettings
    path: ReportPath = field(default_factory=ReportPath)
    hold_output: bool = False
    """`author_code`: what a request says in the window in which it came is delivered when the window is over, S_TTFT
    after it began, or when its instance has nothing left to do."""


class _Lossy:
    """Which messages are lost: a linear congruential generator, the same everywhere."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._state = (seed * 2654435761 + 12345) % 2**32

    def __call__(self) -> bool:
        if not self._share:
            return False
        self._state = (self._state * 1664525 + 1013904223) % 2**32
        return self._state < self._share * 2**32


class _OnItsWay(NamedTuple):
    due_s: float
    report: InstanceReport


class MacroScheduled:
    """One group over `specs`, all of one model."""

    watches_steps = True

    def __init__(self, specs: Sequence[InstanceSpec], settings: MacroSettings) -> None:
        self._settings = settings
        group = settings.group
        self.group = Group(group)
        self._gated = self.group.policy.gated
        self._predictors: dict[int, StepPredictor] = {}
        self.gates = [self._gate(number, spec) for number, spec in enumerate(specs)]
        self._requests: dict[str, Request] = {}
        self._tried: dict[str, list[str]] = {}
        """Sessions that refused a request's lease."""
        self._epoch = 0
        self._lost = _Lossy(settings.path.loss, settings.path.seed)
        self._on_their_way: deque[_OnItsWay] = deque()
        self._report_after_s = [0.0] * len(specs)
        self._timer_s: dict[int, float] = {}
        self._held = _HeldOutput(group.slo_ttft_s) if settings.hold_output else None
        self._effects: list[Effect] = []
        self._begun = False
        for number, spec in enumerate(specs):
            self._joins(number, spec, 0.0)

    def _gate(self, number: int, spec: InstanceSpec) -> PhaseGate:
        group = self._settings.group
        return PhaseGate(
            GateSettings(
                session=_session(number),
                slo_ttft_s=group.slo_ttft_s,
                slo_tpot_s=group.slo_tpot_s,
                kv_tokens_total=_whole_blocks(spec),
                sequences_max=spec.settings.sequences_max,
                waiting_max=100_000,
                step_tokens_max=spec.settings.step_tokens_max,
                tells_steps=True,
                slack_from_first_token=group.policy == "paper",
                ordinary_position=Position.MIXED if self._gated else Position.PREFILL,
                ordinary_tokens_max=512 if self._gated else None,
                without=group.without,
            ),
            self._predictor(spec).prefill_s,
        )

    def _predictor(self, spec: InstanceSpec) -> StepPredictor:
        return self._predictors.setdefault(id(spec.model), predictor_of(spec.model))

    def _joins(self, number: int, spec: InstanceSpec, now_s: float) -> None:
        self._to_group(Joined(_session(number), _whole_blocks(spec), self._predictor(spec)), now_s)

    @property
    def pending(self) -> int:
        """Requests that wait at the scheduler."""
        return len(self.group.pending)

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        """Feed gates and group, and gather what they want."""
        now_s = now_ns / NS
        if self._on_their_way:
            self._deliver_reports(now_s)
        match event:
            case StepEnded():
                self._stepped(event, now_s)
            case Arrived(request):
                key = str(request.number)
                self._requests[key] = request
                self._ask(key, now_s)
            case Ended(request, instance, whole):
                if not whole:
                    self._to_gate(instance, gate.Ended(str(request.number)), now_s)
            case TimerFired(key):
                self._fired(key, now_s)
            case _:
                self._came_or_went(event, now_s)
        effects, self._effects = self._effects, []
        if not self._begun:
            # Timers wanted when the instances joined, at time 0, may be overdue when the first event comes.
            self._begun = True
            return [SetTimer(max(e.at_ns, now_ns), e.key) if isinstance(e, SetTimer) else e for e in effects]
        return effects

    # Gates

    def _stepped(self, step: StepEnded, now_s: float) -> None:
        instance = step.instance
        for number in step.ended:
            self._requests.pop(str(number), None)
            self._tried.pop(str(number), None)
        stepped = gate.Stepped(
            (step.ended_ns - step.began_ns) / NS,
            step.decoded,
            step.prompt_tokens,
            step.prefill_backlog_tokens,
            [str(number) for number in step.first] if step.first else (),
            [str(number) for number in step.ended] if step.ended else (),
            [str(number) for number in step.preempted] if step.preempted else (),
            [str(number) for number in step.again] if step.again else (),
            step.kv_tokens_free,
            step.context_tokens,
        )
        self._to_gate(instance, stepped, now_s)
        if now_s >= self._report_after_s[instance]:
            self._report(instance, now_s)
        if self._held is not None:
            self._effects += self._held.due(instance, not (step.running or step.waiting), now_s)

    def _to_gate(self, instance: int, event: gate.GateEvent, now_s: float) -> None:
        for effect in self.gates[instance].handle(event, now_s):
            match effect:
                case gate.Release(key):
                    self._effects.append(self._release(key, instance))
                case gate.Turn(position, prompt_tokens_max):
                    self._effects.append(SetPhase(instance, Phase(position.value), prompt_tokens_max))
                case gate.RefuseLease(key):
                    self._tried.setdefault(key, []).append(_session(instance))
                    self._ask(key, now_s)
                case gate.WakeAt(at_s):
                    self._wake(instance, at_s, now_s)
                case _:
                    assert_never(effect)

    def _report(self, instance: int, now_s: float) -> None:
        path = self._settings.path
        self._report_after_s[instance] = now_s + path.interval_s - 1e-9
        report = self.gates[instance].report(now_s)
        if self._lost():
            return
        if path.delay_s:
            self._on_their_way.append(_OnItsWay(now_s + path.delay_s, report))
        else:
            self._to_group(Reported(report), now_s)

    def _deliver_reports(self, now_s: float) -> None:
        on_their_way = self._on_their_way
        while on_their_way and on_their_way[0].due_s <= now_s:
            due_s, report = on_their_way.popleft()
            self._to_group(Reported(report), due_s)

    # The group

    def _ask(self, key: str, now_s: float) -> None:
        request = self._requests[key]
        group = self._settings.group
        ask = AdmissionAsk(
            request_id=key,
            prompt_tokens=request.prompt_tokens,
            slo_ttft_s=group.slo_ttft_s,
            slo_tpot_s=group.slo_tpot_s,
            waited_s=max(0.0, now_s - request.arrived_ns / NS),
            project=request.client,
            excluded=self._tried.get(key, []),
        )
        self._to_group(Asked(ask, None), now_s)

    def _to_group(self, event: GroupEvent, now_s: float) -> None:
        for effect in self.group.handle(event, now_s):
            self._obey(effect, now_s)

    def _obey(self, effect: GroupEffect, now_s: float) -> None:
        match effect:
            case Answer(answer):
                self._answered(answer, now_s)
            case Own(session, owner):
                self._epoch += 1
                self._to_group(Owned(session, self._epoch, owner), now_s)
            case Take(session, take):
                instance = _instance(session)
                taken = gate.Taken(take.owner, take.epoch, take.mode, take.low_share, take.beat_s)
                self._to_gate(instance, taken, now_s)
                self._to_group(TookOver(self.gates[instance].state(now_s, accepted=True)), now_s)
            case WakeAt(at_s):
                self._wake(_GROUP_TIMER, at_s, now_s)
            case _:
                self._scale(effect, now_s)

    def _answered(self, answer: AdmissionAnswer, now_s: float) -> None:
        key = answer.request_id
        match answer.decision:
            case Decision.ADMIT | Decision.BEST_EFFORT:
                instance = _instance(answer.session)
                prompt_tokens = self._requests[key].prompt_tokens
                self._to_gate(instance, gate.Offered(key, prompt_tokens, answer.lease), now_s)
                if self._held is not None and answer.lease is not None:
                    self._held.came(int(key), instance, answer.lease.window, now_s)
            case Decision.REFUSE | Decision.UNKNOWN:
                del self._requests[key]
                self._tried.pop(key, None)
                self._effects.append(Refuse(int(key)))
            case Decision.WAIT:
                pass

    # For those who let instances come and go (`macro_scaled`)

    def _came_or_went(self, event: Event, now_s: float) -> None:
        """Whatever else the cluster tells."""

    def _release(self, key: str, instance: int) -> Effect:
        return Send(int(key), instance)

    def _scale(self, effect: GroupEffect, now_s: float) -> None:
        """Whatever else the group wants."""

    # Timers

    def _wake(self, key: int, at_s: float, now_s: float) -> None:
        at_s = max(at_s, now_s)
        known_s = self._timer_s.get(key)
        if known_s is not None and now_s < known_s <= at_s:
            return
        self._timer_s[key] = at_s
        self._effects.append(SetTimer(round(at_s * NS) + 1, key))

    def _fired(self, key: int, now_s: float) -> None:
        if self._timer_s.get(key, now_s + 1) > now_s:
            return  # moved to an earlier time, which has been
        del self._timer_s[key]
        if key != _GROUP_TIMER:
            self._to_gate(key, gate.Tick(), now_s)
        elif self._requests:
            self._to_group(Tick(), now_s)


class _HeldOutput:
    """The active instance's output, kept back until its window is over or S_TTFT long, or it has nothing left to do."""

    def __init__(self, slo_ttft_s: float) -> None:
        self._slo_ttft_s = slo_ttft_s
        self._window: tuple[int, int] = (-1, -1)
        self._began_s = 0.0
        self._numbers: list[int] = []
        self._due: list[Effect] = []

    def came(self, number: int, instance: int, window: int, now_s: float) -> None:
        if (instance, window) != self._window:
            self._flush()
            self._window, self._began_s = (instance, window), now_s
        self._numbers.append(number)

    def due(self, instance: int, is_idle: bool, now_s: float) -> list[Effect]:
        """After a step of `instance`, which `is_idle` when it has nothing left to do."""
        if self._numbers and (now_s - self._began_s >= self._slo_ttft_s or (is_idle and instance == self._window[0])):
            self._flush()
        due, self._due = self._due, []
        return due

    def _flush(self) -> None:
        self._due += [Deliver(number) for number in self._numbers]
        self._numbers = []


def predictor_of(model: LatencyModel) -> StepPredictor:
    """Step times by the cost model; decode steps to within eight sequences and 256 tokens of context each."""
    prefills: dict[int, float] = {}
    decodes: dict[tuple[int, int], float] = {}

    def prefill_s(tokens: int) -> float:
        grid = -(-tokens // 16) * 16
        found = prefills.get(grid)
        if found is None:
            found = prefills[grid] = model.step_s(Step([PrefillChunk(grid)]))
        return found

    def decode_s(sequences: int, context_tokens: int) -> float:
        key = (-(-sequences // 8), context_tokens // max(1, sequences) // 256)
        found = decodes.get(key)
        if found is None:
            count = key[0] * 8
            found = decodes[key] = model.decode_step_s(count, (key[1] + 0.5) * 256)
        return found

    return StepPredictor(prefill_s, decode_s)


def _whole_blocks(spec: InstanceSpec) -> int:
    block = spec.settings.block_tokens
    return spec.settings.kv_tokens // block * block


def _session(number: int) -> str:
    return f"instance-{number:05d}"


def _instance(session: str) -> int:
    return int(session[-5:])


__all__ = ["GateMode", "MacroScheduled", "MacroSettings", "ReportPath", "predictor_of"]
