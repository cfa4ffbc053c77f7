"""Several processes with one budget: compare-and-sets that are lost, answers that do not come, processes that end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from serai.contracts.codec import decode, encode
from serai.contracts.limits import BudgetAccount, LimitsUse, ScopeUse
from serai.contracts.subjects import to_token
from serai.ingress import shared_limits as module
from serai.ingress.configuration import Period
from serai.ingress.limits import Limit, Limiter, Limits, Need, Refused, Reservation
from serai.ingress.shared_limits import BudgetUnknown, SharedLimits
from serai.runtime.bus import BusError, Message
from unit.fakes import FakeBus

SCOPE = "project:p"
KEY = to_token(SCOPE)


class Accounts:
    """A bucket with compare-and-set, slow enough that everybody gets in everybody's way."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[bytes, int]] = {}
        self.calls = 0
        self.get_fails = False
        self.update_fails = ""
        """`before` it was written, or `after`."""

    async def get(self, key: str) -> tuple[bytes, int] | None:
        self.calls += 1
        await asyncio.sleep(0)
        if self.get_fails:
            raise BusError("no answer")
        return self.kept.get(key)

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        self.calls += 1
        await asyncio.sleep(0)
        if self.update_fails == "before":
            raise BusError("no answer")
        if self.kept.get(key, (b"", 0))[1] != revision:
            return False
        self.kept[key] = (value, revision + 1)
        await asyncio.sleep(0)
        if self.update_fails == "after":
            raise BusError("no answer")
        return True

    @property
    def account(self) -> BudgetAccount:
        return decode(BudgetAccount, self.kept[KEY][0])


class Process:
    """One ingress, as far as limits go."""

    def __init__(self, accounts: Accounts, budget: int = 1000) -> None:
        self.bus = FakeBus()
        self.limiter = Limiter()
        self.shared = SharedLimits(self.bus, self.limiter, accounts)
        self.shared.configure({SCOPE: Limits(budget_micros=budget)}, 0)

    async def ask(self, cost: int) -> Reservation | Refused:
        return await self.shared.reserve([SCOPE], Need(1, cost), Period.EVER)

    async def settle(self) -> None:
        await self.shared._settle(SCOPE)

    @property
    def left(self) -> int:
        scope = self.limiter.scope(SCOPE)
        assert scope is not None
        return scope.left_micros


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_a_hundred_at_once_cannot_overrun_a_budget_for_ten_and_ten_get_it(processes: int) -> None:
    async def main() -> None:
        accounts = Accounts()
        some = [Process(accounts) for _ in range(processes)]
        found = await asyncio.gather(*[some[n % processes].ask(100) for n in range(100)])
        granted = [one for one in found if isinstance(one, Reservation)]
        assert len(granted) == 10
        refused = next(one for one in found if isinstance(one, Refused))
        assert (refused.limit, refused.retry_after_s) == (Limit.BUDGET, None)
        for reservation in granted:
            reservation.settle(Need(1, 60))
        for process in some:
            await process.settle()
        assert accounts.account.spent_micros == 600
        await asyncio.sleep(module.EMPTY_FOR_S)  # For so long it is not asked again whether there is any.
        again = await asyncio.gather(*[some[n % processes].ask(100) for n in range(100)])
        assert sum(isinstance(one, Reservation) for one in again) == 4

    run(main)


def test_most_requests_of_a_large_budget_need_not_ask() -> None:
    async def main() -> None:
        accounts = Accounts()
        process = Process(accounts, budget=1_000_000)
        for _ in range(100):
            found = await process.ask(100)
            assert isinstance(found, Reservation)
            found.settle(Need(1, 100))
        assert accounts.calls == 2

    run(main)


def test_what_is_not_needed_is_given_back_and_all_of_it_at_the_end() -> None:
    async def main() -> None:
        accounts = Accounts()
        process = Process(accounts, budget=100_000)
        found = await process.ask(100)
        assert isinstance(found, Reservation)
        assert process.left == 1900
        found.settle(Need(1, 70))
        await process.settle()
        assert (accounts.account.spent_micros, process.left) == (70, 1998)
        await process.settle()  # Nothing was asked for since the last time.
        assert (accounts.account, process.left) == (BudgetAccount("ever", 70), 0)
        found = await process.ask(100)
        assert isinstance(found, Reservation)
        found.settle(Need(1, 10))
        await process.shared.aclose()
        assert accounts.account == BudgetAccount("ever", 80)

    run(main)


