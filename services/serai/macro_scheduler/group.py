"""All instances of one model under one macro-scheduler: events in, effects out. Pure; the caller's monotonic clock.

A shell (the service, or the simulator) feeds what came from ingresses and instances and carries out the effects. The
group's state is soft: instances are authoritative, and a new leader rebuilds from their full states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import assert_never

from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAsk,
    Decision,
    InstanceReport,
    InstanceState,
    Lease,
)
from serai.macro_scheduler.admission import (
    SERAI_PARTS,
    AdmissionPolicy,
    AuthorCode,
    Paper,
    Request,
    Scan,
    Serai,
    Verdict,
    kv_tokens,
)
from serai.macro_scheduler.explain import Decided, DecisionRing
from serai.macro_scheduler.granting import Granting
from serai.macro_scheduler.group_events import (
    Answer,
    Asked,
    Drain,
    Gone,
    Granted,
    GroupEffect,
    GroupEvent,
    Joined,
    NotOwned,
    Own,
    Owned,
    Reported,
    Scale,
    Sleep,
    Slept,
    SpentBy,
    Take,
    Tick,
    TookOver,
    Wake,
    WakeAt,
    Withdrawn,
)
from serai.macro_scheduler.instance_view import InstanceView
from serai.macro_scheduler.macro_instances import MacroInstances
from serai.macro_scheduler.membership import MembershipSettings
from serai.macro_scheduler.mitosis import Bounds
from serai.macro_scheduler.pending import Pending, PendingLine
from serai.macro_scheduler.scaling import ScalingSettings

__all__ = [
    "Answer",
    "Asked",
    "Drain",
    "Gone",
    "Granted",
    "Group",
    "GroupEffect",
    "GroupEvent",
    "GroupSettings",
    "Joined",
    "NotOwned",
    "Own",
    "Owned",
    "Reported",
    "Scale",
    "Sleep",
    "Slept",
    "SpentBy",
    "Take",
    "Tick",
    "TookOver",
    "Wake",
    "WakeAt",
    "Withdrawn",
]

_RETRIES = 16
"""Waiting asks that are tried again at each report."""
_REFUSED_MAX = 1000


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How one model's group decides. Raises ValueError for what cannot be."""

    policy: str = "serai"
    """`serai`, `paper` or `author_code`."""
    slo_ttft_s: float = 5.0
    """For asks that bring no target."""
    slo_tpot_s: float = 0.1
    attainment: float = 0.99
    """The wanted share of requests that meet both."""
    beat_s: float = 1.0
    """How often an instance hears `Take`."""
    pending_max: int = 2000
    """Asks that wait at once; more are refused."""
    lease_s: float = 3.0
    """A lease that no report has acknowledged by then is given back."""
    owner: str = "macro"
    """Names this leader and its term: its macro-instances are called `<owner>/1`, `<owner>/2` and so on."""
    bounds: Bounds = Bounds()
    """How many instances a macro-instance may have."""
    scaling: ScalingSettings | None = None
    """None: instances come and go as others decide."""
    drains: bool = True
    """With scaling: whether an instance that is not needed is drained from here; else that is only wished for."""
    scan: str = ""
    """`paper` only: `random` instead of the cyclic scan."""
    interval_share: float | None = None
    """`paper` only: windows of this share of the TTFT target instead of adaptive ones."""
    without: str = ""
    """`serai` only: one of `SERAI_PARTS`, switched off."""
    grants: bool = False
    """`serai` only: whether ingresses are given places in advance while all is at ease."""

    def __post_init__(self) -> None:
        for name in ("slo_ttft_s", "slo_tpot_s", "beat_s", "lease_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, not {value}")
        if not 0 < self.attainment < 1:
            raise ValueError(f"attainment must be between 0 and 1, not {self.attainment}")
        if self.pending_max < 0:
            raise ValueError(f"pending_max must be at least 0, not {self.pending_max}")
        if self.without and self.without not in SERAI_PARTS:
            raise ValueError(f"without is {self.without!r}: use one of {', '.join(SERAI_PARTS)}")
        policy_of(self)


