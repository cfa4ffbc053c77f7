"""How much a project, or a key, may ask for: per minute, at once, and in all. Pure: `now` in, a reservation or a
refusal out.

The rule in plain words:

* Per minute: a bucket that holds one minute's worth of requests, and one of tokens, filled evenly (token buckets). So
  a minute's worth may come at once, and over any longer time the rate holds: within any `t` seconds at most
  `limit × (1 + t / 60)`. A window that is cleared every minute would allow twice the limit around its edge.
* At admission a request reserves what it may need: its estimated prompt and its `max_tokens`, their price, and one of
  the places. All of its scopes (its key and its project, say) have enough, or nothing is taken from any.
* At its end it is settled: what it did not use goes back. Used and reserved together never exceed a budget, so a
  hundred requests at once cannot overrun a budget for ten; only a request that costs more than was reserved for it
  can, by that difference, and its scope is then in debt.
* A reservation ends once, whatever happens; as a context manager it settles what was noted last.
* Other processes that serve the same callers tell what they have taken (`heard`), which counts as if taken here. Of a
  budget this process spends what it has been granted (`Scope.granted_micros`).

Money is in whole millionths of whatever currency a budget is in, so that sums are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import TracebackType

from serai.contracts.limits import LimitsUse, ScopeUse

BYTES_PER_TOKEN = 3
"""For the estimate of a prompt that nobody has tokenised. Usual are 3 to 5; an estimate that is too high goes back."""
PLACE_RETRY_AFTER_S = 1.0
"""For who finds all places taken: when one becomes free, nobody knows."""
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one scope; None = without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_max: int | None = None
    budget_micros: int | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """In millionths of the currency, for a million tokens."""

    prompt_micros: int = 0
    output_micros: int = 0

    def cost_micros(self, prompt_tokens: int, output_tokens: int) -> int:
        """Rounded up: what costs something is never free."""
        return -(-(prompt_tokens * self.prompt_micros + output_tokens * self.output_micros) // 1_000_000)


@dataclass(frozen=True, slots=True)
class Need:
    """What a request may use at most, as far as can be known before."""

    tokens: int
    cost_micros: int = 0


def need_of(prompt_bytes: int, output_tokens_max: int, price: Price | None = None, choices: int = 1) -> Need:
    """`output_tokens_max` as asked for, or what the model says when nothing is asked for; `choices` is OpenAI's `n`."""
    prompt_tokens = -(-prompt_bytes // BYTES_PER_TOKEN)
    output_tokens = max(0, output_tokens_max) * max(1, choices)
    cost_micros = price.cost_micros(prompt_tokens, output_tokens) if price is not None else 0
    return Need(prompt_tokens + output_tokens, cost_micros)


class Limit(StrEnum):
    """Which limit was reached; its value stands in the message."""

    REQUESTS = "requests per minute"
    TOKENS = "tokens per minute"
    REQUEST_SIZE = "tokens per minute, for a single request"
    CONCURRENT = "requests at once"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Refused:
    """No reservation; answered with 429."""

    scope: str
    limit: Limit
    allowed: int
    asked: int
    left: int
    retry_after_s: float | None
    """None = waiting does not help."""

    @property
    def code(self) -> str:
        """As OpenAI calls it."""
        return "insufficient_quota" if self.limit is Limit.BUDGET else "rate_limit_exceeded"

    @property
    def message(self) -> str:
        """For the caller."""
        left = max(0, self.left)
        if self.limit is Limit.BUDGET:
            allowed, asked, left_over = (f"{micros / 1e6:.6f}" for micros in (self.allowed, self.asked, left))
            return f"The budget of {self.scope} ({allowed}) has {left_over} left; this request may cost {asked}."
        numbers = f"limit {self.allowed}, left {left}, requested {self.asked}"
        if self.retry_after_s is None:
            return f"Limit of {self.scope} on {self.limit}: {numbers}. Ask for less, or with a smaller `max_tokens`."
        return f"Limit of {self.scope} on {self.limit}: {numbers}. Try again in {duration(self.retry_after_s)}."


class _Bucket:
    """One minute's worth, filled evenly. Below 0 when more was used than had been reserved."""

    __slots__ = ("_at_s", "_level", "size")

    def __init__(self, size: int, now: float) -> None:
        self.size = size
        self._level = float(size)
        self._at_s = now

    def level(self, now: float) -> float:
        if now > self._at_s:
            self._level = min(self.size, self._level + (now - self._at_s) * self.size / _MINUTE_S)
            self._at_s = now
        return self._level

    def take(self, amount: float) -> None:
        """Below 0 gives back."""
        self._level = min(self.size, self._level - amount)

    def resize(self, size: int, now: float) -> None:
        """A limit that changes while it is in use: what has been used stays used."""
        self._level = min(size, self.level(now) + size - self.size)
        self.size = size

    def wait_s(self, amount: float, now: float) -> float:
        """Until it holds `amount`."""
        missing = amount - self.level(now)
        if missing <= 1e-9:  # Sums of floats; a billionth of a request is nobody's.
            return 0.0
        return missing * _MINUTE_S / self.size if self.size else math.inf


@dataclass(slots=True)
class Scope:
    """A key or a project: its limits, and what is taken of them."""

    limits: Limits
    requests: _Bucket | None = None
    tokens: _Bucket | None = None
    granted_micros: int | None = None
    """Of the budget, what this process may spend; None = all of it."""
    spent_micros: int = 0
    """Of that."""
    open: dict[int, int] = field(default_factory=dict)
    """What each request that runs has reserved of the budget. How many there are, and their sum, follow from it."""
    requests_total: int = 0
    tokens_total: int = 0
    """Taken here since the process began, as is `requests_total`."""
    elsewhere: dict[str, ScopeUse] = field(default_factory=dict)
    """The last word of each other process."""

    @property
    def reserved_micros(self) -> int:
        return sum(self.open.values())

    @property
    def left_micros(self) -> int:
        """Of the budget, or of what was granted of it."""
        allowed = self.limits.budget_micros if self.granted_micros is None else self.granted_micros
        return (allowed or 0) - self.spent_micros - self.reserved_micros

    @property
    def running(self) -> int:
        """Requests that run, in all processes."""
        return len(self.open) + sum([use.running for use in self.elsewhere.values()])

    @property
    def use(self) -> ScopeUse:
        """For other processes."""
        return ScopeUse(self.requests_total, self.tokens_total, len(self.open))

    def take(self, requests: int, tokens: int) -> None:
        """Below 0 gives back."""
        if self.requests is not None:
            self.requests.take(requests)
        if self.tokens is not None:
            self.tokens.take(tokens)


class Reservation:
    """What a request that runs has reserved. Ends once: by `settle`, `release`, or the end of its `with`."""

    __slots__ = ("_changed", "_closed", "_need", "_number", "_scopes", "_used")

    def __init__(self, number: int, scopes: dict[str, Scope], need: Need, changed: dict[str, None]) -> None:
        self._number = number
        self._scopes = scopes
        self._need = need
        self._changed = changed
        self._used = Need(0)
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def note(self, used: Need) -> None:
        """What has been used until now; it is settled should the request end without a further word."""
        self._used = used

    def settle(self, used: Need) -> bool:
        """The request is over and has used that; what it had reserved beyond goes back. False when it was over."""
        if self._closed:
            return False
        self._closed = True
        beyond = used.tokens - self._need.tokens
        for name, scope in self._scopes.items():
            del scope.open[self._number]
            scope.spent_micros += used.cost_micros
            scope.tokens_total += beyond
            scope.take(0, beyond)
            self._changed[name] = None
        return True

    def release(self) -> bool:
        """The request is over and has used nothing. It still counts as a request."""
        return self.settle(Need(0))

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle(self._used)


class Limiter:
    """All scopes of this process. `now` is monotonic, in seconds. A scope without `configure` has no limits."""

    def __init__(self) -> None:
        self._scopes: dict[str, Scope] = {}
        self._numbers = itertools.count(1)
        self._changed: dict[str, None] = {}
        """Scopes of which something was taken, or given back, since `take_changed`."""

    def configure(self, name: str, limits: Limits, now: float) -> None:
        """Limits of a scope, from now on. What it has used and reserved stays."""
        scope = self._scopes.setdefault(name, Scope(Limits()))
        scope.limits = limits
        scope.requests = _bucket(scope.requests, limits.requests_per_minute, now)
        scope.tokens = _bucket(scope.tokens, limits.tokens_per_minute, now)

    def retain(self, names: Collection[str]) -> None:
        """Forgets all scopes but these, as far as nothing of theirs runs."""
        for name in self._scopes.keys() - set(names):
            if not self._scopes[name].open:
                del self._scopes[name]

    def scope(self, name: str) -> Scope | None:
        return self._scopes.get(name)

    def reserve(self, names: Iterable[str], need: Need, now: float) -> Reservation | Refused:
        """From all of these scopes, or from none; then it is the refusal that lasts longest."""
        scopes = {name: self._scopes[name] for name in names if name in self._scopes}
        refusals = [refused for name, scope in scopes.items() for refused in _refusals(name, scope, need, now)]
        if refusals:
            return max(refusals, key=lambda r: math.inf if r.retry_after_s is None else r.retry_after_s)
        number = next(self._numbers)
        for name, scope in scopes.items():
            scope.open[number] = need.cost_micros
            scope.requests_total += 1
            scope.tokens_total += need.tokens
            scope.take(1, need.tokens)
            self._changed[name] = None
        return Reservation(number, scopes, need, self._changed)

    # -- of several processes ------------------------------------------------------------------------------------

    def take_changed(self) -> dict[str, ScopeUse]:
        """What this process has taken of the scopes that have changed since the last call."""
        changed = [name for name in self._changed if name in self._scopes]
        self._changed.clear()
        return {name: self._scopes[name].use for name in changed}

    def running(self) -> dict[str, ScopeUse]:
        """What this process has taken of the scopes of which it has requests now."""
        return {name: scope.use for name, scope in self._scopes.items() if scope.open}

    def heard(self, told: LimitsUse, listened_s: float) -> None:
        """What another process has taken counts here, too. Of what it took before the `listened_s` seconds that this
        one has listened, nothing is known."""
        for name, use in told.scopes.items():
            scope = self._scopes.get(name)
            if scope is None:
                continue
            before = scope.elsewhere.get(told.process)
            if before is None:
                before = ScopeUse(0, 0, 0) if told.age_s <= listened_s else use
            scope.take(use.requests - before.requests, use.tokens - before.tokens)
            scope.elsewhere[told.process] = use

    def silent(self, process: str) -> None:
        """It has not been heard for so long that its requests are not counted any more."""
        for scope in self._scopes.values():
            if use := scope.elsewhere.get(process):
                scope.elsewhere[process] = replace(use, running=0)

    def forget(self, process: str) -> None:
        """It will not be heard again."""
        for scope in self._scopes.values():
            scope.elsewhere.pop(process, None)

    # -- what is told --------------------------------------------------------------------------------------------

    def headers(self, names: Iterable[str], now: float) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*`: of each kind the scope that has the least left. `reset` is when it will be full."""
        scopes = [self._scopes[name] for name in names if name in self._scopes]
        headers: dict[str, str] = {}
        for kind, buckets in (
            ("requests", [scope.requests for scope in scopes]),
            ("tokens", [scope.tokens for scope in scopes]),
        ):
            there = [bucket for bucket in buckets if bucket is not None]
            if there:
                least = min(there, key=lambda bucket: bucket.level(now))
                headers[f"x-ratelimit-limit-{kind}"] = str(least.size)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(least.level(now) + 1e-9)))
                headers[f"x-ratelimit-reset-{kind}"] = duration(least.wait_s(least.size, now))
        return headers


def _bucket(before: _Bucket | None, size: int | None, now: float) -> _Bucket | None:
    if size is None:
        return None
    if before is None:
        return _Bucket(size, now)
    before.resize(size, now)
    return before


def _refusals(name: str, scope: Scope, need: Need, now: float) -> Iterable[Refused]:
    limits = scope.limits
    if limits.budget_micros is not None:
        left = scope.left_micros
        # With nothing left, what costs nothing has to stop, too: it is a limit, not a price.
        if need.cost_micros > left or left <= 0:
            yield Refused(name, Limit.BUDGET, limits.budget_micros, need.cost_micros, left, None)
    if limits.concurrent_max is not None and (running := scope.running) >= limits.concurrent_max:
        left = limits.concurrent_max - running
        yield Refused(name, Limit.CONCURRENT, limits.concurrent_max, 1, left, PLACE_RETRY_AFTER_S)
    if scope.requests is not None and (wait_s := scope.requests.wait_s(1, now)) > 0:
        yield _rate_refused(name, Limit.REQUESTS, scope.requests, 1, wait_s, now)
    if scope.tokens is not None and (wait_s := scope.tokens.wait_s(need.tokens, now)) > 0:
        if need.tokens > scope.tokens.size:
            left = math.floor(scope.tokens.level(now))
            yield Refused(name, Limit.REQUEST_SIZE, scope.tokens.size, need.tokens, left, None)
        else:
            yield _rate_refused(name, Limit.TOKENS, scope.tokens, need.tokens, wait_s, now)


def _rate_refused(name: str, limit: Limit, bucket: _Bucket, asked: int, wait_s: float, now: float) -> Refused:
    left = math.floor(bucket.level(now))
    return Refused(name, limit, bucket.size, asked, left, None if math.isinf(wait_s) else wait_s)


def duration(seconds: float) -> str:
    """As OpenAI writes it: `120ms`, `8.64s`, `6m0s`, `1h0m3s`. Rounded up, so that it is not too early."""
    if math.isinf(seconds):
        return "never"
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
