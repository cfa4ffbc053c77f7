"""Admission: which instance prefills a request next, and what it was promised for it (design §6).

An ingress asks the leader of the model's group on `admission.<model>`; each ask is answered at once with one of
ADMIT, BEST_EFFORT, REFUSE and WAIT, and after WAIT, on the same reply subject, with the final answer. A lease travels
with the request to the agent, which has the last word: an instance that cannot keep the promise refuses it
(`FailureCode.LEASE_REFUSED`), and the ingress asks again without that instance.

Durations travel, clock readings do not. These are msgspec structs: some are made per request.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Decision(StrEnum):
    """What becomes of a request."""

    ADMIT = "admit"
    """Its targets will be met, by prediction, without hurting those of others."""
    BEST_EFFORT = "best_effort"
    """They cannot be met (any more); it is served where that harms least."""
    REFUSE = "refuse"
    """Nothing is done for it; `retry_after_s` says when that may change."""
    WAIT = "wait"
    """Not yet: the final answer follows."""
    UNKNOWN = "unknown"
    """None of its instances obeys this scheduler yet, or none may have the request: use another policy for it."""


class Lease(msgspec.Struct, frozen=True):
    """A promise to one request, debited at once: window time and KV tokens of one instance."""

    epoch: int
    """Of the instance's owner. An instance obeys only the current one."""
    sequence: int
    """Counts the leases of this owner to this instance, from 1; reports tell the highest that was applied. 0: it comes
    by a place that was granted in advance (`Grant`); reports count these."""
    prefill_s: float
    """Predicted time of its prefill alone."""
    kv_tokens: int
    """Prompt and predicted answer."""
    start_within_s: float
    """From when the lease was made: the latest start of its prefill at which its TTFT target still holds.
    Below 0 for best effort."""
    slo_ttft_s: float = 0.0
    """What was left of the target when the lease was made; 0 = no target."""
    slo_tpot_s: float = 0.0
    """0 = no target."""
    best_effort: bool = False
    prompt_tokens: int = 0
    window: int = 0
    """Counts this owner's windows on this instance, where its policy decides on them (`paper`, `author_code`). With a
    higher one, all that was there before is older than the window; see `InstanceReport.older`."""
    waited_s: float = 0.0
    """How long the request had waited when the lease was made; with `slo_ttft_s`, its whole target."""


class AdmissionAsk(msgspec.Struct, frozen=True):
    """One request that wants to be placed."""

    request_id: str
    """Unique among all ingresses: a client's own name of it, which need not be, is followed by `~` and what makes it
    so. An ask that comes again while it waits is the same ask, and is told WAIT again."""
    prompt_tokens: int
    """Estimated by the ingress."""
    output_tokens_max: int = 0
    """As asked for; 0 = not said."""
    slo_ttft_s: float | None = None
    """Target from its arrival at the ingress; None = the group's default."""
    slo_tpot_s: float | None = None
    waited_s: float = 0.0
    """Since its arrival at the ingress."""
    project: str = ""
    """Whose share of the service it counts to."""
    best_effort: bool = True
    """What its caller wants when its targets cannot be met: served late (True) or refused at once."""
    excluded: list[str] = []
    """Sessions that failed it, refused its lease, or that its caller may not use."""
    affinity: str = ""
    """What other requests share with it whose prefix may be warm somewhere, as a short key; empty = nothing known."""


class UsedGrant(msgspec.Struct, frozen=True):
    """A request that went to `session` by a place granted in advance: nobody was asked for it."""

    ask: AdmissionAsk
    session: str


class AdmissionRequest(msgspec.Struct, frozen=True):
    """Asks of one ingress that came together: a message costs more than a decision."""

    asks: list[AdmissionAsk]
    withdrawn: list[str] = []
    """Earlier asks, by their `request_id`, that nobody waits for any more, or whose lease will not be used."""
    spent: list[UsedGrant] = []
    """So that the scheduler knows what was done with its grants, and gives others."""


class AdmissionAnswer(msgspec.Struct, frozen=True):
    """The word on one ask."""

    request_id: str
    decision: Decision
    session: str = ""
    """With ADMIT and BEST_EFFORT."""
    lease: Lease | None = None
    retry_after_s: float = 0.0
    reason: str = ""
    """For people, with REFUSE and BEST_EFFORT."""


class Grant(msgspec.Struct, frozen=True):
    """A place for one request, given to an ingress before there is a request, while all is at ease: it need not ask for
    it. Debited like a lease when it is given, until the instance has counted it or it is over."""

    session: str
    epoch: int
    """Of the instance's owner, as in the lease."""
    prompt_tokens_max: int
    """Longer prompts have to ask."""
    prefill_s: float
    """Of such a prompt."""
    slo_ttft_s: float
    """Requests with stricter targets have to ask."""
    slo_tpot_s: float
    within_s: float
    """It is good for so long after it has come."""


class AdmissionAnswers(msgspec.Struct, frozen=True):
    """Answers to one or more asks of one ingress."""

    answers: list[AdmissionAnswer]
    grants: list[Grant] = []
    """For requests to come; to be used in this order."""


class GateMode(StrEnum):
    """How an instance orders prefill and decode."""

    PADG = "padg"
    """Apart in time: prefill in windows, decode between them."""
    ORDINARY = "ordinary"
    """Continuous batching as the engine does it by itself: nothing is held back."""