def test_without_nats_what_is_leased_is_spent_and_then_nobody_knows() -> None:
    async def main() -> None:
        accounts = Accounts()
        process = Process(accounts, budget=100_000)
        await process.ask(1000)
        accounts.get_fails = True
        assert isinstance(await process.ask(1000), Reservation)
        with pytest.raises(BudgetUnknown):
            await process.ask(1000)
        accounts.get_fails = False
        assert isinstance(await process.ask(1000), Reservation)

    run(main)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_without_an_answer_is_neither_lost_nor_done_twice(when: str) -> None:
    async def main() -> None:
        accounts = Accounts()
        process = Process(accounts, budget=100_000)
        found = await process.ask(1000)
        assert isinstance(found, Reservation)
        found.settle(Need(1, 900))
        accounts.update_fails = when
        with pytest.raises(BudgetUnknown):
            await process.settle()
        with pytest.raises(BudgetUnknown):  # It may have been given back: nothing of it may be spent.
            await process.ask(100)
        accounts.update_fails = ""
        found = await process.ask(100)
        assert isinstance(found, Reservation)
        found.settle(Need(1, 100))
        await process.shared.aclose()
        assert accounts.account == BudgetAccount("ever", 1000)

    run(main)


def test_who_is_cancelled_while_a_lease_is_fetched_leaves_nothing_behind() -> None:
    async def main() -> None:
        for turns in range(8):
            accounts = Accounts()
            process = Process(accounts, budget=100_000)
            asking = asyncio.create_task(process.ask(100))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            found = await process.ask(100)
            assert isinstance(found, Reservation), turns
            found.settle(Need(1, 100))
            await process.shared.aclose()
            spent = accounts.account.spent_micros
            assert spent == 100 or not asking.cancelled()

    run(main)


def test_an_account_that_vanished_is_made_again_from_what_is_remembered() -> None:
    async def main() -> None:
        accounts = Accounts()
        process = Process(accounts)
        found = await process.ask(900)
        assert isinstance(found, Reservation)
        found.settle(Need(1, 900))
        await process.settle()
        accounts.kept.clear()
        assert isinstance(await process.ask(101), Refused)
        await process.settle()
        assert isinstance(await process.ask(100), Reservation)

    run(main)


def test_an_account_that_cannot_be_read_is_not_one_with_nothing_spent() -> None:
    async def main() -> None:
        accounts = Accounts()
        accounts.kept[KEY] = (b"{", 1)
        with pytest.raises(BudgetUnknown, match="project:p"):
            await Process(accounts).ask(1)

    run(main)


def test_what_is_taken_is_told_once_and_told_again_while_requests_run_or_nats_was_gone() -> None:
    async def main() -> None:
        process = Process(Accounts())
        await process.ask(1)
        process.shared.tell(1.0)
        [message] = process.bus.take()
        assert decode(LimitsUse, message.payload).scopes == {SCOPE: ScopeUse(1, 1, 1)}
        process.shared.tell(1.2)
        assert not process.bus.take()
        process.shared.tell(2.1)
        assert len(process.bus.take()) == 1
        await process.ask(1)
        process.bus.connected = False
        process.shared.tell(2.2)
        process.bus.connected = True
        process.shared.tell(2.4)
        [message] = process.bus.take()
        assert decode(LimitsUse, message.payload).scopes == {SCOPE: ScopeUse(2, 2, 2)}

    run(main)


def test_a_process_that_has_fallen_silent_holds_no_places() -> None:
    async def main() -> None:
        process = Process(Accounts())
        told = LimitsUse("other", 0.0, {SCOPE: ScopeUse(1, 1, 1)})
        process.shared.on_limits(Message("limits.other", encode(told)))
        process.shared.on_limits(Message("limits.other", b"?"))
        scope = process.limiter.scope(SCOPE)
        assert scope is not None
        heard_at_s = process.shared._heard_at_s["other"]
        process.shared.tell(heard_at_s + module.SILENT_S - 0.1)
        assert scope.running == 1
        process.shared.tell(heard_at_s + module.SILENT_S + 0.1)
        assert scope.running == 0
        process.shared.tell(heard_at_s + module.FORGET_S + 0.1)
        assert not scope.elsewhere

    run(main)