def policy_of(settings: GroupSettings) -> AdmissionPolicy:
    """The policy that `settings` names. Raises ValueError with the names there are."""
    match settings.policy:
        case "serai":
            return Serai(settings.without)
        case "author_code":
            return AuthorCode()
        case "paper":
            return Paper(scan=Scan(settings.scan or Scan.CYCLIC), interval_share=settings.interval_share)
    raise ValueError(f"no admission policy {settings.policy!r}: use serai, paper or author_code")


class Group:
    """One model's group."""

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self.policy = policy_of(settings)
        self.views: dict[str, InstanceView] = {}
        self.macros = MacroInstances(
            MembershipSettings(settings.bounds, settings.beat_s, settings.scaling, settings.drains),
            settings.owner,
            self.policy,
            self.views,
            slo_ttft_s=settings.slo_ttft_s,
            slo_tpot_s=settings.slo_tpot_s,
            low_share=round(1.0 - settings.attainment, 9),
        )
        self.pending = PendingLine(settings.slo_ttft_s, by_arrival=not self.policy.gated)
        self.ring = DecisionRing()
        self._granting = None
        if settings.grants and self.policy.gated:
            self._granting = Granting(self.macros, settings.slo_ttft_s, settings.slo_tpot_s)
        self.refused_reports = 0
        """Reports that were not believed."""
        self.last_refusal = ""
        self._leased: dict[str, tuple[str, int]] = {}
        """Session and sequence of leases that are not acknowledged, by request."""
        self._declined: dict[str, set[str]] = {}
        """Who refused a request's lease."""
        self._now_s = -inf

    def handle(self, event: GroupEvent, now_s: float) -> Sequence[GroupEffect]:
        """What is to be done now. A clock that goes back is taken to stand still."""
        now_s = self._now_s = max(now_s, self._now_s)
        effects = self._handled(event, now_s)
        # With every event, since a shell may not tick while it is idle.
        return self._then_wake([*effects, *self._due(now_s)]) if self.macros.is_due(now_s) else effects

    def _handled(self, event: GroupEvent, now_s: float) -> Sequence[GroupEffect]:
        match event:
            case Asked(ask, to):
                return self._asked(ask, to, now_s)
            case Reported(report):
                return self._reported(report, now_s)
            case SpentBy(ask, session, to):
                return self._spent(ask, session, to, now_s)
            case Withdrawn(request_id):
                self.pending.remove(request_id)
                self._give_back(request_id)
            case Joined(session, kv_tokens_total, predict):
                if session not in self.views:
                    self.views[session] = InstanceView(session, kv_tokens_total, predict, self.settings.without)
                return self._then_wake(self.macros.joined(session, now_s))
            case Gone(session):
                self.macros.gone(session, now_s)
                self.views.pop(session, None)
            case Slept(session):
                self.macros.slept(session, now_s)
                self.views.pop(session, None)
            case Owned(session, epoch, owner):
                return self._then_wake(self.macros.owned(session, owner, epoch, now_s))
            case NotOwned(session, epoch):
                self.macros.not_owned(session, epoch, now_s)
                return self._then_wake([])
            case TookOver(state):
                self._took_over(state, now_s)
                return self._retry(now_s)
            case Tick():
                return self._tick(now_s)
            case _:
                assert_never(event)
        return []

    # Members

    def _took_over(self, state: InstanceState, now_s: float) -> None:
        report = state.report
        self.macros.took(report.session, report.epoch, state.accepted, now_s)
        view = self.views.get(report.session)
        if view is None:
            self._distrust(f"a state came from {report.session}, which is not a member")
        elif view.epoch:
            self._believe(view, report, now_s)

    def _tick(self, now_s: float) -> Sequence[GroupEffect]:
        for view in self.views.values():
            view.expire(now_s - self.settings.lease_s)
        return self._then_wake(self._retry(now_s))

    def _due(self, now_s: float) -> list[GroupEffect]:
        """Beats and the like."""
        return self.macros.due(lambda: self.pending.ages_s(now_s), now_s)

    def _then_wake(self, effects: Sequence[GroupEffect]) -> list[GroupEffect]:
        at_s = self.macros.next_due_s()
        if self.pending:
            at_s = min(self._now_s + 0.05, inf if at_s is None else at_s)
        return [*effects, WakeAt(at_s)] if at_s is not None else list(effects)

    # Reports

    def _reported(self, report: InstanceReport, now_s: float) -> Sequence[GroupEffect]:
        view = self.views.get(report.session)
        if view is None:
            self._distrust(f"a report came from {report.session}, which is not a member")
            return []
        self.macros.reported(report, now_s)
        if self.macros.serves(report.session):
            self._believe(view, report, now_s)
        return self._retry(now_s) if self.pending else []

    def _believe(self, view: InstanceView, report: InstanceReport, now_s: float) -> None:
        why = view.take_report(report, now_s)
        if why:
            self._distrust(f"a report of {view.session} was not believed: {why}")
        view.expire(now_s - self.settings.lease_s)

    def _distrust(self, why: str) -> None:
        self.refused_reports += 1
        self.last_refusal = why

    # Asks

    def _asked(self, ask: AdmissionAsk, to: object, now_s: float) -> Sequence[GroupEffect]:
        if ask.request_id in self.pending:
            return [Answer(AdmissionAnswer(ask.request_id, Decision.WAIT), to, final=False)]
        self._note_decline(ask)
        self._give_back(ask.request_id)
        why = self._wrong(ask)
        if why:
            return [self._refuse(ask, to, why, 0.0, now_s)]
        settings = self.settings
        ttft_s = settings.slo_ttft_s if ask.slo_ttft_s is None else ask.slo_ttft_s
        tpot_s = settings.slo_tpot_s if ask.slo_tpot_s is None else ask.slo_tpot_s
        request = Request(ask, now_s - ask.waited_s, ttft_s, tpot_s)
        if self._granting is not None:
            self._granting.note(ask, now_s)
        answer, verdicts = self._placed(request, to, now_s)
        if answer is None:
            return self._kept(request, to, verdicts, now_s)
        return [answer, *self._in_advance(to, now_s)]

    def _note_decline(self, ask: AdmissionAsk) -> None:
        """It had a lease on a session that it excludes now: that instance could not keep the promise. Late, it can."""
        session = self._leased.get(ask.request_id, ("", 0))[0]
        if session in ask.excluded:
            self._declined.setdefault(ask.request_id, set()).add(session)
            if len(self._declined) > _REFUSED_MAX:
                del self._declined[next(iter(self._declined))]

    def _wrong(self, ask: AdmissionAsk) -> str:
        """Why nobody can ever serve it; empty: somebody may."""
        if ask.prompt_tokens < 1:
            return f"prompt_tokens is {ask.prompt_tokens}: a request has at least 1"
        for name, value in (("slo_ttft_s", ask.slo_ttft_s), ("slo_tpot_s", ask.slo_tpot_s)):
            if value is not None and not (isfinite(value) and value > 0):
                return f"{name} is {value}: a target is above 0; leave it out for none of your own"
        if not (isfinite(ask.waited_s) and ask.waited_s >= 0):
            return f"waited_s is {ask.waited_s}: it cannot be below 0"
        if not self.views:
            return "no instance serves this model"
        largest = max([view.kv_tokens_total or inf for view in self.views.values()])
        if ask.prompt_tokens >= largest:
            return f"a prompt of {ask.prompt_tokens} tokens does not fit into any KV cache; the largest has {largest}"
        return ""

    def _placed(self, request: Request, to: object, now_s: float) -> tuple[Answer | None, Sequence[Verdict]]:
        """Give it to whom the policy chooses, if it chooses anyone."""
        view, verdicts = self.macros.choose(request, now_s)
        if view is None:
            return None, verdicts
        anew = len(verdicts) > 1 and verdicts[-1].session == verdicts[0].session
        return self._leased_to(view, request, to, Decision.ADMIT, verdicts, now_s, anew=anew), verdicts

    def _leased_to(
        self,
        view: InstanceView,
        request: Request,
        to: object,
        decision: Decision,
        verdicts: Sequence[Verdict],
        now_s: float,
        *,
        why: str = "",
        anew: bool = False,
    ) -> Answer:
        ask = request.ask
        prefill_s = view.predict.prefill_s(ask.prompt_tokens)
        self.macros.leased(view, prefill_s, now_s, anew=anew)
        left_s = request.deadline_s - now_s
        lease = Lease(
            epoch=view.epoch,
            sequence=view.sequence + 1,
            prefill_s=prefill_s,
            kv_tokens=kv_tokens(ask),
            start_within_s=left_s - prefill_s - view.decode_s() if decision is Decision.ADMIT else -1.0,
            slo_ttft_s=max(left_s, 1e-3),
            slo_tpot_s=request.slo_tpot_s,
            best_effort=decision is Decision.BEST_EFFORT,
            prompt_tokens=ask.prompt_tokens,
            waited_s=max(0.0, now_s - request.arrived_s),
            window=0 if self.policy.gated else view.window,
        )
        view.lease(ask.request_id, lease, now_s)
        self._leased[ask.request_id] = (view.session, lease.sequence)
        if len(self._leased) > _REFUSED_MAX * 10:
            self._forget_old_leases()
        self.pending.serve(ask.project, ask.prompt_tokens)
        self._note(request, decision, view.session, verdicts, now_s, why)
        return Answer(AdmissionAnswer(ask.request_id, decision, view.session, lease, reason=why), to)

    def _spent(self, ask: AdmissionAsk, session: str, to: object, now_s: float) -> Sequence[GroupEffect]:
        """A place that was given in advance was used."""
        if self._granting is None:
            return ()
        self._granting.spent(ask, self.views.get(session), to, now_s)
        self.pending.serve(ask.project, ask.prompt_tokens)
        ttft_s = self.settings.slo_ttft_s if ask.slo_ttft_s is None else ask.slo_ttft_s
        request = Request(ask, now_s - ask.waited_s, ttft_s, 0.0)
        self._note(request, Decision.ADMIT, session, (), now_s, "by a place granted in advance")
        return self._in_advance(to, now_s)

    def _in_advance(self, to: object, now_s: float) -> Sequence[Granted]:
        if self._granting is None or self.pending:
            return ()
        grants = self._granting.places(to, now_s)
        return (Granted(grants, to),) if grants else ()

    def _forget_old_leases(self) -> None:
        for request_id, (session, sequence) in list(self._leased.items()):
            view = self.views.get(session)
            if view is None or sequence not in view.leases:
                del self._leased[request_id]

    def _kept(self, request: Request, to: object, verdicts: Sequence[Verdict], now_s: float) -> Sequence[GroupEffect]:
        """Nobody may take it now: it waits, if waiting can help."""
        if self.policy.gated and self._hopeless(request, now_s):
            return [self._late(request, to, verdicts, now_s)]
        if len(self.pending) >= self.settings.pending_max:
            why = f"{len(self.pending)} requests wait already"
            return [self._refuse(request.ask, to, why, self._retry_after_s(), now_s)]
        self.pending.add(request, to)
        self._note(request, Decision.WAIT, "", verdicts, now_s)
        answer = Answer(AdmissionAnswer(request.ask.request_id, Decision.WAIT), to, final=False)
        return self._then_wake([answer])

    def _hopeless(self, request: Request, now_s: float) -> bool:
        """Whether its target is missed even if it is alone from now on."""
        open_to = [view for view in self.views.values() if view.session not in request.ask.excluded]
        quickest_s = min([view.predict.prefill_s(request.ask.prompt_tokens) for view in open_to], default=inf)
        return now_s + quickest_s > request.deadline_s

    def _late(self, request: Request, to: object, verdicts: Sequence[Verdict], now_s: float) -> Answer:
        """Its target cannot be met: best effort, or no, as its caller chose."""
        left_s = request.deadline_s - now_s
        why = f"its first decode step cannot come within the {left_s:.2f} s that are left"
        if not request.ask.best_effort:
            return self._refuse(request.ask, to, why, self._retry_after_s(), now_s)
        # Who refused the promise takes it without one.
        closed = set(request.ask.excluded) - self._declined.pop(request.ask.request_id, set())
        open_to = [view for view in self.views.values() if view.epoch and view.session not in closed]
        if not open_to:
            why = "no instance that serves this model may take it"
            return self._refuse(request.ask, to, why, self._retry_after_s(), now_s)
        view = min(open_to, key=lambda one: (one.waiting_prefill_s(), one.load))
        return self._leased_to(view, request, to, Decision.BEST_EFFORT, verdicts, now_s, why=why)

    def _refuse(self, ask: AdmissionAsk, to: object, why: str, retry_after_s: float, now_s: float) -> Answer:
        self._note(Request(ask, now_s - ask.waited_s, 0.0, 0.0), Decision.REFUSE, "", (), now_s, why)
        return Answer(AdmissionAnswer(ask.request_id, Decision.REFUSE, retry_after_s=retry_after_s, reason=why), to)

    def _retry_after_s(self) -> float:
        """About when what waits now will have been prefilled."""
        waiting = [view.waiting_prefill_s() for view in self.views.values()]
        return round(max(1.0, min(waiting, default=1.0)), 1)

    def _retry(self, now_s: float) -> list[GroupEffect]:
        """Something has changed: who waits is tried again, in turn."""
        effects: list[GroupEffect] = []
        if not self.pending:
            return effects
        if self.policy.gated:
            effects += self._given_up(now_s)
        for entry in list(self.pending.in_turn(_RETRIES)):
            answer, _ = self._placed(entry.request, entry.to, now_s)
            if answer is not None:
                self.pending.remove(entry.request.ask.request_id)
                effects.append(answer)
        return effects

    def _given_up(self, now_s: float) -> list[GroupEffect]:
        """Those for whom it is too late."""
        late: list[Pending] = []
        for entry in list(self.pending.in_turn(_RETRIES)):
            if self._hopeless(entry.request, now_s):
                self.pending.remove(entry.request.ask.request_id)
                late.append(entry)
        return [self._late(entry.request, entry.to, (), now_s) for entry in late]

    def _give_back(self, request_id: str) -> None:
        """Its lease, if it has one, is not used: it was refused, or nobody wants it any more."""
        session, sequence = self._leased.pop(request_id, ("", 0))
        view = self.views.get(session)
        if view is not None:
            view.give_back(sequence)

    # What was decided

    def _note(
        self,
        request: Request,
        decision: Decision,
        session: str,
        verdicts: Sequence[Verdict],
        now_s: float,
        why: str = "",
    ) -> None:
        ask = request.ask
        left_s = request.deadline_s - now_s
        self.ring.note(Decided(now_s, ask.request_id, decision, session, ask.prompt_tokens, left_s, verdicts, why))

    def explain(self, request_id: str) -> list[str]:
        """What was decided on a request, and why, as lines for people; with an empty id, how the group stands."""
        if request_id:
            return [line for one in self.ring.of(request_id) for line in one.lines(self._now_s)]
        lines = [f"policy {self.policy.name}, {len(self.views)} instances, {len(self.pending)} requests wait"]
        for name, sessions in self.macros.standing():
            lines.append(f"macro-instance {name}, {len(sessions)} of at most {self.settings.bounds.upper}")
            lines += [self._standing(self.views[session]) for session in sessions]
        lines += self.macros.notes(self._now_s)
        if self.last_refusal:
            lines.append(f"{self.refused_reports} reports were not believed; the last: {self.last_refusal}")
        return lines

    def _standing(self, view: InstanceView) -> str:
        report = view.report
        head = f"  {view.session}: epoch {view.epoch}, {view.mode.value}"
        if report is None:
            return f"{head}, no report yet"
        age_s = self._now_s - view.reported_at_s
        return (
            f"{head}, {report.decoding.count} decode with {report.decoding.low_s:.3f} s of slack, "
            f"{report.waiting} wait for {report.waiting_prefill_s:.3f} s of prefill, "
            f"{len(view.leases)} leases on their way, {len(view.grants)} places given in advance, "
            f"reported {age_s:.3f} s ago"
        )
