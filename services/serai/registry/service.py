"""The registry's shell: messages become events and records, effects become messages and writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar, assert_never

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.registry import (
    AllocationEnded,
    DigestRequest,
    Disconnected,
    HostCleared,
    OpinionRequest,
    RegistryBeat,
    SnapshotRequest,
)
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.status import SessionStatus
from serai.contracts.subjects import (
    BEAT,
    CLEARED,
    DIGEST,
    DISCONNECTED,
    ENDED,
    OPINION,
    SESSION,
    SESSIONS_BUCKET,
    SNAPSHOT,
    STATUS,
)
from serai.registry import membership, metrics
from serai.registry.federation import INTERVAL_S_MAX, Federation
from serai.registry.membership import (
    AllocationOver,
    Answered,
    Ask,
    BusBack,
    BusCut,
    CloseRecord,
    Event,
    ForgetRecord,
    Heard,
    Known,
    Look,
    Membership,
    NobodyReceives,
    OwnerDoesNotKnow,
    Standing,
)
from serai.registry.probing import Probing
from serai.registry.settings import RegistrySettings
from serai.registry.storing import Storing
from serai.runtime.bus import Bus, BusDisconnected, BusError, Loss, LossReason, Message, MessageTooLarge
from serai.runtime.disconnects import DisconnectedClient
from serai.runtime.refusals import BAD_FIELD, FOREIGN_SUBJECT, MALFORMED, Refusals
from serai.runtime.registry_replica import RegistryReplica

T = TypeVar("T")

log = structlog.get_logger()

LOOK_EVERY_S = 0.25
LATE_S = 1.0
"""A look that comes so late says that this process was held up: what it did not hear meanwhile is nobody's silence."""
SHOW_EVERY_S = 5.0
OPINIONS_AT_ONCE = 64

WatchDisconnects = Callable[[Callable[[DisconnectedClient], None]], Coroutine[Any, Any, None]]
"""Calls back for each connection that closes, until cancelled (`runtime.disconnects.watch_disconnects`)."""


