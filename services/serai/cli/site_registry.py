"""A look at the registry of a site file's site, for commands that go on without one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from serai.cli.registry_reader import Failed, Reader, ReaderSettings, reading
from serai.launcher.jobs import Unknown
from serai.launcher.site import Site
from serai.runtime.bus import BusError

_T = TypeVar("_T")
TIMEOUT_S = 10.0


async def look(site: Site, see: Callable[[Reader], Awaitable[_T]]) -> _T | Unknown:
    """What `see` makes of it; Unknown when nobody answers within `TIMEOUT_S`."""
    if not site.nats.tools_nkey_file:
        return Unknown("the site file has no `tools_nkey_file` below `nats`")
    try:
        settings = _reader_settings(site)
        async with asyncio.timeout(TIMEOUT_S), reading(settings) as reader:
            return await see(reader)
    except TimeoutError:
        return Unknown(f"NATS at {site.nats.tools_url or site.nats.url} has not answered within {TIMEOUT_S:g} s")
    except (Failed, BusError, ValueError) as error:
        told = str(error).replace("--nats-url", "`url` below `nats` in the site file")
        return Unknown(" ".join(told.split()))


def _reader_settings(site: Site) -> ReaderSettings:
    """Raises ValueError. The certificate's authority goes by the environment, as everywhere."""
    nats = site.nats
    if nats.ca_file:
        os.environ.setdefault("SSL_CERT_FILE", str(_here(nats.ca_file)))
    return ReaderSettings(
        nats_url=nats.tools_url or nats.url, nats_nkey_file=_here(nats.tools_nkey_file), site=site.name
    )


def _here(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()
