"""All macro-instances of a group: who is in which, whose turn it is in each, and which of them a request is offered to
first. Pure.

`membership` decides who belongs where and since when it obeys; here that is turned into circles, views and the group's
effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import assert_never

from serai.contracts.admission import GateMode, InstanceReport, TakeInstance
from serai.macro_scheduler.admission import AdmissionPolicy, Request, Verdict
from serai.macro_scheduler.group_events import Drain, GroupEffect, Own, Scale, Sleep, Take, Wake
from serai.macro_scheduler.group_load import LoadMeter
from serai.macro_scheduler.instance_view import InstanceView
from serai.macro_scheduler.macro_instance import MacroInstance
from serai.macro_scheduler.membership import Membership, MembershipEffect, MembershipSettings
from serai.macro_scheduler.overall import Capacity, free_s, order
from serai.macro_scheduler.ownership import Claim, Say


class MacroInstances:
    """One group's. `views` are the group's own; what they are owned with is kept up here."""

    def __init__(
        self,
        settings: MembershipSettings,
        leader: str,
        policy: AdmissionPolicy,
        views: Mapping[str, InstanceView],
        *,
        slo_ttft_s: float,
        slo_tpot_s: float,
        low_share: float,
    ) -> None:
        self.members = Membership(settings, leader)
        self.circles: dict[int, MacroInstance] = {}
        """By serial, in the order in which they were made."""
        self._policy = policy
        self._views = views
        self._slo_ttft_s, self._slo_tpot_s = slo_ttft_s, slo_tpot_s
        self._low_share = low_share
        window_s = settings.scaling.window_s if settings.scaling is not None else 0.0
        self._meter = LoadMeter(window_s) if settings.scaling is not None else None
        self._next_s: float | None = None

    # -- what instances do ---------------------------------------------------------------------------------------

    def joined(self, session: str, now_s: float) -> list[GroupEffect]:
        """Its view is there."""
        return self._led(self.members.joined(session, now_s))

    def gone(self, session: str, now_s: float) -> None:
        """It has left, or drains."""
        self.members.gone(session, now_s)
        if self._meter is not None:
            self._meter.gone(session)
        self._led([])

    def slept(self, session: str, now_s: float) -> None:
        """It has drained, and its engine sleeps."""
        self.gone(session, now_s)
        self.members.slept(session, now_s)

    def owned(self, session: str, owner: str, epoch: int, now_s: float) -> list[GroupEffect]:
        """A claim went through."""
        return self._led(self.members.owned(session, owner, epoch, now_s))

    def not_owned(self, session: str, epoch: int, now_s: float) -> None:
        """A claim was lost."""
        self.members.not_owned(session, epoch, now_s)
        self._next_s = None

    def took(self, session: str, epoch: int, accepted: bool, now_s: float) -> None:
        """The answer to a `Take`."""
        self.members.answered(session, epoch, accepted, now_s)
        self._own(session)

    def reported(self, report: InstanceReport, now_s: float) -> None:
        """Before the report is believed: it may tell that the instance is not ours any more."""
        self.members.reported(report.session, report.epoch, now_s)
        if report.epoch != self.members.epoch_of(report.session):
            self._next_s = None  # It may have to be told again, now.
        self._own(report.session)
        if self._meter is not None:
            self._meter.reported(report, now_s)

    def serves(self, session: str) -> bool:
        """Whether it is in a macro-instance, and not draining."""
        return self.members.macro_of(session) is not None

    # -- requests ------------------------------------------------------------------------------------------------

    def choose(self, request: Request, now_s: float) -> tuple[InstanceView | None, list[Verdict]]:
        """Who takes `request` now, None: nobody; and what was asked. Changes nothing."""
        asked: list[Verdict] = []
        for circle in self._in_order(request, now_s):
            view, verdicts = circle.choose(request, self._views, self._policy, request.ask.excluded, now_s)
            asked += verdicts
            if view is not None:
                return view, verdicts
        return None, asked

    def leased(self, view: InstanceView, prefill_s: float, now_s: float, *, anew: bool) -> None:
        """`view` was chosen."""
        macro = self.members.macro_of(view.session)
        if macro is not None:
            self.circles[macro.serial].activate(view, prefill_s, now_s, anew=anew)
        if self._meter is not None:
            self._meter.leased(prefill_s, now_s)

    def _in_order(self, request: Request, now_s: float) -> Iterable[MacroInstance]:
        if len(self.circles) < 2:
            return self.circles.values()
        capacities = [self._capacity(serial, circle, now_s) for serial, circle in self.circles.items()]
        ask = request.ask
        return [self.circles[serial] for serial in order(capacities, ask.request_id, ask.affinity).serials]

    def _capacity(self, serial: int, circle: MacroInstance, now_s: float) -> Capacity:
        views = [self._views[session] for session in circle.members]
        owned = [view for view in views if view.epoch]
        return Capacity(serial, free_s([self._slack_s(view, now_s) for view in owned], self._slo_ttft_s), len(owned))

    def _slack_s(self, view: InstanceView, now_s: float) -> float:
        """What it could spend on prefills now."""
        report = view.report
        slack_s = self._slo_ttft_s
        if report is not None and report.decoding.count:
            slack_s = min(slack_s, report.decoding.low_s - (now_s - view.reported_at_s))
        return slack_s - view.waiting_prefill_s()

    # -- time ----------------------------------------------------------------------------------------------------

    def is_due(self, now_s: float) -> bool:
        """Whether `due` has something to do."""
        at_s = self._next_s if self._next_s is not None else self.next_due_s()
        return at_s is not None and now_s >= at_s

    def due(self, waited_s: Callable[[], Sequence[float]], now_s: float) -> list[GroupEffect]:
        """Beats, claims, and what the load asks for. `waited_s`: of all requests that have no place."""
        effects = self._led(self.members.due(now_s))
        if self._meter is not None and now_s >= self._evaluation_due_s(self._meter):
            effects += self._led(self._evaluated(self._meter, waited_s(), now_s))
        return effects

    def next_due_s(self) -> float | None:
        """When `due` has something to do."""
        times = [self.members.next_due_s()]
        if self._meter is not None:
            times.append(self._evaluation_due_s(self._meter))
        self._next_s = min([at_s for at_s in times if at_s is not None and at_s < inf], default=None)
        return self._next_s

    def _evaluation_due_s(self, meter: LoadMeter) -> float:
        """Not before a whole window has been seen."""
        due_s = self.members.evaluation_due_s
        return max(due_s, meter.ready_at_s) if due_s is not None and self.circles else inf

    def _evaluated(self, meter: LoadMeter, waited_s: Sequence[float], now_s: float) -> list[MembershipEffect]:
        members = self.members
        members.forget_old_wishes(now_s)
        serving = [session for circle in self.circles.values() for session in circle.members]
        load = meter.load(
            serving, self._slo_ttft_s, self._slo_tpot_s, now_s, starting=members.starting, waited_s=waited_s
        )
        # Requests are a fair guess of how long an instance takes to drain.
        remaining = {session: float(self._views[session].load) for session in serving}
        return members.evaluate(load, remaining, now_s)

    # -- inside --------------------------------------------------------------------------------------------------

    def _led(self, effects: Sequence[MembershipEffect]) -> list[GroupEffect]:
        """After each change of membership: circles and views follow, effects become the group's."""
        self._follow()
        self._next_s = None
        return [made for effect in effects if (made := self._made(effect)) is not None]

    def _made(self, effect: MembershipEffect) -> GroupEffect | None:
        match effect:
            case Claim(session, owner, _):
                return Own(session, owner)
            case Say(session, owner, epoch):
                return self._take(session, owner, epoch)
            case Drain() | Sleep() | Wake() | Scale():
                return effect
            case _:
                assert_never(effect)

    def _take(self, session: str, owner: str, epoch: int) -> Take | None:
        view = self._views.get(session)
        if view is None:
            return None
        mode = view.choose_mode(self._slo_tpot_s) if self._policy.gated else GateMode.ORDINARY
        beat_s = self.members.settings.beat_s
        return Take(session, TakeInstance(owner, epoch, mode, self._low_share, beat_s))

    def _follow(self) -> None:
        macros = self.members.macros
        for serial in [serial for serial in self.circles if serial not in {macro.serial for macro in macros}]:
            del self.circles[serial]
        for macro in macros:
            circle = self.circles.setdefault(macro.serial, MacroInstance(self.members.owner_name(macro.serial)))
            for session in [one for one in circle.members if one not in macro.members]:
                circle.leave(session)
            for session in macro.members:
                circle.join(session)
        for session in self._views:
            self._own(session)

    def _own(self, session: str) -> None:
        view = self._views.get(session)
        if view is None:
            return
        epoch = self.members.epoch_of(session) or 0
        if epoch != view.epoch:
            view.owned(epoch)

    # -- words ---------------------------------------------------------------------------------------------------

    def standing(self) -> list[tuple[str, list[str]]]:
        """Each macro-instance's name, and its members in the order of its circle."""
        return [(circle.name, list(circle.members)) for circle in self.circles.values()]

    def notes(self, now_s: float) -> list[str]:
        """The last changes."""
        return [f"{now_s - note.at_s:.1f} s ago: {note.why}" for note in self.members.notes[-10:]]
