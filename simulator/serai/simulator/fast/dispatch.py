"""The seam between a cluster and whoever decides where its requests go: events in, effects out.

A policy is pure: it keeps state, takes `now_ns`, and never waits. A request for which it neither sends nor refuses is
pending with the policy; nothing needs to be said for that. Status may come late (`ClusterSettings.status_delay_s`):
`StepEnded` describes the instance as it was when its step ended. `Arrived` and `Ended` are never late, since a
router sees its own requests come and go.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

from serai.engine_emulator.batching.settings import Phase

StepKind = Literal["prefill", "decode", "mixed"]


class BadDispatch(RuntimeError):
    """A policy asked for what cannot be; the text names the effect."""


class Request(NamedTuple):
    """What a router knows of a request: not how long its answer will be."""

    number: int
    """Its place in the workload; names it everywhere."""
    arrived_ns: int
    prompt_tokens: int
    block_keys: tuple[int, ...]
    model: str
    client: str


# Named tuples, not dataclasses: some of these are made once a step, a million times an hour of simulated time.


class Arrived(NamedTuple):
    """A request is here."""

    request: Request


class Prefilled(NamedTuple):
    """A prefill instance has said a request's first token and holds its KV until a `Transfer` has taken it away."""

    request: Request
    instance: int


class Ended(NamedTuple):
    """A request that had been sent has left its instance: all said (`whole`), or never taken because it cannot fit."""

    request: Request
    instance: int
    whole: bool


class StepEnded(NamedTuple):
    """An engine's status after one step, with everything that changed in it. Requests are named by number.

    Together these tell how many tokens every request has said, without listing all that run: whoever is in `first`
    has said one, and one more in each later step of the instance with `decoded`, until it is in `ended` or
    `preempted`.
    """

    instance: int
    began_ns: int
    ended_ns: int
    kind: StepKind
    decoded: bool
    first: tuple[int, ...]
    ended: tuple[int, ...]
    preempted: tuple[int, ...]
    running: int
    waiting: int
    kv_tokens_free: int
    prefill_backlog_tokens: int
    prefill_open: bool
    again: tuple[int, ...] = ()
    """Who had been preempted, has been computed again, and decodes from now on."""
    prompt_tokens: int = 0
    """Tokens of prompts that the step worked on."""
    context_tokens: int = 0
    """Tokens that the decoding requests have in the cache."""


class Joined(NamedTuple):
    """An instance serves from now on: one that was started (`Start`), or whose `InstanceSpec.joins_at_s` has come."""

    instance: int


class Left(NamedTuple):
    """A retired instance has nothing left, and is gone."""

    instance: int


class TimerFired(NamedTuple):
    """A timer that the policy set."""

    key: int


Event = Arrived | Prefilled | Ended | StepEnded | Joined | Left | TimerFired


class Send(NamedTuple):
    """Give the request to an instance. From now on it is the instance's."""

    number: int
    instance: int


class Transfer(NamedTuple):
    """Move a prefilled request's KV to a decode instance, as soon as that has room and the link is free."""

    number: int
    instance: int


class Refuse(NamedTuple):
    """Tell the client no."""

    number: int


class Gate(NamedTuple):
    """Open or close an instance's prefill phase, from its next step on (engines with phase-gated batching)."""

    instance: int
    prefill_open: bool


class SetPhase(NamedTuple):
    """What an engine with phase-gated batching does from its next step on, and how many tokens of prompts a step may
    have (None: as many as its settings allow)."""

    instance: int
    phase: Phase
    prompt_tokens_max: int | None = None


class Deliver(NamedTuple):
    """What a request has said so far was held back until now: its client sees its first token, and the beginning of
    its decoding, not before now."""

    number: int


class Start(NamedTuple):
    """Start an instance that is set up as number `like`; it serves (`Joined`) at a time, not before now."""

    like: int
    at_ns: int


class Retire(NamedTuple):
    """Nothing more is sent to this instance; it is gone (`Left`) when it has ended what it has."""

    instance: int


class Move(NamedTuple):
    """End a request where it is, and go on with it on another instance: its prompt and what it has said are computed
    there as one prompt. Nothing happens when it has ended."""

    number: int
    instance: int


class SetTimer(NamedTuple):
    """Send `TimerFired(key)` at a time, not before now."""

    at_ns: int
    key: int


Effect = Send | Transfer | Refuse | Gate | SetPhase | Deliver | Start | Retire | Move | SetTimer


class Dispatch(Protocol):
    """One dispatch policy."""

    watches_steps: bool
    """Whether it wants `StepEnded`; without, a run is faster."""

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        """What is to be done now. Called in order of time."""
        ...
