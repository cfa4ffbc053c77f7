"""What the batch system itself says a job would wait: often too much, sometimes the only word there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from serai.launcher.deployments import Deployment
from serai.launcher.jobs import ExpectedStart, Slurm
from serai.runtime.slurm_time import duration_text

FIRST_AFTER_S = 10.0
ASK_EVERY_S = 900.0


class Estimates:
    """By deployment."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self.wait_s: dict[str, float] = {}

    async def run(self, wanted: Callable[[], Sequence[Deployment]]) -> None:
        """Asks now and then, for those that jobs are submitted for."""
        while True:
            await asyncio.sleep(FIRST_AFTER_S)
            for one in wanted():
                answer = await self._slurm.expected_start(one.script, [f"--time={duration_text(one.time_limit_s)}"])
                self.wait_s.pop(one.name, None)
                if isinstance(answer, ExpectedStart):
                    self.wait_s[one.name] = answer.wait_s
            await asyncio.sleep(ASK_EVERY_S)
