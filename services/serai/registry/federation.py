"""One registry among those of other sites: it beats, answers what it is asked, and compares its copies with the owners.

The registry of a site is the authority for that site's sessions. Everybody hears sessions directly, across sites too;
what was missed in a cut shows in the digest of the next beat, and is fetched by bucket from the owner, never from a
third one. So traffic grows with what changed, and with the number of sites, not with its square times the fleet.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.registry import (
    DigestAnswer,
    DigestRequest,
    RegistryBeat,
    SnapshotPage,
    SnapshotRequest,
)
from serai.contracts.registry_digest import BUCKETS, bucket_of
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.subjects import BEAT, DIGEST, SESSION, SNAPSHOT, Subject
from serai.registry.metrics import BEATS, REPAIRED, REPAIRS
from serai.runtime.bus import Bus, BusDisconnected, BusError, Message
from serai.runtime.refusals import BAD_FIELD, FOREIGN_SUBJECT, Refusals
from serai.runtime.registry_comparison import Comparison
from serai.runtime.registry_replica import RegistryReplica

T = TypeVar("T")

log = structlog.get_logger()

BEAT_EVERY_S = 2.0
BEAT_GAP_S = 0.1
"""At most so long after a change, and no more often: changes that come together share a beat."""
COMPARE_EVERY_S = 0.25
ASK_TIMEOUT_S = 0.75
"""Short: a question lost with a link is put again in the next turn."""
CUT_ASK_EVERY_S = 0.5
"""A site that does not beat is asked so often whether it is there again: sooner than its next beat, and once more when
that is lost. Nobody there costs one small message that NATS sends back."""
CUT_ASK_FOR_S = 600.0
"""After so long without a beat we wait for the next one."""
SITES_MAX = 1000
INTERVAL_S_MAX = 60.0
PAGE_BYTES_MAX = 256 * 1024

_bucket_of = lru_cache(maxsize=65536)(bucket_of)

Learn = Callable[[SessionRecord, float | None], bool]
"""Takes a record and for how long its session has been silent by the owner's ears (None = not heard there); True when
it was news."""
Unknown = Callable[[str, float], None]
"""The owner does not know this session, and has been complete for so long."""


class _Neighbour:
    """Another site's registry, as seen from here."""

    def __init__(self, now: float) -> None:
        self.comparison = Comparison()
        self.known_since_s = now
        self.asked_at_s = 0.0
        self.trouble = False


