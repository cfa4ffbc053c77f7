"""What a sign of life says beside that we live: the engine's work, its streams' slack, the GPUs. Shown to Prometheus
under the same names."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import structlog
from prometheus_client import Gauge

from serai.contracts.status import SlackSummary
from serai.runtime.metrics import Counts
from serai.worker_agent.desk import Desk
from serai.worker_agent.engine_metrics import phase_of
from serai.worker_agent.engine_reports import EngineReports
from serai.worker_agent.exchange import Exchange
from serai.worker_agent.gpu_watch import GpuWatch
from serai.worker_agent.leaks import FREE_WITHIN_S, Leaks
from serai.worker_agent.presence import Vitals
from serai.worker_agent.slack import slack_s, summary_of, tokens_said, tpot_target_s

log = structlog.get_logger()

RUNNING = Gauge("serai_agent_engine_requests_running", "Requests that the engine works on, by its own word")
WAITING = Gauge("serai_agent_engine_requests_waiting", "Requests that wait in the engine, by its own word")
KV_USED = Gauge("serai_agent_engine_kv_tokens_used", "Tokens in the engine's KV cache")
KV_FREE = Gauge("serai_agent_engine_kv_tokens_free", "Tokens that fit into the engine's KV cache beside those")
PREFILL_RATE = Gauge("serai_agent_engine_prefill_tokens_per_second", "Prompt tokens a second, by the engine's count")
DECODE_RATE = Gauge("serai_agent_engine_decode_tokens_per_second", "Output tokens a second, by the engine's count")
POWER = Gauge("serai_agent_gpu_power_watts", "Power of the session's GPUs together")
ENERGY = Gauge("serai_agent_gpu_energy_joules", "Energy of the session's GPUs since it began")
CELSIUS = Gauge("serai_agent_gpu_temperature_celsius", "Of the hottest of the session's GPUs")
THROTTLED = Gauge("serai_agent_gpu_throttled", "1 while heat or the power brake slows one of the session's GPUs down")
LEAKED = Counts(
    "serai_agent_leaked_requests", "Cancelled requests that the engine still had a second after it could know", []
)


class VitalSigns:
    """One session's, while its engine serves."""

    def __init__(self, desk: Desk, reports: EngineReports, gpus: GpuWatch, *, engine_is_ours: bool) -> None:
        """An engine that others use too (`engine_is_ours` False) may have requests that we know nothing of."""
        self._desk = desk
        self._reports = reports
        self._gpus = gpus
        self._leaks = Leaks() if engine_is_ours else None
        self._events = 0
        self._events_of: dict[int, int] = {}
        desk.on_cancelled = self._cancelled
        reports.on_report = self._reported

    async def watching(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reports.reporting())
            tasks.create_task(self._gpus.watching())

    def now(self) -> Vitals:
        """To be asked once for each sign of life: what the phase is told from is what came since the last time."""
        load, rates, exchanges = self._reports.load, self._reports.rates, self._desk.at_the_engine()
        queued = load.waiting or 0
        unanswered = sum(1 for exchange in exchanges if not exchange.sent_bytes)
        prefills = bool(rates.prefill) or unanswered > queued
        decodes = self._streams_moved(exchanges) or bool(rates.decode)
        if not exchanges and not load.running:
            prefills = decodes = False  # Rates are those of the time before the last report.
        vitals = Vitals(
            queued=queued + self._desk.held,
            running=load.running,
            kv_tokens_used=load.kv_tokens_used,
            kv_tokens_free=load.kv_tokens_free,
            prefill_tokens_per_s=_tenths(rates.prefill),
            decode_tokens_per_s=_tenths(rates.decode),
            phase=phase_of(len(exchanges), load.running, prefills, decodes),
            slack=_slack(exchanges, time.monotonic()),
            gpu_power_w=_whole(self._gpus.power_w),
            gpu_energy_j=_whole(self._gpus.energy_j),
            gpu_celsius=self._gpus.celsius,
            gpu_throttled=self._gpus.throttled,
        )
        _show(vitals)
        return vitals

    def _streams_moved(self, exchanges: Sequence[Exchange]) -> bool:
        """Whether a stream said anything after its first token since the last time."""
        before = self._events_of
        self._events_of = {id(exchange): exchange.events for exchange in exchanges}
        return any(events > max(1, before.get(key, 0)) for key, events in self._events_of.items())

    def _cancelled(self, exchange: Exchange) -> None:
        if self._leaks is not None and exchange.posted_at_s:
            self._leaks.cancelled(time.monotonic())
            self._reports.want(FREE_WITHIN_S)

    def _reported(self, ours: int) -> None:
        load = self._reports.load
        if self._leaks is None or load.running is None or not self._leaks.waits:
            return
        now = time.monotonic()
        leaked = self._leaks.looked(load.running + (load.waiting or 0) - ours, now)
        if leaked:
            LEAKED.of().add(leaked)
            log.warning("engine.leaks", requests=leaked, running=load.running, ours=ours)
        if self._leaks.waits:
            self._reports.want(FREE_WITHIN_S)


def _slack(exchanges: Sequence[Exchange], now: float) -> SlackSummary | None:
    slacks = []
    for exchange in exchanges:
        if exchange.first_data_at_s and exchange.request.stream:
            target_s = tpot_target_s(exchange.request.headers)
            if target_s is not None:
                tokens = tokens_said(exchange.events, exchange.last_data)
                slacks.append(slack_s(tokens, target_s, now - exchange.first_data_at_s))
    return summary_of(slacks)


def _show(vitals: Vitals) -> None:
    """What is not known is shown as NaN, not as 0."""
    shown = (
        (RUNNING, vitals.running),
        (WAITING, None if vitals.running is None else vitals.queued),
        (KV_USED, vitals.kv_tokens_used),
        (KV_FREE, vitals.kv_tokens_free),
        (PREFILL_RATE, vitals.prefill_tokens_per_s),
        (DECODE_RATE, vitals.decode_tokens_per_s),
        (POWER, vitals.gpu_power_w),
        (ENERGY, vitals.gpu_energy_j),
        (CELSIUS, vitals.gpu_celsius),
        (THROTTLED, float(vitals.gpu_throttled)),
    )
    for gauge, value in shown:
        gauge.set(math.nan if value is None else value)


def _tenths(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _whole(value: float | None) -> float | None:
    return None if value is None else float(round(value))
