"""How engines are started at this site: what its settings say of scratch folders, interfaces and proxies."""

from __future__ import annotations

import os
import socket

from serai.runtime.settings import refuse
from serai.worker_agent.engine.environment import caches_in
from serai.worker_agent.engine.interfaces import address_of
from serai.worker_agent.engine.process import LoopbackStarter
from serai.worker_agent.settings import AgentSettings


def starter_of(settings: AgentSettings) -> LoopbackStarter:
    """With what the site says of its nodes."""
    address = ""
    if settings.interface:
        try:
            address = address_of(settings.interface)
        except OSError:
            there = ", ".join(name for _, name in socket.if_nameindex())
            refuse(f"--interface {settings.interface!r}: has no IPv4 address on this node; there are {there}")
    if settings.scratch:
        try:
            os.makedirs(caches_in(settings.scratch), mode=0o700, exist_ok=True)
        except OSError as error:
            refuse(f"--scratch {settings.scratch!r}: {error.strerror}; name a folder that this user may write to")
    return LoopbackStarter(
        scratch=settings.scratch,
        interface=settings.interface,
        address=address,
        keep_proxies=settings.engine_proxies,
    )