class Registry:
    """Collaborators come from outside; `run` returns when told to stop."""

    def __init__(self, settings: RegistrySettings, bus: Bus, watch_disconnects: WatchDisconnects | None = None) -> None:
        self._settings = settings
        self._bus = bus
        self._watch_disconnects = watch_disconnects
        self.replica = RegistryReplica()
        self.refusals = Refusals()
        self.membership = Membership(
            settings.site,
            time.monotonic(),
            silence_grace_s=settings.silence_grace_s,
            retention_s=settings.retention_s,
        )
        self.storing = Storing(bus.bucket(SESSIONS_BUCKET), self._value_of, self._stored_sessions)
        self.federation = Federation(
            bus,
            settings.site,
            self.replica,
            self.refusals,
            learn=self._learn,
            unknown=self._owner_does_not_know,
            listening_since=lambda: self.membership.listening_since_s,
        )
        self.probing = Probing(bus, settings.site, self.replica, self._tell, lambda: self.federation.other_sites)
        self._by_connection: dict[str, dict[str, None]] = {}
        self._gone: dict[str, None] = {}
        """Sessions whose connections have closed in this turn of the loop: told in one message."""
        self._opinions = asyncio.Queue[tuple[str, str]](4 * OPINIONS_AT_ONCE)
        self._deaf_since_s: float | None = None
        self._looked_at_s = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Listens first, then reads what KV still knows: the order in which records come does not matter."""
        site = self._settings.site
        handlers = [
            (SESSION.every, self.on_session),
            (STATUS.every, self.on_status),
            (BEAT.every, self.on_beat),
            (DISCONNECTED.every, self.on_disconnected),
            (SNAPSHOT.of_site(site), self.on_snapshot),
            (DIGEST.of_site(site), self.on_digest),
            (OPINION.of_site(site), self.on_opinion),
            (ENDED.of_site(site), self.on_ended),
            (CLEARED.of_site(site), self.on_cleared),
        ]
        subscriptions = [await self._bus.subscribe(subject, handler) for subject, handler in handlers]
        self._bus.on_disconnect(self._on_cut)
        self._bus.on_reconnect(self._on_back)
        self._bus.on_loss(self._on_loss)
        await self._bus.barrier()
        self._tell(BusBack())
        await self._read_bucket()
        log.info("registry.ready", site=site, sessions=len(self.replica))
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(work) for work in self._work()]
            await stop.wait()
            for task in working:
                task.cancel()
        for subscription in subscriptions:
            await subscription.unsubscribe()
        await self.storing.finish()

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        work = [
            self.storing.storing(),
            self.storing.supervising(self._read_bucket),
            self.federation.beating(),
            self.federation.comparing(),
            self.probing.run(),
            self._looking(),
            self._giving_opinions(),
        ]
        if self._watch_disconnects is not None:
            work.append(self._watch_disconnects(self.on_connection_closed))
        return work

    # -- bus handlers --------------------------------------------------------------------------------------------

    def on_session(self, message: Message) -> None:
        """A record: joined in, stored, and, when its session is of this site, acknowledged with the joined one."""
        record = self.refusals.record_in(message)
        if record is None:
            return
        spoke = record.lifecycle is not Lifecycle.LEFT  # LEFT may be said by registries, on the session's behalf.
        self._merge(record, heard=spoke)
        if spoke:
            self._tell(Heard(record.session))
        joined = self.replica.get(record.session)
        if joined is None or record.metadata.site != self._settings.site:
            return
        if message.reply:
            self._send(message.reply, encode(joined))
        if spoke and joined.lifecycle is Lifecycle.LEFT:
            self._send(SESSION.of(joined.session), encode(joined))  # It does not know yet.

    def on_status(self, message: Message) -> None:
        """A sign of life. A record that it tells of and that was missed shows in the owner's next beat."""
        status = self._read(SessionStatus, message)
        if status is None:
            return
        if message.subject != STATUS.of(status.session):
            self.refusals.note(FOREIGN_SUBJECT, "a status on the subject of another session", message.subject)
        elif not 0 < status.interval_s <= INTERVAL_S_MAX:
            text = f"interval_s: {status.interval_s} is not above 0 and up to {INTERVAL_S_MAX:g}"
            self.refusals.note(BAD_FIELD, text, message.subject)
        else:
            self.replica.hear(status, time.monotonic())
            self._tell(Heard(status.session, status.interval_s))

    def on_beat(self, message: Message) -> None:
        """Another site's registry says what it knows."""
        beat = self._read(RegistryBeat, message)
        if beat is not None:
            self.federation.on_beat(message, beat)

    def on_digest(self, message: Message) -> None:
        """The buckets of a site's digest, for whoever found its copy to differ."""
        request = self._read(DigestRequest, message)
        if request is not None:
            self._send(message.reply, encode(self.federation.digest_answer(request)))

    def on_snapshot(self, message: Message) -> None:
        """A page of records, for a service that starts or repairs its copy."""
        request = self._read(SnapshotRequest, message)
        if request is not None:
            self._send(message.reply, encode(self.federation.page(request)))

    def on_opinion(self, message: Message) -> None:
        """Whether we can reach a session; found out by a few tasks at a time, so that a crowd of questions waits."""
        request = self._read(OpinionRequest, message)
        if request is None:
            return
        try:
            self._opinions.put_nowait((request.session, message.reply))
        except asyncio.QueueFull:
            metrics.ASKED.of("opinion", "not asked").add()

    def on_ended(self, message: Message) -> None:
        """The batch system's word that an allocation is over: positive evidence, obeyed at once."""
        ended = self._read(AllocationEnded, message)
        if ended is None:
            return
        if ended.site != self._settings.site or not ended.allocation:
            text = f"an end of allocation {ended.allocation[:40]!r} of site {ended.site[:40]!r}"
            self.refusals.note(BAD_FIELD, text, message.subject)
            return
        log.info("allocation.ended", allocation=ended.allocation, reason=ended.reason, runs_up_to=ended.restart_count)
        self._tell(AllocationOver(ended.allocation, ended.restart_count))
        self._send(message.reply, encode(ended))

    def on_cleared(self, message: Message) -> None:
        """A person's word that a host is well. Records of sessions that have left are nobody else's to write."""
        cleared = self._read(HostCleared, message)
        if cleared is None:
            return
        if cleared.site != self._settings.site or not cleared.host:
            text = f"a host {cleared.host[:40]!r} of site {cleared.site[:40]!r} is cleared"
            self.refusals.note(BAD_FIELD, text, message.subject)
            return
        blamed = [
            record
            for record in self.replica.records_of_site(cleared.site)
            if record.metadata.host == cleared.host and record.metadata.faults and record.lifecycle is Lifecycle.LEFT
        ]
        for record in blamed:
            without = record.advanced(Lifecycle.LEFT, replace(record.metadata, faults=[]))
            self._merge(without, heard=False)
            self._send(SESSION.of(record.session), encode(without))
        log.info("host.cleared", host=cleared.host, sessions=len(blamed))
        self._send(message.reply, encode(replace(cleared, sessions=len(blamed))))

    def on_disconnected(self, message: Message) -> None:
        """Another site's NATS server says that connections have closed there."""
        closed = self._read(Disconnected, message)
        if closed is None or message.subject == DISCONNECTED.of_site(self._settings.site):
            return
        for session in closed.sessions:
            record = self.replica.get(session)
            if record is not None and message.subject == DISCONNECTED.of_site(record.metadata.site):
                self._tell(membership.Disconnected(session))

    def on_connection_closed(self, client: DisconnectedClient) -> None:
        """Our own NATS server says so of one connection. Nothing ends: the agent may be back in a second."""
        sessions = self._by_connection.get(client.name)
        if not sessions:
            return
        log.info("session.disconnected", sessions=list(sessions), reason=client.reason, effect="not routed to")
        if not self._gone:
            asyncio.get_running_loop().call_soon(self._publish_gone)
        for session in sessions:
            self._gone[session] = None
            self._tell(membership.Disconnected(session))

    def _publish_gone(self) -> None:
        gone, self._gone = list(self._gone), {}
        for start in range(0, len(gone), 500):
            self._send(DISCONNECTED.of_site(self._settings.site), encode(Disconnected(gone[start : start + 500])))

    def _read(self, kind: type[T], message: Message) -> T | None:
        try:
            return decode(kind, message.data)
        except MalformedMessage as error:
            self.refusals.note(MALFORMED, str(error), message.subject)
            return None

    # -- the bus itself ------------------------------------------------------------------------------------------

    def _on_cut(self) -> None:
        if self._deaf_since_s is None:
            self._deaf_since_s = time.monotonic()
        self._tell(BusCut())

    def _on_back(self) -> None:
        """Nothing that was missed counts as silence, and other sites may have changed meanwhile. (So may KV: `storing`
        finds that out by itself.)"""
        now = time.monotonic()
        if self._deaf_since_s is not None:
            self.replica.excuse(now - self._deaf_since_s, now)
            self._deaf_since_s = None
        self._tell(BusBack())
        self.federation.missed()

    def _on_loss(self, loss: Loss) -> None:
        if loss.reason is LossReason.DROPPED:
            self.federation.missed()

    # -- events and effects --------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """To the membership, and to the replica what it must know of it; then does what follows."""
        now = time.monotonic()
        match event:
            case Answered(session, silent_s):
                self.replica.vouch(session, now, silent_s=silent_s)
            case membership.Disconnected(session) | NobodyReceives(session):
                self.replica.unreachable(session)
            case _:
                pass
        for effect in self.membership.handle(event, now):
            match effect:
                case Ask(session, path):
                    self.probing.ask(session, path)
                case CloseRecord(session, cause):
                    self._close(session, cause)
                case ForgetRecord(session):
                    self._forget(session)
                case _:
                    assert_never(effect)

    def _close(self, session: str, cause: membership.Cause) -> None:
        record = self.replica.get(session)
        if record is None or record.lifecycle is Lifecycle.LEFT:
            return
        log.warning("session.closed", session=session, reason=str(cause), allocation=record.metadata.allocation)
        metrics.CLOSED.of(cause.name.lower()).add()
        left = record.advanced(Lifecycle.LEFT)
        self._merge(left, heard=False)
        self._send(SESSION.of(session), encode(left))

    def _forget(self, session: str) -> None:
        record = self.replica.get(session)
        self.replica.forget([session])
        metrics.FORGOTTEN.of().add()
        if record is None:
            return
        log.info("session.forgotten", session=session, site=record.metadata.site, lifecycle=record.lifecycle.name)
        self._unname(record)
        self.federation.changed()
        if record.metadata.site == self._settings.site:
            self.storing.changed(session)

    # -- records -------------------------------------------------------------------------------------------------

    def _merge(self, record: SessionRecord, *, heard: bool) -> bool:
        before = self.replica.get(record.session)
        if not self.replica.merge(record, time.monotonic(), heard=heard):
            return False
        joined = self.replica.get(record.session)
        assert joined is not None
        if before is None or before.lifecycle is not joined.lifecycle:
            log.info("session.changed", session=joined.session, lifecycle=joined.lifecycle.name, version=joined.version)
        self._unname(before or joined)
        if joined.metadata.connection and joined.lifecycle is not Lifecycle.LEFT:
            self._by_connection.setdefault(joined.metadata.connection, {})[joined.session] = None
        self._tell(Known(joined))
        self.federation.changed()
        if joined.metadata.site == self._settings.site:
            self.storing.changed(joined.session)
        return True

    def _unname(self, record: SessionRecord) -> None:
        sessions = self._by_connection.get(record.metadata.connection)
        if sessions is not None:
            sessions.pop(record.session, None)
            if not sessions:
                del self._by_connection[record.metadata.connection]

    def _learn(self, record: SessionRecord, silent_s: float | None) -> bool:
        """A record of another site, from its owner."""
        news = self._merge(record, heard=False)
        if silent_s is not None and record.lifecycle is not Lifecycle.LEFT:
            self._tell(Answered(record.session, max(0.0, silent_s)))
        return news

    def _owner_does_not_know(self, session: str, complete_s: float) -> None:
        self._tell(OwnerDoesNotKnow(session, complete_s))

    # -- KV ------------------------------------------------------------------------------------------------------

    async def _read_bucket(self) -> None:
        """What earlier lives have written of this site's sessions."""
        for key, value in (await self.storing.entries()).items():
            record = self.refusals.record_of(value, f"KV {key}")
            if record is not None and record.session == key and record.metadata.site == self._settings.site:
                self._merge(record, heard=False)

    def _value_of(self, session: str) -> bytes | None:
        record = self.replica.get(session)
        return None if record is None else encode(record)

    def _stored_sessions(self) -> Iterable[str]:
        return [record.session for record in self.replica.records_of_site(self._settings.site)]

    # -- in the background ---------------------------------------------------------------------------------------

    async def _giving_opinions(self) -> None:
        places = asyncio.Semaphore(OPINIONS_AT_ONCE)

        async def give(session: str, reply: str) -> None:
            try:
                self._send(reply, encode(await self.probing.opinion(session)))
            finally:
                places.release()

        async with asyncio.TaskGroup() as tasks:
            while True:
                session, reply = await self._opinions.get()
                await places.acquire()
                tasks.create_task(give(session, reply))

    async def _looking(self) -> None:
        shown_at_s = self._looked_at_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            late_s = now - self._looked_at_s - LOOK_EVERY_S
            self._looked_at_s = now
            if late_s > LATE_S:
                log.warning("registry.held_up", seconds=round(late_s, 1))
                self.replica.excuse(late_s, now)
            self._tell(Look())
            if now - shown_at_s > SHOW_EVERY_S:
                shown_at_s = now
                self._show()

    def _show(self) -> None:
        counts: dict[tuple[str, str], int] = {}
        for site in self.replica.sites:
            counts |= {(lifecycle.name, site): 0 for lifecycle in Lifecycle}
        for record in self.replica.records():
            counts[record.lifecycle.name, record.metadata.site] += 1
        for (lifecycle, site), count in counts.items():
            metrics.SESSIONS.labels(lifecycle, site).set(count)
        for standing in Standing:
            metrics.STANDINGS.labels(standing).set(self.membership.count(standing))
        braked = self.membership.braked
        metrics.BRAKED.set(braked)

    def _send(self, subject: str, payload: bytes) -> None:
        if not subject:
            return  # Nobody waits for the answer.
        try:
            self._bus.publish(subject, payload)
        except BusDisconnected:
            pass  # Whoever asked asks again.
        except MessageTooLarge as error:
            log.error("registry.answer_too_large", error=str(error), advice="raise max_payload of the NATS server")
        except BusError as error:
            log.warning("registry.not_sent", subject=subject, error=str(error))