class Federation:
    """`listening_since` tells since when this registry has heard everything, or None."""

    def __init__(
        self,
        bus: Bus,
        site: str,
        replica: RegistryReplica,
        refusals: Refusals,
        *,
        learn: Learn,
        unknown: Unknown,
        listening_since: Callable[[], float | None],
    ) -> None:
        self._bus = bus
        self._site = site
        self._replica = replica
        self._refusals = refusals
        self._learn = learn
        self._unknown = unknown
        self._listening_since = listening_since
        self._epoch = secrets.token_hex(6)
        self._sequence = 0
        self._changed = asyncio.Event()
        self._woken = asyncio.Event()
        self._neighbours: dict[str, _Neighbour] = {}

    @property
    def other_sites(self) -> list[str]:
        """Sites whose registries have been heard lately."""
        now = time.monotonic()
        return sorted(site for site, one in self._neighbours.items() if not one.comparison.silent(now))

    # -- our beat ------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """A record has changed here: the others hear of it with the next beat, soon."""
        self._sequence += 1
        self._changed.set()

    def beat(self) -> RegistryBeat:
        """What we say now."""
        replica = self._replica
        roots = {site: replica.digest(site).root for site in replica.sites}
        return RegistryBeat(self._site, self._epoch, self._sequence, BEAT_EVERY_S, roots, len(replica))

    async def beating(self) -> None:
        """Beats until it is cancelled."""
        while True:
            try:
                self._bus.publish(BEAT.of_site(self._site), encode(self.beat()))
                BEATS.of().add()
            except BusDisconnected:
                pass  # Whoever does not hear us knows what that means.
            except BusError as error:
                log.error("registry.no_beat", error=str(error))
            await asyncio.sleep(BEAT_GAP_S)
            try:
                async with asyncio.timeout(BEAT_EVERY_S - BEAT_GAP_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()

    # -- what we are asked ---------------------------------------------------------------------------------------

    def digest_answer(self, request: DigestRequest) -> DigestAnswer:
        """The buckets of one site's digest."""
        return DigestAnswer(request.site, list(self._replica.digest(request.site).buckets))

    def page(self, request: SnapshotRequest) -> SnapshotPage:
        """The records after `request.after` that were asked for, as many as fit in a page."""
        now = time.monotonic()
        since_s = self._listening_since()
        complete_since_s = 0.0 if since_s is None else now - since_s
        records: list[SessionRecord] = []
        silent_s: list[float | None] = []
        size = 0
        page_bytes_max = min(PAGE_BYTES_MAX, self._bus.message_bytes_max - 1024)
        for record in self._wanted(request):
            size += len(encode(record)) + 24  # Its silence beside it.
            if records and size > page_bytes_max:
                return SnapshotPage(records, True, silent_s, complete_since_s)
            records.append(record)
            heard_ago_s = self._replica.heard_ago_s(record.session, now)
            silent_s.append(None if heard_ago_s is None else round(heard_ago_s, 3))
        return SnapshotPage(records, False, silent_s, complete_since_s)

    def _wanted(self, request: SnapshotRequest) -> Iterator[SessionRecord]:
        known = self._replica.records_of_site(request.site) if request.site else self._replica.records()
        buckets = frozenset(request.buckets)
        for record in known:
            if record.session > request.after and (not buckets or _bucket_of(record.session) in buckets):
                yield record

    # -- the others ----------------------------------------------------------------------------------------------

    def on_beat(self, message: Message, beat: RegistryBeat) -> None:
        """Another registry's beat; our own comes back to us too."""
        if message.subject != BEAT.of_site(beat.site):
            self._refusals.note(FOREIGN_SUBJECT, "a beat on the subject of another site", message.subject)
        elif not 0 < beat.interval_s <= INTERVAL_S_MAX:
            self._refusals.note(BAD_FIELD, f"interval_s: {beat.interval_s}", message.subject)
        elif beat.site != self._site:
            self._hear(beat)

    def _hear(self, beat: RegistryBeat) -> None:
        now = time.monotonic()
        neighbour = self._neighbours.get(beat.site)
        if neighbour is None:
            if len(self._neighbours) >= SITES_MAX:
                self._refusals.note(BAD_FIELD, f"more than {SITES_MAX} sites", BEAT.of_site(beat.site))
                return
            neighbour = self._neighbours[beat.site] = _Neighbour(now)
            log.info("site.found", site=beat.site)
        own_word = {beat.site: beat.roots.get(beat.site, 0)}  # Of its own sessions it is the authority; of others not.
        neighbour.comparison.hear(replace(beat, roots=own_word), self._root_of, (), now)
        if neighbour.comparison.distrusted:
            self._woken.set()

    def missed(self) -> None:
        """Something was lost on the way to us: compare with everybody at once."""
        for neighbour in self._neighbours.values():
            neighbour.comparison.distrust()
        self._woken.set()

    async def comparing(self) -> None:
        """Compares until it is cancelled."""
        while True:
            try:
                async with asyncio.timeout(COMPARE_EVERY_S):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()
            if not self._bus.connected:
                continue
            due = self._due(time.monotonic())
            if due:
                async with asyncio.TaskGroup() as tasks:
                    for site in due:
                        tasks.create_task(self.repair(site))
                await asyncio.sleep(0.05)

    def _due(self, now: float) -> list[str]:
        due = []
        for site, neighbour in self._neighbours.items():
            comparison = neighbour.comparison
            silent_s = comparison.silent_s(now)
            interval_s = comparison.beat.interval_s if comparison.beat is not None else BEAT_EVERY_S
            cut = 1.25 * interval_s < silent_s < CUT_ASK_FOR_S
            if comparison.due(self._root_of, now) or (cut and now - neighbour.asked_at_s >= CUT_ASK_EVERY_S):
                neighbour.asked_at_s = now
                due.append(site)
        return due

    async def repair(self, site: str) -> None:
        """Compares our copy of `site` with its owner's, bucket by bucket, and takes what differs."""
        neighbour = self._neighbours[site]
        try:
            answer = await self._request(DIGEST, site, DigestRequest(site), DigestAnswer)
            if answer.site != site or len(answer.buckets) != BUCKETS:
                raise MalformedMessage(f"DigestAnswer: {len(answer.buckets)} buckets of {answer.site[:40]!r}")
            differing = self._replica.digest(site).differing(answer.buckets)
            news = await self._pull(site, differing) if differing else 0
        except (BusError, TimeoutError, MalformedMessage) as error:
            REPAIRS.of(site, "no answer").add()
            if not neighbour.trouble:
                effect = "its sessions are judged by what they say themselves; asked again until it answers"
                log.warning("site.no_answer", site=site, error=str(error) or type(error).__name__, effect=effect)
            neighbour.trouble = True
            return
        if neighbour.trouble:
            log.info("site.answers_again", site=site)
        neighbour.trouble = False
        neighbour.comparison.asked(site, self._root_of, time.monotonic())
        REPAIRS.of(site, "repaired" if news else "equal").add()
        if news:
            REPAIRED.of(site).add(news)
            log.info("site.repaired", site=site, buckets=len(differing), records=news)

    async def _pull(self, site: str, buckets: list[int]) -> int:
        """Takes the owner's records in `buckets`; how many were news."""
        asked = [] if len(buckets) == BUCKETS else buckets
        seen: dict[str, None] = {}
        news = 0
        after, more, complete_since_s = "", True, 0.0
        while more:
            page = await self._request(SNAPSHOT, site, SnapshotRequest(after, site, asked), SnapshotPage)
            for position, record in enumerate(page.records):
                seen[record.session] = None
                silent_s = page.silent_s[position] if position < len(page.silent_s) else None
                news += self._take(site, record, silent_s)
            complete_since_s = page.complete_since_s
            last = page.records[-1].session if page.records else ""
            more = page.more and last > after  # A page that leads nowhere is the last.
            after = last
        self._compare_unknown(site, frozenset(buckets), seen, complete_since_s)
        return news

    def _take(self, site: str, record: SessionRecord, silent_s: float | None) -> bool:
        if record.metadata.site != site or self._refusals.checked(record, SNAPSHOT.of_site(site)) is None:
            return False
        known = self._replica.get(record.session)
        if known is not None and known.lifecycle is Lifecycle.LEFT and record.lifecycle is not Lifecycle.LEFT:
            self._say_again(known)
        return self._learn(record, silent_s)

    def _say_again(self, left: SessionRecord) -> None:
        """Its owner has missed that it left, which is final: it may hear of it from anybody."""
        try:
            self._bus.publish(SESSION.of(left.session), encode(left))
        except BusError:
            pass  # The next comparison finds it again.

    def _compare_unknown(
        self, site: str, buckets: frozenset[int], seen: dict[str, None], complete_since_s: float
    ) -> None:
        for record in self._replica.records_of_site(site):
            if (
                record.session not in seen
                and record.lifecycle is not Lifecycle.LEFT
                and _bucket_of(record.session) in buckets
            ):
                self._unknown(record.session, complete_since_s)

    async def _request(self, subject: Subject[Any], site: str, message: object, kind: type[T]) -> T:
        async with asyncio.timeout(ASK_TIMEOUT_S * 1.5):  # Whatever the bus does with its own limit.
            answer = await self._bus.request(subject.of_site(site), encode(message), ASK_TIMEOUT_S)
        return decode(kind, answer.data)

    def _root_of(self, site: str) -> int:
        return self._replica.digest(site).root
