"""What to do about more than can be held: keep everybody's pace and leave requests out, or let long answers go. Pure.

Prefills take a share x of an instance's time. While x is at most 1 − d / S (d a decode step, S the TPOT target), all
who decode keep their pace; of the prompts offered, which would take a share ρ, x / ρ are served. With more than that,
tokens come too late on average, but not everybody's: with windows as far apart as the TTFT target S_TTFT lets them be,

    a period is T = S_TTFT / (1 + x),   and between two windows there are n = (1 − x) · T / d decode steps,

and an answer of m further tokens that crosses w = ⌈m / n⌉ − 1 windows meets its target if m · d + w · x · T ≤ m · S.
Short ones do, whatever x; so where most answers are short, more requests are served by letting the long ones go. How
many that is, is known from the lengths of the answers so far.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from math import ceil, exp

_KEPT = 256
_GUESSED = (2, 6, 15, 35, 70, 130, 220, 400)
"""What counts as the first answers' lengths, until they are forgotten."""
_QUANTILES = 32
_SHARES = tuple([step / 20 for step in range(1, 20)])
_MEMORY_S = 20.0
_SEEN_S, _REQUESTS_MIN = 1.0, 3
"""Before so much has been seen nothing is said about what is offered; and before twice that not enough to believe."""
_HOPELESS = 0.2
"""Where prefills may take no more than this share of the time, no slack worth mentioning ever comes."""
_EVERY_S = 0.5
_SHARE_OF_NEWEST = 0.5
_MISSING_TELLS_MAX, _MISSING_TELLS = 2.0, 0.6
"""For each that is behind or late now, so many are taken to miss in the end: at most the first, and the second over the
share of the time in which slack can be made up for, since where that is large who is behind seldom stays so."""
_ENTER = 0.05
"""By how much of all requests letting go must be better, by prediction, before it is begun."""


class AnswerLengths:
    """The last answers' lengths in tokens."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(_GUESSED)
        self._ordered = sorted(_GUESSED)

    def add(self, tokens: int) -> None:
        """One has ended."""
        self._last.append(tokens)
        insort(self._ordered, tokens)
        if len(self._last) > _KEPT:
            del self._ordered[bisect_left(self._ordered, self._last.popleft())]

    def ends_within(self, said: int, tokens: float) -> float:
        """The probability that an answer that has said `said` tokens and goes on ends before it says `tokens` more."""
        ordered = self._ordered
        gone = bisect_right(ordered, said)
        going_on = len(ordered) - gone
        if not going_on:
            return min(1.0, tokens / said)
        return (bisect_left(ordered, said + tokens) - gone) / going_on

    def quantiles(self) -> list[int]:
        """At equal steps."""
        ordered = self._ordered
        return [ordered[(2 * step + 1) * len(ordered) // (2 * _QUANTILES)] for step in range(_QUANTILES)]


class OfferedWork:
    """Prompt tokens offered in a second, lately."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._requests = 0
        self._began_s: float | None = None
        self._at_s = 0.0

    def add(self, tokens: int, now_s: float) -> None:
        """A request came."""
        if self._began_s is None:
            self._began_s = self._at_s = now_s
        self._tokens = self._tokens * exp((self._at_s - now_s) / _MEMORY_S) + tokens
        self._at_s = now_s
        self._requests += 1

    def is_known(self, now_s: float) -> bool:
        """Whether enough has been seen."""
        seen_s = 0.0 if self._began_s is None else now_s - self._began_s
        return self._requests >= 2 * _REQUESTS_MIN and seen_s >= 2 * _SEEN_S

    def tokens_per_s(self, now_s: float) -> float:
        """A mean that forgets, over what has been seen."""
        if self._began_s is None or self._requests < _REQUESTS_MIN or now_s - self._began_s < _SEEN_S:
            return 0.0
        seen = _MEMORY_S * (1.0 - exp((self._began_s - now_s) / _MEMORY_S))
        return self._tokens * exp((self._at_s - now_s) / _MEMORY_S) / seen


def met_share(share: float, lengths: list[int], decode_s: float, slo_ttft_s: float, slo_tpot_s: float) -> float:
    """Of the answers, those that keep their TPOT target while prefills take `share` of the time, in windows."""
    period_s = slo_ttft_s / (1.0 + share)
    steps = max(1.0, (1.0 - share) * period_s / decode_s)
    window_s, spare_s = share * period_s, slo_tpot_s - decode_s
    met = sum([(ceil((tokens - 1) / steps) - 1) * window_s <= (tokens - 1) * spare_s for tokens in lengths])
    return met / len(lengths)


class Overload:
    """One instance's pace, decided anew twice a second while it has too much to do."""

    def __init__(self) -> None:
        self.lengths = AnswerLengths()
        self.offered = OfferedWork()
        self.lets_go = False
        self._missing = 0.0
        self._decided_s = float("-inf")

    def decide(
        self,
        s_per_token: float,
        decode_s: float,
        slo_ttft_s: float,
        slo_tpot_s: float,
        now_s: float,
        missing: Callable[[], float],
    ) -> bool:
        """Whether long answers are let go from now on. `s_per_token`: of prompts, in long steps; `missing`: the share
        of those who are here that is behind or late. A prediction alone is not enough to begin."""
        if now_s - self._decided_s < _EVERY_S:
            return self.lets_go
        self._decided_s = now_s
        self._missing += _SHARE_OF_NEWEST * (missing() - self._missing)
        offered = self.offered.tokens_per_s(now_s) * s_per_token
        held = max(0.0, 1.0 - decode_s / slo_tpot_s)
        early = held > _HOPELESS and not self.offered.is_known(now_s)
        lengths = self.lengths.quantiles() if offered > held and not early else []
        if not lengths:
            self.lets_go = False
            return False
        best = 0.0
        for share in _SHARES:
            if share <= held:
                continue
            value = min(1.0, share / offered) * met_share(share, lengths, decode_s, slo_ttft_s, slo_tpot_s)
            best = max(best, value)
            if share >= offered:
                break
        needs = held / offered + (0.0 if self.lets_go else _ENTER)
        tells = min(_MISSING_TELLS_MAX, _MISSING_TELLS / held) if held else _MISSING_TELLS_MAX
        seen = held <= _HOPELESS or best > 1.0 - tells * self._missing
        self.lets_go = best > needs and (self.lets_go or seen)
        return self.lets_go
