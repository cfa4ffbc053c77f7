"""The loop in virtual time: asyncio as on a real one, but for what time it is."""

from __future__ import annotations

import asyncio
import time

import pytest

from serai.simulator.whole.virtual_loop import START_S, Stalled, VirtualLoop, run


def test_an_hour_takes_no_time_and_is_an_hour() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600)
        return loop.time() - START_S

    began_s = time.monotonic()
    assert run(main()) == pytest.approx(3600, abs=1e-6)
    assert time.monotonic() - began_s < 60  # Of an hour.


def test_timers_run_by_time_and_those_of_one_instant_in_the_order_they_were_set() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        order: list[int] = []
        for number, delay_s in enumerate((2.0, 1.0, 1.0, 0.0, 1.0)):
            loop.call_later(delay_s, order.append, number)
        await asyncio.sleep(3)
        return order

    assert run(main()) == [3, 1, 2, 4, 0]


def test_what_is_ready_runs_before_time_goes_on() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        order: list[str] = []
        loop.call_later(1e-9, order.append, "timer")
        for _ in range(5):
            order.append("ready")
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        return order

    assert run(main()) == [*["ready"] * 5, "timer"]


def test_cancelled_timers_never_run_and_leave_no_time_behind() -> None:
    async def main() -> tuple[list[int], float]:
        loop = asyncio.get_running_loop()
        ran: list[int] = []
        timers = [loop.call_later(1 + number, ran.append, number) for number in range(5000)]
        for timer in timers[1:]:
            timer.cancel()
        await asyncio.sleep(0.5)
        await asyncio.sleep(1)
        return ran, loop.time() - START_S

    assert run(main()) == ([0], 1.5)


def test_timeouts_and_cancellation_are_asyncios_own() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(10)
        task = loop.create_task(asyncio.sleep(100))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(2))
            tasks.create_task(asyncio.sleep(3))
        return loop.time() - START_S

    assert run(main()) == pytest.approx(9)


def test_waiting_for_what_never_comes_is_told() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stalled, match="nothing will ever happen"):
        run(main())


def test_a_loop_that_never_rests_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    monkeypatch.setattr("serai.simulator.whole.virtual_loop.TURNS_PER_INSTANT_MAX", 1000)
    with pytest.raises(Stalled, match="time stands still"):
        run(main())


def test_a_run_has_a_limit_in_virtual_time() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(Stalled, match="within 60 s"):
        run(main(), VirtualLoop(60))


def test_what_callbacks_raise_is_kept() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)
        return loop.problems

    assert "ZeroDivisionError" in run(main())[0]


def test_threads_and_sockets_are_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(NotImplementedError):
            await asyncio.to_thread(time.sleep, 0)
        with pytest.raises(RuntimeError, match="no network"):
            await loop.create_connection(asyncio.Protocol, "127.0.0.1", 80)

    run(main())
