"""The phase gate: when this instance prefills what was promised to it (design §6). Pure; the caller's monotonic clock.

The gate holds requests back and releases them to the engine in bursts, so that prefill and decode are apart in time.
It knows exactly what a scheduler far away knows late: who waits until when, and how far each stream is ahead of its
TPOT target. So it has the last word on every lease.

Events in, effects out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from serai.contracts.admission import GateMode, InstanceReport, InstanceState, Lease, Spread

FOREVER_S = 1e9
"""A laxity that nothing will use up."""


class Position(StrEnum):
    """What an engine that can be told is to do with its next steps."""

    PREFILL = "prefill"
    """Only prompts while some wait; decodes otherwise."""
    DECODE = "decode"
    """Only decodes."""
    MIXED = "mixed"
    """Prompts and decodes share steps: ordinary continuous batching."""


# Named tuples, not dataclasses: in a simulation some of these are made once a step.


class Offered(NamedTuple):
    """A request is here, whole. Without a lease it came from an ingress that decided by itself."""

    key: str
    prompt_tokens: int
    lease: Lease | None = None


class FirstToken(NamedTuple):
    """Its prefill is done."""

    key: str


class Said(NamedTuple):
    """How many output tokens it has now; coalesced, may be late. For engines that do not tell their steps."""

    key: str
    tokens: int


class Stepped(NamedTuple):
    """An engine that tells its steps has ended one, and what came of it. With `decoded`, every stream that had its
    first token before the step began has one more. A gate is fed either these, or `FirstToken` and `Said`."""

    duration_s: float
    decoded: bool
    prompt_tokens: int = 0
    """Tokens of prompts that the step worked on."""
    backlog_tokens: int = 0
    """Tokens of prompts that the engine has still to work on, preempted ones included."""
    first: Sequence[str] = ()
    """Whose prefill is done."""
    ended: Sequence[str] = ()
    preempted: Sequence[str] = ()
    """Whose KV was dropped so that the step could begin; they are computed again."""
    again: Sequence[str] = ()
    """Who has been computed again and decodes on."""
    kv_tokens_free: int = 0
    context_tokens: int = 0
    """Tokens that the decoding requests have in the cache."""


class Ended(NamedTuple):
    """Finished, failed or cancelled."""

    key: str


class EngineSays(NamedTuple):
    """The room in its KV cache, when it tells."""

    kv_tokens_free: int
    kv_tokens_total: int


class Taken(NamedTuple):
    """`TakeInstance` came: from a new owner, or as a heartbeat of the present one."""

    owner: str
    epoch: int
    mode: GateMode
    low_share: float
    beat_s: float


class Tick(NamedTuple):
    """A wanted time has come."""


GateEvent = Offered | FirstToken | Said | Stepped | Ended | EngineSays | Taken | Tick


class Release(NamedTuple):
    """Post it to the engine now."""

    key: str


class RefuseLease(NamedTuple):
    """Tell its ingress `FailureCode.LEASE_REFUSED`; the gate has forgotten it."""

    key: str
    why: str


class Turn(NamedTuple):
    """Tell an engine that can be told, from its next step on; others are left as they are."""

    position: Position
    prompt_tokens_max: int | None = None
    """Tokens of prompts in one step; None = as many as the engine's settings allow."""


class WakeAt(NamedTuple):
    """Send `Tick` then. The latest wish counts; earlier ones may be forgotten."""

    at_s: float


GateEffect = Release | RefuseLease | Turn | WakeAt


class GateSettings(NamedTuple):
    """What an instance is told at its start; a lease's own targets come first."""

    session: str = ""
    slo_ttft_s: float = 5.0
    """For requests that bring no target."""
    slo_tpot_s: float = 0.1
    kv_tokens_total: int = 0
    """0 = the engine does not say."""
    waiting_max: int = 4096
    """More than that are refused."""


class PhaseGate:
    """One instance's gate. `predict_prefill_s` has the time of one prefill step over so many prompt tokens."""

    def __init__(self, settings: GateSettings, predict_prefill_s: Callable[[int], float]) -> None:
        self._settings = settings
        self._predict_s = predict_prefill_s
        self._held: set[str] = set()

    def handle(self, event: GateEvent, now_s: float) -> Sequence[GateEffect]:
        """What is to be done now. Called in order of time."""
        match event:
            case Offered(key):
                self._held.add(key)
                return (Release(key),)
            case Ended(key):
                self._held.discard(key)
        return ()

    def report(self, now_s: float) -> InstanceReport:
        """What the scheduler is told."""
        return InstanceReport(
            session=self._settings.session,
            sequence=0,
            epoch=0,
            applied=0,
            mode=GateMode.ORDINARY,
            prefilling=False,
            window_s=0.0,
            decoding=Spread(len(self._held)),
            waiting=0,
            waiting_prefill_s=0.0,
            laxity_s=FOREVER_S,
            kv_tokens_free=self._settings.kv_tokens_total,
            kv_tokens_total=self._settings.kv_tokens_total,
        )

    def state(self, now_s: float, accepted: bool) -> InstanceState:
        """Everything, for a new owner."""
        return InstanceState(self.report(now_s), [], accepted)
