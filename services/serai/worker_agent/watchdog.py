"""Watches whether the engine gets on with its requests; what counts as progress is decided in `progress.py`.

Costs nothing per token, and next to nothing while tokens come: some comparisons a few times a second. The engine's
counters are asked for only while requests run and nothing has come for a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog
from prometheus_client import Gauge

from serai.runtime.http1 import HttpFailure, HttpPool
from serai.worker_agent.desk import Desk
from serai.worker_agent.engine.base import Engine, NotServing, ServedModel
from serai.worker_agent.engine.readiness import canary
from serai.worker_agent.engine_metrics import counters_of
from serai.worker_agent.engine_reports import EngineReports
from serai.worker_agent.exchange import Exchange
from serai.worker_agent.progress import QUIET_S, ProgressWatch, RunningRequest
from serai.worker_agent.request_text import BYTES_PER_TOKEN, answer_shape

log = structlog.get_logger()

LOOK_EVERY_S = 0.2
LOOK_EVERY_IDLE_S = 1.0
"""Not before a second of silence is there anything to see."""
COUNTERS_EVERY_S = 0.4
"""While they move. When they do not, at each look."""
COUNTERS_AGAIN_S = 60.0
"""An engine that has no counters is asked again after so long."""
CANARY_EVERY_S = 5.0

STALLED = Gauge("serai_agent_engine_stalled_seconds", "Time without progress beyond what the engine's work explains")


class Watchdog:
    """Looks after one engine. `stalled_s` is its word; `on_change` is called when that becomes 0 or ceases to be."""

    def __init__(
        self,
        desk: Desk,
        pool: HttpPool,
        engine: Engine,
        served: ServedModel,
        headers: dict[str, str],
        on_change: Callable[[], None],
        reports: EngineReports,
        *,
        prefill_s_per_token: float | None = None,
    ) -> None:
        self._desk = desk
        self._pool = pool
        self._engine = engine
        self._served = served
        self._headers = headers
        self._on_change = on_change
        self._reports = reports
        self._progress = ProgressWatch(
            prefill_s_per_token=prefill_s_per_token or engine.prefill_s_per_token,
            counter_grain_s=engine.counter_grain_s,
            context_tokens_max=served.context_tokens_max,
        )
        self._waiting: dict[Exchange, RunningRequest | None] = {}
        """Requests that nothing has come of yet, with what was found out of them, if it was asked for."""
        self._answered: dict[Exchange, RunningRequest] = {}
        self._asking: asyncio.Task[None] | None = None
        self._counters: tuple[float, ...] | None = None
        self._counters_due_s = 0.0
        self._canary_due_s = 0.0
        self.stalled_s = 0.0

    async def watching(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._look()
                exchanges = self._desk.at_the_engine()
                if self._asking is None or self._asking.done():
                    self._asking = self._ask(tasks, exchanges)
                busy = bool(exchanges) or self.stalled_s > 0
                await asyncio.sleep(LOOK_EVERY_S if busy else LOOK_EVERY_IDLE_S)

    # -- looking -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        exchanges = self._desk.at_the_engine()
        self._learn(exchanges, now)
        progress_at_s = self._desk.progress_at_s()
        self._progress.progressed(progress_at_s)
        if not exchanges:
            self._answered.clear()
            self._judge(self._progress.look((), now))
        elif now - progress_at_s < QUIET_S and not self._progress.stalled:
            self._judge(0.0)
        else:
            self._judge(self._progress.look(self._describe(exchanges), now))

    def _judge(self, stalled_s: float) -> None:
        before, self.stalled_s = self.stalled_s, stalled_s
        STALLED.set(stalled_s)
        if stalled_s and not before:
            log.error("engine.stalled", silent_s=round(stalled_s, 1), requests=self._desk.in_flight)
        elif before and not stalled_s:
            log.info("engine.progresses", stalled_s=round(before, 1))
        else:
            return
        self._on_change()

    def _learn(self, exchanges: list[Exchange], now: float) -> None:
        """From the requests whose answer has begun since the last look."""
        for exchange in self._waiting:
            if exchange.sent_bytes and exchange.request.stream and exchange.status < 400:
                until_s = min(now, exchange.last_engine_byte_at_s)
                tokens = exchange.request.body_bytes // BYTES_PER_TOKEN
                self._progress.first_token_after(until_s - exchange.posted_at_s, tokens)
        known = self._waiting
        self._waiting = {exchange: known.get(exchange) for exchange in exchanges if not exchange.sent_bytes}

    def _describe(self, exchanges: list[Exchange]) -> list[RunningRequest]:
        """What the watch needs to know of each request; found out once each, and once more when its answer begins."""
        described, answered = [], {}
        for exchange in exchanges:
            if exchange.sent_bytes:
                found = answered[exchange] = self._answered.get(exchange) or self._described(exchange)
            else:
                found = self._waiting.get(exchange) or self._described(exchange)
                self._waiting[exchange] = found
            described.append(found)
        self._answered = answered
        return described

    def _described(self, exchange: Exchange) -> RunningRequest:
        shape = answer_shape(exchange.body)
        return RunningRequest(
            posted_at_s=exchange.posted_at_s,
            prompt_tokens=exchange.request.body_bytes // BYTES_PER_TOKEN,
            answered=bool(exchange.sent_bytes),
            shows_steps=exchange.request.stream and not shape.held_back,
            output_tokens_max=shape.output_tokens_max,
            setup_s=max(shape.setup_s, self._engine.setup_s),
        )

    # -- asking the engine ---------------------------------------------------------------------------------------

    def _ask(self, tasks: asyncio.TaskGroup, exchanges: list[Exchange]) -> asyncio.Task[None] | None:
        """Asks for the counters when it is quiet; for a token when it was stalled and has nothing else to do."""
        now = time.monotonic()
        quiet = bool(exchanges) and now - self._since_s(exchanges) >= QUIET_S
        if quiet and now >= self._counters_due_s:
            return tasks.create_task(self._ask_counters())
        if not exchanges and self.stalled_s and now >= self._canary_due_s:
            self._canary_due_s = now + CANARY_EVERY_S
            return tasks.create_task(self._ask_token())
        return None

    def _since_s(self, exchanges: list[Exchange]) -> float:
        return max(self._desk.progress_at_s(), min(exchange.posted_at_s for exchange in exchanges))

    async def _ask_counters(self) -> None:
        samples = await self._reports.ask()
        if samples is None:
            return
        now = time.monotonic()
        counters = counters_of(samples, self._engine.counters)
        if counters is None:
            self._counters_due_s = now + COUNTERS_AGAIN_S
            return
        if counters != self._counters:
            self._counters_due_s = now + COUNTERS_EVERY_S - LOOK_EVERY_S / 2
        self._counters = counters
        self._progress.progressed(self._desk.progress_at_s())
        self._progress.counted(counters, now)
        self._look()

    async def _ask_token(self) -> None:
        """A hung engine whose clients have all given up would stay out of the service for ever."""
        try:
            await canary(self._pool, self._served.engine_model, self._headers, CANARY_EVERY_S)
        except (NotServing, HttpFailure, TimeoutError):
            return
        self._progress.progressed(time.monotonic())
        self._look()
