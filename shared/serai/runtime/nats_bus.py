"""NATS, and nothing else knows it. Every workaround here has its measured reason beside it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import nats
import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import KeyValueConfig
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from serai.runtime.bus import (
    Bucket,
    BusDisconnected,
    BusError,
    Handler,
    Message,
    MessageTooLarge,
    NoResponders,
    RequestTimeout,
    Subscription,
)

T = TypeVar("T")

log = structlog.get_logger()

RECONNECT_FIRST_S = 0.1
RECONNECT_MAX_S = 5.0
REFUSALS_MAX = 3
"""So many refused logins in a row are meant: nats-py itself would try for ever."""
WRITE_GAP_S = 0.001
"""At most one write per connection in so long for what is not sent `at_once`. A write wakes the server, and the server
the receiver; on a busy connection these wake-ups cost more than the messages in them, and a millisecond of them share
one. A connection that has been quiet for a millisecond writes at once."""


@dataclass(frozen=True, slots=True)
class NatsAddress:
    """Where NATS is and who we are to it."""

    url: str
    nkey_file: Path | None = None
    credentials_file: Path | None = None

    def __str__(self) -> str:
        return self.url


def decorrelated_jitter(previous_s: float) -> float:
    """The next wait before a reconnect, in seconds: random, growing, bounded. Keeps a fleet from storming a server."""
    return min(RECONNECT_MAX_S, random.uniform(RECONNECT_FIRST_S, max(RECONNECT_FIRST_S, previous_s * 3)))


class _FastParser(Parser):  # type: ignore[misc]
    """nats-py's parser, with a short way for whole MSG lines, which is what nearly all traffic is: no regular
    expressions, no copies but the payload's. Everything else goes the long way."""

    async def parse(self, data: bytes = b"") -> None:
        if self.buf or self.state != AWAITING_CONTROL_LINE:  # In the middle of something.
            await super().parse(data)
            return
        position, direct = 0, self.nc.direct
        while data.startswith(b"MSG ", position):
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                break
            words = data[position + 4 : line_end].split()
            start = line_end + 2
            end = start + int(words[-1])
            handler = direct.get(int(words[1]))
            if handler is None or end + 2 > len(data):
                break
            handler(words[0].decode(), data[start:end], words[2].decode() if len(words) == 4 else "", False)
            position = end + 2
        if position < len(data):
            await super().parse(data[position:] if position else data)


class _DirectClient(Client):  # type: ignore[misc]
    """nats-py, but a message goes straight from the parser to its handler. nats-py itself puts it into a queue and
    wakes a task for it: a third of the cost of a message, and one more turn of the loop of latency. Our handlers
    only note or spawn, so the queue (and its slow-consumer drops) is not needed: TCP pushes back instead."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _FastParser(self)
        self._pending: list[bytes]
        self._pending_data_size: int
        self.direct: dict[int, Callable[[str, bytes, str, bool], None]] = {}

    def append(self, head: bytes, payload: bytes) -> None:
        """Puts one PUB behind whatever waits to be written; nats-py's own commands share the order."""
        self._pending.extend((head, payload, b"\r\n"))
        self._pending_data_size += len(head) + len(payload) + 2
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)

    def write_pending(self) -> None:
        """Writes what waits, without a task. Lost with the connection, like everything that was on its way."""
        if self._pending and self.is_connected and self._transport is not None:
            self._transport.writelines(self._pending[:])
            self._pending.clear()
            self._pending_data_size = 0

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        handler = self.direct.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        no_responders = headers is not None and not data and headers.startswith(b"NATS/1.0 503")
        handler(subject.decode(), data, reply.decode(), no_responders)


