"""Child processes of `serai up`: each with its own log file, dying with their parent, started again when they fail."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from serai.runtime.parent_death import die_with_parent

RESTART_FIRST_S = 1.0
RESTART_MAX_S = 30.0
STEADY_AFTER_S = 60.0
"""A child that ran for so long starts again with the first pause."""


class Child:
    """One program with its log. `run_once` until the system is up, `keep_running` from then on."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_file: Path,
        stop_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = command
        self.log_file = log_file
        self.stop_s = stop_s
        self.environment = dict(environment or {})
        self.process: asyncio.subprocess.Process | None = None
        self._stopping = False

    async def start(self) -> None:
        """Raises OSError when the program cannot be started."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
                start_new_session=True,  # Ctrl-C in the terminal is for us; we stop them in order.
                preexec_fn=die_with_parent,
            )

    async def ended(self) -> int:
        """The exit code, once it has ended."""
        assert self.process is not None
        return await self.process.wait()

    async def keep_running(self, say: Callable[[str], None]) -> None:
        """Starts it again whenever it ends, with growing pauses, until `stop`."""
        pause_s = RESTART_FIRST_S
        while True:
            started_s = time.monotonic()
            code = await self.ended()
            if self._stopping:
                return
            if time.monotonic() - started_s > STEADY_AFTER_S:
                pause_s = RESTART_FIRST_S
            say(f"{self.name} ended (exit code {code}); starting it again in {pause_s:g} s. Its log: {self.log_file}")
            await asyncio.sleep(pause_s)
            pause_s = min(RESTART_MAX_S, pause_s * 2)
            await self.start()

    async def stop(self) -> None:
        """SIGTERM; SIGKILL after `stop_s`."""
        self._stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.stop_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def last_lines(self, count: int = 8) -> str:
        """The end of its log."""
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        return "\n".join(f"  {line[:400]}" for line in lines[-count:])

    def children_pids(self) -> list[int]:
        """Processes that it has started itself."""
        if self.process is None:
            return []
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []
