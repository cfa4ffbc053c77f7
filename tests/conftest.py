"""Tests that run side by side take their ports, and so do the processes that they start, from ranges of their own."""

from __future__ import annotations

import os

from serai.worker_agent.engine.ports import PORT_RANGE, PORTS_VARIABLE

SLICES = 4

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    length = len(PORT_RANGE) // SLICES
    first = PORT_RANGE.start + int(worker.removeprefix("gw")) % SLICES * length
    os.environ[PORTS_VARIABLE] = f"{first}-{first + length - 1}"
