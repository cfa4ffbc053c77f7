"""Asks after silent sessions: directly, by way of a peer session in another allocation, or by another site's registry.

Every wait is bounded, and so is the number of questions at a time; what does not fit is not asked, for then it is not
one session that is in trouble.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import TypeVar

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.registry import Opinion, OpinionRequest
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.status import ProbeAnswer, ProbeRequest
from serai.contracts.subjects import OPINION, PROBE
from serai.registry.membership import Answered, Event, NobodyReceives, NotReached, Path
from serai.registry.metrics import ASKED
from serai.runtime.bus import Bus, BusError, NoResponders
from serai.runtime.registry_replica import RegistryReplica

_T = TypeVar("_T")

PROBE_TIMEOUT_S = 0.5
PEER_TIMEOUT_S = 1.0
"""A peer needs a probe's time itself, and its own way."""
ASKED_AT_ONCE = 64
WAITING_MAX = 512
FRESH_S = 1.5
"""A session heard within so long is alive, without asking."""


class Probing:
    """`tell` takes what was found out. `other_sites` are those whose registries may be asked for an opinion."""

    def __init__(
        self,
        bus: Bus,
        site: str,
        replica: RegistryReplica,
        tell: Callable[[Event], None],
        other_sites: Callable[[], list[str]],
    ) -> None:
        self._bus = bus
        self._site = site
        self._replica = replica
        self._tell = tell
        self._other_sites = other_sites
        self._questions: asyncio.Queue[tuple[str, Path]] = asyncio.Queue(WAITING_MAX)
        self._direct: dict[str, asyncio.Task[bool]] = {}
        """Running direct probes: whoever asks meanwhile gets the same answer."""
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)
        self._tasks: asyncio.TaskGroup | None = None
        """While it runs."""

    def ask(self, session: str, path: Path) -> None:
        """Puts the question into the queue; the answer comes as an event, or none does when too many wait."""
        try:
            self._questions.put_nowait((session, path))
        except asyncio.QueueFull:
            ASKED.of(path, "not asked").add()

    async def run(self) -> None:
        """Asks until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                session, path = await self._questions.get()
                await self._places.acquire()
                tasks.create_task(self._find_out(session, path)).add_done_callback(lambda _: self._places.release())

    async def _find_out(self, session: str, path: Path) -> None:
        if path is Path.DIRECT:
            await self.probe(session)
        else:
            await self._by_peer(session)

    # -- directly ----------------------------------------------------------------------------------------------------

    async def probe(self, session: str) -> bool:
        """Whether `session` itself answers now."""
        running = self._direct.get(session)
        if running is None:
            assert self._tasks is not None
            running = self._direct[session] = self._tasks.create_task(self._probe(session))
            running.add_done_callback(lambda _: self._direct.pop(session, None))
        return await asyncio.shield(running)

    async def _probe(self, session: str) -> bool:
        try:
            answer = await self._request(PROBE.of(session), ProbeRequest(), ProbeAnswer, PROBE_TIMEOUT_S)
        except NoResponders:
            ASKED.of(Path.DIRECT, "nobody receives").add()
            self._tell(NobodyReceives(session))
            return False
        except (BusError, TimeoutError, MalformedMessage):
            answer = None
        if answer is not None and answer.session == session and answer.reached:
            ASKED.of(Path.DIRECT, "answered").add()
            self._tell(Answered(session))
            return True
        ASKED.of(Path.DIRECT, "no answer").add()
        self._tell(NotReached(session, Path.DIRECT))
        return False

    # -- by a peer ---------------------------------------------------------------------------------------------------

    async def _by_peer(self, session: str) -> None:
        peer = self._peer_of(session)
        try:
            if peer is not None:
                reached, by = await self._ask_session(peer.session, session), peer.session
            elif sites := self._other_sites():
                by = random.choice(sites)
                reached = await self._ask_registry(by, session)
            else:
                reached, by = False, ""
        except (BusError, TimeoutError, MalformedMessage):
            reached, by = False, ""  # The one in between has not answered, and so confirms nothing.
        ASKED.of(Path.PEER, "answered" if reached else "no answer" if by else "nobody to ask").add()
        self._tell(Answered(session) if reached else NotReached(session, Path.PEER, by))

    def _peer_of(self, session: str) -> SessionRecord | None:
        """A live session of another allocation of this site, another one each time."""
        record = self._replica.get(session)
        if record is None:
            return None
        now = time.monotonic()
        known = self._replica.records_of_site(self._site)
        random_first = random.sample(known, min(len(known), 50))
        for peer in random_first:
            elsewhere = peer.metadata.allocation != record.metadata.allocation
            if elsewhere and peer.lifecycle < Lifecycle.DOWN and not self._replica.suspected(peer.session, now):
                return peer
        return None

    async def _ask_session(self, peer: str, about: str) -> bool:
        answer = await self._request(PROBE.of(peer), ProbeRequest(about=about), ProbeAnswer, PEER_TIMEOUT_S)
        if answer.session != about:
            raise MalformedMessage(f"ProbeAnswer: about {answer.session[:40]!r}, asked about another session")
        return answer.reached

    async def _ask_registry(self, site: str, about: str) -> bool:
        opinion = await self._request(OPINION.of_site(site), OpinionRequest(about), Opinion, PEER_TIMEOUT_S)
        if opinion.alive is None:
            raise MalformedMessage("Opinion: it does not know the session")
        return opinion.alive

    async def _request(self, subject: str, message: object, kind: type[_T], timeout_s: float) -> _T:
        async with asyncio.timeout(timeout_s * 1.5):  # Whatever the bus does with its own limit.
            answer = await self._bus.request(subject, encode(message), timeout_s)
        return decode(kind, answer.data)

    # -- our own opinion -----------------------------------------------------------------------------------------------

    async def opinion(self, session: str) -> Opinion:
        """What this registry thinks of `session`, after asking it when it has not just been heard."""
        now = time.monotonic()
        record = self._replica.get(session)
        if record is None:
            return Opinion(session, None, reason="not known here")
        silent_s = self._replica.heard_ago_s(session, now)
        if record.lifecycle is Lifecycle.LEFT:
            return Opinion(session, False, silent_s, "it has left")
        if silent_s is not None and silent_s < FRESH_S and not self._replica.is_unreachable(session):
            return Opinion(session, True, silent_s)
        async with self._places:
            alive = await self.probe(session)
        return Opinion(session, alive, 0.0 if alive else silent_s, "" if alive else "it does not answer a probe")
