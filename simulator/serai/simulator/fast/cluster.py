"""The event loop: arrivals, ends of steps, timers and KV transfers, in order of virtual time.

Time is an integer number of nanoseconds, and so is every step's duration, so that the last bit of a machine's floating
point changes nothing. Events at the same time run in the order in which they were made; arrivals come last.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from serai.engine_emulator.batching.engine import TooLong
from serai.engine_emulator.batching.sequence import Place
from serai.engine_emulator.batching.sequence import Sequence as EngineSequence
from serai.engine_emulator.batching.steps import RunningStep, StepOutcome
from serai.simulator.fast.dispatch import (
    Arrived,
    BadDispatch,
    Deliver,
    Dispatch,
    Effect,
    Ended,
    Event,
    Gate,
    Joined,
    Left,
    Move,
    Prefilled,
    Refuse,
    Request,
    Retire,
    Send,
    SetPhase,
    SetTimer,
    Start,
    StepEnded,
    TimerFired,
    Transfer,
)
from serai.simulator.fast.instance import Instance, InstanceSpec, Role
from serai.simulator.fast.kv_connectors import ObjectStore
from serai.simulator.fast.kv_handover import KvHandOver
from serai.simulator.fast.life import Life
from serai.simulator.fast.links import Network
from serai.simulator.fast.run import NS, InstanceFigures, Run
from serai.simulator.outcomes import Outcomes
from serai.simulator.workloads.workload import Arrival


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What is between the policy and the engines, and how long a run goes on."""

    network: Network | None = None
    """For KV transfers; None where there are none."""
    copies_between_steps: bool = False
    """A decode instance makes no step while KV comes to it, whatever its connector: one copies, or computes."""
    status_delay_s: float = 0.0
    """How late `StepEnded` reaches the policy."""
    send_delay_s: float = 0.0
    """From a `Send` to the engine's queue."""
    drain_s: float | None = None
    """How long to go on after the last arrival; None: until everything has ended."""
    keep_phases: bool = True

    def __post_init__(self) -> None:
        for name in ("status_delay_s", "send_delay_s", "drain_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, not {value}")


def simulate(
    instances: Sequence[InstanceSpec],
    arrivals: Iterable[Arrival],
    dispatch: Dispatch,
    settings: ClusterSettings | None = None,
    *,
    watch: Callable[[Instance, int], None] | None = None,
) -> Run:
    """Run `arrivals` through `instances` under `dispatch`. `watch` is called after every step, for tests.

    Raises BadDispatch when the policy asks for what cannot be.
    """
    return _Cluster(instances, dispatch, settings or ClusterSettings(), watch).run(arrivals)


