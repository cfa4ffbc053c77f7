"""Asks the engine what it does: one question for all who want to know, and no more often than somebody does.

While requests run, once a second; when all have ended once more, and then hardly ever: an idle engine has nothing to
tell. The watchdog asks oftener when nothing comes of the requests, and its answers count here too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from serai.runtime.http1 import HttpFailure, HttpPool, fetch
from serai.worker_agent.engine.base import Engine
from serai.worker_agent.engine_metrics import (
    LOAD_METRICS,
    EngineLoad,
    EngineRates,
    Samples,
    load_of,
    rates_between,
    samples_in,
    samples_in_loads,
)

log = structlog.get_logger()

TIMEOUT_S = 1.0
BUSY_EVERY_S = 1.0
IDLE_EVERY_S = 30.0
LOOK_EVERY_S = 0.5
AGAIN_S = 60.0
"""An engine that says nothing of itself is asked again after so long."""
LATE_AGAIN_S = 3.0
"""One that did not answer in time has enough to do."""
RATES_OVER_S = 0.8
"""Rates between answers that lie closer together are noise."""
_METRICS, _LOADS = "/metrics", "/v1/loads"


class EngineReports:
    """One engine's. `load` and `rates` are its last word; `on_report(at_the_engine)` is called after each, with how
    many of our requests it had at most while it was asked."""

    def __init__(
        self, pool: HttpPool, engine: Engine, headers: dict[str, str], at_the_engine: Callable[[], int]
    ) -> None:
        self._pool = pool
        self._headers = headers
        self._at_the_engine = at_the_engine
        self._names = LOAD_METRICS | frozenset(engine.counters)
        self._asking: asyncio.Future[Samples | None] | None = None
        self._rates_from: EngineLoad | None = None
        self._rates_from_s = 0.0
        self._silent_until_s = 0.0
        self._was_busy = True
        self._wanted_at_s: float | None = None
        self.load = EngineLoad()
        self.rates = EngineRates()
        self.at_s = float("-inf")
        self.on_report: Callable[[int], None] = lambda _: None

    async def reporting(self) -> None:
        """Until it is cancelled."""
        while True:
            if self._is_due(time.monotonic()):
                await self.ask()
            await asyncio.sleep(LOOK_EVERY_S)

    def want(self, after_s: float) -> None:
        """Somebody wants to know after so many seconds, whatever runs then."""
        self._wanted_at_s = time.monotonic() + after_s

    async def ask(self) -> Samples | None:
        """The engine's samples now; None when it has none, or does not answer in time. Asking together is asking
        once."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    async def ask_load(self) -> EngineLoad | None:
        """Its load now, from where it costs the engine little; None when it does not say. Changes nothing here."""
        try:
            answer = await fetch(self._pool, "GET", _LOADS, headers=self._headers, timeout_s=TIMEOUT_S)
        except (HttpFailure, TimeoutError):
            return None
        samples = samples_in_loads(answer.body) if answer.status == 200 else {}
        return load_of(samples) if samples else None

    def _asked(self, _: asyncio.Future[Samples | None]) -> None:
        self._asking = None

    def _is_due(self, now: float) -> bool:
        if now < self._silent_until_s:
            return False
        if self._wanted_at_s is not None and now >= self._wanted_at_s:
            self._wanted_at_s = None
            return True
        busy = bool(self._at_the_engine() or self.load.running)
        ended, self._was_busy = self._was_busy and not busy, busy
        every_s = BUSY_EVERY_S if busy else IDLE_EVERY_S
        return ended or now - self.at_s >= every_s - LOOK_EVERY_S / 2

    async def _ask(self) -> Samples | None:
        before = self._at_the_engine()
        try:
            samples = await self._samples()
        except (HttpFailure, TimeoutError):
            # A busy engine answers late, a hung one never: the watchdog judges. What it said before is old now.
            self.load, self.rates, self._rates_from = EngineLoad(), EngineRates(), None
            self._silent_until_s = time.monotonic() + LATE_AGAIN_S
            return None
        now = time.monotonic()
        self.at_s = now
        if not samples:
            self._silent_until_s = now + AGAIN_S
            return None
        self.load = load_of(samples)
        self._take_rates(now)
        self.on_report(max(before, self._at_the_engine()))
        return samples

    async def _samples(self) -> Samples:
        """SGLang has the one only where it was told to, and the other always."""
        for path in (_METRICS, _LOADS):
            answer = await fetch(self._pool, "GET", path, headers=self._headers, timeout_s=TIMEOUT_S)
            if answer.status != 200:
                continue
            samples = samples_in_loads(answer.body) if path == _LOADS else samples_in(answer.body, self._names)
            if samples:
                return samples
        return {}

    def _take_rates(self, now: float) -> None:
        since_s = now - self._rates_from_s
        if self._rates_from is not None and since_s < RATES_OVER_S:
            return
        if self._rates_from is not None:
            self.rates = rates_between(self._rates_from, self.load, since_s)
        self._rates_from, self._rates_from_s = self.load, now
