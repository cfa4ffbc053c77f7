"""Whether the engine gets on with its work: no I/O, no clock; times are seconds on the caller's monotonic clock.

An engine can hang while its process, its HTTP server and our own heartbeat live. What counts is progress: a byte of
any answer, or a change in the engine's own counters. While requests run and neither comes, the silence is compared
with what the work there explains:

- **Prompts** that are not answered yet: prefill may hold up everything else. Seconds per prompt token are a
  pessimistic guess until this engine's own first bytes teach better.
- **Answers in one piece** (and streams that an engine holds back, as for tool calls) show no steps. Then the engine's
  counters speak; where it has none, their output explains: so many tokens at a generous time each.

Beyond that, `LIMIT_S` of silence is a stall. A false alarm takes a working engine out of the service, which is worse
than a second of delay; so every guess here errs towards waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LIMIT_S = 2.3
"""Silence that nothing explains. With a look every 0.2 s, and counters asked for as often, a hang shows within 3 s; and
progress every 2 s is never taken for one."""
QUIET_S = 1.0
"""After so long a silence the engine's counters are looked at; before, they cost nothing."""

OUTPUT_S_PER_TOKEN = 0.1
"""An engine slower than ten tokens a second is of no use to anybody."""
OUTPUT_TOKENS_UNKNOWN = 4096
"""An answer in one piece whose request names no limit."""
COUNTERS_FRESH_S = 1.2
"""Counters say nothing when the last answer is older than this: busy engines answer late, hung ones never."""

_TOGETHER_S = 0.1
_BATCH_TOKENS = 32_768
_BATCH_PROMPTS = 4
_RATES_KEPT = 64
_RATE_QUANTILE = 0.9
_RATE_MARGIN = 2.0
_RATE_LEAST_S = 0.000_1
_RATE_TIMES_GUESS_MAX = 5.0
LEARN_FROM_TOKENS = 512
"""Shorter prompts say more of queues and steps than of prefill."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One request that the engine has and whose answer somebody reads."""

    posted_at_s: float
    prompt_tokens: int
    answered: bool = False
    """Some of its answer's body has come."""
    shows_steps: bool = True
    """It is streamed, and the engine sends each token when it is there."""
    output_tokens_max: int = 0
    """0 = not known."""
    setup_s: float = 0.0
    """Work before its first token that is neither prefill nor decode: fetching images, compiling a grammar."""


