"""Who may spend how much of a budget, when several processes spend from it. Pure: an account in, the next one out.

The rule in plain words:

* What is spent and what is leased never exceed the budget together, and every write of an account is a
  compare-and-set. So however many processes admit requests at the same moment, they cannot overrun it.
* A process leases what it needs now and a share of what is free beside it, so that most requests need not ask; the less
  is left, the less is leased ahead. What it does not use it gives back within seconds.
* A process that is killed takes its lease with it: that much counts as spent once the lease is over, because nobody
  knows how much of it was. It is at most what its requests had reserved, and the share ahead.
* A new period begins with nothing spent; requests that still run then are paid from it.
* An account that has vanished, or gone back, is restored from what a process remembers of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from serai.contracts.limits import BudgetAccount, BudgetLease
from serai.ingress.configuration import Period

LEASE_S = 120.0
"""Renewed with each write; who holds one writes more often than that."""
AHEAD_SHARE = 0.02
"""Of what is free; so a killed process of ten costs a budget two per cent at most."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a process knows of its own part of a budget."""

    spent_micros: int = 0
    """Not in the account yet."""
    reserved_micros: int = 0
    """For requests that run."""


def settled(found: BudgetAccount | None, remembered: BudgetAccount | None, period: str, now_s: float) -> BudgetAccount:
    """The account as it is to be read now: of this period, without leases that are over."""
    account = found if found is not None and found.period == period else BudgetAccount(period)
    if remembered is not None and remembered.period == period:
        account = remembered if found is None or remembered.spent_micros > account.spent_micros else account
    over = [lease.micros for lease in account.leases.values() if lease.until_s <= now_s]
    if not over:
        return account
    running = {process: lease for process, lease in account.leases.items() if lease.until_s > now_s}
    return BudgetAccount(period, account.spent_micros + sum(over), running)


def free_micros(account: BudgetAccount, budget_micros: int) -> int:
    """Neither spent nor leased; below 0 after the budget has been lowered."""
    return budget_micros - account.spent_micros - sum([lease.micros for lease in account.leases.values()])


def renewed(
    account: BudgetAccount, process: str, held: Held, wanted_micros: int, budget_micros: int, now_s: float
) -> tuple[BudgetAccount, int]:
    """The next account, in which what `process` has spent is settled, and its lease covers what it has reserved and, if
    that is free, `wanted_micros` beside it; and what it is granted from then on. With nothing wanted it gives back all
    that is not reserved.

    `account` is `settled`. When it has no lease of `process` that had one, the lease is over and counted as spent
    whole; when it is of another period, what was granted is gone: the process begins with nothing in both cases, and
    what it has reserved is leased again.
    """
    lease = account.leases.get(process)
    spent = account.spent_micros + (held.spent_micros if lease is not None else 0)
    others = {name: other for name, other in account.leases.items() if name != process}
    free = budget_micros - spent - sum([other.micros for other in others.values()]) - held.reserved_micros
    granted = held.reserved_micros
    if 0 < wanted_micros <= free:
        granted += max(wanted_micros, int(free * AHEAD_SHARE))
    leases = others if granted == 0 else others | {process: BudgetLease(granted, now_s + LEASE_S)}
    return replace(account, spent_micros=spent, leases=leases), granted


def period_name(period: Period, now_s: float) -> str:
    """The period of `now_s`, seconds since the epoch: days, weeks and months of UTC."""
    day = datetime.fromtimestamp(now_s, UTC)
    match period:
        case Period.DAY:
            return f"{day:%Y-%m-%d}"
        case Period.WEEK:
            return f"{day:%G-W%V}"
        case Period.MONTH:
            return f"{day:%Y-%m}"
        case Period.EVER:
            return "ever"


def period_left_s(period: Period, now_s: float) -> float | None:
    """Seconds until the next period; None = there is none."""
    now = datetime.fromtimestamp(now_s, UTC)
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    match period:
        case Period.DAY:
            end = today + timedelta(days=1)
        case Period.WEEK:
            end = today + timedelta(days=7 - today.weekday())
        case Period.MONTH:
            end = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
        case Period.EVER:
            return None
    return (end - now).total_seconds()
