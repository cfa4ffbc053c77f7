"""A macro-scheduled group whose scaling is carried out: instances are started when it wishes for them, and drained when
it needs them no more.

A start takes its time, and GPUs from its beginning. A session that drains releases all that it held back, ends what it
can by the deadline, and hands over the rest: those with most left first, one after the other before the time is up
(`worker_agent.drain`), to wherever the group finds a place, where prompt and text so far are computed as one prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serai.contracts.admission import AdmissionAnswer, Decision, GateMode
from serai.macro_scheduler.group import Gone, GroupEffect, Withdrawn
from serai.macro_scheduler.mitosis import Drain, Scale
from serai.simulator.fast import dispatch
from serai.simulator.fast.dispatch import Effect, Event, Move, Retire, Send, SetTimer, Start, StepEnded
from serai.simulator.fast.instance import InstanceSpec
from serai.simulator.fast.macro_scheduled import NS, MacroScheduled, MacroSettings, _instance, _session
from serai.worker_agent import drain as draining
from serai.worker_agent import phase_gate as gate

_DRAIN_TIMER = -2
_LOOK_EVERY_S = 0.1


class Change(NamedTuple):
    """What happened to the group, and when."""

    at_s: float
    what: str
    """`wished`, `joined`, `drains`, `left`."""
    instance: int
    """−1 for a wish."""
    macros: tuple[int, ...]
    """Sizes of the macro-instances after it."""


@dataclass(slots=True)
class _Running:
    """One request in an engine."""

    instance: int
    said: int = 0
    leaving: bool = False
    """It asks for a place elsewhere; until it has one it goes on where it is."""
    target: int = -1
    """Where it has been given one."""


class MacroScaled(MacroScheduled):
    """`specs` serve from the start. `start_s`: from a wish until the instance serves."""

    def __init__(self, specs: Sequence[InstanceSpec], settings: MacroSettings, start_s: float) -> None:
        self.changes: list[Change] = []
        self.moves = 0
        """Requests that were moved from a draining instance."""
        self._start_s = start_s
        self._spec = specs[0]
        self._running: dict[str, _Running] = {}
        self._drains: dict[int, draining.Drain] = {}
        super().__init__(specs, settings)

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        """As `MacroScheduled`; and requests are counted, to know what a draining instance has left."""
        if isinstance(event, StepEnded):
            self._count(event)
        return super().handle(event, now_ns)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the macro-instances, now."""
        return tuple([len(members) for _, members in self.group.macros.standing()])

    # -- what the cluster tells ----------------------------------------------------------------------------------

    def _came_or_went(self, event: Event, now_s: float) -> None:
        match event:
            case dispatch.Joined(instance):
                self._joins(instance, self._spec, now_s)
                self._note(now_s, "joined", instance)
            case dispatch.Left(instance):
                self._drains.pop(instance, None)
                self._to_group(Gone(_session(instance)), now_s)
                self._note(now_s, "left", instance)

    def _count(self, step: StepEnded) -> None:
        if step.decoded:
            for one in self._running.values():
                if one.instance == step.instance and one.said:
                    one.said += 1
        for number in step.first:
            if (first := self._running.get(str(number))) is not None:
                first.said = first.said + 1 if first.said else 1
        for number in step.ended:
            self._ended_where_it_was(str(number), step.ended_ns / NS)

    def _ended_where_it_was(self, key: str, now_s: float) -> None:
        one = self._running.pop(key, None)
        if one is None or not one.leaving:
            return
        if one.target >= 0:
            self._to_gate(one.target, gate.Ended(key), now_s)
        else:
            self._to_group(Withdrawn(key), now_s)

    # -- what the group wants ------------------------------------------------------------------------------------

    def _scale(self, effect: GroupEffect, now_s: float) -> None:
        match effect:
            case Scale(change, _) if change > 0:
                for _ in range(change):
                    self.gates.append(self._gate(len(self.gates), self._spec))
                    self._report_after_s.append(0.0)
                    self._effects.append(Start(0, round((now_s + self._start_s) * NS) + 1))
                    self._note(now_s, "wished", -1)
            case Drain(session, _, deadline_s) if _instance(session) not in self._drains:
                self._drain(_instance(session), deadline_s, now_s)
            case _:
                pass

    def _drain(self, instance: int, deadline_s: float, now_s: float) -> None:
        # It holds nothing back from now on.
        owner, epoch = self.gates[instance].obeyed
        self._to_gate(instance, gate.Taken(owner, epoch, GateMode.ORDINARY, 0.0, 1e9), now_s)
        plan = self._drains[instance] = draining.Drain(engine_stop_s=0.0)
        plan.handle(draining.Told(draining.Ending(draining.Reason.ASKED, deadline_s + draining.LEAVING_S)), now_s)
        self._effects.append(Retire(instance))
        self._note(now_s, "drains", instance)
        self._look_again(now_s)

    def _look_again(self, now_s: float) -> None:
        self._effects.append(SetTimer(round((now_s + _LOOK_EVERY_S) * NS), _DRAIN_TIMER))

    # -- draining ------------------------------------------------------------------------------------------------

    def _fired(self, key: int, now_s: float) -> None:
        if key != _DRAIN_TIMER:
            super()._fired(key, now_s)
            return
        for instance, plan in list(self._drains.items()):
            # An agent does not know either how long an answer will be.
            here = [
                draining.Running(int(number), 0.0, one.said)
                for number, one in self._running.items()
                if one.instance == instance and not one.leaving
            ]
            for effect in plan.handle(draining.Look(here), now_s):
                if isinstance(effect, draining.HandOver):
                    for number in effect.keys:
                        self._hand_over(str(number), instance, now_s)
        if self._drains:
            self._look_again(now_s)

    def _hand_over(self, key: str, instance: int, now_s: float) -> None:
        """It asks for a place anew, with all its text as its prompt."""
        one, request = self._running[key], self._requests[key]
        one.leaving = True
        self.moves += 1
        self._to_gate(instance, gate.Ended(key), now_s)
        prompt_tokens = request.prompt_tokens + one.said
        self._requests[key] = request._replace(prompt_tokens=prompt_tokens, arrived_ns=round(now_s * NS))
        self._tried.setdefault(key, []).append(_session(instance))
        self._ask(key, now_s)

    def _answered(self, answer: AdmissionAnswer, now_s: float) -> None:
        one = self._running.get(answer.request_id)
        if one is not None and one.leaving:
            match answer.decision:
                case Decision.ADMIT | Decision.BEST_EFFORT:
                    one.target = _instance(answer.session)
                case Decision.REFUSE | Decision.UNKNOWN:
                    one.leaving = False  # Nobody has room: it stays to its end.
                    return
        super()._answered(answer, now_s)

    def _release(self, key: str, instance: int) -> Effect:
        """To the engine: for the first time, or from another one."""
        one = self._running.get(key)
        if one is None:
            self._running[key] = _Running(instance)
            return Send(int(key), instance)
        one.instance, one.leaving, one.target = instance, False, -1
        return Move(int(key), instance)

    def _note(self, now_s: float, what: str, instance: int) -> None:
        self.changes.append(Change(now_s, what, instance, self.sizes))


__all__ = ["Change", "MacroScaled", "MacroSettings"]
