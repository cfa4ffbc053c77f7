"""That a task which is cancelled while it waits for NATS ends, whatever comes in that moment."""

from __future__ import annotations

import asyncio

import pytest

from serai.runtime.nats_bus import never_forgetting_a_cancel


def test_a_cancel_that_comes_with_the_answer_is_not_forgotten() -> None:
    async def main() -> None:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(never_forgetting_a_cancel(asyncio.wait_for(answer, 5)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answer.set_result("here")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_who_is_cancelled_already_may_still_ask_for_its_last_words() -> None:
    async def last_words() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(answer.set_result, "heard")
            said.append(await never_forgetting_a_cancel(asyncio.wait_for(answer, 5)))
        return ""

    async def main() -> None:
        task = asyncio.create_task(last_words())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    said: list[str] = []
    asyncio.run(main())
    assert said == ["heard"]
