"""What the others know of our session: its record, signs of life, answers to probes; and whether its id is spent.

The record has one writer, and this is it. Each change goes out at once; an announcer sees to it that a registry has
heard, and says it again now and then. What the registry answers is the only word on us that counts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode, encode_sparse
from serai.contracts.session_record import Lifecycle, SessionMetadata, SessionRecord
from serai.contracts.status import Phase, ProbeAnswer, SessionStatus, SlackSummary
from serai.contracts.subjects import PROBE, SESSION, STATUS
from serai.runtime.bus import Bus, BusDisconnected, BusError, Message, Subscription
from serai.runtime.service import ServiceFailure
from serai.worker_agent.absence import Absence
from serai.worker_agent.probe_answers import ProbeAnswers

log = structlog.get_logger()

ANNOUNCE_TIMEOUT_S = 2.0
ACKNOWLEDGED_WITHIN_S = 1.0
REANNOUNCE_EVERY_S = 10.0
LEAVE_WITHIN_S = 5.0
LEAVE_AGAIN_AFTER_S = 0.2
RETURN_SPREAD_S = 1.0
"""Agents that are back at the same moment announce themselves over so many seconds."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Of engine and GPUs; fields as in `SessionStatus`."""

    queued: int = 0
    running: int | None = None
    kv_tokens_used: int | None = None
    kv_tokens_free: int | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    phase: Phase = Phase.UNKNOWN
    slack: SlackSummary | None = None
    gpu_power_w: float | None = None
    gpu_energy_j: float | None = None
    gpu_celsius: float | None = None
    gpu_throttled: bool = False


_VITALS = [field.name for field in fields(Vitals)]


@dataclass(frozen=True, slots=True)
class Work:
    """What a sign of life says beside that we live."""

    in_flight: int = 0
    requests_total: int = 0
    output_bytes_total: int = 0
    stalled_s: float = 0.0
    allocation_remaining_s: float | None = None
    vitals: Callable[[], Vitals] = Vitals
    """Worked out only when they are said."""


