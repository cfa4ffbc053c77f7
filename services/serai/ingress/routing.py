"""Which session gets a request. Pure: candidates in, one of them out; chance comes from outside.

| name | rule |
|---|---|
| `uniform-random` | each with the same chance |
| `round-robin` | each in its turn |
| `hardware-weighted` | in turn, the faster ones more often, in proportion to their measured speed |
| `least-loaded` | fewest requests; while others send there too, the lesser of two drawn by lot |
| `prefix-affine` | where prompts with this head have been before, unless it has too much to do |
| `session-sticky` | where this conversation (`x-session-id`) has been before, unless it has too much to do |
| `macro-scheduled` | where the macro-scheduler's lease says; when it says nothing, another policy |

Which of them serves a model stands in a `PolicyChoice`, which may change while requests run. A pick among 50
candidates costs at most 30 µs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol

from serai.contracts.session_record import SessionRecord
from serai.ingress.patterns import ByPattern

PROMPT_HEAD_BYTES = 2048
"""So much of a prompt decides where it goes: more than a usual system prompt's beginning, less than its whole, so that
conversations with one system prompt share its cache."""
LOAD_BOUND = 1.25
"""`c` of consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): no session gets a request by
its hash when it would then have more than `c` times the average."""
LOAD_FREE = 4
"""Requests that a session may hold whatever the average is: a batch of so many costs an engine next to nothing, and
on an idle fleet the average would send the second request of a conversation away from its cache."""
OTHERS_SHARE_MAX = 0.25
"""While others have no more of the work than this, the least load of all is the best choice; beyond, a lot is drawn."""
SPEED_SAMPLE = 0.1
"""Weight of one more request in a session's observed speed."""


@dataclass(slots=True)  # Not frozen, as candidates are not.
class Ask:
    """What a policy may know of a request."""

    model: str
    prompt_head: bytes = b""
    """The prompt's beginning (`prompt_head`); empty = unknown."""
    session_key: str = ""
    """The client's name of its conversation (`x-session-id`); empty = none."""
    request_id: str = ""
    prompt_tokens: int = 0
    """Estimated; 0 = unknown."""
    output_tokens_max: int = 0
    """As asked for; 0 = not said."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None


@dataclass(slots=True)  # Not frozen: some are made per request and session, and that would cost three times as much.
class Candidate:
    """A session that may be sent the request, with what is known of its load."""

    record: SessionRecord
    own_in_flight: int
    """Requests this ingress has there now."""
    reported_in_flight: int
    """Requests of all ingresses as of its last status, up to a second ago."""
    penalty: float = 0.0
    """Requests it is counted as having for its recent failures (`SessionHealth.load_penalty`)."""
    own_when_reported: int | None = None
    """Of `reported_in_flight`, how many were this ingress's own (`OwnShare`); None = not known, as many as could be."""

    others: int = field(init=False)
    """Requests of other ingresses, as of the last status."""
    load: float = field(init=False)
    """Requests there now, as well as can be known: our own, which we know, and others' as reported."""

    def __post_init__(self) -> None:
        own = self.own_in_flight
        others = self.reported_in_flight - (own if self.own_when_reported is None else self.own_when_reported)
        self.others = others if others > 0 else 0  # noqa: FURB136 - half the time of max()
        self.load = own + self.others + self.penalty


class OwnShare:
    """How many of the requests that a session reports were this ingress's own.

    A status comes once a second and counts everyone's requests. Ours have come and gone since, so what others have
    there is the report less our own count when it came: the ends of requests that it still counts come after it, on
    the same connection. Looked at later, a request of ours that has ended meanwhile would pass for somebody else's.
    """

    def __init__(self) -> None:
        self._noted: dict[str, tuple[int, int]] = {}

    def when_reported(self, session: str, sequence: int, own_in_flight: int) -> int:
        """Our count when status number `sequence` was new; `own_in_flight` is our count now."""
        noted = self._noted.get(session)
        if noted is None or noted[0] != sequence:
            self._noted[session] = (sequence, own_in_flight)
            return own_in_flight
        return noted[1]

    def retain(self, sessions: Iterable[str]) -> None:
        """Forgets all sessions but these."""
        for session in self._noted.keys() - set(sessions):
            del self._noted[session]


