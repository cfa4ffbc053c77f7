"""An engine that has some of its host's GPUs for itself, and must not touch the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serai.contracts.session_record import GpuDevice
from serai.worker_agent.engine.process import LoopbackStarter


def with_own_gpus(starter: LoopbackStarter, devices: Sequence[GpuDevice]) -> LoopbackStarter:
    """One whose engines see `devices` only, and no GPU at all when there are none."""
    return replace(starter, variables={"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in devices)})
