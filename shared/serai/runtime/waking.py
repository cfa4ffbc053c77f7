"""A loop that looks now and then, and at once when something has happened."""

from __future__ import annotations

import asyncio


async def woken_or_after(wake: asyncio.Event, seconds: float) -> None:
    """Returns when `wake` is set, or after so long; and it is no longer set then."""
    try:
        async with asyncio.timeout(seconds):  # Not wait_for: it may swallow that we are cancelled.
            await wake.wait()
    except TimeoutError:
        pass
    wake.clear()
