"""Asking a command of the host something: bounded in time and never fatal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence


async def output_of(command: Sequence[str], timeout_s: float) -> str | None:
    """Its standard output; None when it cannot be started, fails, or has not ended after `timeout_s` seconds. It and
    its children are killed then: batch systems' commands hang when their controller does."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            await process.wait()
    return output.decode(errors="replace") if process.returncode == 0 else None
