"""The registry's shell: messages into the replica, the replica into KV, snapshots to whoever asks."""

from __future__ import annotations

import asyncio
import time

import structlog
from prometheus_client import Gauge

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.registry import SnapshotPage, SnapshotRequest
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.status import SessionStatus
from serai.contracts.subjects import SESSION, SESSIONS_BUCKET, SNAPSHOT, STATUS
from serai.registry.membership import CloseRecord, ForgetRecord, Observation, due
from serai.registry.settings import RegistrySettings
from serai.runtime.bus import Bus, BusDisconnected, BusError, Message, MessageTooLarge
from serai.runtime.registry_replica import RegistryReplica

log = structlog.get_logger()

LOOK_EVERY_S = 1.0
STORE_RETRY_S = 1.0
PAGE_BYTES_MAX = 256 * 1024

SESSIONS = Gauge("serai_registry_sessions", "Session records known, by lifecycle", ["lifecycle"])


class Registry:
    """Collaborators come from outside; `run` returns when told to stop."""

    def __init__(self, settings: RegistrySettings, bus: Bus) -> None:
        self._settings = settings
        self._bus = bus
        self._bucket = bus.bucket(SESSIONS_BUCKET)
        self.replica = RegistryReplica()
        self._unstored: set[str] = set()
        self._store_wanted = asyncio.Event()
        self._listening_since_s = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Listens first, then reads what KV still knows: the order in which records come does not matter."""
        subscriptions = [
            await self._bus.subscribe(SESSION.every, self.on_session),
            await self._bus.subscribe(STATUS.every, self.on_status),
            await self._bus.subscribe(SNAPSHOT.of_site(self._settings.site), self.on_snapshot),
        ]
        await self._bus.barrier()
        await self._read_bucket()
        self._bus.on_reconnect(self._listen_anew)
        log.info("registry.ready", sessions=len(self.replica))
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._storing()), tasks.create_task(self._looking())]
            await stop.wait()
            for task in working:
                task.cancel()
        for subscription in subscriptions:
            await subscription.unsubscribe()
        await self._store_once()

    # -- bus handlers --------------------------------------------------------------------------------------------

    def on_session(self, message: Message) -> None:
        """A record: joined in, stored, and acknowledged with the joined one."""
        try:
            record = decode(SessionRecord, message.data)
        except MalformedMessage as error:
            log.warning("session.malformed", subject=message.subject, error=str(error))
            return
        if message.subject != SESSION.of(record.session):
            log.warning("session.foreign", subject=message.subject, session=record.session)
            return
        if self.replica.merge(record, time.monotonic(), heard=True):
            self._changed(record.session)
        joined = self.replica.get(record.session)
        if message.reply and joined is not None:
            self._answer(message.reply, encode(joined))

    def on_status(self, message: Message) -> None:
        """A sign of life."""
        try:
            status = decode(SessionStatus, message.data)
        except MalformedMessage as error:
            log.warning("status.malformed", subject=message.subject, error=str(error))
            return
        self.replica.hear(status, time.monotonic())

    def on_snapshot(self, message: Message) -> None:
        """A page of records for a service that starts, or that checks its copy."""
        try:
            request = decode(SnapshotRequest, message.data)
        except MalformedMessage as error:
            log.warning("snapshot.malformed", error=str(error))
            return
        self._answer(message.reply, encode(self.page(request.after)))

    def page(self, after: str) -> SnapshotPage:
        """The records after `after`, as many as fit in a page."""
        records: list[SessionRecord] = []
        size = 0
        page_bytes_max = min(PAGE_BYTES_MAX, self._bus.message_bytes_max - 1024)
        for record in self.replica.records():
            if record.session <= after:
                continue
            size += len(encode(record))
            if records and size > page_bytes_max:
                return SnapshotPage(records, more=True)
            records.append(record)
        return SnapshotPage(records)

    # -- keeping -------------------------------------------------------------------------------------------------

    async def _read_bucket(self) -> None:
        try:
            stored = await self._bucket.entries()
        except BusError as error:
            log.warning("registry.bucket_unreadable", error=str(error), effect="starting from what agents announce")
            return
        now = time.monotonic()
        for key, value in stored.items():
            try:
                self.replica.merge(decode(SessionRecord, value), now)
            except MalformedMessage as error:
                log.warning("registry.bad_record", key=key, error=str(error))

    def _changed(self, session: str) -> None:
        record = self.replica.get(session)
        if record is not None:
            log.info("session.changed", session=session, lifecycle=record.lifecycle.name, version=record.version)
        self._unstored.add(session)
        self._store_wanted.set()

    async def _storing(self) -> None:
        while True:
            await self._store_wanted.wait()
            self._store_wanted.clear()
            if not await self._store_once():
                await asyncio.sleep(STORE_RETRY_S)
                self._store_wanted.set()

    async def _store_once(self) -> bool:
        """Writes what changed; False when some of it must be tried again."""
        for session in sorted(self._unstored):
            record = self.replica.get(session)
            self._unstored.discard(session)
            if record is None:
                continue
            try:
                await self._bucket.put(session, encode(record))
            except BusError as error:
                self._unstored.add(session)
                log.warning("registry.not_stored", session=session, error=str(error))
                return False
        return True

    # -- looking -------------------------------------------------------------------------------------------------

    async def _looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._look(time.monotonic())

    async def _look(self, now: float) -> None:
        if not self._bus.connected:
            return  # Whoever hears nothing at all knows nothing of who is silent.
        records = self.replica.records()
        for lifecycle in Lifecycle:
            SESSIONS.labels(lifecycle.name).set(sum(record.lifecycle is lifecycle for record in records))
        effects = due(
            (
                Observation(r, self.replica.silent_s(r.session, now), self.replica.suspected(r.session, now))
                for r in records
            ),
            observed_for_s=now - self._listening_since_s,
            silence_grace_s=self._settings.silence_grace_s,
            retention_s=self._settings.retention_s,
        )
        for effect in effects:
            match effect:
                case CloseRecord(record):
                    self._close(record, now)
                case ForgetRecord(session):
                    await self._forget(session)

    def _close(self, record: SessionRecord, now: float) -> None:
        log.warning("session.closed", session=record.session, reason="silent beyond the grace")
        if self.replica.merge(record, now):
            self._changed(record.session)
        self._answer(SESSION.of(record.session), encode(record))

    async def _forget(self, session: str) -> None:
        try:
            await self._bucket.delete(session)
        except BusError as error:
            log.warning("registry.not_deleted", session=session, error=str(error))
            return
        self.replica.forget([session])

    def _listen_anew(self) -> None:
        """After a cut nothing that was missed counts as silence, and KV may have lost what we wrote."""
        self._listening_since_s = time.monotonic()
        self._unstored |= {record.session for record in self.replica.records()}
        self._store_wanted.set()

    def _answer(self, subject: str, payload: bytes) -> None:
        try:
            self._bus.publish(subject, payload)
        except BusDisconnected:
            pass  # Whoever asked asks again.
        except MessageTooLarge as error:
            log.error("registry.answer_too_large", error=str(error), advice="raise max_payload of the NATS server")
