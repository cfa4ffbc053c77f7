"""Brings usage records from their spool to JetStream, behind the requests' backs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from hashlib import sha256

import structlog
from prometheus_client import Gauge

from serai.contracts.codec import encode
from serai.contracts.usage import UsageRecord
from serai.ingress.usage_spool import Spool, SpoolFull
from serai.runtime.bus import BusError
from serai.runtime.metrics import Counts

log = structlog.get_logger()

RECORDS = Counts("serai_ingress_usage_records", "Usage records made, or dropped for want of room", ["fate"])
PENDING = Gauge("serai_ingress_usage_pending_bytes", "Usage records that JetStream has not acknowledged yet")

GATHER_S = 0.5
"""Records of so long go together in one message: each costs JetStream, and the ledger's database, some files' writing,
however many records it holds."""
MESSAGE_BYTES_MAX = 256 * 1024
BACK_OFF_S, BACK_OFF_MAX_S = 0.25, 10.0
ADOPT_EVERY_S = 10.0

Publish = Callable[[bytes, str], Awaitable[None]]
"""Payload, and the id under which it is stored once. Raises BusError."""


class UsageSender:
    """One message is on its way at a time; what it holds leaves the spool when it is acknowledged."""

    def __init__(self, spool: Spool, publish: Publish) -> None:
        self._spool = spool
        self._publish = publish
        self._news = asyncio.Event()
        self._adopt_at_s = 0.0
        self._told_full = False
        self._made, self._dropped = RECORDS.of("made"), RECORDS.of("dropped")

    def add(self, record: UsageRecord) -> None:
        """Never waits and never fails: a request that was answered stays answered."""
        line = encode(record) + b"\n"
        if len(line) > MESSAGE_BYTES_MAX:  # It would never fit, and nothing behind it would ever go.
            self._dropped.add()
            log.error("usage.dropped", error=f"a record of {len(line)} bytes; at most {MESSAGE_BYTES_MAX}")
            return
        try:
            self._spool.append(line)
        except SpoolFull as error:
            self._dropped.add()
            if not self._told_full:
                self._told_full = True
                log.error("usage.dropped", error=str(error), effect="records are lost until there is room")
            return
        self._made.add()
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        back_off_s = BACK_OFF_S
        while True:
            batch = await self._next_batch()
            try:
                await self._send(batch)
            except BusError as error:
                if back_off_s == BACK_OFF_S:
                    log.warning("usage.waiting", error=str(error), pending_bytes=self._spool.pending_bytes)
                await asyncio.sleep(back_off_s * random.uniform(0.5, 1.0))
                back_off_s = min(BACK_OFF_MAX_S, back_off_s * 2)
            else:
                if back_off_s > BACK_OFF_S:
                    log.info("usage.flows", pending_bytes=self._spool.pending_bytes)
                back_off_s = BACK_OFF_S

    async def flush(self, timeout_s: float) -> None:
        """Sends what is there; what cannot be sent in time stays in the spool. Not beside `run`."""
        try:
            async with asyncio.timeout(timeout_s):
                while batch := self._spool.read(MESSAGE_BYTES_MAX):
                    await self._send(batch)
        except (TimeoutError, BusError) as error:
            log.warning("usage.not_sent", pending_bytes=self._spool.pending_bytes, error=str(error) or "no answer")

    async def _next_batch(self) -> bytes:
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() >= self._adopt_at_s:
                self._adopt_at_s = loop.time() + ADOPT_EVERY_S
                if taken := self._spool.adopt():
                    log.info("usage.adopted", bytes=taken)
            PENDING.set(self._spool.pending_bytes)
            self._news.clear()
            if not self._spool.pending_bytes:
                try:
                    async with asyncio.timeout_at(self._adopt_at_s):
                        await self._news.wait()
                except TimeoutError:
                    continue
            if self._spool.pending_bytes < MESSAGE_BYTES_MAX:
                # Under load, too: a message for each acknowledgement costs everybody behind it a write.
                await asyncio.sleep(GATHER_S)
            if batch := self._spool.read(MESSAGE_BYTES_MAX):
                return batch

    async def _send(self, batch: bytes) -> None:
        # The id is made from what it holds: places in files are used again.
        await self._publish(batch, sha256(batch).hexdigest()[:32])
        self._spool.forget(len(batch))
        self._told_full = False
