"""Who leads a model's group: every macro-scheduler stands for it, one holds its lease in KV, and only that is asked.

Others look after the holder each beat: where NATS says that nobody is there (a killed process), they need not wait
until its lease runs out. Were that wrong, the instances would obey the higher epoch only.

A leader that was held up finds out before it acts: each answer asks whether the lease is still young (`KvLease.held`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from serai.contracts.admission import GroupLease
from serai.contracts.codec import encode
from serai.contracts.session_record import SessionRecord
from serai.contracts.subjects import MACRO_PRESENCE, to_token
from serai.macro_scheduler.group import Group
from serai.macro_scheduler.owner_keys import OwnerKeys
from serai.macro_scheduler.ownership import next_leader_epoch
from serai.macro_scheduler.settings import MacroSchedulerSettings
from serai.macro_scheduler.term import Term
from serai.macro_scheduler.wishing import Wishing
from serai.runtime.bus import Bus, BusError
from serai.runtime.kv_lease import KvLease, StateKeys

log = structlog.get_logger()

BEATS_PER_LEASE = 6
PRESENCE = "presence"
"""Last token of the subject on which NATS says that nobody heard a look after the holder."""


class Candidate:
    """This process, as far as one model's group goes."""

    def __init__(
        self,
        model: str,
        settings: MacroSchedulerSettings,
        bus: Bus,
        groups: StateKeys,
        owners: OwnerKeys,
        name: str,
        instances: Callable[[str], Iterable[SessionRecord]],
        asleep: Callable[[str], set[str]],
        heard_epoch: Callable[[str], int],
        unheard_inbox: str,
    ) -> None:
        self.model = model
        self.term: Term | None = None
        """While it leads."""
        self._settings = settings
        self._bus = bus
        self._owners = owners
        self._name = name
        self._instances = instances
        self._asleep = asleep
        self._heard_epoch = heard_epoch
        self._unheard_inbox = unheard_inbox
        self._epoch = 0
        self._why_not = ""
        self._wanted = 0
        """With scaling: what the leader before wanted, or this one in its last term; 0 = there was none."""
        self._wake = asyncio.Event()
        self.lease: KvLease[GroupLease] = KvLease(
            groups,
            to_token(model),
            name,
            settings.lease_s,
            time.monotonic,
            lambda beat: GroupLease(self._name, self._epoch, beat, self._wanted_now()),
            self._on_taken,
            nobody=GroupLease("", 0, 0),
            name="macro-scheduler",
            acts="macro-scheduler leads the group",
        )

    async def run(self) -> None:
        """Until cancelled; gives the lease back then."""
        try:
            while True:
                await self._step()
                await self._wait(self._settings.lease_s / BEATS_PER_LEASE)
        finally:
            await self._resign()

    def look(self) -> None:
        """Something may have changed among the instances."""
        if self.term is not None:
            self._meet(self.term)
            self.term.look()

    async def _step(self) -> None:
        if not await self.lease.beat() and (holder := self.lease.seen_holder):
            self._look_after(holder)
        if self.term is not None and (not self.lease.held or self.term.epoch != self._epoch):
            await self._end(self.term)
        if self.term is None and self.lease.held:
            await self._begin()
        self._say_why_not()

    def _say_why_not(self) -> None:
        """Once, when it changes: another leads, or KV does not answer."""
        why = self.lease.why_not
        if why and why != self._why_not:
            log.info("macro.stands_by", model=self.model, why=why)
        self._why_not = why

    def _look_after(self, holder: str) -> None:
        lease, reply = GroupLease(holder, 0, 0), f"{self._unheard_inbox}.{PRESENCE}"
        try:
            self._bus.publish(MACRO_PRESENCE.of(to_token(holder)), encode(lease), reply)
        except BusError:
            pass  # Then nothing can be known; the lease runs out.

    def holder_is_gone(self) -> None:
        """NATS's word: nobody is where the holder should be."""
        if holder := self.lease.seen_holder:
            log.info("macro.leader_gone", model=self.model, holder=holder)
            self.lease.holder_gone(holder)
            self._wake.set()

    async def _begin(self) -> None:
        # Two leaders never use the same name of an owner, nor does one in two terms.
        owner = f"{self._name}-{self._epoch}"
        group = Group(self._settings.group(owner))
        term = Term(
            self.model,
            self._epoch,
            group,
            self._bus,
            self._owners,
            lambda: self.lease.held,
            self._on_deposed,
            self._unheard_inbox,
            self._wishing(),
        )
        self.term = term  # From now on it hears reports.
        try:
            # Beside it the lease must be kept.
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._beating())
                await term.begin(self._instances(self.model))
                beating.cancel()
        except* BusError as errors:
            log.warning("macro.not_begun", model=self.model, error=str(errors.exceptions[0]), effect="tried again")
            await self._end(term)

    async def _beating(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / BEATS_PER_LEASE)
            await self.lease.beat()

    async def _end(self, term: Term) -> None:
        self._wanted_now()
        self.term = None
        await term.end()

    async def _resign(self) -> None:
        if self.term is not None:
            await self._end(self.term)
        await self.lease.give_back(GroupLease("", self._epoch, self.lease.beats + 1, self._wanted_now()))

    def _meet(self, term: Term) -> None:
        """The group has the instances that the registry says serve."""
        records = {record.session: record for record in self._instances(self.model)}
        known, asleep = term.sessions, self._asleep(self.model)
        for session in asleep - term.asleep:
            term.slept(session)
        for session in (known | term.asleep) - set(records) - asleep:
            term.leave(session)
        for session, record in records.items():
            if session not in known:
                term.join(record)

    def _wishing(self) -> Wishing | None:
        settings = self._settings
        if not settings.scaling:
            return None
        who = (settings.site, self.model, self._epoch, settings.scaling_by)
        return Wishing(self._bus, *who, self._wanted, settings.instances_min)

    def _wanted_now(self) -> int:
        if self.term is not None and self.term.wishing is not None:
            self._wanted = self.term.wishing.wanted
        return self._wanted if self._settings.scaling else 0

    def _on_taken(self, before: GroupLease) -> None:
        self._wanted = before.wanted
        self._epoch = next_leader_epoch(max(before.epoch, self._epoch), self._heard_epoch(self.model))

    def _on_deposed(self, why: str) -> None:
        """An instance has obeyed a later leader: KV had forgotten that one. The next epoch is above it."""
        log.warning("macro.deposed", model=self.model, epoch=self._epoch, why=why)
        self._epoch = next_leader_epoch(self._epoch, self._heard_epoch(self.model))
        self._wake.set()

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
