"""The placement file as it is now. One that cannot be used changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from serai.placer.placement_file import PlacementFile
from serai.runtime.fields import BadInput

log = structlog.get_logger()


class WatchedFile:
    """Raises BadInput when it cannot be used from the beginning."""

    def __init__(self, read: Callable[[], PlacementFile]) -> None:
        self._read = read
        self.now = read()
        self.problem = ""
        """Of the one that lies there, when an earlier one still counts."""

    def again(self) -> bool:
        """Reads it; whether it has changed."""
        try:
            fresh = self._read()
        except BadInput as error:
            if str(error) != self.problem:
                log.error("placer.file_refused", error=str(error), effect="the one before goes on to count")
            self.problem = str(error)
            return False
        self.problem = ""
        if fresh is self.now:
            return False
        log.info("placer.file_read", models=sorted(fresh.models), mode=str(fresh.mode))
        self.now = fresh
        return True
