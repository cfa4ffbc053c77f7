"""Keeps a service's own copy of its site's registry: hears sessions directly, and asks for what it missed.

Sessions speak to everybody; the registry is asked once at the start, and later only about buckets whose digest
differs. When registry, JetStream or all of NATS is away the copy stays what it was, and says how old it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
from prometheus_client import Counter, Gauge

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.registry import (
    DigestAnswer,
    DigestRequest,
    Disconnected,
    Opinion,
    OpinionRequest,
    RegistryBeat,
    SnapshotPage,
    SnapshotRequest,
)
from serai.contracts.registry_digest import BUCKETS, bucket_of
from serai.contracts.session_record import Lifecycle
from serai.contracts.status import ProbeAnswer, ProbeRequest, SessionStatus
from serai.contracts.subjects import (
    BEAT,
    DIGEST,
    DISCONNECTED,
    OPINION,
    PROBE,
    SESSION,
    SNAPSHOT,
    STATUS,
    Subject,
)
from serai.runtime.bus import Bus, BusError, Loss, LossReason, Message, NoResponders, Subscription
from serai.runtime.refusals import BAD_FIELD, FOREIGN_SUBJECT, MALFORMED, Refusals
from serai.runtime.registry_comparison import ASK_AGAIN_AFTER_S, Comparison
from serai.runtime.registry_replica import RegistryReplica

T = TypeVar("T")

log = structlog.get_logger()

LOOK_EVERY_S = 0.25
LATE_S = 1.0
"""A look that comes so late says that this process was held up: what it did not hear meanwhile is nobody's silence."""
REPAIR_PAUSE_S = 0.05
"""Many signs of something missed come together; one repair is for all of them."""
SNAPSHOT_TIMEOUT_S = 2.0
SNAPSHOT_AGAIN_S = 1.0
NO_ANSWER_PAUSE_S = 1.0
"""A registry that did not answer is left alone for so long, unless it speaks."""
PROBE_TIMEOUT_S = 0.5
OPINION_TIMEOUT_S = 0.75
"""Longer than a probe: the registry may probe the session itself before it answers."""
ASKED_AT_ONCE = 64
"""So many silent sessions are asked after at the same time; more than that are not one session's trouble."""
UNKNOWN_FOR_S = 60.0
"""A record that the registry does not know, though it has listened for so long, is dropped when the session has been
silent here for so long too."""
LEFT_RETENTION_S = 86_400.0
TIDY_EVERY_S = 60.0
INTERVAL_S_MAX = 60.0
"""A status that promises the next one later than this would keep a dead session in use."""

AGE = Gauge(
    "serai_registry_copy_age_seconds", "Since the registry's last word, or since the start; routing goes on without it"
)
REPAIRS = Counter("serai_registry_copy_repairs_total", "Times this copy asked the registry for what it had missed")
KNOWN = Gauge("serai_registry_copy_sessions", "Session records in this copy, those that left included")


