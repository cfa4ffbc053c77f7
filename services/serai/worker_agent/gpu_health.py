"""What GPUs say of themselves, and when one of them is broken. Pure.

Broken is what a restart of the engine does not mend: memory that lost data, a GPU that fell off its bus, firmware that
no longer answers. Errors that programs cause (Xid 13, 31, 43, 45 …), heat and being busy are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FATAL_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halted",
    64: "row remapper failed",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained ECC error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""By NVIDIA's catalogue: those after which the GPU or the node has to be reset."""

# Hardware slowdown, heat (by software and by hardware), power brake. Not the power cap: under load that is normal.
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80

SMI_FIELDS = "uuid,power.draw,temperature.gpu,clocks_throttle_reasons.active,ecc.errors.uncorrected.volatile.total"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment; what it does not tell is None."""

    uuid: str
    power_w: float | None = None
    energy_j: float | None = None
    """Since the driver was loaded."""
    celsius: float | None = None
    throttled: bool = False
    ecc_uncorrected: int = 0
    """Since the driver was loaded: a reset clears it."""
    xids: tuple[int, ...] = ()
    """Since the last reading."""


def throttled_by(reasons: int) -> bool:
    """From the bits that NVML and nvidia-smi give."""
    return bool(reasons & _THROTTLED)


def readings_in(text: str) -> list[GpuReading]:
    """From nvidia-smi's lines of SMI_FIELDS, without header and units. `[N/A]` and the like are None; lines that say
    something else are left out."""
    readings = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and fields[0].startswith("GPU-"):
            uuid, power, celsius, reasons, ecc = fields
            readings.append(
                GpuReading(
                    uuid,
                    power_w=_number(power),
                    celsius=_number(celsius),
                    throttled=throttled_by(int(reasons, 16)) if _is_hexadecimal(reasons) else False,
                    ecc_uncorrected=int(_number(ecc) or 0),
                )
            )
    return readings


def faults_in(readings: Sequence[GpuReading]) -> list[tuple[str, str]]:
    """GPU and what is broken, in words; none of most."""
    found = []
    for reading in readings:
        if reading.ecc_uncorrected:
            found.append((reading.uuid, "uncorrectable ECC errors"))
        found += [(reading.uuid, f"Xid {xid}: {FATAL_XIDS[xid]}") for xid in reading.xids if xid in FATAL_XIDS]
    return found


class Energy:
    """Energy used since it was first asked, in joules: by the GPUs' own meters, else by power and time."""

    def __init__(self) -> None:
        self._used_j: dict[str, float] = {}
        self._last: dict[str, tuple[GpuReading, float]] = {}

    def add(self, readings: Sequence[GpuReading], now: float) -> None:
        """What the GPUs say at `now`, in seconds of any clock that does not jump."""
        for reading in readings:
            last = self._last.get(reading.uuid)
            if last is not None:
                used_j = self._used_j.get(reading.uuid, 0.0)
                self._used_j[reading.uuid] = used_j + _used_between(last[0], reading, now - last[1])
            elif reading.energy_j is not None or reading.power_w is not None:
                self._used_j.setdefault(reading.uuid, 0.0)
            self._last[reading.uuid] = (reading, now)

    @property
    def total_j(self) -> float | None:
        """None = no GPU has told."""
        return sum(self._used_j.values()) if self._used_j else None


def _used_between(before: GpuReading, after: GpuReading, seconds: float) -> float:
    if before.energy_j is not None and after.energy_j is not None:
        return max(0.0, after.energy_j - before.energy_j)  # A driver that was loaded anew counts from 0.
    if before.power_w is not None and after.power_w is not None:
        return (before.power_w + after.power_w) / 2 * seconds
    return 0.0


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _is_hexadecimal(text: str) -> bool:
    return text.startswith("0x") and all(letter in "0123456789abcdefABCDEF" for letter in text[2:]) and len(text) > 2
