"""The files that an ingress is configured by, looked at again while it runs: keys and configuration.

What has changed takes effect with the next request; streams go on. A file that has become wrong changes nothing: its
fault is logged, shown by `/health/ready` and counted, and what was read before holds until the file is right again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from serai.ingress import metrics
from serai.ingress.access import Access, BadKeysFile
from serai.ingress.configuration import Configuration
from serai.ingress.configuration_file import BadConfiguration, Configured

log = structlog.get_logger()

LOOK_EVERY_S = 2.0


class Reloading:
    """Watches both files; `apply` is told of everything that holds from now on."""

    def __init__(self, access: Access, configured: Configured, apply: Callable[[Configuration], None]) -> None:
        self._access = access
        self._configured = configured
        self._apply = apply
        self._wanted = asyncio.Event()
        self._wrong: dict[str, str] = {}
        for file in ("keys", "configuration"):
            metrics.CONFIGURATION_VALID.labels(file).set(1)

    @property
    def wrong(self) -> list[str]:
        """Which files are not in effect as they are now."""
        return list(self._wrong)

    def now(self) -> None:
        """Looks at once instead of within `LOOK_EVERY_S`."""
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):  # Not wait_for: it may swallow that we are cancelled.
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            await self.look()

    async def look(self) -> None:
        """Takes over what has changed."""
        # In a thread: a long file takes longer than a token may be late.
        configuration = self._taken("configuration", await asyncio.to_thread(_read, self._configured.refresh))
        keys = self._taken("keys", _read(self._access.refresh))
        if configuration and (waiting := self._configured.needs_restart()):
            log.warning("configuration.needs_restart", settings=waiting, effect="they stay as they are until then")
        if keys or configuration:
            self._apply(self._configured.configuration)

    def _taken(self, file: str, found: bool | str) -> bool:
        """Whether it has changed; a fault is told once."""
        if isinstance(found, str):
            if self._wrong.get(file) != found:
                log.error(f"{file}.wrong", error=found, effect="what was read before holds")
            self._wrong[file] = found
            metrics.CONFIGURATION_VALID.labels(file).set(0)
            return False
        if found:
            log.info(f"{file}.read")
            self._wrong.pop(file, None)
            metrics.CONFIGURATION_VALID.labels(file).set(1)
        return found


def _read(refresh: Callable[[], bool]) -> bool | str:
    """Whether the file has changed; or what is wrong with it."""
    try:
        return refresh()
    except (BadKeysFile, BadConfiguration) as error:
        return str(error)