class NatsBus:
    """`Bus` on nats-py. Open with `connect`, close with `aclose`."""

    def __init__(self, client: _DirectClient, address: NatsAddress, name: str) -> None:
        self._client = client
        self._address = address
        self._name = name
        self._disconnect_callbacks: list[Callable[[], None]] = []
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._refused: list[str] = []
        self._authorization_error: Exception | None = None
        self._refusals = 0
        self._established = False
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._write_scheduled = False
        self._written_at_s = 0.0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with BusError when the client closed by itself: it never comes back, so the process must not stay."""
        self.inbox_prefix = ""

    @classmethod
    async def connect(cls, address: NatsAddress, role: str, *, timeout_s: float = 5.0) -> NatsBus:
        """Connects, or raises BusError with one line that says what to do. Answers come to `_INBOX_<role>.<random>`,
        so that one subject permission per role keeps every inbox private."""
        client = _DirectClient()
        name = f"{role}-{os.getpid()}"
        bus = cls(client, address, name)
        bus.inbox_prefix = f"_INBOX_{role}.{os.urandom(12).hex()}"
        wait_s = RECONNECT_FIRST_S

        def next_server(servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
            nonlocal wait_s
            wait_s = decorrelated_jitter(wait_s)
            return random.choice(servers), wait_s

        async def on_reconnected() -> None:
            nonlocal wait_s
            wait_s = RECONNECT_FIRST_S
            bus._refusals = 0
            log.info("bus.reconnected", server=address.url)
            for callback in bus._reconnect_callbacks:
                callback()

        options: dict[str, Any] = {}
        if address.nkey_file is not None:
            options["nkeys_seed_str"] = _read_seed(address.nkey_file)
        if address.credentials_file is not None:
            options["user_credentials"] = str(address.credentials_file)
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    servers=[address.url],
                    name=name,
                    error_cb=bus._on_error,
                    closed_cb=bus._on_closed,
                    disconnected_cb=bus._on_disconnected,
                    reconnected_cb=on_reconnected,
                    inbox_prefix=bus.inbox_prefix.encode(),
                    # nats-py gives up after 60 attempts by default; an agent outlives any outage of the control plane.
                    max_reconnect_attempts=-1,
                    reconnect_to_server_handler=next_server,
                    # Default 120 s x 3: a half-open NAT path would go unnoticed for minutes.
                    ping_interval=10,
                    max_outstanding_pings=2,
                    # 0 = publishing while disconnected fails instead of sending stale messages after the reconnect.
                    pending_size=0,
                    allow_reconnect=True,
                    **options,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            bus._closing = True
            await _quietly(client.close())
            # While it retries, nats-py tells the reason only to the error callback.
            raise BusError(_connect_advice(address, bus._authorization_error or error)) from error
        bus._established = True
        bus._refusals = 0
        return bus

    @property
    def message_bytes_max(self) -> int:
        # The server counts headers into max_payload and closes the connection for good when it is passed.
        return int(self._client.max_payload * 0.9)

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    def publish(self, subject: str, payload: bytes, reply: str = "", *, at_once: bool = False) -> None:
        client = self._client
        if not client.is_connected:
            raise BusDisconnected(f"not connected to NATS at {self._address}")
        if len(payload) > self.message_bytes_max:
            raise MessageTooLarge(f"{len(payload)} bytes for {subject}; at most {self.message_bytes_max}")
        head = f"PUB {subject} {reply} {len(payload)}\r\n" if reply else f"PUB {subject} {len(payload)}\r\n"
        client.append(head.encode(), payload)
        if at_once:
            self._write()
        elif not self._write_scheduled:
            wait_s = self._written_at_s + WRITE_GAP_S - time.monotonic()
            if wait_s > 0:
                self._write_scheduled = True
                self._loop.call_later(wait_s, self._write_later)
            else:
                self._write()

    def _write_later(self) -> None:
        self._write_scheduled = False
        self._write()

    def _write(self) -> None:
        self._written_at_s = time.monotonic()
        self._client.write_pending()

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        def deliver(subject: str, data: bytes, reply: str, no_responders: bool) -> None:
            try:
                handler(Message(subject, data, reply, no_responders))
            except Exception:
                # One bad message must end neither the subscription nor nats-py's read loop.
                log.exception("bus.handler_failed", subject=subject)

        async def deliver_queued(message: Msg) -> None:
            found = _as_message(message)
            deliver(found.subject, found.data, found.reply, found.no_responders)

        try:
            subscription = await self._client.subscribe(subject, cb=deliver_queued)
        except nats.errors.Error as error:
            raise BusError(f"cannot subscribe to {subject}: {error}") from error
        self._client.direct[subscription._id] = deliver
        return _Subscription(self._client, subscription)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message:
        try:
            return _as_message(await self._client.request(subject, payload, timeout=timeout_s))
        except nats.errors.NoRespondersError as error:
            raise NoResponders(f"nobody answers on {subject}") from error
        except (TimeoutError, nats.errors.TimeoutError) as error:
            raise RequestTimeout(f"no answer on {subject} in {timeout_s:g} s") from error
        except (nats.errors.Error, OSError) as error:
            raise BusDisconnected(f"request on {subject} failed: {error!r}") from error

    async def barrier(self) -> None:
        # One flush is no barrier: nats-py's PING overtakes SUB and PUB that are still buffered. The second's does not.
        try:
            await self._client.flush()
            await self._client.flush()
        except (nats.errors.Error, OSError) as error:
            raise BusDisconnected(f"lost NATS at {self._address}: {error!r}") from error
        if self._refused:
            raise BusError(f"NATS at {self._address} refuses what {self._name} must do: {'; '.join(self._refused)}")

    def bucket(self, name: str) -> Bucket:
        return _KvBucket(self._client, name)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._disconnect_callbacks.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._reconnect_callbacks.append(callback)

    async def aclose(self) -> None:
        """Sends what was published, then closes. Unlike nats-py's drain it loses nothing: callers unsubscribe first,
        wait at a barrier, and finish their own work."""
        self._closing = True
        if self._client.is_connected:
            await _quietly(self._client.flush(timeout=2))
        await _quietly(self._client.close())

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            log.error(
                "bus.slow_consumer", subject=error.subject, advice="messages were dropped; streams will show gaps"
            )
            return
        text = str(error)
        if "authorization" in text.lower():
            self._authorization_error = error
            self._refusals += 1
            if self._refusals >= REFUSALS_MAX:
                self._end(f"NATS at {self._address} refuses this service's credentials now; have they expired?")
        if "permissions violation" in text.lower():
            # A forbidden subscribe or publish raises nowhere else: kept, so that the next barrier fails loudly.
            self._refused.append(text)
        log.warning("bus.error", error=text or repr(error))

    async def _on_disconnected(self) -> None:
        if self._closing:
            return
        log.warning("bus.disconnected", server=self._address.url)
        for callback in self._disconnect_callbacks:
            callback()

    async def _on_closed(self) -> None:
        self._end(f"NATS at {self._address} closed the connection for good")

    def _end(self, reason: str) -> None:
        if self._established and not self._closing and not self.closed.done():
            self.closed.set_exception(BusError(reason))


class _Subscription:
    def __init__(self, client: _DirectClient, subscription: Any) -> None:
        self._client = client
        self._subscription = subscription

    async def unsubscribe(self) -> None:
        self._client.direct.pop(self._subscription._id, None)
        try:
            await self._subscription.unsubscribe()
        except nats.errors.Error:
            pass  # Closed or disconnected: it delivers nothing any more, which is what was asked for.


class _KvBucket:
    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name

    async def put(self, key: str, value: bytes) -> None:
        async def write() -> None:
            kv = await self._client.jetstream().key_value(self._name)
            await kv.put(key, value)

        try:
            await write()
        except nats.js.errors.NotFoundError:
            await self._translate(self._create())
            await self._translate(write())
        except (nats.errors.Error, nats.js.errors.APIError, TimeoutError, OSError) as error:
            raise BusError(f"KV bucket {self._name}: {error!r}") from error

    async def delete(self, key: str) -> None:
        async def purge() -> None:
            try:
                kv = await self._client.jetstream().key_value(self._name)
                await kv.purge(key)
            except nats.js.errors.NotFoundError:
                pass

        await self._translate(purge())

    async def entries(self) -> dict[str, bytes]:
        async def read() -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            try:
                kv = await self._client.jetstream().key_value(self._name)
                keys = await kv.keys()
            except (nats.js.errors.NotFoundError, nats.js.errors.NoKeysError):
                return found
            for key in keys:
                try:
                    entry = await kv.get(key)
                except (nats.js.errors.KeyNotFoundError, nats.js.errors.KeyDeletedError):
                    continue
                if entry.value:
                    found[key] = entry.value
            return found

        return await self._translate(read())

    async def _create(self) -> None:
        await self._client.jetstream().create_key_value(config=KeyValueConfig(bucket=self._name, history=1))

    async def _translate(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except (nats.errors.Error, nats.js.errors.APIError, TimeoutError, OSError) as error:
            raise BusError(f"KV bucket {self._name}: {error!r}") from error


def _as_message(message: Msg) -> Message:
    headers = message.headers
    silent = headers is not None and headers.get("Status") == "503" and not message.data
    return Message(message.subject, message.data, message.reply, silent)


async def _quietly(work: Awaitable[Any]) -> None:
    try:
        async with asyncio.timeout(3):
            await work
    except (nats.errors.Error, OSError, TimeoutError):
        pass


def _read_seed(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise BusError(f"cannot read the NATS key {path}: {error.strerror}") from error


def _connect_advice(address: NatsAddress, error: Exception) -> str:
    text = str(error) or type(error).__name__
    if "authorization" in text.lower():
        return f"NATS at {address} refuses these credentials; check --nats-nkey-file or --nats-creds-file"
    return f"cannot reach NATS at {address} ({text}); is it running, and is --nats-url right?"
