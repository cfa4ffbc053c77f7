"""What a group is told, and what it asks for."""

from __future__ import annotations

from typing import NamedTuple

from serai.contracts.admission import AdmissionAnswer, AdmissionAsk, Grant, InstanceReport, InstanceState, TakeInstance
from serai.macro_scheduler.instance_view import StepPredictor
from serai.macro_scheduler.mitosis import Drain, Scale, Sleep, Wake

__all__ = [
    "Answer",
    "Asked",
    "Drain",
    "Gone",
    "Granted",
    "GroupEffect",
    "GroupEvent",
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


class Asked(NamedTuple):
    """One ask. Asked again with the same id (a lease was refused, a session failed) it is decided anew, without the
    sessions it excludes."""

    ask: AdmissionAsk
    to: object
    """Whom to answer; only handed back."""


class Withdrawn(NamedTuple):
    """Its client or its ingress has left: what waits is forgotten, a lease not applied yet is given back."""

    request_id: str


class SpentBy(NamedTuple):
    """A request went to `session` by a place that had been given to `to` in advance."""

    ask: AdmissionAsk
    session: str
    to: object


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


class Slept(NamedTuple):
    """It has drained, and its engine sleeps: it can be woken before another is started. `Joined` when it is back,
    `Gone` when it has left for good."""

    session: str


class Owned(NamedTuple):
    """An `Own` went through: the instance is `owner`'s with this epoch now."""

    session: str
    epoch: int
    owner: str


class NotOwned(NamedTuple):
    """An `Own` lost: somebody else has it with this epoch, or KV is away (`epoch` 0: to be tried again)."""

    session: str
    epoch: int


class TookOver(NamedTuple):
    """An instance's answer to `TakeInstance`: everything it knows."""

    state: InstanceState


class Tick(NamedTuple):
    """A wanted time has come."""


GroupEvent = Asked | Withdrawn | SpentBy | Reported | Joined | Gone | Slept | Owned | NotOwned | TookOver | Tick


class Answer(NamedTuple):
    """Send it. `final` is False after WAIT: another follows."""

    answer: AdmissionAnswer
    to: object
    final: bool = True


class Granted(NamedTuple):
    """Places for requests to come: send them."""

    grants: tuple[Grant, ...]
    to: object


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


# Of `mitosis`: Drain (the shell asks the session to end), Sleep, Wake, and Scale, a wish to whoever starts instances.

GroupEffect = Answer | Granted | Own | Take | WakeAt | Drain | Sleep | Wake | Scale
