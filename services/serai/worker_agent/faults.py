"""What went wrong with a node, as the record tells it: engines that ended by themselves, GPUs that are broken. Whoever
chooses nodes reads it there (`runtime/quarantine_list.py`)."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

from serai.contracts.session_record import ENGINE_DIED, FAULTS_MAX, Fault, SessionMetadata

__all__ = ["ENGINE_DIED", "with_fault"]


def with_fault(metadata: SessionMetadata, what: str, gpu: str = "") -> SessionMetadata:
    """`metadata` with this fault, seen now. The first ones tell most: beyond FAULTS_MAX none is added."""
    if len(metadata.faults) >= FAULTS_MAX:
        return metadata
    at = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return replace(metadata, faults=[*metadata.faults, Fault(what, at, gpu)])
