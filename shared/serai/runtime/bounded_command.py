"""Asking a command of the host something: bounded in time and in what it may say, and never fatal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

OUTPUT_BYTES_MAX = 32 * 1024 * 1024
"""Fifty thousand jobs are 10 MB."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ended by itself."""

    code: int
    """Its exit code; negative = the signal that ended it."""
    output: str
    errors: str


@dataclass(frozen=True, slots=True)
class NotEnded:
    """A command that did not come to its end, and why, in a line."""

    reason: str


async def run_bounded(command: Sequence[str], timeout_s: float, given: str = "") -> Ended | NotEnded:
    """Runs it with `given` as its standard input. It and its children are killed when it has not ended after
    `timeout_s` seconds, or says too much: batch systems' commands hang when their controller does, and ignore TERM."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return NotEnded(f"{command[0]} cannot be started: {getattr(error, 'strerror', None) or error}")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(timeout_s):
            _, output, errors = await asyncio.gather(
                _write(process.stdin, given.encode()), _read(process.stdout), _read(process.stderr)
            )
            code = await process.wait()
    except TimeoutError:
        return NotEnded(f"{command[0]} has not ended after {timeout_s:g} s")
    except _TooMuch:
        return NotEnded(f"{command[0]} said more than {OUTPUT_BYTES_MAX} bytes")
    finally:
        # Also children that it left behind: they may hold its output open for ever.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # What they hold open is not ours to wait for.
    return Ended(code, output.decode(errors="replace"), errors.decode(errors="replace"))


async def output_of(command: Sequence[str], timeout_s: float) -> str | None:
    """Its standard output; None when it cannot be started, fails, or does not come to its end."""
    result = await run_bounded(command, timeout_s)
    return result.output if isinstance(result, Ended) and result.code == 0 else None


class _TooMuch(Exception):
    pass


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    try:
        if data:
            stream.write(data)
            await stream.drain()
        stream.close()
    except (BrokenPipeError, ConnectionResetError, RuntimeError):  # The last is uvloop's, of a pipe that is closed.
        pass  # It did not want to hear it; its exit code tells whether that matters.


async def _read(stream: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await stream.read(65_536):
        parts.append(part)
        if (size := size + len(part)) > OUTPUT_BYTES_MAX:
            raise _TooMuch
    return b"".join(parts)
