"""Instances as a macro-scheduler sees them, without engines: records, signs of life, reports, answers to `take.*`.

What is leased to them is prefilled at once, as far as they tell; so nothing but the macro-scheduler is measured.
"""

from __future__ import annotations

import asyncio

from serai.contracts.admission import GateMode, InstanceReport, InstanceState, Lease, Spread, TakeInstance
from serai.contracts.codec import decode, encode
from serai.contracts.session_record import Lifecycle, SessionMetadata, SessionRecord, new_session_id
from serai.contracts.status import SessionStatus
from serai.contracts.subjects import INSTANCE, SESSION, STATUS, TAKE
from serai.runtime.bus import Bus, Message

KV_TOKENS = 2_000_000
REPORT_EVERY_S = 0.03
STATUS_EVERY_S = 1.0


class StandInInstance:
    """One session of `model`, with `decoding` streams that are far ahead of their targets."""

    def __init__(self, bus: Bus, model: str, number: int, decoding: int) -> None:
        allocation = f"a{number}"
        self.session = new_session_id("local", allocation, 0, f"{number:012x}")
        self.epoch = self.applied = self.sequence = 0
        self._bus = bus
        self._decoding = decoding
        metadata = SessionMetadata(
            model=model, engine_model=model, engine="emulated", allocation=allocation, kv_tokens_max=KV_TOKENS
        )
        self._record = encode(SessionRecord(self.session, Lifecycle.SERVING, 1, metadata))

    async def start(self) -> None:
        """Obeys whoever takes it; the caller puts a barrier behind it."""
        await self._bus.subscribe(TAKE.of(self.session), self.on_take)

    def announce(self) -> None:
        """Record and sign of life."""
        status = SessionStatus(self.session, self.sequence, Lifecycle.SERVING, 1, STATUS_EVERY_S)
        self._bus.publish(SESSION.of(self.session), self._record)
        self._bus.publish(STATUS.of(self.session), encode(status))

    def say(self) -> None:
        """A report."""
        self._bus.publish(INSTANCE.of(self.session), encode(self.report()))

    def applies(self, lease: Lease) -> None:
        """It has the request."""
        if lease.epoch == self.epoch:
            self.applied = max(self.applied, lease.sequence)

    def report(self) -> InstanceReport:
        """As it stands; each has a number of its own."""
        self.sequence += 1
        return easy_report(self.session, self.epoch, self.applied, self.sequence, self._decoding)

    def on_take(self, message: Message) -> None:
        """`take.<session>`."""
        take = decode(TakeInstance, message.data)
        if take.epoch > self.epoch:
            self.epoch, self.applied = take.epoch, 0
        self._bus.publish(message.reply, encode(InstanceState(self.report(), [], take.epoch == self.epoch)))


def easy_report(session: str, epoch: int, applied: int, sequence: int, decoding: int) -> InstanceReport:
    """Of an instance that has room for everything: long slack, half its KV free, prefills of half a millisecond."""
    return InstanceReport(
        session=session,
        sequence=sequence,
        epoch=epoch,
        applied=applied,
        mode=GateMode.PADG,
        prefilling=False,
        window_s=0.1,
        decoding=Spread(decoding, 30.0, 20.0, 25.0, 40.0),
        waiting=0,
        waiting_prefill_s=0.0,
        laxity_s=1e9,
        kv_tokens_free=KV_TOKENS // 2,
        kv_tokens_total=KV_TOKENS,
        step_s=0.02,
        prefill_base_s=0.0005,
        prefill_s_per_token=1e-7,
        context_tokens=decoding * 512,
    )


async def live(instances: list[StandInInstance]) -> None:
    """Until cancelled."""
    turn = 0
    while True:
        for instance in instances:
            if turn % round(STATUS_EVERY_S / REPORT_EVERY_S) == 0:
                instance.announce()
            instance.say()
        turn += 1
        await asyncio.sleep(REPORT_EVERY_S)