class _Cluster:
    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        dispatch: Dispatch,
        settings: ClusterSettings,
        watch: Callable[[Instance, int], None] | None,
    ) -> None:
        self.instances: list[Instance] = []
        self._dispatch = dispatch
        self._settings = settings
        self._watch = watch
        self._status_delay_ns = round(settings.status_delay_s * NS)
        self._send_delay_ns = round(settings.send_delay_s * NS)
        self.lives: list[Life] = []
        self._events: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._made = 0
        self.now_ns = 0
        self._steps = 0
        self.touched: list[Instance] = []
        """Who may be able to begin a step now."""
        for spec in specs:
            self._add(spec, round(spec.joins_at_s * NS))
        network, between_steps = settings.network, settings.copies_between_steps
        self._kv = None if network is None else KvHandOver(self, network, copies_between_steps=between_steps)

    # The loop

    def run(self, arrivals: Iterable[Arrival]) -> Run:
        """Until nothing is left to happen, or the drain is over."""
        events, pop = self._events, heapq.heappop
        last_ns = 0
        for arrival in arrivals:
            at_ns = arrival.at_ns
            if at_ns < last_ns:
                raise ValueError(f"arrivals are not in order: {at_ns} ns after {last_ns} ns")
            last_ns = at_ns
            while events and events[0][0] <= at_ns:
                self.now_ns, _, action, subject = pop(events)
                action(subject)
            self.now_ns = at_ns
            self._arrive(arrival)
        drain_s = self._settings.drain_s
        until_ns = None if drain_s is None else last_ns + round(drain_s * NS)
        while events and (until_ns is None or events[0][0] <= until_ns):
            self.now_ns, _, action, subject = pop(events)
            action(subject)
        return self._result()

    def at(self, at_ns: int, action: Callable[[Any], None], subject: Any) -> None:
        self._made += 1
        heapq.heappush(self._events, (at_ns, self._made, action, subject))

    def _arrive(self, arrival: Arrival) -> None:
        request = Request(
            len(self.lives),
            arrival.at_ns,
            arrival.prompt_tokens,
            arrival.block_keys,
            arrival.model,
            arrival.client,
        )
        self.lives.append(Life(request, arrival))
        self.tell(Arrived(request))
        self.wake()

    # The policy

    def tell(self, event: Event) -> None:
        for effect in self._dispatch.handle(event, self.now_ns):
            self._obey(effect)

    def _obey(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Transfer():
                if self._kv is None:
                    raise BadDispatch(f"{effect}: the cluster has no network for KV (ClusterSettings.network)")
                self._kv.expect(effect)
            case Refuse(number):
                life = self.lives[number]
                if life.instance >= 0 or life.refused:
                    raise BadDispatch(f"{effect}: the request was sent or refused before")
                life.refused = True
            case Gate(number, prefill_open):
                instance = self.instances[number]
                instance.engine.prefill_open = prefill_open
                self.touched.append(instance)
            case SetPhase(number, phase, prompt_tokens_max):
                instance = self.instances[number]
                instance.engine.phase = phase
                instance.engine.prompt_tokens_max = prompt_tokens_max
                self.touched.append(instance)
            case Deliver(number):
                self.lives[number].delivered_ns = self.now_ns
            case Start(like, at_ns):
                if at_ns < self.now_ns:
                    raise BadDispatch(f"{effect}: that was before now, {self.now_ns} ns")
                self._add(self.instances[like].spec, at_ns)
            case Retire(number):
                instance = self.instances[number]
                instance.retired = True
                self._leave_if_done(instance)
            case Move():
                self._move(effect)
            case SetTimer(at_ns, key):
                if at_ns < self.now_ns:
                    raise BadDispatch(f"{effect}: that was before now, {self.now_ns} ns")
                self.at(at_ns, self._fire, key)
            case _:
                assert_never(effect)

    def _fire(self, key: int) -> None:
        self.tell(TimerFired(key))
        self.wake()

    def _report(self, status: StepEnded) -> None:
        self.tell(status)
        self.wake()

    def _send(self, send: Send) -> None:
        life = self.lives[send.number]
        if life.instance >= 0 or life.refused:
            raise BadDispatch(f"{send}: the request was sent or refused before")
        if self.instances[send.instance].spec.role is Role.DECODE:
            raise BadDispatch(f"{send}: that instance only decodes")
        self._give(life, send)

    def _give(self, life: Life, effect: Send | Move) -> None:
        instance = self.instances[effect.instance]
        if not instance.serving or instance.retired:
            raise BadDispatch(f"{effect}: that instance does not serve {'any more' if instance.retired else 'yet'}")
        life.instance = instance.number
        if self._send_delay_ns:
            instance.coming.add(life.request.number)
            self.at(self.now_ns + self._send_delay_ns, self._submit_late, life)
        else:
            self._submit(life)

    def _submit_late(self, life: Life) -> None:
        self.instances[life.instance].coming.discard(life.request.number)
        self._submit(life)
        self.wake()

    def _submit(self, life: Life) -> None:
        arrival, instance = life.arrival, self.instances[life.instance]
        sequence = life.sequence = EngineSequence(
            life.request.number,
            arrival.prompt_tokens + life.said_before,
            arrival.output_tokens - life.said_before,
            block_keys=arrival.block_keys,
            prefill_only=instance.spec.role is Role.PREFILL,
            owner=life,
        )
        try:
            instance.engine.submit(sequence, self.now_ns / NS)
        except TooLong:
            life.refused = True
            self.tell(Ended(life.request, instance.number, False))
            return
        self.touched.append(instance)

    # Instances that come and go

    def _add(self, spec: InstanceSpec, at_ns: int) -> None:
        instance = Instance(len(self.instances), spec, self.now_ns)
        self.instances.append(instance)
        if at_ns:
            self.at(at_ns, self._join, instance)
        else:
            instance.serving = True

    def _join(self, instance: Instance) -> None:
        instance.serving = True
        self.tell(Joined(instance.number))
        self.wake()

    def _leave_if_done(self, instance: Instance) -> None:
        if instance.is_done and instance.left_ns is None:
            instance.left_ns = self.now_ns
            self.tell(Left(instance.number))

    def _move(self, move: Move) -> None:
        """The running step's token, if it has a part in one, is lost with its place in the batch."""
        life = self.lives[move.number]
        if life.instance < 0 or self.instances[life.instance].spec.role is not Role.WHOLE:
            raise BadDispatch(f"{move}: the request is with no instance that it could be moved from")
        if life.finished_ns is not None or life.refused:
            return
        source, sequence = self.instances[life.instance], life.sequence
        if life.request.number in source.coming or sequence is None:
            raise BadDispatch(f"{move}: the request is still on its way to instance {source.number}")
        if life.decoding:
            life.gap(*source.gaps.longest(life.spoke_ns, sequence.joined_at))
            life.decoding = False
        if sequence.decode_began_at_s is not None and life.decode_began_ns is None:
            life.decode_began_ns = round(sequence.decode_began_at_s * NS)
        life.said_before += source.engine.produced(sequence)
        life.preemptions += sequence.preemptions
        source.engine.abort(sequence, self.now_ns / NS)
        self.touched.append(source)
        self._give(life, move)
        self._leave_if_done(source)

    # Steps

    def wake(self) -> None:
        """Begin a step wherever something has changed and none runs."""
        while self.touched:
            instance = self.touched.pop()
            if instance.engine.step is None and instance.held_until_ns <= self.now_ns:
                self._begin(instance)

    def _begin(self, instance: Instance) -> None:
        running = instance.engine.begin_step(self.now_ns / NS)
        if running is not None:
            # At least one nanosecond, so that time goes on whatever a model says.
            duration_ns = max(1, round((running.ends_at_s - running.began_at_s) * NS))
            self.at(self.now_ns + duration_ns, self._end, instance)
        if self._kv is not None and instance.spec.role is Role.DECODE:
            self._kv.admitted(instance)

    def _end(self, instance: Instance) -> None:
        engine, now_ns = instance.engine, self.now_ns
        running = engine.step
        assert running is not None
        outcome = engine.end_step()
        self._steps += 1
        began_ns = round(running.began_at_s * NS)
        if self._settings.keep_phases:
            instance.phases.add(running.kind, began_ns, now_ns)
        if outcome.preempted:
            self._preempted(instance, outcome)
        if running.prefilled:
            self._prefilled(running, outcome)
        if running.kind != "prefill":
            instance.gaps.decoded(now_ns)
        for sequence in outcome.finished:
            self._finished(instance, sequence)
        if self._watch is not None:
            self._watch(instance, now_ns)
        self.touched.append(instance)
        if self._dispatch.watches_steps:
            status = _status(instance, running, outcome, began_ns, now_ns)
            if self._status_delay_ns:
                self.at(now_ns + self._status_delay_ns, self._report, status)
            else:
                self.tell(status)
        if self._kv is not None and instance.spec.role is not Role.WHOLE:
            self._kv.step_ended(instance)
        if instance.retired:
            self._leave_if_done(instance)
        self.wake()

    def _preempted(self, instance: Instance, outcome: StepOutcome) -> None:
        for sequence in outcome.preempted:
            life: Life = sequence.owner
            if life.decoding:
                life.gap(*instance.gaps.longest(life.spoke_ns, sequence.joined_at))
                life.decoding = False

    def _prefilled(self, running: RunningStep, outcome: StepOutcome) -> None:
        """First tokens, and tokens of those who were preempted and computed again."""
        now_ns = self.now_ns
        for sequence in outcome.said_first:
            life: Life = sequence.owner
            if life.first_ns is None:
                life.first_ns = life.spoke_ns = now_ns
            else:
                life.gap(now_ns - life.spoke_ns, now_ns)
            life.decoding = True
        for sequence, _ in running.prefilled:
            if sequence.preemptions and sequence.place in (Place.DECODING, Place.ENDED):
                life = sequence.owner
                if not life.decoding:
                    life.gap(now_ns - life.spoke_ns, now_ns)
                    life.decoding = True

    def _finished(self, instance: Instance, sequence: EngineSequence) -> None:
        life: Life = sequence.owner
        life.preemptions += sequence.preemptions
        if sequence.decode_began_at_s is not None and life.decode_began_ns is None:
            life.decode_began_ns = round(sequence.decode_began_at_s * NS)
        if not sequence.prefilled:
            life.cached_tokens = sequence.cached_tokens
        if sequence.prefill_only and life.arrival.output_tokens > 1:
            life.kept = sequence
            if self._kv is not None and isinstance(instance.spec.connector, ObjectStore):
                instance.to_put.append(sequence)
            else:
                self.tell(Prefilled(life.request, instance.number))
            return
        if sequence.prefill_only:
            instance.engine.release(sequence)
        elif life.spoke_ns != self.now_ns:
            # Its last token came from a decode step, and not just now from computing a prompt again.
            life.gap(*instance.gaps.longest(life.spoke_ns, sequence.joined_at))
        if life.decode_began_ns is None and life.arrival.output_tokens > 1:
            # Preempted before it ever decoded: each token came from computing its prompt, the last one just now.
            life.decode_began_ns = self.now_ns
        life.finished_ns = self.now_ns
        self.tell(Ended(life.request, instance.number, True))

    # The result

    def _result(self) -> Run:
        lives = self.lives
        return Run(
            outcomes=Outcomes(life.outcome() for life in lives),
            phases=[instance.phases for instance in self.instances],
            instances=[_figures(instance, self.now_ns) for instance in self.instances],
            lanes={} if self._kv is None else self._kv.lanes,
            duration_ns=self.now_ns,
            steps=self._steps,
            unfinished=sum(1 for life in lives if life.finished_ns is None and not life.refused),
        )


def _status(instance: Instance, running: RunningStep, outcome: StepOutcome, began_ns: int, ended_ns: int) -> StepEnded:
    engine = instance.engine
    prefilled = running.prefilled
    # By position: one is made at each step. In the order of StepEnded's fields.
    return StepEnded(
        instance.number,
        began_ns,
        ended_ns,
        running.kind,
        running.kind != "prefill",
        tuple([sequence.owner.request.number for sequence in outcome.said_first]) if prefilled else (),
        tuple([sequence.owner.request.number for sequence in outcome.finished]) if outcome.finished else (),
        tuple([sequence.owner.request.number for sequence in outcome.preempted]) if outcome.preempted else (),
        engine.running,
        engine.waiting,
        engine.kv_tokens_free,
        engine.prefill_backlog_tokens,
        engine.prefill_open,
        _again(running) if prefilled else (),
        sum([tokens for _, tokens in prefilled]) if prefilled else 0,
        engine.context_tokens,
    )


def _again(running: RunningStep) -> tuple[int, ...]:
    return tuple(
        [
            sequence.owner.request.number
            for sequence, _ in running.prefilled
            if sequence.preemptions and sequence.place is Place.DECODING and sequence.said > 1
        ]
    )


def _figures(instance: Instance, duration_ns: int) -> InstanceFigures:
    engine, spec = instance.engine, instance.spec
    until_ns = duration_ns if instance.left_ns is None else instance.left_ns
    duration_s = max(0, until_ns - instance.taken_ns) / NS
    # A step that the end of the run has cut counts in full with the engine.
    busy_s = min(engine.busy_s, duration_s)
    idle_j = spec.idle_power_w * (duration_s - busy_s) if spec.energy_j is not None else 0.0
    return InstanceFigures(
        role=spec.role.value,
        gpus=spec.gpus,
        held_s=duration_s,
        busy_share=busy_s / duration_s if duration_s else 0.0,
        prefill_share=min(engine.prefill_busy_s, duration_s) / duration_s if duration_s else 0.0,
        decode_steps=engine.decode_steps,
        preemptions=engine.preemptions_total,
        prefix_queries_tokens=engine.prefix_queries_tokens,
        prefix_hits_tokens=engine.prefix_hits_tokens,
        energy_j=engine.energy_j + idle_j,
        kv_tokens_total=engine.kv_tokens_total,
        kv_tokens_held=engine.kv_tokens_used,
    )
