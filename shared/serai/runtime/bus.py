"""The seam between services and NATS: what a service may ask of the bus, whichever bus it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

BUCKET_TIMEOUT_S = 5.0


class BusError(Exception):
    """The bus could not do it. The text says what to do."""


class BusDisconnected(BusError):
    """Not connected now; nothing was sent. Stale messages are never kept back for later."""


class MessageTooLarge(BusError):
    """Larger than the server takes. Callers split before they come here, so this is our own mistake."""


class NoResponders(BusError):
    """Nobody subscribes to the subject: the receiver is not there."""


class RequestTimeout(BusError):
    """Somebody may have received the request, but no answer came in time."""


class Message(msgspec.Struct, frozen=True):
    """One message as it arrived."""

    subject: str
    data: bytes
    reply: str = ""
    no_responders: bool = False
    """The server's word, on the reply subject, that nobody received what was published with it."""


class LossReason(StrEnum):
    """Why messages may be missing."""

    DISCONNECTED = "disconnected"
    """The connection broke: whatever was on its way, in either direction, is gone."""
    DROPPED = "dropped"
    """They came faster than this process took them, and the client dropped some."""
    REFUSED = "refused"
    """The server does not let this connection publish, or subscribe to, the subject."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that the connection noticed to be missing. What it does not notice, numbered frames must tell."""

    reason: LossReason
    subject: str = ""
    """Empty = any."""
    detail: str = ""


Handler = Callable[[Message], None]
"""Called in order of arrival; must not block: it notes or spawns, and returns."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None:
        """Stops delivery. Messages on their way may still come until a `barrier`."""


@dataclass(frozen=True, slots=True)
class BucketState:
    """What a bucket is now. Another `created` than last time: it was made anew, and what stood in it is gone."""

    created: str
    """The server's mark of when it was made; to be compared, nothing else."""
    keys: int


class Bucket(Protocol):
    """A JetStream KV bucket. It may lie or vanish; a vanished one is made again on the next `put`. Every call ends
    within a bounded time, and whatever goes wrong is a BusError."""

    async def put(self, key: str, value: bytes) -> None: ...

    async def delete(self, key: str) -> None: ...

    async def entries(self) -> dict[str, bytes]:
        """All keys with their values; empty when the bucket does not exist."""

    async def state(self) -> BucketState | None:
        """What the bucket is now; None when it does not exist. Cheap: to be asked every few seconds by the one who
        writes it, instead of a watch, which goes blind without a word when its bucket is made anew."""


class Bus(Protocol):
    """Core messaging and KV. All methods raise BusError or one of its kinds, never a library's error."""

    @property
    def message_bytes_max(self) -> int:
        """Largest payload to publish, in bytes: 90 % of what the server allows."""

    @property
    def connected(self) -> bool: ...

    @property
    def inbox_prefix(self) -> str:
        """First token of the reply subjects that only this connection may read."""

    def publish(self, subject: str, payload: bytes, reply: str = "", *, at_once: bool = False) -> None:
        """Sends without waiting. Raises BusDisconnected or MessageTooLarge; then nothing was sent. On a busy
        connection it shares a write with what follows within a millisecond, unless it must go `at_once`."""

    async def subscribe(self, subject: str, handler: Handler) -> Subscription: ...

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message:
        """One request, one answer. Raises NoResponders or RequestTimeout."""

    async def barrier(self) -> None:
        """Returns when the server has seen everything this connection sent before."""

    def bucket(self, name: str, *, in_memory: bool = False, timeout_s: float = BUCKET_TIMEOUT_S) -> Bucket:
        """The bucket of that name; nothing is asked of the server yet. `in_memory` counts when it has to be made;
        `timeout_s` bounds each of its calls."""

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Calls back each time the connection is lost."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Calls back each time the connection is there again, subscriptions included."""

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """Calls back each time the connection notices that messages may be missing."""

    async def aclose(self) -> None: ...


def split_by_size(payloads: Sequence[bytes], bytes_max: int) -> list[bytes]:
    """Joins consecutive payloads into as few messages as fit in `bytes_max` bytes each, in order."""
    messages: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for payload in payloads:
        if parts and size + len(payload) > bytes_max:
            messages.append(b"".join(parts))
            parts, size = [], 0
        parts.append(payload)
        size += len(payload)
    if parts:
        messages.append(b"".join(parts))
    return messages
