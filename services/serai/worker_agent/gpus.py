"""Which GPUs this process may use, as nvidia-smi and CUDA_VISIBLE_DEVICES say. Never fatal: records without them are
whole too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import structlog

from serai.contracts.session_record import GPUS_MAX, GpuDevice
from serai.runtime.bounded_command import output_of

log = structlog.get_logger()

QUERY_TIMEOUT_S = 4.0
"""Without its persistence daemon the driver takes a second or two to wake."""
_MIB = 1024 * 1024


async def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[GpuDevice]:
    """Empty where there are none, where nvidia-smi is missing, and where it does not answer in time."""
    if shutil.which("nvidia-smi") is None:
        return []
    text = await output_of(
        ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader"], QUERY_TIMEOUT_S
    )
    if text is None:
        log.warning("gpus.unknown", effect="the session's record names none")
        return []
    return chosen(devices_in(text), environment.get("CUDA_VISIBLE_DEVICES"))[:GPUS_MAX]


def devices_in(text: str) -> list[GpuDevice]:
    """From `uuid, name, 81559 MiB` lines. Unified memory shows as `[N/A]`; lines that are something else are left
    out."""
    devices = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 3 and fields[0].startswith(("GPU-", "MIG-")):
            size = fields[-1].removesuffix("MiB").strip()
            devices.append(GpuDevice(fields[0], ",".join(fields[1:-1]), int(size) * _MIB if size.isdigit() else 0))
    return devices


def chosen(devices: list[GpuDevice], visible: str | None) -> list[GpuDevice]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order: indices or UUIDs (or the beginning of one). As CUDA does,
    it ends at the first entry that is not there. A MIG instance is not in nvidia-smi's list and stands for itself."""
    if visible is None or visible.strip().lower() == "all":
        return devices
    found: list[GpuDevice] = []
    for entry in (word.strip() for word in visible.split(",")):
        if entry.isdigit():
            matches = [devices[int(entry)]] if int(entry) < len(devices) else []
        elif entry.startswith("MIG-"):
            matches = [GpuDevice(entry)]
        else:
            matches = [device for device in devices if entry and device.uuid.startswith(entry)]
        if len(matches) != 1:
            break
        found += matches
    return found
