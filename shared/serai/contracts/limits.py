"""Limits that hold across processes: what each ingress has taken of them, and what budgets have left.

Rates and places are told (`LimitsUse`, core NATS, may be lost): counts since the teller began, so that the next message
makes up for a lost one. Money is leased (`BudgetAccount`, one key of a KV bucket for each budget, written only by
compare-and-set): a process spends only what its lease says.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ScopeUse:
    """What one process has taken of one scope's limits."""

    requests: int
    """Since the process began, as is `tokens`."""
    tokens: int
    """Reserved, and settled since: it may fall."""
    running: int
    """Requests that it has now."""


@dataclass(frozen=True, slots=True)
class LimitsUse:
    """One ingress process's word, a few times a second while something changes, and each second while its requests
    run."""

    process: str
    age_s: float
    """How long ago it began: who has listened for longer than that has missed nothing."""
    scopes: dict[str, ScopeUse]
    """Those that have changed, or have requests running."""


@dataclass(frozen=True, slots=True)
class BudgetLease:
    """What one process may spend without asking."""

    micros: int
    until_s: float
    """Seconds since the epoch. After that, whoever reads this counts it as spent: its holder is gone, and nobody knows
    how much of it was."""


@dataclass(frozen=True, slots=True)
class BudgetAccount:
    """One budget in one period. Spent and leased together never exceed it."""

    period: str
    """`2026-11`, `2026-11-30`, `2026-W48`, or `ever`. A later one begins anew."""
    spent_micros: int = 0
    leases: dict[str, BudgetLease] = field(default_factory=dict)
    """By process."""
