"""GPUs through NVIDIA's management library (`nvidia-ml-py`, the extra `[gpu]`). Each question is a call into the
driver and may take milliseconds, so all of this runs in a thread."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from serai.worker_agent.gpu_health import GpuReading, throttled_by

log = structlog.get_logger()

_EVENTS_MAX = 64
"""At one reading: a GPU that is dying may report without end."""


def nvml() -> Any | None:
    """The library, ready for use; None where binding or driver is missing."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        log.info("gpus.no_nvml", error=str(error))
        return None
    return library


class NvmlReader:
    """Reads the GPUs of these UUIDs. A MIG instance is read by its GPU, but power and energy of that are also others'
    and not told."""

    def __init__(self, library: Any, uuids: Sequence[str]) -> None:
        self._nvml = library
        self._handles: list[tuple[str, Any, bool]] = []
        self._events: Any = None
        for uuid in uuids:
            try:
                handle = library.nvmlDeviceGetHandleByUUID(uuid)
                is_part = uuid.startswith("MIG-")
                whole = library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_part else handle
            except library.NVMLError as error:
                log.warning("gpus.not_found", gpu=uuid, error=str(error))
                continue
            self._handles.append((uuid, whole, is_part))
        self._listen()

    def read(self) -> list[GpuReading]:
        """All of them now."""
        xids = self._xids()
        return [self._reading(uuid, handle, is_part, xids) for uuid, handle, is_part in self._handles]

    def close(self) -> None:
        """Lets go of the driver."""
        try:
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            pass

    def _reading(self, uuid: str, handle: Any, is_part: bool, xids: Sequence[tuple[str, int]]) -> GpuReading:
        nvml = self._nvml
        milliwatts = None if is_part else self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        millijoules = None if is_part else self._ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        celsius = self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        ecc = self._ask(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
        own_uuid = self._uuid_of(handle)
        return GpuReading(
            uuid,
            power_w=None if milliwatts is None else milliwatts / 1000,
            energy_j=None if millijoules is None else millijoules / 1000,
            celsius=celsius,
            throttled=throttled_by(int(reasons or 0)),
            ecc_uncorrected=int(ecc or 0),
            xids=tuple(xid for of, xid in xids if of in ("", own_uuid)),
        )

    def _listen(self) -> None:
        """To Xids, where the driver lets us."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        heard = 0
        for _, handle, _ in self._handles:
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                heard += 1
            except nvml.NVMLError as error:
                log.info("gpus.no_xids", error=str(error))
        if heard:
            self._events = events

    def _xids(self) -> list[tuple[str, int]]:
        """Since the last time, each with its GPU's UUID; empty = not known which."""
        found: list[tuple[str, int]] = []
        while self._events is not None and len(found) < _EVENTS_MAX:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:
                break  # Nothing more has happened.
            found.append((self._uuid_of(event.device), int(event.eventData)))
        return found

    def _uuid_of(self, handle: Any) -> str:
        uuid = self._ask(lambda: self._nvml.nvmlDeviceGetUUID(handle))
        return uuid.decode() if isinstance(uuid, bytes) else uuid or ""

    def _ask(self, question: Callable[[], Any]) -> Any | None:
        """None where this GPU does not tell."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None
