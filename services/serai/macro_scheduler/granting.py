"""Places given to ingresses in advance, so that requests need not be asked for while all is at ease. Pure: takes
`now_s`.

The ledger stays as sound as it is with leases. A place is debited on its instance when it is given. It is credited when
the instance has counted the request that used it, for then the report itself contains that; or when it is over: an
ingress uses it for `GRANT_S`, and the life of a lease is added for what is on its way. It bears the epoch of the
instance's owner, so nothing of it outlives its scheduler.

Only a scheduler that is at ease gives any: each place is decided like a request that comes now, with all places before
it debited, and is given only while that request would be done within `EASE_SHARE` of the strictest target about. So
what is debited for requests that may never come keeps nobody from his place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from serai.contracts.admission import AdmissionAsk, Grant
from serai.macro_scheduler.admission import Request, Verdict, kv_tokens
from serai.macro_scheduler.grant_book import Place
from serai.macro_scheduler.instance_view import InstanceView
from serai.macro_scheduler.macro_instances import MacroInstances

GRANT_S = 3.0
EASE_SHARE = 0.2
"""Of the TTFT target."""
PLACES_FIRST, PLACES_EACH = 4, 32
"""That an ingress holds at first, and at most. It is given more when half of them are gone."""
STRICT_S = 60.0
"""For so long after a request with stricter targets than the group's, these decide what is at ease."""
HOLDERS_MAX = 1000
TOKENS_LEAST = 64
_TYPICAL_SHARE = 0.02


class _Holder:
    """One ingress."""

    __slots__ = ("allowed", "held")

    def __init__(self) -> None:
        self.allowed = PLACES_FIRST
        """What it may hold: more when it uses them, less when they run out unused."""
        self.held: deque[float] = deque()
        """Until when each of its places is good, as far as it has told."""


class Holders:
    """How many places each ingress has, and may have: as many as it uses."""

    def __init__(self) -> None:
        self._holders: dict[object, _Holder] = {}
        self._typical_tokens = 0.0
        """Running mean of prompts; 0: none has come."""

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def tokens_max(self) -> int:
        """What a place is good for: twice a prompt as they come."""
        return max(TOKENS_LEAST, round(2 * self._typical_tokens))

    def note(self, prompt_tokens: int) -> None:
        """A request came."""
        share = _TYPICAL_SHARE if self._typical_tokens else 1.0
        self._typical_tokens += share * (prompt_tokens - self._typical_tokens)

    def missing(self, holder: object, now_s: float) -> int:
        """How many places it may be given now: none while it has more than half of what it may have."""
        one = self._one(holder)
        if one.held and one.held[0] <= now_s:
            one.allowed = max(PLACES_FIRST, one.allowed // 2)
            while one.held and one.held[0] <= now_s:
                one.held.popleft()
        return one.allowed - len(one.held) if len(one.held) <= one.allowed // 2 else 0

    def give(self, holder: object, until_s: float) -> None:
        """One more."""
        self._one(holder).held.append(until_s)

    def spent(self, holder: object) -> None:
        """It has told that one is gone."""
        one = self._one(holder)
        if one.held:
            one.held.popleft()
            if len(one.held) == one.allowed // 2:
                one.allowed = min(PLACES_EACH, 2 * one.allowed)

    def _one(self, holder: object) -> _Holder:
        found = self._holders.get(holder)
        if found is None:
            if len(self._holders) >= HOLDERS_MAX:
                del self._holders[next(iter(self._holders))]
            found = self._holders[holder] = _Holder()
        return found


class Granting:
    """One group's."""

    def __init__(self, macros: MacroInstances, slo_ttft_s: float, slo_tpot_s: float) -> None:
        self._macros = macros
        self._slo_ttft_s, self._slo_tpot_s = slo_ttft_s, slo_tpot_s
        self._holders = Holders()
        self._strictest_s = slo_ttft_s
        """The least TTFT target that was lately asked for."""
        self._strict_until_s = float("-inf")

    def note(self, ask: AdmissionAsk, now_s: float) -> None:
        """A request came."""
        self._holders.note(ask.prompt_tokens)
        if now_s > self._strict_until_s:
            self._strictest_s = self._slo_ttft_s
        if ask.slo_ttft_s is not None and ask.slo_ttft_s < self._slo_ttft_s:
            self._strictest_s = min(self._strictest_s, ask.slo_ttft_s)
            self._strict_until_s = now_s + STRICT_S

    def spent(self, ask: AdmissionAsk, view: InstanceView | None, holder: object, now_s: float) -> None:
        """`holder` has used a place: what a lease would have been entered for."""
        self._holders.spent(holder)
        self.note(ask, now_s)
        if view is not None:
            self._macros.leased(view, view.predict.prefill_s(ask.prompt_tokens), now_s, anew=False)

    def places(self, holder: object, now_s: float) -> tuple[Grant, ...]:
        """As many as are missing to `holder`, while a request that comes now would be done in a small part of its time.
        Not with several macro-instances: there a request may have one that is home to it."""
        missing = self._holders.missing(holder, now_s) if len(self._macros.circles) == 1 else 0
        grants: list[Grant] = []
        while len(grants) < missing and (grant := self._place(now_s)) is not None:
            self._holders.give(holder, now_s + GRANT_S)
            grants.append(grant)
        return tuple(grants)

    def _place(self, now_s: float) -> Grant | None:
        tokens = self._holders.tokens_max
        ask = AdmissionAsk("", tokens)
        view, verdicts = self._macros.choose(Request(ask, now_s, self._slo_ttft_s, self._slo_tpot_s), now_s)
        if view is None or _cost_s(view, verdicts) > EASE_SHARE * self._strictest_s:
            return None
        prefill_s = view.predict.prefill_s(tokens)
        view.grant(Place(prefill_s, kv_tokens(ask), now_s + GRANT_S))
        return Grant(view.session, view.epoch, tokens, prefill_s, self._slo_ttft_s, self._slo_tpot_s, GRANT_S)


def _cost_s(view: InstanceView, verdicts: Sequence[Verdict]) -> float:
    return next(verdict.cost for verdict in verdicts if verdict.session == view.session)
