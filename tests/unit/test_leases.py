"""However many processes spend from a budget, and however they end: together never more than it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.limits import BudgetAccount, BudgetLease
from serai.ingress.configuration import Period
from serai.ingress.leases import LEASE_S, Held, free_micros, period_left_s, period_name, renewed, settled

NOON = 1_796_040_000.0  # Monday, 2026-11-30, 12:00 UTC.


def test_what_is_wanted_is_leased_with_a_share_ahead_and_given_back_when_nothing_is() -> None:
    account, granted = renewed(BudgetAccount("ever"), "a", Held(), 100, 100_000, NOON)
    assert granted == 2000
    assert free_micros(account, 100_000) == 98_000
    account, granted = renewed(account, "a", Held(spent_micros=80, reserved_micros=50), 0, 100_000, NOON)
    assert (granted, account.spent_micros, free_micros(account, 100_000)) == (50, 80, 99_870)
    account, granted = renewed(account, "a", Held(spent_micros=50), 0, 100_000, NOON)
    assert (granted, account) == (0, BudgetAccount("ever", 130, {}))


def test_what_is_not_free_is_not_leased() -> None:
    account = BudgetAccount("ever", 50, {"b": BudgetLease(40, NOON + 9)})
    assert renewed(account, "a", Held(), 11, 100, NOON)[1] == 0
    assert renewed(account, "a", Held(), 10, 100, NOON)[1] == 10
    assert renewed(account, "a", Held(), 1, 80, NOON)[1] == 0  # The budget was lowered.


def test_a_lease_that_is_over_counts_as_spent_whole_and_its_holder_does_not_count_it_again() -> None:
    account, _ = renewed(BudgetAccount("ever"), "a", Held(), 10, 100, NOON)
    later_s = NOON + LEASE_S
    account = settled(account, None, "ever", later_s)
    assert account == BudgetAccount("ever", 10, {})
    account, granted = renewed(account, "a", Held(spent_micros=7, reserved_micros=3), 5, 100, later_s)
    assert (account.spent_micros, granted) == (10, 8)


def test_a_new_period_begins_with_nothing_spent_and_an_account_that_went_back_is_restored() -> None:
    old = BudgetAccount("2026-11", 90, {"a": BudgetLease(5, NOON + 9)})
    assert settled(old, old, "2026-12", NOON) == BudgetAccount("2026-12")
    assert settled(None, old, "2026-11", NOON) == old
    assert settled(BudgetAccount("2026-11", 10), old, "2026-11", NOON) == old
    newer = BudgetAccount("2026-11", 95)
    assert settled(newer, old, "2026-11", NOON) == newer


@pytest.mark.parametrize(
    ("period", "name", "left_s"),
    [
        (Period.DAY, "2026-11-30", 12 * 3600),
        (Period.WEEK, "2026-W49", 6.5 * 86_400),
        (Period.MONTH, "2026-11", 12 * 3600),
        (Period.EVER, "ever", None),
    ],
)
def test_periods_are_those_of_utc(period: Period, name: str, left_s: float | None) -> None:
    assert (period_name(period, NOON), period_left_s(period, NOON)) == (name, left_s)
    if left_s is not None:
        assert period_name(period, NOON + left_s - 1) == name
        assert period_name(period, NOON + left_s) != name


moves = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "settle", "report", "kill", "wait"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(1, 40),
    ),
    max_size=60,
)


@given(moves)
def test_spent_and_leased_never_exceed_the_budget(history: list[tuple[str, str, int]]) -> None:
    budget, now = 200, NOON
    account = BudgetAccount("ever")
    granted = dict.fromkeys("abc", 0)
    spent = dict.fromkeys("abc", 0)
    reserved: dict[str, list[int]] = {name: [] for name in "abc"}
    truly_spent = 0

    def renew(name: str, wanted: int) -> None:
        nonlocal account
        account = settled(account, None, "ever", now)
        account, granted[name] = renewed(account, name, Held(spent[name], sum(reserved[name])), wanted, budget, now)
        spent[name] = 0

    for step, (kind, name, amount) in enumerate(history):
        left = granted[name] - spent[name] - sum(reserved[name])
        match kind:
            case "reserve":
                if left < amount:
                    renew(name, amount)
                if granted[name] - spent[name] - sum(reserved[name]) >= amount:
                    reserved[name].append(amount)
            case "settle" if reserved[name]:
                used = min(amount, reserved[name].pop())
                spent[name] += used
                truly_spent += used
            case "report":
                renew(name, 0)
            case "kill":
                granted[name], spent[name], reserved[name] = 0, 0, []
                if name in account.leases:  # What comes after it has another name.
                    dead = f"{name} dead at {step}"
                    leases = {dead if one == name else one: lease for one, lease in account.leases.items()}
                    account = BudgetAccount("ever", account.spent_micros, leases)
            case "wait":
                for one in "abc":  # Who lives renews in time.
                    renew(one, 0)
                now += LEASE_S * 0.6
        assert free_micros(account, budget) >= 0
        assert truly_spent + sum(sum(running) for running in reserved.values()) <= budget