class RegistryCopy:
    """Feeds a `RegistryReplica` from the bus. `start` it, put a barrier behind that, then let it `run`."""

    def __init__(self, bus: Bus, site: str) -> None:
        self._bus = bus
        self._site = site
        self.replica = RegistryReplica()
        self.comparison = Comparison()
        self._refusals = Refusals()
        self._wake = asyncio.Event()
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._started_s = time.monotonic()
        self._snapshot_at_s: float | None = None
        self._ask_again_at_s = self._started_s
        self._tidied_at_s = self._started_s
        self._looked_at_s = self._started_s
        self._wanted: dict[str, None] = {}
        """Sites of which a record was missed, by the word of the session itself."""
        self._all_wanted = False
        self._quiet_until_s = 0.0
        self._deaf_since_s: float | None = None
        self.problem = ""
        """Why the registry did not answer when last asked; empty = it did."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after whatever may have changed this copy."""
        self.on_connection_closed: Callable[[str], None] = lambda session: None
        """Called with each session whose connection the NATS server says has closed."""
        self.on_report: Callable[[SessionStatus], None] = lambda status: None
        """Called with each status, after this copy has noted it."""
        self.synced = False
        """Whether a snapshot has been merged since the start; until then "unknown" does not mean "not there"."""

    # -- what is known -------------------------------------------------------------------------------------------

    def knowledge_age_s(self, now: float) -> float | None:
        """Seconds since the registry's last beat or snapshot; None = it has not been heard yet."""
        heard = [at_s for at_s in (self.comparison.heard_at_s, self._snapshot_at_s) if at_s is not None]
        return now - max(heard) if heard else None

    def judged_at_s(self, now: float) -> float:
        """When this observer last had ears: now, or when its connection broke. Opinions are of that time."""
        return now if self._deaf_since_s is None else min(now, self._deaf_since_s)

    # -- hearing -------------------------------------------------------------------------------------------------

    async def start(self) -> list[Subscription]:
        """Subscribes; the caller puts a barrier behind it."""
        self._bus.on_disconnect(self._on_disconnect)
        self._bus.on_reconnect(self._on_reconnect)
        self._bus.on_loss(self._on_loss)
        return [
            await self._bus.subscribe(SESSION.every, self.on_session),
            await self._bus.subscribe(STATUS.every, self.on_status),
            await self._bus.subscribe(BEAT.of_site(self._site), self.on_beat),
            await self._bus.subscribe(DISCONNECTED.every, self.on_disconnected),
        ]

    def on_session(self, message: Message) -> None:
        """A record, from its agent or, when the session is taken to have left, from its registry."""
        record = self._refusals.record_in(message)
        if record is None:
            return
        if self.replica.knows_newer(record):
            text = f"version {record.version} of {record.session} ({record.lifecycle.name}) is older than what is known"
            self._refusals.note("older-version", text, message.subject)
            return
        self.replica.merge(record, time.monotonic(), heard=True)
        self.on_change()

    def on_status(self, message: Message) -> None:
        """A sign of life; when it tells of a newer record, that one was missed."""
        status = self._read(SessionStatus, message)
        if status is None:
            return
        if message.subject != STATUS.of(status.session):
            self._refusals.note(FOREIGN_SUBJECT, "a status on the subject of another session", message.subject)
        elif not 0 < status.interval_s <= INTERVAL_S_MAX:
            text = f"interval_s: {status.interval_s} is not above 0 and up to {INTERVAL_S_MAX:g}"
            self._refusals.note(BAD_FIELD, text, message.subject)
        else:
            newer = self.replica.hear(status, time.monotonic())
            self.on_report(status)
            # One that is not known at all shows in the registry's next beat: only that tells its site.
            if newer and (record := self.replica.get(status.session)):
                self._wanted[record.metadata.site] = None
                self._wake.set()

    def on_beat(self, message: Message) -> None:
        """The registry's word that it is there, and what it knows, in one number a site."""
        beat = self._read(RegistryBeat, message)
        if beat is None:
            return
        if message.subject != BEAT.of_site(beat.site):
            self._refusals.note(FOREIGN_SUBJECT, "a beat on the subject of another site", message.subject)
        elif not 0 < beat.interval_s <= INTERVAL_S_MAX:
            self._refusals.note(BAD_FIELD, f"interval_s: {beat.interval_s}", message.subject)
        else:
            self.comparison.hear(beat, self._root_of, self.replica.sites, time.monotonic())
            self._quiet_until_s = 0.0  # It is there.
            if not self.synced:
                self._ask_again_at_s = self._started_s
            if not self.synced or self.comparison.distrusted:
                self._wake.set()

    def on_disconnected(self, message: Message) -> None:
        """The NATS server's word that connections closed, passed on by the registry of the site they were made to."""
        closed = self._read(Disconnected, message)
        if closed is None:
            return
        for session in closed.sessions:
            record = self.replica.get(session)
            if record is None:
                continue
            if message.subject == DISCONNECTED.of_site(record.metadata.site):
                self.replica.unreachable(session)
                self.on_connection_closed(session)
            else:
                self._refusals.note(FOREIGN_SUBJECT, f"another site's word on {session}", message.subject)
        self.on_change()

    def _read(self, kind: type[T], message: Message) -> T | None:
        try:
            return decode(kind, message.data)
        except MalformedMessage as error:
            self._refusals.note(MALFORMED, str(error), message.subject)
            return None

    def _on_disconnect(self) -> None:
        if self._deaf_since_s is None:
            self._deaf_since_s = time.monotonic()

    def _on_reconnect(self) -> None:
        now = time.monotonic()
        if self._deaf_since_s is not None:
            self.replica.excuse(now - self._deaf_since_s, now)
            self._deaf_since_s = None
        self._compare_all()

    def _on_loss(self, loss: Loss) -> None:
        if loss.reason is LossReason.DROPPED:
            self._compare_all()

    def _compare_all(self) -> None:
        self._ask_again_at_s = time.monotonic()
        self._quiet_until_s = 0.0
        self._all_wanted = True
        self.comparison.distrust()
        self._wake.set()

    # -- repair --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Looks, asks and repairs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repairing())
            tasks.create_task(self._looking(tasks))

    async def _repairing(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self._bus.connected:
                await self.repair()
                await asyncio.sleep(REPAIR_PAUSE_S)

    async def repair(self) -> None:
        """One turn: a whole snapshot while there was none, then the buckets that differ. Without a registry the copy
        stays as it is."""
        now = time.monotonic()
        if now < self._quiet_until_s:
            return
        if self.synced:
            for site in self._due(now):
                if not await self._repair_site(site):
                    return  # Whoever is silent about one site is silent about all.
        elif now >= self._ask_again_at_s:
            self._ask_again_at_s = now + SNAPSHOT_AGAIN_S
            await self.snapshot()

    def _due(self, now: float) -> list[str]:
        """Sites to ask about now."""
        due = dict.fromkeys([*self.comparison.due(self._root_of, now), *self._wanted])
        if self._all_wanted or (self.comparison.silent(now) and now >= self._ask_again_at_s):
            due |= dict.fromkeys([self._site, *self.replica.sites])
        self._all_wanted = False
        self._wanted.clear()
        if due:
            self._ask_again_at_s = now + ASK_AGAIN_AFTER_S
        return sorted(due)

    async def snapshot(self) -> None:
        """Everything the registry knows, page by page."""
        try:
            await self._fetch("", [])
        except (BusError, TimeoutError, MalformedMessage) as error:
            self._no_answer(error)
            return
        self._answered()
        self._snapshot_at_s = time.monotonic()
        self.synced = True
        self.on_change()

    async def _repair_site(self, site: str) -> bool:
        """Fetches what differs; False when the registry does not answer."""
        REPAIRS.inc()
        try:
            answer = await self._request(DIGEST, DigestRequest(site), DigestAnswer, SNAPSHOT_TIMEOUT_S)
            if len(answer.buckets) != BUCKETS:
                raise MalformedMessage(f"DigestAnswer: {len(answer.buckets)} buckets; expected {BUCKETS}")
            own = self.replica.digest(site).buckets
            differing = [bucket for bucket in range(BUCKETS) if own[bucket] != answer.buckets[bucket]]
            if differing:
                await self._fetch(site, differing)
                log.info("registry_copy.repaired", site=site, buckets=len(differing))
        except (BusError, TimeoutError, MalformedMessage) as error:
            self._no_answer(error)
            return False
        self._answered()
        self.comparison.asked(site, self._root_of, time.monotonic())
        self.on_change()
        return True

    async def _fetch(self, site: str, buckets: list[int]) -> None:
        """Merges the registry's records of `site` (empty: all) in `buckets` (empty: all), and drops those it would
        have to know but does not."""
        wanted = [] if len(buckets) == BUCKETS else buckets
        known: set[str] = set()
        after, more, complete_since_s = "", True, 0.0
        while more:
            page = await self._request(SNAPSHOT, SnapshotRequest(after, site, wanted), SnapshotPage, SNAPSHOT_TIMEOUT_S)
            self._merge_page(page)
            known.update([record.session for record in page.records])
            complete_since_s = page.complete_since_s
            last = page.records[-1].session if page.records else ""
            more = page.more and last > after  # A page that leads nowhere is the last.
            after = last
        if complete_since_s > UNKNOWN_FOR_S:
            self._drop_unknown(known, site, frozenset(buckets))

    def _merge_page(self, page: SnapshotPage) -> None:
        now = time.monotonic()
        for position, record in enumerate(page.records):
            if self._refusals.checked(record, "a snapshot") is None:
                continue
            self.replica.merge(record, now)
            silent_s = page.silent_s[position] if position < len(page.silent_s) else None
            if silent_s is not None and record.lifecycle is not Lifecycle.LEFT:
                self.replica.vouch(record.session, now, silent_s=max(0.0, silent_s))

    def _drop_unknown(self, known: set[str], site: str, buckets: frozenset[int]) -> None:
        now = time.monotonic()
        unknown = [
            record.session
            for record in self.replica.records()
            if record.session not in known
            and (not site or record.metadata.site == site)
            and (not buckets or bucket_of(record.session) in buckets)
            and record.lifecycle is not Lifecycle.LEFT
            and self.replica.silent_s(record.session, now) > UNKNOWN_FOR_S
        ]
        for session in unknown:
            log.info("registry_copy.dropped", session=session, reason="its registry does not know it")
        self.replica.forget(unknown)

    async def _request(self, subject: Subject[Any], message: object, kind: type[T], timeout_s: float) -> T:
        """Asks the own site's registry. Raises BusError, TimeoutError or MalformedMessage."""
        async with asyncio.timeout(timeout_s * 1.5):  # Whatever the bus does with its own limit.
            answer = await self._bus.request(subject.of_site(self._site), encode(message), timeout_s)
        return decode(kind, answer.data)

    def _no_answer(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if not self.problem:
            effect = "routing goes on from this copy and from what sessions say themselves"
            log.warning("registry_copy.no_answer", error=text, effect=effect)
        self.problem = text
        self._quiet_until_s = time.monotonic() + NO_ANSWER_PAUSE_S

    def _answered(self) -> None:
        if self.problem:
            log.info("registry_copy.answered_again")
        self.problem = ""
        self._quiet_until_s = 0.0

    def _root_of(self, site: str) -> int:
        return self.replica.digest(site).root

    # -- looking -------------------------------------------------------------------------------------------------

    async def _looking(self, tasks: asyncio.TaskGroup) -> None:
        self._looked_at_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for session in self.look(time.monotonic()):
                tasks.create_task(self.ask_after(session))

    def look(self, now: float) -> list[str]:
        """One look at everybody's silence; who is to be asked after."""
        late_s = now - self._looked_at_s - LOOK_EVERY_S
        self._looked_at_s = now
        self._show_age(now)
        if not self._bus.connected:
            return []  # Whoever hears nothing at all knows nothing of who is silent.
        if late_s > LATE_S:
            log.warning("registry_copy.held_up", seconds=round(late_s, 1))
            self.replica.excuse(late_s, now)
        if now - self._tidied_at_s > TIDY_EVERY_S:
            self._tidied_at_s = now
            self._tidy(now)
        return self.replica.doubtful(now)

    def _show_age(self, now: float) -> None:
        age_s = self.knowledge_age_s(now)
        AGE.set(now - self._started_s if age_s is None else age_s)
        KNOWN.set(len(self.replica))

    def _tidy(self, now: float) -> None:
        """Each copy forgets those that left in its own time; digests leave them out for that reason."""
        self.replica.forget(
            [
                record.session
                for record in self.replica.records()
                if record.lifecycle is Lifecycle.LEFT and self.replica.silent_s(record.session, now) > LEFT_RETENTION_S
            ]
        )

    async def ask_after(self, session: str) -> None:
        """Asks by both other paths at once whether a silent session is there; any answer is a sign of life."""
        async with self._asking:
            await asyncio.gather(self._probe(session), self._opinion(session))

    async def _probe(self, session: str) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S * 1.5):
                answer = await self._bus.request(PROBE.of(session), encode(ProbeRequest()), PROBE_TIMEOUT_S)
            said = decode(ProbeAnswer, answer.data)
        except NoResponders:
            self.replica.unreachable(session)
            self.on_change()
            return
        except (BusError, TimeoutError):
            return
        except MalformedMessage as error:
            self._refusals.note(MALFORMED, str(error), PROBE.of(session))
            return
        if said.session == session and said.reached:
            self.replica.vouch(session, time.monotonic())

    async def _opinion(self, session: str) -> None:
        try:
            opinion = await self._request(OPINION, OpinionRequest(session), Opinion, OPINION_TIMEOUT_S)
        except (BusError, TimeoutError):
            return
        except MalformedMessage as error:
            self._refusals.note(MALFORMED, str(error), OPINION.of_site(self._site))
            return
        if opinion.session == session and opinion.alive:
            self.replica.vouch(session, time.monotonic(), silent_s=max(0.0, opinion.silent_s or 0.0))