class ProgressWatch:
    """One engine's progress. `look` is the question; everything else is what it is answered from."""

    def __init__(
        self, *, prefill_s_per_token: float, counter_grain_s: float | None = None, context_tokens_max: int = 0
    ) -> None:
        """`counter_grain_s`: for how long this engine's counters may stand still while it works; None = for any time,
        so that only their moving says something."""
        self._guess_s = prefill_s_per_token
        self._counter_grain_s = counter_grain_s
        self._context_tokens_max = context_tokens_max
        self._rates: deque[float] = deque(maxlen=_RATES_KEPT)
        self._progress_at_s = float("-inf")
        self._busy_since_s: float | None = None
        self._counters: tuple[float, ...] | None = None
        self._counters_at_s = float("-inf")
        self._stalled_since_s: float | None = None
        """The last progress before the stall that is on now."""

    # -- what is told --------------------------------------------------------------------------------------------

    def progressed(self, at_s: float) -> None:
        """A byte of an answer came, or another proof that the engine works."""
        self._progress_at_s = max(self._progress_at_s, at_s)

    def counted(self, counters: tuple[float, ...] | None, now: float) -> None:
        """The engine's counters at `now`; None = it has none, or did not answer."""
        if counters is None:
            return
        # A sample from before the last byte says nothing of the silence after it.
        if self._counters is not None and self._counters_at_s >= self._progress_at_s and counters != self._counters:
            self._progress_at_s = now
        self._counters, self._counters_at_s = counters, now

    def first_token_after(self, waited_s: float, prompt_tokens: int) -> None:
        """A streamed answer began `waited_s` seconds after its request, whose prompt had so many tokens."""
        if prompt_tokens >= LEARN_FROM_TOKENS:
            self._rates.append(waited_s / prompt_tokens)

    # -- what is asked -------------------------------------------------------------------------------------------

    @property
    def prefill_s_per_token(self) -> float:
        """What a prompt token may take, in seconds."""
        if not self._rates:
            return self._guess_s
        rates = sorted(self._rates)
        high = rates[min(len(rates) - 1, int(len(rates) * _RATE_QUANTILE))]
        return min(max(high * _RATE_MARGIN, _RATE_LEAST_S), self._guess_s * _RATE_TIMES_GUESS_MAX)

    @property
    def stalled(self) -> bool:
        return self._stalled_since_s is not None

    def idle(self) -> None:
        """The engine has nothing to do: silence from now on is rest."""
        self._busy_since_s = None

    def look(self, running: Sequence[RunningRequest], now: float) -> float:
        """For how long the engine has made no progress beyond what these requests explain; 0 = it works or is idle.

        Once stalled, it stays so until there is progress: an engine that hung does not work again because its clients
        gave up.
        """
        if not running:
            self.idle()
        elif self._busy_since_s is None:
            self._busy_since_s = min(request.posted_at_s for request in running)
        quiet_s = now - self._since_s()
        if self._stalled_since_s is not None:
            if self._progress_at_s <= self._stalled_since_s:
                return now - self._stalled_since_s
            self._stalled_since_s = None
        if not running or quiet_s <= LIMIT_S or quiet_s - self._explained_s(running, now) <= LIMIT_S:
            return 0.0
        self._stalled_since_s = self._since_s()
        return quiet_s

    # -- inside --------------------------------------------------------------------------------------------------

    def _since_s(self) -> float:
        """When the silence began: at the last progress, or when the idle engine was given work."""
        busy_since_s = self._busy_since_s
        return self._progress_at_s if busy_since_s is None else max(self._progress_at_s, busy_since_s)

    def _explained_s(self, running: Sequence[RunningRequest], now: float) -> float:
        since_s = self._since_s()
        explained_s = self._prefill_s(running, since_s)
        if any(request.answered and request.shows_steps for request in running):
            return explained_s  # Its next token would have come by now.
        hidden = [request for request in running if not request.shows_steps]
        if not hidden:
            return explained_s
        if self._counter_grain_s is not None and now - self._counters_at_s <= COUNTERS_FRESH_S:
            return explained_s + self._counter_grain_s
        return max(explained_s, max(self._whole_s(request) for request in hidden) - since_s)

    def _prefill_s(self, running: Sequence[RunningRequest], since_s: float) -> float:
        """How long the prompts that wait may keep the engine from showing anything.

        Those that were there when the silence began may be prefilled together, as far as engines batch. Of those that
        came later one may have been taken up; the others do not explain why nothing came before them.
        """
        waiting = [request for request in running if not request.answered]
        if not waiting:
            return 0.0
        there = [self._tokens(request) for request in waiting if request.posted_at_s <= since_s + _TOGETHER_S]
        later = [self._tokens(request) for request in waiting if request.posted_at_s > since_s + _TOGETHER_S]
        together = min(sum(there), max(_BATCH_TOKENS, _BATCH_PROMPTS * max(there, default=0)))
        setup_s = max(request.setup_s for request in waiting)
        return setup_s + (together + max(later, default=0)) * self.prefill_s_per_token

    def _whole_s(self, request: RunningRequest) -> float:
        """Until when the request's whole answer may take, on the clock."""
        prefill_s = self._tokens(request) * self.prefill_s_per_token
        output_s = (request.output_tokens_max or OUTPUT_TOKENS_UNKNOWN) * OUTPUT_S_PER_TOKEN
        return request.posted_at_s + request.setup_s + prefill_s + output_s

    def _tokens(self, request: RunningRequest) -> int:
        limit = self._context_tokens_max
        return min(request.prompt_tokens, limit) if limit else request.prompt_tokens
