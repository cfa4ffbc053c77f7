"""What a measurement was taken on. No host names, users or paths: results are published."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path


def describe_machine() -> dict[str, object]:
    """The machine and its state now, as JSON values."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "virtual": "hypervisor" in _cpu_flags(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def folder_name(machine: dict[str, object]) -> str:
    """`<machine>-<date>`: a name for the folder of raw results."""
    words = str(machine["cpu"]).lower().replace("(r)", "").replace("(tm)", "")
    cpu = "-".join("".join(letter if letter.isalnum() else " " for letter in words).split()[:4])
    return f"{cpu}-{machine['cores']}-cores-{str(machine['date'])[:10]}"


def _cpu_info(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.machine() or "unknown"


def _cpu_flags() -> list[str]:
    return _cpu_info("flags").split()