class Presence:
    """One session's. `listen` first, then let `announcing` and `showing_life` run."""

    def __init__(
        self,
        bus: Bus,
        record: SessionRecord,
        work: Callable[[], Work],
        *,
        status_interval_s: float,
        rejoin_after_s: float,
    ) -> None:
        self._bus = bus
        self.record = record
        self._work = work
        self._status_interval_s = status_interval_s
        self._status_sequence = 0
        self._absence = Absence(rejoin_after_s)
        self._probes = ProbeAnswers(bus, record.session, self.probe_answer)
        self._subscriptions: list[Subscription] = []
        self._acknowledgements = ""
        """Where registries acknowledge what `say` says, version by version; empty until we listen there."""
        self._acknowledged_version = -1
        self._acknowledged = asyncio.Event()
        self._changed = asyncio.Event()
        self._registry_answers = True
        self._spent_because = ""
        self.spent = asyncio.Event()
        """Set when our id can be used no more."""

    async def listen(self) -> None:
        """To what concerns us before the engine serves: whether we are there, and what the registry says of us."""
        acknowledgements = f"{self._bus.inbox_prefix}.announced.{self.record.session}"
        self._subscriptions.append(await self._bus.subscribe(f"{acknowledgements}.*", self._on_acknowledged))
        self._acknowledgements = acknowledgements
        probes = await self._bus.subscribe(PROBE.of(self.record.session), self._probes.on_probe)
        self._subscriptions.append(probes)

    async def close(self) -> None:
        """Gives up on what others wanted to know, and listens no more."""
        self._probes.close()
        self._acknowledgements = ""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    # -- the record ----------------------------------------------------------------------------------------------

    def say(self, lifecycle: Lifecycle, metadata: SessionMetadata | None = None) -> None:
        """Changes our record, says so at once, and wakes the announcer, who sees to it that a registry has heard."""
        self.record = self.record.advanced(lifecycle, metadata)
        self._changed.set()
        if self._silenced:
            return
        version = self.record.version
        reply = f"{self._acknowledgements}.{version}" if self._acknowledgements else ""
        try:
            self._bus.publish(SESSION.of(self.record.session), encode(self.record), reply)
        except BusDisconnected:
            pass  # The announcer repeats it after the reconnect.

    def note(self, metadata: SessionMetadata) -> None:
        """As `say`, but with the next thing there is to say."""
        self.record = self.record.advanced(self.record.lifecycle, metadata)

    async def announcing(self) -> None:
        """Repeats our record until the registry has acknowledged this version of it, then now and then: what the
        registry stores may be lost, and whoever starts later should hear of us."""
        said_already = False
        while True:
            self._changed.clear()
            if not (said_already and await self._is_acknowledged()):
                await self.announce()
            acknowledged = self._acknowledged_version == self.record.version
            pause_s = REANNOUNCE_EVERY_S * random.uniform(0.8, 1.2) if acknowledged else 1.0
            said_version = self.record.version
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            # Woken without a new version means: we are back after an absence, and nobody has heard us meanwhile.
            said_already = self.record.version != said_version

    async def announce(self) -> bool:
        """Says our record once, and waits for the registry's answer for a while. Whether there was one."""
        record = self.record
        if self._silenced:
            return False
        try:
            answer = await self._bus.request(SESSION.of(record.session), encode(record), ANNOUNCE_TIMEOUT_S)
            self._heed(answer.data)
            self._acknowledged_version = max(self._acknowledged_version, record.version)
            self._registry_answers = True
            return True
        except BusError as error:
            if self._registry_answers:
                log.warning("agent.not_acknowledged", error=str(error), effect="repeated until a registry answers")
            self._registry_answers = False
            return False

    async def leave(self) -> None:
        """Our last word. A registry that answered before is given some seconds to come back and hear it: after NATS
        was away, agents may be there again before registries are."""
        if self.record.lifecycle is Lifecycle.LEFT:
            return
        self.record = self.record.advanced(Lifecycle.LEFT)
        give_up_at_s = time.monotonic() + LEAVE_WITHIN_S
        while not await self.announce():
            if self._acknowledged_version < 0 or not self._bus.connected or time.monotonic() > give_up_at_s:
                break
            await asyncio.sleep(LEAVE_AGAIN_AFTER_S)
        log.info("agent.left", session=self.record.session)

    def _on_acknowledged(self, message: Message) -> None:
        version = message.subject.rpartition(".")[2]
        if version.isdigit() and not message.no_responders:
            self._acknowledged_version = max(self._acknowledged_version, int(version))
            self._acknowledged.set()
            self._heed(message.data)

    async def _is_acknowledged(self) -> bool:
        """Whether the registry acknowledges within a moment what has just been said."""
        if not self._acknowledgements:
            return False
        try:
            async with asyncio.timeout(ACKNOWLEDGED_WITHIN_S):
                while self._acknowledged_version != self.record.version:
                    self._acknowledged.clear()
                    await self._acknowledged.wait()
        except TimeoutError:
            return False
        return True

    # -- whether our id is spent ---------------------------------------------------------------------------------

    def refuse_spent_id(self) -> None:
        """Raises ServiceFailure when it is. A new id means a new session from the start; ending and being started
        again is the one path to it."""
        if self.spent.is_set():
            raise ServiceFailure(f"{self._spent_because}; start again as a new session")

    def _heed(self, data: bytes) -> None:
        """The registry's answer: what it knows of us. When that is LEFT (after a long silence of ours), so it is: our
        id is spent, and only a new session can serve. Nobody else's word counts, and so nobody else is listened to."""
        try:
            record = decode(SessionRecord, data) if data else self.record
        except MalformedMessage:
            return
        if record.session == self.record.session and record.lifecycle > self.record.lifecycle:
            log.error("agent.declared_gone", lifecycle=record.lifecycle.name)
            self._spend("the registry says that this session has left")

    def _spend(self, because: str) -> None:
        self._spent_because = because
        self.spent.set()

    def on_disconnect(self) -> None:
        """NATS is lost: to be called by whoever has the connection."""
        self._absence.lost(time.monotonic())

    def on_reconnect(self) -> None:
        """NATS is there again."""
        now = time.monotonic()
        away_s = self._absence.lasted_s(now)
        if not self._absence.over(now):
            log.error("agent.away_too_long", away_s=round(away_s))
            self._spend(f"NATS was out of reach for {away_s:.0f} s, and others may have closed this session meanwhile")
            return
        asyncio.get_running_loop().call_later(random.uniform(0, RETURN_SPREAD_S), self._return)

    def _return(self) -> None:
        self._changed.set()
        self.show_life()

    @property
    def _silenced(self) -> bool:
        """Whether the only word that is still ours to say is that we leave."""
        return self.record.lifecycle is not Lifecycle.LEFT and self._absence.too_long(time.monotonic())

    # -- signs of life -------------------------------------------------------------------------------------------

    async def showing_life(self) -> None:
        """About once a status interval, until it is cancelled."""
        while True:
            self.show_life()
            await asyncio.sleep(self._status_interval_s * random.uniform(0.9, 1.1))

    def show_life(self) -> None:
        """One sign of life, now."""
        if self._silenced:
            return
        self._status_sequence += 1
        record, work = self.record, self._work()
        vitals = work.vitals()
        status = SessionStatus(
            session=record.session,
            sequence=self._status_sequence,
            lifecycle=record.lifecycle,
            version=record.version,
            interval_s=self._status_interval_s,
            in_flight=work.in_flight,
            requests_total=work.requests_total,
            output_bytes_total=work.output_bytes_total,
            stalled_s=work.stalled_s,
            allocation_remaining_s=work.allocation_remaining_s,
            **{name: getattr(vitals, name) for name in _VITALS},
        )
        try:
            self._bus.publish(STATUS.of(status.session), encode_sparse(status))
        except BusDisconnected:
            pass  # Silence is what a disconnected agent should be.

    def probe_answer(self) -> ProbeAnswer:
        """That we are there, and what we are."""
        record = self.record
        return ProbeAnswer(
            record.session, lifecycle=record.lifecycle, version=record.version, stalled_s=self._work().stalled_s
        )
