"""All instances of one model under one macro-scheduler: events in, effects out. Pure; the caller's monotonic clock.

A shell (the service, or the simulator) feeds what came from ingresses and instances and carries out the effects. The
group's state is soft: instances are authoritative, and a new leader rebuilds from their full states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAsk,
    Decision,
    InstanceReport,
    InstanceState,
    Lease,
    TakeInstance,
)
from serai.macro_scheduler.instance_view import InstanceView, PendingLease, StepPredictor


class Asked(NamedTuple):
    """One ask. Asked again with the same id (a lease was refused, a session failed) it is decided anew, without the
    sessions it excludes."""

    ask: AdmissionAsk
    to: object
    """Whom to answer; only handed back."""


class Withdrawn(NamedTuple):
    """Its client or its ingress has left: what waits is forgotten, a lease not applied yet is given back."""

    request_id: str


class Reported(NamedTuple):
    """A report, as late as it may be."""

    report: InstanceReport


class Joined(NamedTuple):
    """An instance serves this model now. The group asks the shell to `Own` it."""

    session: str
    kv_tokens_total: int
    predict: StepPredictor


class Gone(NamedTuple):
    """It does not any more, or will soon not (draining): nothing new goes there."""

    session: str


class Owned(NamedTuple):
    """An `Own` went through: the instance's epoch is this now."""

    session: str
    epoch: int


class NotOwned(NamedTuple):
    """An `Own` lost: somebody else has it with this epoch, or KV is away (`epoch` 0: to be tried again)."""

    session: str
    epoch: int


class TookOver(NamedTuple):
    """An instance's answer to `TakeInstance`: everything it knows."""

    state: InstanceState


class Tick(NamedTuple):
    """A wanted time has come."""


GroupEvent = Asked | Withdrawn | Reported | Joined | Gone | Owned | NotOwned | TookOver | Tick


class Answer(NamedTuple):
    """Send it. `final` is False after WAIT: another follows."""

    answer: AdmissionAnswer
    to: object
    final: bool = True


class Own(NamedTuple):
    """Compare-and-set the instance's owner to `owner` with a higher epoch than any so far; tell `Owned` or
    `NotOwned`."""

    session: str
    owner: str


class Take(NamedTuple):
    """Send it to the instance; also as the heartbeat. Its answer comes back as `TookOver`."""

    session: str
    take: TakeInstance


class WakeAt(NamedTuple):
    """Send `Tick` then. The latest wish counts."""

    at_s: float


class Scale(NamedTuple):
    """A wish to whoever starts and stops instances."""

    change: int
    """+1 or −1."""
    why: str


class Sleep(NamedTuple):
    """The instance is drained and not needed: let its engine sleep where it can."""

    session: str


GroupEffect = Answer | Own | Take | WakeAt | Scale | Sleep


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How one model's group decides."""

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
    owner: str = "macro-0"
    """Name of the first macro-instance."""


class Group:
    """One model's group."""

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self.views: dict[str, InstanceView] = {}

    def handle(self, event: GroupEvent, now_s: float) -> Sequence[GroupEffect]:
        """What is to be done now. Called in order of time."""
        match event:
            case Asked(ask, to):
                return [Answer(self._answer(ask, now_s), to)]
            case Reported(report):
                view = self.views.get(report.session)
                if view is not None:
                    view.report, view.reported_at_s = report, now_s
            case Joined(session, kv_tokens_total, predict):
                self.views[session] = InstanceView(session, kv_tokens_total, predict)
                return [Own(session, self.settings.owner)]
            case Gone(session):
                self.views.pop(session, None)
            case Owned(session, epoch):
                if session in self.views:
                    self.views[session].epoch = epoch
            case Withdrawn() | NotOwned() | TookOver() | Tick():
                pass
            case _:
                assert_never(event)
        return []

    def explain(self, request_id: str) -> list[str]:
        """What was decided on a request, and why, as lines for people; with an empty id, how the group stands."""
        return []

    def _answer(self, ask: AdmissionAsk, now_s: float) -> AdmissionAnswer:
        open_to = [view for view in self.views.values() if view.session not in ask.excluded]
        if not open_to:
            return AdmissionAnswer(ask.request_id, Decision.REFUSE, retry_after_s=1.0, reason="no instance serves it")
        view = min(open_to, key=lambda one: one.load)
        view.sequence += 1
        lease = Lease(
            epoch=view.epoch,
            sequence=view.sequence,
            prefill_s=view.predict.prefill_s(ask.prompt_tokens),
            kv_tokens=ask.prompt_tokens,
            start_within_s=self.settings.slo_ttft_s - ask.waited_s,
            prompt_tokens=ask.prompt_tokens,
        )
        view.leases[view.sequence] = PendingLease(ask.request_id, lease, now_s)
        return AdmissionAnswer(ask.request_id, Decision.ADMIT, view.session, lease)
