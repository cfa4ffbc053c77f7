"""Small stand-ins for the bus, the clock and the engine's connections; they record what is done to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from serai.contracts.codec import decode_frames
from serai.contracts.inference import Frame
from serai.contracts.session_record import Lifecycle, SessionMetadata, SessionRecord
from serai.runtime.bus import BusDisconnected, Handler, Loss, LossReason, Message, MessageTooLarge, NoResponders
from serai.runtime.http1 import HttpFailure, Origin, ResponseHandler


def record_of(
    session: str = "s1",
    lifecycle: Lifecycle = Lifecycle.SERVING,
    version: int = 1,
    *,
    model: str = "m",
    **metadata: Any,
) -> SessionRecord:
    """A session record in which only what matters to the test is said."""
    filled = {"engine_model": model, "engine": "emulated"} | metadata
    return SessionRecord(session, lifecycle, version, SessionMetadata(model=model, **filled))


class Clock:
    """Time that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def put_into(self, patch: pytest.MonkeyPatch, *modules: Any) -> None:
        """Makes `modules` read this clock."""
        for module in modules:
            readings = SimpleNamespace(
                monotonic=lambda: self.now_s,
                monotonic_ns=lambda: round(self.now_s * 1e9),
                time_ns=time.time_ns,
            )
            patch.setattr(module, "time", readings)


@dataclass(frozen=True, slots=True)
class Published:
    subject: str
    payload: bytes
    reply: str

    @property
    def frames(self) -> list[Frame]:
        return decode_frames(self.payload)


@dataclass(slots=True)
class FakeSubscription:
    bus: FakeBus
    subject: str

    async def unsubscribe(self) -> None:
        del self.bus.handlers[self.subject]


class FakeBus:
    """A bus with nobody at the other end: the test reads `published` and calls handlers itself."""

    def __init__(self, message_bytes_max: int = 900_000) -> None:
        self.message_bytes_max = message_bytes_max
        self.connected = True
        self.inbox_prefix = "_INBOX_test.x"
        self.published: list[Published] = []
        self.handlers: dict[str, Handler] = {}
        self.answers: dict[str, Callable[[bytes], bytes]] = {}
        self._on_disconnect: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []
        self._on_loss: list[Callable[[Loss], None]] = []

    def publish(self, subject: str, payload: bytes, reply: str = "", *, at_once: bool = False) -> None:
        if not self.connected:
            raise BusDisconnected("not connected")
        if len(payload) > self.message_bytes_max:
            raise MessageTooLarge(f"{len(payload)} bytes")
        self.published.append(Published(subject, payload, reply))

    async def subscribe(self, subject: str, handler: Handler) -> FakeSubscription:
        self.handlers[subject] = handler
        return FakeSubscription(self, subject)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message:
        if subject not in self.answers:
            raise NoResponders(f"nobody answers on {subject}")
        return Message("", self.answers[subject](payload))

    async def barrier(self) -> None: ...

    def bucket(self, name: str, *, in_memory: bool = False, timeout_s: float = 5.0) -> Any:
        return SimpleNamespace()

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._on_disconnect.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._on_reconnect.append(callback)

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        self._on_loss.append(callback)

    async def aclose(self) -> None: ...

    def lose_connection(self) -> None:
        self.connected = False
        for callback in self._on_disconnect:
            callback()
        self.lose(Loss(LossReason.DISCONNECTED))

    def lose(self, loss: Loss) -> None:
        for told in self._on_loss:
            told(loss)

    def reconnect(self) -> None:
        self.connected = True
        for callback in self._on_reconnect:
            callback()

    def take(self) -> list[Published]:
        """What was published since the last call."""
        taken, self.published = self.published, []
        return taken

    def take_frames(self) -> list[Frame]:
        """The frames of what was published since the last call."""
        return [frame for message in self.take() for frame in message.frames]


class FakeConnection:
    """What an `Exchange` does to the connection it was lent."""

    def __init__(self) -> None:
        self.reading = True
        self.aborted = False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


@dataclass(slots=True)
class Posted:
    """One request that was given to the pool; the test plays the engine. After an abort the handler hears nothing,
    as with a real connection."""

    request: bytes
    handler: ResponseHandler
    lent: Callable[[Any], None]
    connection: FakeConnection | None = None
    over: bool = False

    @property
    def body(self) -> bytes:
        return self.request.partition(b"\r\n\r\n")[2]

    @property
    def live(self) -> bool:
        return self.connection is not None and not self.connection.aborted and not self.over

    def lend(self) -> FakeConnection:
        self.connection = FakeConnection()
        self.lent(self.connection)
        return self.connection

    def head(self, status: int = 200, **headers: str) -> None:
        if self.live:
            self.handler.on_head(status, headers)

    def data(self, data: bytes) -> None:
        if self.live:
            self.handler.on_data(data)

    def complete(self) -> None:
        if self.live:
            self.over = True
            self.handler.on_complete()

    def fail(self, failure: HttpFailure) -> None:
        if not self.over and (self.connection is None or self.live):
            self.over = True
            self.handler.on_failure(failure)


@dataclass(slots=True)
class FakePool:
    """A pool whose connections are made when the test says so."""

    origin: Origin = Origin("127.0.0.1", 9)
    posted: list[Posted] = field(default_factory=list)

    def start(self, request: Iterable[bytes], handler: ResponseHandler, lent: Callable[[Any], None]) -> None:
        self.posted.append(Posted(b"".join(request), handler, lent))
