"""GPUs by nvidia-smi and by NVML, both stand-ins: power, energy, heat, and what makes one of them broken (H29)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serai.contracts.session_record import GpuDevice
from serai.worker_agent.gpu_health import Energy, GpuReading, faults_in, readings_in
from serai.worker_agent.gpu_watch import GpuWatch
from serai.worker_agent.nvml import NvmlReader

A, B = "GPU-aaaa", "GPU-bbbb"


def test_lines_of_nvidia_smi() -> None:
    text = f"{A}, 311.25, 54, 0x0000000000000004, 0\n{B}, [N/A], 88, 0x0000000000000060, 2\nNo devices were found\n"
    assert readings_in(text) == [
        GpuReading(A, power_w=311.25, celsius=54.0),
        GpuReading(B, celsius=88.0, throttled=True, ecc_uncorrected=2),
    ]


@pytest.mark.parametrize("text", ["", "GPU-a", "GPU-a, x, y, z, w", "NVIDIA-SMI has failed, a, b, c, d"])
def test_lines_that_are_none(text: str) -> None:
    assert all(reading == GpuReading("GPU-a") for reading in readings_in(text))


def test_h29_what_a_reset_has_to_mend_is_a_fault() -> None:
    readings = [GpuReading(A, xids=(31, 13, 79)), GpuReading(B, ecc_uncorrected=1), GpuReading("GPU-c", celsius=99)]
    assert faults_in(readings) == [(A, "Xid 79: fallen off the bus"), (B, "uncorrectable ECC errors")]


def test_energy_by_meter_and_by_power() -> None:
    energy = Energy()
    assert energy.total_j is None
    energy.add([GpuReading(A, energy_j=1_000_000.0), GpuReading(B, power_w=100.0)], 10.0)
    assert energy.total_j == 0.0
    energy.add([GpuReading(A, energy_j=1_000_500.0), GpuReading(B, power_w=300.0)], 20.0)
    assert energy.total_j == pytest.approx(500.0 + 2000.0)
    energy.add([GpuReading(A, energy_j=3.0), GpuReading(B)], 30.0)  # The driver was loaded anew; B is silent.
    assert energy.total_j == pytest.approx(2500.0)


def test_h29_each_fault_is_told_once() -> None:
    told: list[tuple[str, str]] = []
    watch = GpuWatch([GpuDevice(A), GpuDevice(B)], lambda gpu, what: told.append((gpu, what)))
    assert (watch.power_w, watch.energy_j, watch.celsius, watch.throttled) == (None, None, None, False)
    broken = GpuReading(A, power_w=90.0, celsius=40.0, ecc_uncorrected=1)
    watch.take([broken, GpuReading(B, power_w=10.0, celsius=60.0, throttled=True)], 1.0)
    watch.take([broken, GpuReading(B, power_w=10.0, celsius=60.0, throttled=True)], 2.0)
    watch.take([], 3.0)
    assert told == [(A, "uncorrectable ECC errors")]
    assert (watch.power_w, watch.energy_j, watch.celsius, watch.throttled) == (100.0, 100.0, 60.0, True)


class Refused(Exception):
    """As NVMLError."""


class FakeNvml:
    """As much of pynvml as is used. One GPU, one MIG instance of it; the second GPU is unknown."""

    NVMLError = Refused
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.registered: list[Any] = []

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid == B:
            raise Refused
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        assert handle.startswith("MIG-")
        return A

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 250_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 7_000_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x80

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        raise Refused

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        if not self.events:
            raise Refused("timeout")
        return self.events.pop(0)


def test_h29_nvml_tells_power_energy_heat_and_xids_of_the_gpu_they_are_of() -> None:
    library = FakeNvml()
    reader = NvmlReader(library, [A, B, "MIG-1"])
    assert library.registered == [A, A]
    library.events = [SimpleNamespace(device=A, eventData=79), SimpleNamespace(device="GPU-other", eventData=48)]
    whole, part = reader.read()
    assert whole == GpuReading(A, 250.5, 7000.0, 61, True, 0, (79,))
    assert part == GpuReading("MIG-1", None, None, 61, True, 0, (79,))
    assert [reading.xids for reading in reader.read()] == [(), ()]