class Chance(Protocol):
    """Where luck comes from: `random.Random` is one."""

    def random(self) -> float:
        """A number from 0 to below 1."""


class CountedChance:
    """Luck without a source: a hash of how often it was asked (SplitMix64). The same for everyone with one `seed`, so
    for simulations and tests; processes that serve beside each other must be given a true one."""

    def __init__(self, seed: int = 0) -> None:
        self._state = seed & _BITS

    def random(self) -> float:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _BITS
        mixed = (self._state ^ (self._state >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _BITS
        return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)


class Policy(Protocol):
    """One routing policy. It may remember; it may not wait."""

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """One of `candidates`, which is never empty and sorted by session id."""

    def on_request_start(self, session: str) -> None: ...

    def on_request_end(self, session: str, *, whole: bool) -> None: ...


class _Forgetful:
    """A policy that need not know when requests begin and end."""

    def on_request_start(self, session: str) -> None: ...

    def on_request_end(self, session: str, *, whole: bool) -> None: ...


# -- by lot, in turn, by load ------------------------------------------------------------------------------------------


class UniformRandom(_Forgetful):
    """Each session with the same chance."""

    def __init__(self, chance: Chance | None = None) -> None:
        self._chance = chance or CountedChance()

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        return candidates[int(self._chance.random() * len(candidates))]


class RoundRobin(_Forgetful):
    """Each session in its turn, per model."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        turn = self._turns.get(ask.model, 0)
        self._turns[ask.model] = turn + 1
        return candidates[turn % len(candidates)]


class LeastLoaded(RoundRobin):
    """The session with the fewest requests; in turn among equals, so that an idle fleet shares the work.

    That is right as long as most requests are this ingress's own, which it counts exactly. Others' counts are up to a
    second old: if each ingress took the least of all, all would take the same one until its next status. So when
    others have more than `OTHERS_SHARE_MAX` of the work, it is the lesser of two drawn by lot (the power of two
    choices; Mitzenmacher, "How useful is old information?", 2000).
    """

    def __init__(self, chance: Chance | None = None) -> None:
        super().__init__()
        self._chance = chance or CountedChance()

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        others = sum([candidate.others for candidate in candidates])
        if others and others > OTHERS_SHARE_MAX * (others + sum([c.own_in_flight for c in candidates])):
            return self._lesser_of_two(candidates)
        loads = [candidate.load for candidate in candidates]
        least = min(loads)
        if loads.count(least) == 1:
            return candidates[loads.index(least)]
        return super().pick(ask, [c for c, load in zip(candidates, loads, strict=True) if load == least])

    def _lesser_of_two(self, candidates: Sequence[Candidate]) -> Candidate:
        count = len(candidates)
        if count == 1:
            return candidates[0]
        place = int(self._chance.random() * count)
        other = int(self._chance.random() * (count - 1))
        one, two = candidates[place], candidates[other + (other >= place)]
        return one if one.load <= two.load else two


# -- by speed ----------------------------------------------------------------------------------------------------------


class SessionSpeeds:
    """How fast sessions are, in output tokens per second of one request: as published, else as observed in the
    requests of this ingress, else by the kind of GPU.

    The speed of one request falls when its session has much to do, so weights by it bring themselves into balance. A
    session's total would not: who gets little says little, and would get less.
    """

    def __init__(self, by_gpu: Mapping[str, float] | None = None) -> None:
        self._by_gpu = dict(by_gpu or {})
        self._published: set[str] = set()
        self._measured: dict[str, float] = {}

    def published(self, session: str, tokens_per_s: float) -> None:
        """What the session, or a measurement of it, says; it outdoes what is observed here."""
        if _is_speed(tokens_per_s):
            self._published.add(session)
            self._measured[session] = tokens_per_s

    def observed(self, session: str, output_tokens: int, decode_s: float) -> None:
        """One request's answer: its tokens after the first, and the time from the first to the last."""
        speed = output_tokens / decode_s if decode_s > 0 else 0.0
        if _is_speed(speed) and session not in self._published:
            before = self._measured.get(session, speed)
            self._measured[session] = before + SPEED_SAMPLE * (speed - before)

    def of(self, session: str) -> float:
        """Tokens per second; 0 = not measured."""
        return self._measured.get(session, 0.0)

    def retain(self, sessions: Iterable[str]) -> None:
        """Forgets all sessions but these."""
        there = set(sessions)
        self._published &= there
        for session in self._measured.keys() - there:
            del self._measured[session]

    def weights(self, candidates: Sequence[Candidate]) -> list[float]:
        """One per candidate, all above 0. Kinds of GPU are only comparable among themselves, so they are brought to
        the scale of what was measured; who is unknown altogether counts as an average one."""
        measured = [self._measured.get(candidate.record.session, 0.0) for candidate in candidates]
        if all(measured):
            return measured
        if self._by_gpu:
            by_kind = [self._of_kind(candidate.record) for candidate in candidates]
            scales = [speed / kind for speed, kind in zip(measured, by_kind, strict=True) if speed and kind]
            if scales or not any(measured):
                scale = math.fsum(scales) / len(scales) if scales else 1.0
                measured = [speed or kind * scale for speed, kind in zip(measured, by_kind, strict=True)]
        known = [speed for speed in measured if speed]
        average = math.fsum(known) / len(known) if known else 1.0
        return [speed or average for speed in measured]

    def _of_kind(self, record: SessionRecord) -> float:
        gpus = record.metadata.gpus
        return self._by_gpu.get(gpus[0].name, 0.0) if gpus else 0.0


class HardwareWeighted(_Forgetful):
    """Turns in proportion to speed, spread evenly (smooth weighted round robin, as in nginx): with speeds 5, 1, 1 the
    turns are a a b a c a a, not a a a a a b c."""

    def __init__(self, speeds: SessionSpeeds | None = None) -> None:
        self._speeds = speeds or SessionSpeeds()
        self._due: dict[str, dict[str, float]] = {}

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        weights = self._speeds.weights(candidates)
        due = self._due.setdefault(ask.model, {})
        if len(due) > 2 * len(candidates) + 8:  # Sessions that have left; and what a further try does not see.
            there = {candidate.record.session for candidate in candidates}
            due = self._due[ask.model] = {session: share for session, share in due.items() if session in there}
        # Shares of one turn, since speeds may change meanwhile.
        share = 1 / sum(weights)
        sessions = [candidate.record.session for candidate in candidates]
        now_due = [due.get(session, 0.0) + weight * share for session, weight in zip(sessions, weights, strict=True)]
        due.update(zip(sessions, now_due, strict=True))
        best = now_due.index(max(now_due))
        due[sessions[best]] -= 1.0
        return candidates[best]


# -- by affinity -------------------------------------------------------------------------------------------------------


class PrefixAffine(_Forgetful):
    """Prompts with the same head go to the same session, whose engine has that part in its cache.

    Each head has its own order of sessions (rendezvous hashing), the same in every ingress; a session that comes or
    goes moves only the heads that are, or will be, its own. The first in that order with room gets the request: who
    would then have more than `bound` times the average, and more than `free` requests, is passed over, so that a head
    that all share spreads over as many sessions as it takes. Without a head, another policy decides.
    """

    def __init__(self, otherwise: Policy | None = None, *, bound: float = LOAD_BOUND, free: int = LOAD_FREE) -> None:
        self._otherwise = otherwise or LeastLoaded()
        self._bound = bound
        self._free = free

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        head = ask.prompt_head
        if not head:
            return self._otherwise.pick(ask, candidates)
        return home(head, candidates, self._bound, self._free)

    def on_request_start(self, session: str) -> None:
        self._otherwise.on_request_start(session)

    def on_request_end(self, session: str, *, whole: bool) -> None:
        self._otherwise.on_request_end(session, whole=whole)


class SessionSticky(PrefixAffine):
    """As `PrefixAffine`, by the client's name of its conversation. When its session goes, or has too much to do, the
    next in its order takes over, the same one each time."""

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        key = ask.session_key
        if not key:
            return self._otherwise.pick(ask, candidates)
        return home(key.encode(), candidates, self._bound, self._free)


def home(key: bytes, candidates: Sequence[Candidate], bound: float = LOAD_BOUND, free: int = LOAD_FREE) -> Candidate:
    """The first candidate in the order of `key` that has room for one more."""
    number = _number(key)
    sessions = _numbers(tuple([candidate.record.session for candidate in candidates]))
    # Multiply, fold, multiply: enough for each key to see the sessions in an order of its own. Within 60 bits, since
    # that is what Python is quick at.
    order = [
        ((x := (number ^ session) * 0x2545F491) ^ x >> 30) % _PRIME * 0x1B873593 & _BITS_30 for session in sessions
    ]
    first = candidates[order.index(max(order))]
    loads = [candidate.load for candidate in candidates]
    room = max(free, math.ceil(bound * (sum(loads) + 1) / len(loads))) - 1
    if first.load <= room:
        return first
    open_to_it = [
        (place, candidate) for place, candidate in zip(order, candidates, strict=True) if candidate.load <= room
    ]
    # Penalties are no whole requests, so it may be that none has room; then the least loaded.
    return max(open_to_it, key=_place)[1] if open_to_it else candidates[loads.index(min(loads))]


def _place(pair: tuple[int, Candidate]) -> int:
    return pair[0]


def prompt_head(body: Mapping[str, Any], bytes_max: int = PROMPT_HEAD_BYTES) -> bytes:
    """The head of the prompt in a parsed OpenAI body: everything up to the end of the first thing the user says, cut
    at `bytes_max`. So all turns of a conversation have one head. Empty when there is no prompt in a form known here."""
    pieces: list[str] = []
    messages = body.get("messages")
    if isinstance(messages, list):
        size = 0
        for message in messages:
            if not isinstance(message, dict):
                break
            role = message.get("role")
            text = _text_of(message.get("content"))
            pieces.append(f"{role}\n{text[:bytes_max]}\n")
            size += len(pieces[-1])
            if role == "user" or size >= bytes_max:
                break
    else:
        prompt = body.get("prompt", body.get("input"))
        first = prompt[:bytes_max] if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else prompt
        pieces.append(_text_of(first)[:bytes_max])
    return "".join(pieces).encode("utf-8", "surrogatepass")[:bytes_max]


def _text_of(content: object) -> str:
    """Text, or the parts of a list; a picture counts by the beginning of its address, or of its bytes."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part.get("text") or part)[:512] if isinstance(part, dict) else str(part) for part in content[:64]
        )
    return ""


_BITS = (1 << 64) - 1
_BITS_30 = (1 << 30) - 1
_PRIME = (1 << 30) - 35


@lru_cache(maxsize=256)  # A fleet is the same for many requests; further tries see a part of it.
def _numbers(sessions: tuple[str, ...]) -> list[int]:
    return [_number(session.encode()) for session in sessions]


def _number(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") & _BITS_30


def _is_speed(tokens_per_s: float) -> bool:
    return 0 < tokens_per_s < math.inf


# -- by lease ----------------------------------------------------------------------------------------------------------


class LeaseProvider(Protocol):
    """What the macro-scheduler has granted, as far as it is known here. A policy may not wait: who asks over a network
    asks before the pick, and hands out here what came in time."""

    def lease(self, ask: Ask, candidates: Sequence[Candidate]) -> str | None:
        """The session that is to have this request; None = nothing was heard in time."""


class MacroScheduled:
    """Where the lease says. Without one, or with one for a session that may not have the request (it has left, it has
    failed it already, the caller does not want it), `otherwise` decides."""

    def __init__(self, leases: LeaseProvider | None = None, otherwise: Policy | None = None) -> None:
        self._leases = leases
        self._otherwise = otherwise or LeastLoaded()
        self.by_lease = 0
        self.without_lease = 0

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        session = self._leases.lease(ask, candidates) if self._leases is not None else None
        if session is not None:
            for candidate in candidates:
                if candidate.record.session == session:
                    self.by_lease += 1
                    return candidate
        self.without_lease += 1
        return self._otherwise.pick(ask, candidates)

    def on_request_start(self, session: str) -> None:
        self._otherwise.on_request_start(session)

    def on_request_end(self, session: str, *, whole: bool) -> None:
        self._otherwise.on_request_end(session, whole=whole)


# -- the choice --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyNeeds:
    """What some policies need from outside."""

    chance: Chance = field(default_factory=CountedChance)
    speeds: SessionSpeeds = field(default_factory=SessionSpeeds)
    leases: LeaseProvider | None = None


class PolicyMaker(Protocol):
    def __call__(self, needs: PolicyNeeds = ...) -> Policy: ...


def _maker(make: Callable[[PolicyNeeds], Policy]) -> PolicyMaker:
    def made(needs: PolicyNeeds | None = None) -> Policy:
        return make(PolicyNeeds() if needs is None else needs)

    return made


POLICIES: dict[str, PolicyMaker] = {
    "least-loaded": _maker(lambda needs: LeastLoaded(needs.chance)),
    "round-robin": _maker(lambda needs: RoundRobin()),
    "uniform-random": _maker(lambda needs: UniformRandom(needs.chance)),
    "hardware-weighted": _maker(lambda needs: HardwareWeighted(needs.speeds)),
    "prefix-affine": _maker(lambda needs: PrefixAffine(LeastLoaded(needs.chance))),
    "session-sticky": _maker(lambda needs: SessionSticky(LeastLoaded(needs.chance))),
    "macro-scheduled": _maker(lambda needs: MacroScheduled(needs.leases, LeastLoaded(needs.chance))),
}


class UnknownPolicy(ValueError):
    """The text names the model, the policy and what there is."""


class PolicyChoice:
    """Which policy serves which model, by its name or a pattern. One policy of each name serves all models that want
    it: what they remember, they remember per model. A change takes effect with the next pick; policies that stay in use
    keep what they know."""

    def __init__(
        self, default: str = "least-loaded", by_model: Mapping[str, str] | None = None, needs: PolicyNeeds | None = None
    ) -> None:
        self._needs = needs or PolicyNeeds()
        self._policies: dict[str, Policy] = {}
        self.change(default, by_model or {})

    def change(self, default: str, by_model: Mapping[str, str]) -> None:
        """Raises UnknownPolicy, and then changes nothing."""
        for model, name in [("", default), *by_model.items()]:
            if name not in POLICIES:
                where = f"policy of model {model!r}" if model else "default policy"
                raise UnknownPolicy(f"{where}: no policy {name!r}; use one of {', '.join(POLICIES)}")
        names = {default, *by_model.values()}
        self._policies = {name: self._policies.get(name) or POLICIES[name](self._needs) for name in sorted(names)}
        self._names = ByPattern(by_model, default)

    def name(self, model: str) -> str:
        return self._names.of(model)

    def of(self, model: str) -> Policy:
        """The policy for `model`. A request keeps the one it got to its end."""
        return self._policies[self._names.of(model)]


def with_room(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those that hold fewer requests than they accept; all, when none does, since then each may say so itself."""
    found = [
        candidate
        for candidate in candidates
        if not (most := candidate.record.metadata.concurrency_max) or candidate.own_in_flight + candidate.others < most
    ]
    return found or candidates


def capacity(candidates: Sequence[Candidate]) -> int | None:
    """How many requests of a model this ingress may have out at once: those it has, and the room that sessions have
    left beside everybody's. None = no limit, since a session does not say how many it accepts."""
    room = 0
    for candidate in candidates:
        most = candidate.record.metadata.concurrency_max
        if not most:
            return None
        room += candidate.own_in_flight + max(0, most - candidate.own_in_flight - candidate.others)
    return room


def untried(records: Sequence[SessionRecord], tried: Sequence[SessionRecord]) -> Sequence[SessionRecord]:
    """The records a (further) try may go to: never a session twice, and another allocation where there is one."""
    if not tried:
        return records
    sessions = {record.session for record in tried}
    fresh = [record for record in records if record.session not in sessions]
    allocations = {(record.metadata.site, record.metadata.allocation) for record in tried}
    elsewhere = [r for r in fresh if (r.metadata.site, r.metadata.allocation) not in allocations]
    return elsewhere or fresh
