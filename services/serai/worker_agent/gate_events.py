"""What a phase gate is told, and what it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from serai.contracts.admission import GateMode, Lease

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
    """The room in its KV cache and its slots, when it tells."""

    kv_tokens_free: int
    kv_tokens_total: int
    sequences_max: int = 0
    """As `GateSettings.sequences_max`; 0 = it does not say this time."""


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
    sequences_max: int = 0
    """Requests that the engine runs at once; 0 = it does not say."""
    waiting_max: int = 4096
    """More than that are refused."""
    step_tokens_max: int = 8192
    """Tokens of prompts that the engine takes in one step."""
    tells_steps: bool = False
    """Whether the gate is fed `Stepped`."""
    cuts_prompts: bool = True
    """Whether the engine obeys `Turn`; else a prompt that is released is prefilled whole, whatever slack is left."""
    slack_from_first_token: bool = False
    """Slack as PaDG has it, from the first token on: L · S − (now − first token); else from the first decode step on,
    in which the second token is said: (L − 1) · S − (now − its begin)."""
    ordinary_position: Position = Position.MIXED
    """What the engine does while the gate is open for all."""
    ordinary_tokens_max: int | None = 512
    """Prompt tokens of one step then; None = as many as the engine's settings allow."""
    without: str = ""
    """A part of the policy that is switched off (`admission.SERAI_PARTS`), to see what it is worth."""
