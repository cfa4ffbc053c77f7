"""Keeps the ingress's copy of the registry: listens to agents directly, and asks the registry for what it missed."""

from __future__ import annotations

import asyncio
import random
import time

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.registry import SnapshotPage, SnapshotRequest
from serai.contracts.session_record import SessionRecord
from serai.contracts.status import SessionStatus
from serai.contracts.subjects import SESSION, SNAPSHOT, STATUS
from serai.runtime.bus import Bus, BusError, Message, Subscription
from serai.runtime.registry_replica import RegistryReplica

log = structlog.get_logger()

REPAIR_EVERY_S = 10.0
REPAIR_PAUSE_S = 0.2
"""Several signs of something missed in a row are repaired by one snapshot."""
SNAPSHOT_TIMEOUT_S = 2.0


class RegistryCopy:
    """Feeds a `RegistryReplica` from the bus."""

    def __init__(self, bus: Bus, site: str) -> None:
        self._bus = bus
        self._site = site
        self.replica = RegistryReplica()
        self._missed = asyncio.Event()
        self.synced = False
        """Whether a snapshot has been merged since the start; until then "unknown" does not mean "not there"."""

    async def start(self) -> list[Subscription]:
        """Subscribes; the caller puts a barrier behind it."""
        self._bus.on_reconnect(self._missed.set)
        return [
            await self._bus.subscribe(SESSION.every, self.on_session),
            await self._bus.subscribe(STATUS.every, self.on_status),
        ]

    def on_session(self, message: Message) -> None:
        """A record, from its agent or from a registry."""
        try:
            record = decode(SessionRecord, message.data)
        except MalformedMessage as error:
            log.warning("session.malformed", subject=message.subject, error=str(error))
            return
        if message.subject == SESSION.of(record.session):
            self.replica.merge(record, time.monotonic(), heard=True)

    def on_status(self, message: Message) -> None:
        """A sign of life; when it tells of a newer record, that one was missed."""
        try:
            status = decode(SessionStatus, message.data)
        except MalformedMessage as error:
            log.warning("status.malformed", subject=message.subject, error=str(error))
            return
        if self.replica.hear(status, time.monotonic()):
            self._missed.set()

    async def repairing(self) -> None:
        """Merges a snapshot at the start, whenever something was missed, and now and then anyway."""
        while True:
            self._missed.clear()
            await self.repair()
            try:
                async with asyncio.timeout(REPAIR_EVERY_S * random.uniform(0.8, 1.2)):
                    await self._missed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(REPAIR_PAUSE_S)

    async def repair(self) -> None:
        """One whole snapshot, page by page. Without a registry the copy stays as it is."""
        after, more = "", True
        try:
            while more:
                answer = await self._bus.request(SNAPSHOT.of_site(self._site), encode(SnapshotRequest(after)), SNAPSHOT_TIMEOUT_S)
                page = decode(SnapshotPage, answer.data)
                for record in page.records:
                    self.replica.merge(record, time.monotonic())
                last = page.records[-1].session if page.records else ""
                more = page.more and last > after  # A page that leads nowhere is the last.
                after = last
        except (BusError, MalformedMessage) as error:
            log.info("registry.no_snapshot", error=str(error), effect="routing goes on from what was heard")
            return
        self.synced = True
