"""Limits that hold over all processes that serve the same callers: the shell around `limits` and `leases`.

* Rates and places: each process tells the others what it has taken, every `TELL_EVERY_S` while something changes, in
  one message. What is taken within that time at several processes at once can exceed a limit; then its scope is in debt
  and waits that much longer. Without NATS each process goes on by itself: open for rates.
* Budgets: each process spends what it has leased from the account, by compare-and-set. Without NATS it spends what it
  has leased already, and then refuses: closed for budgets.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.limits import BudgetAccount, LimitsUse, ScopeUse
from serai.contracts.subjects import BUDGETS_BUCKET, LIMITS, to_token
from serai.ingress.configuration import Period
from serai.ingress.leases import LEASE_S, Held, free_micros, period_left_s, period_name, renewed, settled
from serai.ingress.limits import Limit, Limiter, Limits, Need, Refused, Reservation, Scope
from serai.runtime.bus import Bus, BusError, Message, Subscription

log = structlog.get_logger()

TELL_EVERY_S = 0.2
TELL_RUNNING_EVERY_S = 1.0
"""Of requests that run on without a change: so that others go on counting them."""
SILENT_S = 3.5
"""A process of which nothing was heard for so long has no requests, as far as others are concerned."""
FORGET_S = 90.0
"""Its buckets are full again by then."""
SCOPES_PER_MESSAGE = 2000
SETTLE_EVERY_S = 2.0
"""What was spent is put into the accounts, and what is not needed given back."""
CAS_TRIES = 30
"""Each lost race means that another process has won one."""
EMPTY_FOR_S = 0.2
"""A budget that was found to be used up is not asked for again for so long."""


class BudgetUnknown(Exception):
    """Nobody can say now whether a budget has something left."""


class Accounts(Protocol):
    """Where accounts lie: `NatsBucket`. Raises BusError."""

    async def get(self, key: str) -> tuple[bytes, int] | None: ...

    async def update(self, key: str, value: bytes, revision: int) -> bool: ...


@dataclass(slots=True)
class _Purse:
    """What this process knows of one account."""

    period: Period
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    account: BudgetAccount | None = None
    """As it was written, or read, last."""
    unsure: tuple[BudgetAccount, int, int] | None = None
    """A write of which it is not known whether it was done: what was written, spent in it, and granted by it."""
    empty: tuple[float, int] | None = None
    """When it was found to have how little free."""
    requests_seen: int = 0
    written_at_s: float = 0.0


class SharedLimits:
    """One per process. Without `accounts`, budgets are this process's own."""

    def __init__(self, bus: Bus, limiter: Limiter, accounts: Accounts | None = None) -> None:
        self._bus = bus
        self._limiter = limiter
        self._accounts = accounts
        self._process = secrets.token_hex(8)
        self._began_s = time.monotonic()
        self._untold: dict[str, ScopeUse] = {}
        self._running_told_s = 0.0
        self._heard_at_s: dict[str, float] = {}
        self._purses: dict[str, _Purse] = {}
        self._reachable = True

    def configure(self, limits: Mapping[str, Limits], now: float) -> None:
        """The limits of all scopes, from now on."""
        for name, one in limits.items():
            self._limiter.configure(name, one, now)
            scope = self._limiter.scope(name)
            if scope is not None and scope.granted_micros is None and self._accounts is not None:
                scope.granted_micros = 0
        self._limiter.retain(limits.keys())

    async def start(self) -> Subscription:
        return await self._bus.subscribe(LIMITS.every, self.on_limits)

    async def run(self) -> None:
        """Until it is cancelled; then `aclose`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._telling())
            tasks.create_task(self._settling())

    async def aclose(self) -> None:
        """Gives back what is leased. What cannot be given back now counts as spent when the leases are over."""
        try:
            async with asyncio.timeout(SETTLE_EVERY_S):
                for name in list(self._purses):
                    await self._settle(name, keep=False)
        except (TimeoutError, BudgetUnknown):
            log.warning("limits.not_given_back", effect="counts as spent in two minutes")

    # -- reserve -------------------------------------------------------------------------------------------------

    async def reserve(self, names: Sequence[str], need: Need, period: Period) -> Reservation | Refused:
        """As `Limiter.reserve`, with leases where budgets are. Raises BudgetUnknown."""
        found = self._limiter.reserve(names, need, time.monotonic())
        if self._accounts is None or isinstance(found, Reservation) or found.limit is not Limit.BUDGET:
            return found
        for _ in range(len(names)):  # While one scope's lease is fetched, others may use up another's.
            for name in names:
                await self._cover(name, max(1, need.cost_micros), period)
            found = self._limiter.reserve(names, need, time.monotonic())
            if isinstance(found, Reservation) or found.limit is not Limit.BUDGET:
                return found
        return self._as_told(found, period)

    def _as_told(self, refused: Refused, period: Period) -> Refused:
        """With what all processes have left together, and the time at which there will be more."""
        purse, scope = self._purses.get(refused.scope), self._limiter.scope(refused.scope)
        left = refused.left
        if purse is not None and purse.account is not None and scope is not None:
            left += max(0, free_micros(purse.account, scope.limits.budget_micros or 0))
        return replace(refused, left=left, retry_after_s=period_left_s(period, time.time()))

    async def _cover(self, name: str, wanted_micros: int, period: Period) -> None:
        """Leases so much, if there is so much."""
        scope = self._limiter.scope(name)
        if scope is None or scope.limits.budget_micros is None:
            return
        purse = self._purses.setdefault(name, _Purse(period))
        async with purse.lock:
            purse.period = period
            if scope.left_micros >= wanted_micros and self._is_current(purse):
                return  # Whoever was here before has leased enough.
            empty_at_s, free = purse.empty or (0.0, 0)
            if purse.empty is None or time.monotonic() - empty_at_s > EMPTY_FOR_S or free >= wanted_micros:
                await self._renew(name, purse, scope, wanted_micros)

    def _is_current(self, purse: _Purse) -> bool:
        return purse.account is not None and purse.account.period == period_name(purse.period, time.time())

    # -- accounts ------------------------------------------------------------------------------------------------

    async def _renew(self, name: str, purse: _Purse, scope: Scope, wanted_micros: int) -> None:
        """Under the purse's lock. Raises BudgetUnknown; what is leased may be spent nevertheless."""
        assert self._accounts is not None
        key, budget = to_token(name), scope.limits.budget_micros or 0
        for _ in range(CAS_TRIES):
            try:
                found = await self._accounts.get(key)
            except BusError as error:
                raise self._unreachable(error) from error
            revision, kept = (0, None) if found is None else (found[1], self._account(name, found[0]))
            self._look_back(purse, scope, kept)
            now_s = time.time()
            account = settled(kept, purse.account, period_name(purse.period, now_s), now_s)
            held = Held(scope.spent_micros, scope.reserved_micros)
            wanted, granted = renewed(account, self._process, held, wanted_micros, budget, now_s)
            free = free_micros(wanted, budget)
            is_empty = granted - held.reserved_micros < wanted_micros
            purse.empty = (time.monotonic(), free) if is_empty else None
            if is_empty and kept == account and not held.spent_micros:
                purse.account = account
                return  # There is nothing to write.
            if await self._write(key, purse, scope, wanted, held, granted, revision):
                return
        raise self._unreachable(BusError(f"{name}: {CAS_TRIES} others were faster"))

    async def _write(
        self, key: str, purse: _Purse, scope: Scope, wanted: BudgetAccount, held: Held, granted: int, revision: int
    ) -> bool:
        assert self._accounts is not None
        before = scope.granted_micros
        # Until it is written, nothing beyond what is reserved may be spent: it may be given back by this very write.
        scope.granted_micros = held.spent_micros + held.reserved_micros
        purse.unsure = (wanted, held.spent_micros, granted)
        try:
            written = await self._accounts.update(key, encode(wanted), revision)
        except BusError as error:
            raise self._unreachable(error) from error
        purse.unsure = None
        if not written:
            scope.granted_micros = before
            return False
        self._take(purse, scope, wanted, held.spent_micros, granted)
        return True

    def _take(self, purse: _Purse, scope: Scope, written: BudgetAccount, settled_micros: int, granted: int) -> None:
        scope.granted_micros = granted
        scope.spent_micros -= settled_micros
        purse.account = written
        purse.written_at_s = time.monotonic()
        if not self._reachable:
            self._reachable = True
            log.info("limits.accounts_work_again")

    def _look_back(self, purse: _Purse, scope: Scope, kept: BudgetAccount | None) -> None:
        """Whether a write without an answer was done: then its lease stands there."""
        if purse.unsure is None:
            return
        written, settled_micros, granted = purse.unsure
        purse.unsure = None
        if kept is not None and kept.leases.get(self._process) == written.leases.get(self._process):
            self._take(purse, scope, written, settled_micros, granted)

    def _account(self, name: str, data: bytes) -> BudgetAccount:
        try:
            return decode(BudgetAccount, data)
        except MalformedMessage as error:
            # Not as if nothing had been spent. Whoever wrote that has to delete it.
            raise self._unreachable(BusError(f"the account of {name} in {BUDGETS_BUCKET}: {error}")) from error

    def _unreachable(self, error: BusError) -> BudgetUnknown:
        if self._reachable:
            self._reachable = False
            log.error("limits.accounts_fail", error=str(error), effect="budgets: what is leased is spent, then refused")
        return BudgetUnknown(str(error))

    async def _settling(self) -> None:
        while True:
            await asyncio.sleep(SETTLE_EVERY_S)
            for name in list(self._purses):
                try:
                    await self._settle(name)
                except BudgetUnknown:
                    break

    async def _settle(self, name: str, *, keep: bool = True) -> None:
        """Puts what was spent into the account. With `keep`, a scope that is in use keeps a share ahead."""
        purse, scope = self._purses[name], self._limiter.scope(name)
        if scope is None:
            del self._purses[name]
            return
        async with purse.lock:
            in_use = keep and scope.requests_total != purse.requests_seen
            purse.requests_seen = scope.requests_total
            due = scope.reserved_micros and time.monotonic() - purse.written_at_s > LEASE_S / 3
            if scope.spent_micros or due or (scope.left_micros > 0 and not in_use):
                await self._renew(name, purse, scope, 1 if in_use else 0)

    # -- what is told --------------------------------------------------------------------------------------------

    def on_limits(self, message: Message) -> None:
        """What another process has taken."""
        try:
            told = decode(LimitsUse, message.data)
        except MalformedMessage as error:
            log.warning("limits.malformed", subject=message.subject, error=str(error))
            return
        if told.process != self._process:
            now = time.monotonic()
            self._heard_at_s[told.process] = now
            self._limiter.heard(told, now - self._began_s)

    async def _telling(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            self.tell(time.monotonic())

    def tell(self, now: float) -> None:
        """One round: tells what has changed here, and notes who has fallen silent."""
        self._untold.update(self._limiter.take_changed())
        if now - self._running_told_s >= TELL_RUNNING_EVERY_S:
            self._running_told_s = now
            self._untold.update(self._limiter.running())
        names = list(self._untold)[:SCOPES_PER_MESSAGE]
        if names:
            use = LimitsUse(self._process, now - self._began_s, {name: self._untold[name] for name in names})
            try:
                self._bus.publish(LIMITS.of(self._process), encode(use))
            except BusError:
                return  # Counts since the beginning: said once more, nothing is missing.
            for name in names:
                del self._untold[name]
        for process, heard_at_s in list(self._heard_at_s.items()):
            if now - heard_at_s > FORGET_S:
                del self._heard_at_s[process]
                self._limiter.forget(process)
            elif now - heard_at_s > SILENT_S:
                self._limiter.silent(process)
