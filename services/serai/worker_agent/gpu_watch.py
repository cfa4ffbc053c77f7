"""Looks after a session's GPUs: power, energy, heat, and whether one of them is broken. Never fatal, and nothing where
there are none.

By NVML where its binding is installed, every few seconds; else by nvidia-smi, which takes a second of a core on large
nodes and is asked seldom.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from serai.contracts.session_record import GpuDevice
from serai.runtime.bounded_command import output_of
from serai.worker_agent.gpu_health import SMI_FIELDS, Energy, GpuReading, faults_in, readings_in
from serai.worker_agent.nvml import NvmlReader, nvml

log = structlog.get_logger()

NVML_EVERY_S = 5.0
SMI_EVERY_S = 30.0
SMI_TIMEOUT_S = 10.0


class GpuReader(Protocol):
    """Where readings come from."""

    every_s: float

    async def read(self) -> list[GpuReading]:
        """All that can be read now."""

    async def close(self) -> None: ...


class GpuWatch:
    """One session's. `on_fault(gpu, what)` is called once for each fault that is found."""

    def __init__(self, gpus: Sequence[GpuDevice], on_fault: Callable[[str, str], None]) -> None:
        self._uuids = [gpu.uuid for gpu in gpus]
        self._on_fault = on_fault
        self._known: dict[tuple[str, str], None] = {}
        self._energy = Energy()
        self._readings: Sequence[GpuReading] = ()

    @property
    def power_w(self) -> float | None:
        """Of all together; None = no GPU tells, as the others."""
        powers = [reading.power_w for reading in self._readings if reading.power_w is not None]
        return sum(powers) if powers else None

    @property
    def energy_j(self) -> float | None:
        return self._energy.total_j

    @property
    def celsius(self) -> float | None:
        return max((reading.celsius for reading in self._readings if reading.celsius is not None), default=None)

    @property
    def throttled(self) -> bool:
        return any(reading.throttled for reading in self._readings)

    async def watching(self) -> None:
        """Until it is cancelled; returns at once where there is nothing to watch."""
        if not self._uuids:
            return
        reader = await _reader(self._uuids)
        try:
            while True:
                self.take(await reader.read(), time.monotonic())
                await asyncio.sleep(reader.every_s)
        finally:
            await reader.close()

    def take(self, readings: Sequence[GpuReading], now: float) -> None:
        """What was read at `now`. None at all says nothing: what was known stays."""
        if not readings:
            return
        self._readings = readings
        self._energy.add(readings, now)
        for gpu, what in faults_in(readings):
            if (gpu, what) not in self._known:
                self._known[gpu, what] = None
                log.error("gpu.fault", gpu=gpu, fault=what)
                self._on_fault(gpu, what)


async def _reader(uuids: Sequence[str]) -> GpuReader:
    library = await asyncio.to_thread(nvml)
    if library is None:
        return _BySmi(uuids)
    return _ByNvml(await asyncio.to_thread(NvmlReader, library, uuids))


class _ByNvml:
    every_s = NVML_EVERY_S

    def __init__(self, reader: NvmlReader) -> None:
        self._reader = reader

    async def read(self) -> list[GpuReading]:
        return await asyncio.to_thread(self._reader.read)

    async def close(self) -> None:
        self._reader.close()


class _BySmi:
    every_s = SMI_EVERY_S

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids

    async def read(self) -> list[GpuReading]:
        command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
        text = await output_of(command, SMI_TIMEOUT_S)
        return [reading for reading in readings_in(text or "") if reading.uuid in self._uuids]

    async def close(self) -> None:
        pass
