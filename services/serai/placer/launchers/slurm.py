"""Slurm, by the site's own `serai launcher`: it knows queues, maintenances, quarantined nodes and time limits, submits
jobs that fit, and cancels only what has drained. Here it is only told how many slots of a deployment are wanted.
"""

from __future__ import annotations

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.launcher import LauncherWord, ScaleRequest
from serai.contracts.subjects import LAUNCHER_SCALE
from serai.placer.placement_file import Launchable
from serai.runtime.bus import Bus, BusError, NoResponders

TIMEOUT_S = 5.0


class SlurmLauncher:
    """By messages to the launcher of the site."""

    def __init__(self, bus: Bus, site: str) -> None:
        self._bus = bus
        self._site = site

    async def scale(self, what: Launchable, count: int, why: str) -> str:
        request = encode(ScaleRequest(what.name, count, why))
        try:
            message = await self._bus.request(LAUNCHER_SCALE.of_site(self._site), request, TIMEOUT_S)
            return decode(LauncherWord, message.data).problem
        except NoResponders:
            return f"no launcher runs for site {self._site!r}"
        except (BusError, MalformedMessage) as error:
            return str(error)