class Spread(msgspec.Struct, frozen=True):
    """A few numbers instead of a list; seconds."""

    count: int
    mean_s: float = 0.0
    least_s: float = 0.0
    low_s: float = 0.0
    """The wanted low quantile, see `InstanceReport.low_share`."""
    most_s: float = 0.0


class InstanceReport(msgspec.Struct, frozen=True):
    """What an instance says of itself, at most once each 20 ms, at least once a second. Later ones replace earlier."""

    session: str
    sequence: int
    epoch: int
    """Of the owner it obeys; 0 = none."""
    applied: int
    """The highest lease sequence of that owner that it has seen; all below have been seen or will be refused."""
    mode: GateMode
    prefilling: bool
    """Its window is open now."""
    window_s: float
    """For how long the window has been open, or has been closed."""
    decoding: Spread
    """Slack of streams that decode: how far they are ahead of their TPOT targets."""
    waiting: int
    """Requests that it holds back or that have no first token yet."""
    waiting_prefill_s: float
    """Predicted time of their prefills."""
    laxity_s: float
    """The least time left until the prefill of one of them must start; a large number when there is none."""
    kv_tokens_free: int
    kv_tokens_total: int
    """0 = the engine does not say."""
    kv_tokens_promised: int = 0
    """By leases, not yet in use."""
    low_share: float = 0.1
    """Which quantile `Spread.low_s` is: 1 − the attainment that is wanted."""
    step_s: float = 0.0
    """Of the last decode steps, on average; 0 = not known."""
    prefill_base_s: float = 0.0
    prefill_s_per_token: float = 0.0
    """Prefill time by its own measurements, as base + tokens × this; 0 = not known yet."""
    refused_total: int = 0
    stalled_ratio_max: float = 0.0
    """Longest stall of a running stream ÷ its TPOT target, since the last report."""
    window: int = 0
    """The highest `Lease.window` seen."""
    older: Spread = Spread(0)
    """Of the streams that decode, those of earlier windows."""
    context_tokens: int = 0
    """Tokens of all streams that decode, prompts included; 0 = not known."""
    first_tokens_total: int = 0
    """Of requests with a lease and a TTFT target, since it started."""
    slow_first_tokens_total: int = 0
    """Those that came later than 0.8 of the target after the request's arrival at its ingress."""
    ttft_s_total: float = 0.0
    """Sum of their times to first token."""
    granted_total: int = 0
    """Requests of this owner's epoch that came by a place granted in advance, refused ones too."""
    lets_go: bool = False
    """It has more to do than it can hold, and lets long answers go: prompts come first whatever slack there is."""
    ending: float = 0.0
    """While it does: how many of those who are not behind would soon end, expected, if nobody were prefilled."""
    slots_free: int | None = None
    """How many more requests its engine would run at once; below 0: so many wait for a slot. None = not known."""
    slot_every_s: float = 0.0
    """In which time one request ends and leaves its slot to another, on average."""


class HeldRequest(msgspec.Struct, frozen=True):
    """One request in an instance's full state."""

    request_id: str
    lease: Lease | None
    """None = it came without one."""
    waited_s: float
    """Since it came here."""
    tokens_said: int
    since_first_token_s: float


class InstanceState(msgspec.Struct, frozen=True):
    """Everything an instance knows, for a new owner; the answer to `TakeInstance`."""

    report: InstanceReport
    requests: list[HeldRequest]
    """Of a new owner's first `TakeInstance`; later ones, its beats, are answered without."""
    accepted: bool
    """False: it obeys a higher epoch, `report.epoch`."""


class TakeInstance(msgspec.Struct, frozen=True):
    """From a group's leader to one instance: obey this owner from now on."""

    owner: str
    """Name of the macro-instance."""
    epoch: int
    mode: GateMode
    low_share: float
    beat_s: float
    """How often it will be said again. An instance that hears nothing for two beats admits by itself, in ORDINARY."""


class InstanceOwner(msgspec.Struct, frozen=True):
    """Who owns an instance: in KV, key = session, by compare-and-set only; `epoch` only ever grows."""

    session: str
    owner: str
    epoch: int
    sequence: int = 0
    """The last lease known to have been given."""


class GroupLease(msgspec.Struct, frozen=True):
    """Who leads a model's group: in KV, key = model as a token, by compare-and-set only. A holder whose `beat` stands
    still for the length of a lease has gone."""

    holder: str
    epoch: int
    """Grows with each change of holder."""
    beat: int
    wanted: int = 0
    """With scaling: how many instances it wants; 0 = it has never said. The next holder begins from there."""


class ScaleWish(msgspec.Struct, frozen=True):
    """How many instances a model's group wants, from its leader to whoever starts and ends them at its site. It is said
    again and again while it holds, so one that is lost changes nothing."""

    model: str
    instances: int
    """In all: those that serve, those that start, and those that are missing."""
    owner: str
    """Who is to act on it: `placer` or `launcher`, never both."""
    epoch: int
    """Of the leader: an older one's wishes are over."""
    holds_s: float
    """It is over when it has not been said again for so long."""
    why: str = ""


class MacroExplainRequest(msgspec.Struct, frozen=True):
    """What was decided on a request, and why; with an empty `request_id`, how the groups stand."""

    request_id: str = ""
    model: str = ""


class MacroWord(msgspec.Struct, frozen=True):
    """The answer: lines for people."""

    lines: list[str]
