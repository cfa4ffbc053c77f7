"""What the placer asks of a launcher."""

from __future__ import annotations

from typing import Protocol

from serai.placer.placement_file import Launchable


class Launcher(Protocol):
    """Brings more pool agents, or fewer."""

    async def scale(self, what: Launchable, count: int, why: str) -> str:
        """So many are wanted from now on. Why that cannot be, in a line; empty = it was taken. Asked again with the
        same number it changes nothing."""
