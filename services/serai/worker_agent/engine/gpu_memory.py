"""Memory of GPUs that somebody holds, as nvidia-smi tells it. Never fatal: without it, nothing is held.

A GPU that the batch system calls free may still hold the memory of a job that is ending, of an orphan, or of another
tenant. An engine that starts then fails in a way that looks like a model that is too large.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from serai.contracts.session_record import GpuDevice
from serai.runtime.bounded_command import output_of

QUERY_TIMEOUT_S = 4.0
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of one GPU that processes other than Serai's engines hold."""

    uuid: str
    bytes_held: int
    pids: tuple[int, ...] = ()
    """Of those that nvidia-smi names; it sees those of its own process namespace only."""


async def held_by_others(gpus: Sequence[GpuDevice], ours: Collection[int]) -> list[Held]:
    """Of `gpus`; `ours` are processes of engines, whose memory is theirs to hold."""
    if not gpus or shutil.which("nvidia-smi") is None:
        return []
    used = await output_of(
        ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"], QUERY_TIMEOUT_S
    )
    if used is None:
        return []
    apps = await output_of(
        ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"],
        QUERY_TIMEOUT_S,
    )
    return held_in(used, apps or "", [gpu.uuid for gpu in gpus], ours)


def held_in(used: str, apps: str, uuids: Sequence[str], ours: Collection[int]) -> list[Held]:
    """From nvidia-smi's lines. What is used and not by our engines is held by others; lines that say something else
    (`[N/A]`, messages) are left out."""
    pids: dict[str, list[int]] = {}
    own_bytes: dict[str, int] = {}
    for uuid, pid, size in _rows(apps, 3):
        if pid.isdigit() and int(pid) in ours:
            own_bytes[uuid] = own_bytes.get(uuid, 0) + (int(size) * _MIB if size.isdigit() else 0)
        elif pid.isdigit():
            pids.setdefault(uuid, []).append(int(pid))
    held = []
    for uuid, size in _rows(used, 2):
        if uuid in uuids and size.isdigit():
            others = int(size) * _MIB - own_bytes.get(uuid, 0)
            held.append(Held(uuid, max(0, others), tuple(pids.get(uuid, ()))))
    return held


async def lost_of(gpus: Sequence[GpuDevice]) -> list[str]:
    """UUIDs of those that nvidia-smi does not list any more; when it says nothing, that proves nothing. Instances of
    MIG are never in its list."""
    if not gpus or shutil.which("nvidia-smi") is None:
        return []
    listed = await output_of(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], QUERY_TIMEOUT_S)
    uuids = {row[0] for row in _rows(listed or "", 1)}
    return [gpu.uuid for gpu in gpus if uuids and gpu.uuid.startswith("GPU-") and gpu.uuid not in uuids]


async def gpu_bytes_of(pids: Collection[int]) -> int:
    """GPU memory that these processes hold, together; 0 when it cannot be told."""
    if shutil.which("nvidia-smi") is None:
        return 0
    apps = await output_of(
        ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"],
        QUERY_TIMEOUT_S,
    )
    rows = _rows(apps or "", 3)
    return sum(int(size) * _MIB for _, pid, size in rows if pid.isdigit() and int(pid) in pids and size.isdigit())


def held_story(held: Sequence[Held]) -> str:
    """For people."""
    told = []
    for one in held:
        names = [f"{pid} ({name})" if (name := _program(pid)) else str(pid) for pid in one.pids[:4]]
        by = f" by process {', '.join(names)}" if names else ""
        told.append(f"{one.bytes_held / 2**30:.1f} GiB of {one.uuid} are held{by}")
    return "; ".join(told)


def _program(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == width and row[0].startswith(("GPU-", "MIG-"))]
