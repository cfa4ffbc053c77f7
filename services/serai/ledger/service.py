"""The ledger's shell: messages become rows, and are acknowledged when those are committed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import structlog
from prometheus_client import Gauge

from serai.contracts.codec import MalformedMessage, decode, decode_lines, encode
from serai.contracts.subjects import USAGE_CONSUMER, USAGE_DEMAND, USAGE_SPENT, USAGE_STREAM
from serai.contracts.usage import DemandAnswer, DemandRequest, SpentAnswer, SpentRequest, UsageRecord
from serai.ledger.demand import why_not
from serai.ledger.settings import LedgerSettings
from serai.ledger.sql_store import SqlStore, StoreError
from serai.runtime.bus import Bus, BusError, Message
from serai.runtime.metrics import Counts
from serai.runtime.nats_stream import NatsStream, PullConsumer, StreamLimits
from serai.runtime.service import ServiceFailure

T = TypeVar("T")

log = structlog.get_logger()

RECORDS = Counts("serai_ledger_records", "Usage records: new, known already (counted once), malformed", ["fate"])
KEPT_AT = Gauge("serai_ledger_last_kept_timestamp_seconds", "When records were last committed")

MESSAGES_AT_ONCE = 32
"""Committed together. A message has 256 KiB at most."""
BACK_OFF_S, BACK_OFF_MAX_S = 0.25, 10.0
QUESTIONS_WAITING_MAX = 256
SCOPES_MAX = 1_000
FORGET_EVERY_S = 3600.0
_ACK = b"+ACK"


class Ledger:
    """Collaborators come from outside; `run` returns when told to stop."""

    def __init__(self, settings: LedgerSettings, bus: Bus, stream: NatsStream, store: SqlStore) -> None:
        self._settings = settings
        self._bus = bus
        self._stream = stream
        self._consumer = PullConsumer(bus, USAGE_STREAM, USAGE_CONSUMER, MESSAGES_AT_ONCE)
        self._store = store
        self._thread = ThreadPoolExecutor(1, "sql")
        self._questions = asyncio.Queue[tuple[SpentRequest | DemandRequest, str]](QUESTIONS_WAITING_MAX)

    async def run(self, stop: asyncio.Event) -> None:
        try:
            await self._in_thread(self._store.open)
        except StoreError as error:
            raise ServiceFailure(f"{error}; is --ledger right?", exit_code=2) from error
        subscriptions = [
            await self._consumer.start(),
            await self._bus.subscribe(USAGE_SPENT.of_site(self._settings.site), self.on_spent),
            await self._bus.subscribe(USAGE_DEMAND.of_site(self._settings.site), self.on_demand),
        ]
        await self._bus.barrier()
        try:
            async with asyncio.TaskGroup() as tasks:
                work = (self._consuming(), self._answering(), self._forgetting())
                working = [tasks.create_task(one) for one in work]
                await stop.wait()
                for task in working:
                    task.cancel()
            for subscription in subscriptions:
                await subscription.unsubscribe()
        finally:
            await self._in_thread(self._store.close)
            self._thread.shutdown()

    # -- records -------------------------------------------------------------------------------------------------

    async def _consuming(self) -> None:
        """Takes and keeps, whatever happens to NATS or the database; both are come back to."""
        back_off_s = BACK_OFF_S
        limits = StreamLimits(self._settings.stream_bytes_max)
        while True:
            try:
                await self._stream.make(USAGE_CONSUMER, limits)
                log.info("ledger.ready", site=self._settings.site)
                while True:
                    await self._keep(await self._consumer.take())
                    back_off_s = BACK_OFF_S
            except (BusError, StoreError) as error:
                if back_off_s <= BACK_OFF_S * 2:
                    log.warning("ledger.waiting", error=str(error))
                await asyncio.sleep(back_off_s * random.uniform(0.5, 1.0))
                back_off_s = min(BACK_OFF_MAX_S, back_off_s * 2)

    async def _keep(self, messages: Sequence[Message]) -> None:
        """Commits what they hold, then acknowledges them. Killed in between, it gets them again, and knows them."""
        if not messages:
            return
        records: list[UsageRecord] = []
        for message in messages:
            found, malformed = decode_lines(UsageRecord, message.data)
            records += found
            if malformed:
                RECORDS.of("malformed").add(malformed)
                log.error("ledger.malformed", lines=malformed, effect="they count for nothing")
        new = await self._in_thread(lambda: self._store.insert(records)) if records else 0
        for message in messages:
            self._bus.publish(message.reply, _ACK)
        RECORDS.of("new").add(new)
        RECORDS.of("known").add(len(records) - new)
        KEPT_AT.set_to_current_time()

    async def _forgetting(self) -> None:
        while self._settings.retention_days:
            before = datetime.now(UTC) - timedelta(days=self._settings.retention_days)
            try:
                while gone := await self._in_thread(lambda: self._store.forget_before(before.isoformat())):  # noqa: B023
                    log.info("ledger.forgot", records=gone)
            except StoreError as error:
                log.warning("ledger.cannot_forget", error=str(error))
            await asyncio.sleep(FORGET_EVERY_S)

    # -- questions -----------------------------------------------------------------------------------------------

    def on_spent(self, message: Message) -> None:
        """What scopes have used since a moment."""
        try:
            request = decode(SpentRequest, message.data)
        except MalformedMessage as error:
            self._answer(message.reply, SpentAnswer(problem=str(error)))
            return
        if len(request.scopes) > SCOPES_MAX:
            self._answer(message.reply, SpentAnswer(problem=f"scopes: {len(request.scopes)}; at most {SCOPES_MAX}"))
            return
        try:
            self._questions.put_nowait((request, message.reply))
        except asyncio.QueueFull:
            self._answer(message.reply, SpentAnswer(problem="the ledger has too many questions waiting"))

    def on_demand(self, message: Message) -> None:
        """How much of each model was asked for, and when."""
        try:
            request = decode(DemandRequest, message.data)
        except MalformedMessage as error:
            self._answer(message.reply, DemandAnswer(problem=str(error)))
            return
        if problem := why_not(request):
            self._answer(message.reply, DemandAnswer(problem=problem))
            return
        try:
            self._questions.put_nowait((request, message.reply))
        except asyncio.QueueFull:
            self._answer(message.reply, DemandAnswer(problem="the ledger has too many questions waiting"))

    async def _answering(self) -> None:
        while True:
            request, reply = await self._questions.get()
            answer: SpentAnswer | DemandAnswer
            if isinstance(request, DemandRequest):
                answer = await self._demand(request)
            else:
                answer = await self._spent(request)
            self._answer(reply, answer)

    async def _spent(self, request: SpentRequest) -> SpentAnswer:
        try:
            return SpentAnswer(await self._in_thread(lambda: self._store.spent(request.scopes, request.since)))
        except StoreError as error:
            return SpentAnswer(problem=str(error))

    async def _demand(self, request: DemandRequest) -> DemandAnswer:
        try:
            return DemandAnswer(await self._in_thread(lambda: self._store.demand(request)))
        except StoreError as error:
            return DemandAnswer(problem=str(error))

    def _answer(self, reply: str, answer: SpentAnswer | DemandAnswer) -> None:
        if not reply:
            return
        try:
            self._bus.publish(reply, encode(answer))
        except BusError as error:
            log.warning("usage.not_answered", error=str(error))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
