"""Clears away, in KV, what pools that are no more were to run: looks every few minutes, and tells nobody anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import structlog

from serai.contracts.codec import MalformedMessage, decode
from serai.contracts.placement import ASSIGNMENT_LABEL, Assignments
from serai.contracts.session_record import Lifecycle
from serai.placer.leftovers import Fate, Leftovers
from serai.runtime.bus import BusError
from serai.runtime.kv_lease import StateKeys
from serai.runtime.registry_replica import RegistryReplica

log = structlog.get_logger()

LOOK_EVERY_S = 600.0


class PoolKeys(StateKeys, Protocol):
    """Where what pools are to run lies: `NatsBucket`. Raises BusError."""

    async def entries(self) -> dict[str, bytes]: ...

    async def delete(self, key: str) -> None: ...


class Clearing:
    """Of one site's keys; `heard` are the pools that speak."""

    def __init__(self, keys: PoolKeys, replica: RegistryReplica, heard: Callable[[], Collection[str]]) -> None:
        self._keys = keys
        self._replica = replica
        self._heard = heard
        self._leftovers = Leftovers()

    async def run(self, acts: Callable[[], bool]) -> None:
        """As long as this placer acts; what it has not heard of in that time has been silent."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if not acts():
                self._leftovers.start_over()
                continue
            try:
                await self.look(time.monotonic())
            except BusError as error:
                log.warning("placer.not_cleared", error=str(error), effect="looked at again")

    async def look(self, now: float) -> None:
        """Once."""
        kept = await self._keys.entries()
        silent = self._leftovers.note(kept, self._heard(), now)
        fates = {pool: self._fate(kept[pool]) for pool in silent}
        for pool in self._leftovers.due(fates, now):
            if pool in self._heard():
                continue  # It has come back in this moment.
            await self._keys.delete(pool)
            log.info("placer.pool_cleared", pool=pool, why=f"it is silent, and its sessions are {fates[pool].name}")

    def _fate(self, data: bytes) -> Fate:
        try:
            named = {one.id for one in decode(Assignments, data).run}
        except MalformedMessage:
            named = set()
        found = [record for record in self._replica.records() if _assigned(record.metadata.labels) in named]
        if not found:
            return Fate.UNKNOWN
        left = all(record.lifecycle is Lifecycle.LEFT for record in found)
        return Fate.LEFT if left else Fate.THERE


def _assigned(labels: Mapping[str, str]) -> str | None:
    return labels.get(ASSIGNMENT_LABEL)
