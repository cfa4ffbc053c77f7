"""What all connections of one emulated engine share, and a request as it came."""

from __future__ import annotations

from typing import Protocol

from serai.engine_emulator.answering import reads
from serai.engine_emulator.completion import CompletionReader
from serai.engine_emulator.engine import Engine
from serai.engine_emulator.faults import FaultKind, FaultPlan
from serai.engine_emulator.settings import EmulatorSettings
from serai.engine_emulator.sleep import Sleep


class Closable(Protocol):
    """A connection, as far as the service's end is concerned."""

    def close(self) -> None:
        """Close at once."""


class HttpRequest:
    """One request as it came."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path")

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes, keep_alive: bool) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.keep_alive = keep_alive


class EmulatorState:
    """What all connections of one emulated engine share."""

    def __init__(self, settings: EmulatorSettings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.reader = CompletionReader(settings)
        self.reads = reads(settings)
        self.faults = FaultPlan(fault for fault in settings.faults if fault.kind is not FaultKind.REFUSE_START)
        self.sleep = Sleep(settings.sleep_s, settings.wake_s)
        self.last_request: HttpRequest | None = None
        self.connections: set[Closable] = set()
        """Those that are open."""
