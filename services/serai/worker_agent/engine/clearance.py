"""Before an engine starts: what former runs left behind is ended, and GPUs that others hold are waited for."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from serai.contracts.session_record import GpuDevice
from serai.worker_agent.engine import process_table
from serai.worker_agent.engine.gpu_memory import Held, held_by_others, held_story, lost_of
from serai.worker_agent.engine.process import kill
from serai.worker_agent.engine.process_table import ProcessIdentity

log = structlog.get_logger()

ORPHAN_GRACE_S = 2.0
LOOK_EVERY_S = 2.0
_SOON_S = 0.05


class NodeBusy(Exception):
    """Others hold the GPU's memory, and did not let go of it in time."""


@dataclass(frozen=True, slots=True)
class NodeFault:
    """What is wrong with the node, for people."""

    story: str
    busy: bool
    """Others hold a GPU's memory; else a GPU is gone."""


class Clearance(Protocol):
    """Looks after what is around an engine."""

    async def clear(self, on_waiting: Callable[[], None]) -> None:
        """Returns when an engine may start; calls back when it has to wait. Raises NodeBusy."""

    async def fault(self) -> NodeFault | None:
        """What of the node may have ended an engine."""


class NothingInTheWay:
    """The `Clearance` of a place where there is nothing to clear."""

    async def clear(self, on_waiting: Callable[[], None]) -> None:
        """At once."""

    async def fault(self) -> NodeFault | None:
        """None ever."""
        return None


class NodeClearance:
    """The real `Clearance`."""

    def __init__(self, gpus: Sequence[GpuDevice], *, wait_s: float, borne_bytes: int) -> None:
        """`borne_bytes`: what others may hold of a GPU without being in the way."""
        self._gpus = gpus
        self._wait_s = wait_s
        self._borne_bytes = borne_bytes

    async def clear(self, on_waiting: Callable[[], None]) -> None:
        """Ends what is left over, and waits for the GPUs."""
        await end_left_over()
        give_up_at_s = time.monotonic() + self._wait_s
        told = False
        while held := await self._held():
            if not told:
                log.warning("gpus.held", by=held_story(held), wait_s=self._wait_s)
                on_waiting()
                told = True
            if time.monotonic() >= give_up_at_s:
                raise NodeBusy(
                    f"{held_story(held)}, still so after {self._wait_s:g} s, so no engine was started; use another "
                    f"node, end what holds it, or where GPUs are shared on purpose allow it with --gpu-others-gib"
                )
            await asyncio.sleep(min(LOOK_EVERY_S, self._wait_s or LOOK_EVERY_S))

    async def fault(self) -> NodeFault | None:
        """Asks nvidia-smi, where there is one."""
        if held := await self._held():
            return NodeFault(held_story(held), busy=True)
        if lost := await lost_of(self._gpus):
            return NodeFault(f"{', '.join(lost)} is gone: nvidia-smi does not list it any more", busy=False)
        return None

    async def _held(self) -> list[Held]:
        if not self._gpus:
            return []
        ours = await asyncio.to_thread(process_table.sibling_pids)
        return [one for one in await held_by_others(self._gpus, ours) if one.bytes_held > self._borne_bytes]


async def end_left_over() -> list[ProcessIdentity]:
    """Ends engines of our user whose agent is gone. Which ones that were."""
    found = await asyncio.to_thread(process_table.left_over)
    if not found:
        return []
    log.warning("engine.left_over", pids=[process.pid for process in found], effect="ended")
    for process in found:
        kill(process, signal.SIGTERM)
    for _ in range(round(ORPHAN_GRACE_S / _SOON_S)):
        if not any(process.alive for process in found):
            break
        await asyncio.sleep(_SOON_S)
    for process in found:
        kill(process, signal.SIGKILL)
    return found
