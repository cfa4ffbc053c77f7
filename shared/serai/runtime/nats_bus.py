"""NATS, and nothing else knows it. Every workaround here has its measured reason beside it."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import nkeys
import structlog
from prometheus_client import Counter

from serai.runtime.bus import (
    BUCKET_TIMEOUT_S,
    BusDisconnected,
    BusError,
    Handler,
    Loss,
    LossReason,
    Message,
    MessageTooLarge,
    NoResponders,
    RequestTimeout,
    Subscription,
)
from serai.runtime.lean_imports import without
from serai.runtime.nats_kv import NatsBucket
from serai.runtime.nats_stream import NatsStream
from serai.runtime.reconnect_curve import SPAN_MANY_S, span_s, wait_s

with without("aiohttp", "multidict"):  # `_with_websockets` brings them when an address asks for that.
    import nats
    import nats.aio.transport
    import nats.errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.protocol.parser import AWAITING_CONTROL_LINE, PERMISSIONS_ERR, STALE_CONNECTION, Parser

log = structlog.get_logger()
_T = TypeVar("_T")

LOSSES = Counter("serai_bus_losses_total", "Times that messages may have been lost, by reason", ["reason"])
RECONNECTS = Counter("serai_bus_reconnects_total", "Connections to NATS that were lost and made again")
HANDLER_FAILURES = Counter("serai_bus_handler_failures_total", "Messages whose handler raised")

SERVER_OLDEST = (2, 12)
"""Older ones lose KV entries with a TTL (case K12) and cannot test a permission without delivering a message."""
REFUSALS_MAX = 3
"""So many refused logins in a row are meant: nats-py itself would try for ever."""
EJECTIONS_MAX, EJECTIONS_WITHIN_S = 5, 60.0
"""A server that throws us out so often means it, or we do something that it cannot bear."""
_SELF_TEST = "self-test"
WRITE_GAP_S = 0.001
"""At most one write per connection in so long for what is not sent `at_once`. A write wakes the server, and the server
the receiver; on a busy connection these wake-ups cost more than the messages in them, and a millisecond of them share
one. A connection that has been quiet for a millisecond writes at once. What is sent `at_once` neither waits nor makes
others wait: an ask for a place is followed by the request itself."""
WRITE_MESSAGES = 8
"""So many wait for no gap. Who has thirty requests to pass on takes milliseconds over them, in one turn of its loop; if
all left at its end, sender and receiver would take turns, each with one core, while the other core sleeps."""


@dataclass(frozen=True, slots=True)
class NatsAddress:
    """Where NATS is and who we are to it."""

    url: str
    nkey_file: Path | None = None
    credentials_file: Path | None = None

    def __str__(self) -> str:
        return self.url


class _FastParser(Parser):  # type: ignore[misc]
    """nats-py's parser, with a short way for whole MSG lines, which is what nearly all traffic is: no regular
    expressions, no copies but the payload's. Everything else goes the long way."""

    async def parse(self, data: bytes = b"") -> None:
        position = self.take(data)
        if position < len(data):
            await super().parse(data[position:] if position else data)

    def take(self, data: bytes) -> int:
        """Hands out the whole messages that `data` begins with; how many bytes they were."""
        if self.buf or self.state != AWAITING_CONTROL_LINE:  # In the middle of something.
            return 0
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
        return position


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
        self.leaving: list[int] = []
        """Of `direct`, those whose UNSUB may not have reached the server: what it has sent before must be heard."""
        self.on_ejected: Callable[[str], None] = lambda text: None
        self.on_dead: Callable[[Exception], None] = lambda error: None

    async def _process_err(self, err_msg: str) -> None:
        """nats-py closes for good on any error but two kinds, some of which pass (too many connections, a renewed
        credential). A reconnect tries; whoever counts ends it."""
        if STALE_CONNECTION in err_msg or PERMISSIONS_ERR in err_msg or not self.is_connected:
            await super()._process_err(err_msg)
            return
        error = nats.errors.Error(f"nats: {err_msg.strip(chr(39))}")
        self._err = error
        self.on_ejected(str(error))
        await self._process_op_err(error)

    async def _read_loop(self) -> None:
        """nats-py's loop ends on an error it does not know, and leaves a connection that looks alive and is deaf."""
        reader = getattr(self._transport, "_io_reader", None)  # Not over WebSockets.
        if reader is not None:
            _take_at_once(reader, self._ps)
        await super()._read_loop()
        task = asyncio.current_task()
        if self.is_connected and not (task and task.cancelling()):
            await self._process_op_err(nats.errors.ProtocolError())

    async def _connect_to_server(self, s: Any) -> None:
        """nats-py forgets the socket of a try that got as far as a connection, and no further."""
        if self._transport is not None:
            self._transport.close()
        await super()._connect_to_server(s)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """`tls://` means TLS: nats-py goes on in the clear with a server that does not ask for it, and so with anybody
        who answers in its place."""
        asked = self._current_server is not None and self._current_server.uri.scheme == "tls"
        if initial_connection and asked and not info.get("tls_required"):
            raise nats.errors.Error("the server has no TLS, and the address says tls://")
        await super()._process_info(info, initial_connection=initial_connection)

    async def request(self, *words: Any, **named: Any) -> Msg:
        return await never_forgetting_a_cancel(super().request(*words, **named))

    async def flush(self, *words: Any, **named: Any) -> None:
        await never_forgetting_a_cancel(super().flush(*words, **named))

    async def _attempt_reconnect(self) -> None:
        try:
            await super()._attempt_reconnect()
        except Exception as error:  # One that nats-py does not expect ends its tries without a word.
            self.on_dead(error)

    def forget_pending(self) -> None:
        """What was not written when the connection broke; nats-py would send it, stale, after the reconnect."""
        self._pending.clear()
        self._pending_data_size = 0
        self.forget_handlers(self.leaving)

    def forget_handlers(self, gone: list[int]) -> None:
        """Of subscriptions for which nothing can come any more."""
        for number in gone:
            self.direct.pop(number, None)
        self.leaving = [number for number in self.leaving if number in self.direct]

    def append(self, head: bytes, payload: bytes) -> None:
        """Puts one PUB behind whatever waits to be written; nats-py's own commands share the order."""
        self._pending.extend((head, payload, b"\r\n"))
        self._pending_data_size += len(head) + len(payload) + 2
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)

    @property
    def waiting(self) -> int:
        """About so many messages wait to be written."""
        return len(self._pending) // 3

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


async def never_forgetting_a_cancel(work: Awaitable[_T]) -> _T:
    """What nats-py waits for, it waits for with `asyncio.wait_for`; before Python 3.12 that forgets that its task was
    cancelled when the answer came in that very turn of the loop, and whoever asks in a loop never ends."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await work
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


def _take_at_once(reader: Any, parser: _FastParser) -> None:
    """Whole messages are handed out the moment they come, while the read loop waits for them: waking it costs each of
    them a turn of the event loop. What it has not read yet, and all that is not simple, stays its own."""
    feed = reader.feed_data

    def feed_data(data: bytes) -> None:
        if not reader._buffer:
            try:
                taken = parser.take(data)
            except Exception as error:  # As in the read loop: the connection is made anew.
                log.exception("nats.unreadable")
                failure = nats.errors.ProtocolError()
                failure.__cause__ = error
                reader.set_exception(failure)
                return
            if taken == len(data):
                return
            data = data[taken:]
        feed(data)

    reader.feed_data = feed_data


class NatsBus:
    """`Bus` on nats-py. Open with `connect`, close with `aclose`."""

    def __init__(self, client: _DirectClient, address: NatsAddress, name: str) -> None:
        self._client = client
        self._address = address
        self.name = name
        """What the server calls this connection, in its own reports too."""
        self._disconnect_callbacks: list[Callable[[], None]] = []
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._loss_callbacks: list[Callable[[Loss], None]] = []
        self._losses_told: set[tuple[LossReason, str]] = set()
        self._refused: dict[str, None] = {}
        self._trying: list[str] | None = None
        self._authorization_error: Exception | None = None
        self._connect_error: Exception | None = None
        self._refusals = 0
        self._ejected_s: deque[float] = deque(maxlen=EJECTIONS_MAX)
        self._established = False
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._write_scheduled = False
        self._written_at_s = 0.0
        self._span_max_s = SPAN_MANY_S
        self._span_s = SPAN_MANY_S
        self._tries = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with BusError when the client closed by itself: it never comes back, so the process must not stay."""
        self.inbox_prefix = ""
        client.on_ejected = self._on_ejected
        client.on_dead = lambda error: self._end(f"NATS at {address}: the client gave up: {error!r}")

    @classmethod
    async def connect(
        cls,
        address: NatsAddress,
        role: str,
        *,
        name: str | None = None,
        timeout_s: float = 5.0,
        reconnect_span_s: float = SPAN_MANY_S,
        ping_interval_s: float = 10.0,
    ) -> NatsBus:
        """Connects, or raises BusError with one line that says what to do. Answers come to `_INBOX_<role>.<random>`,
        so that one subject permission per role keeps every inbox private. `name` is what the server reports this
        connection as; `reconnect_span_s` is one of `reconnect_curve`'s. A silent cut is noticed after two to three
        ping intervals."""
        if address.url.startswith(("ws://", "wss://")):
            _with_websockets()
        client = _DirectClient()
        bus = cls(client, address, name or f"{role}-{os.getpid()}")
        bus.inbox_prefix = f"_INBOX_{role}.{os.urandom(12).hex()}"
        bus._span_max_s = reconnect_span_s
        options: dict[str, Any] = {}
        if address.nkey_file is not None:
            options["nkeys_seed_str"] = _read_seed(address.nkey_file)
        if address.credentials_file is not None:
            _check_credentials(address.credentials_file)
            options["user_credentials"] = str(address.credentials_file)
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    servers=[address.url],
                    name=bus.name,
                    error_cb=bus._on_error,
                    closed_cb=bus._on_closed,
                    disconnected_cb=bus._on_disconnected,
                    reconnected_cb=bus._on_reconnected,
                    inbox_prefix=bus.inbox_prefix.encode(),
                    # nats-py gives up after 60 attempts by default; an agent outlives any outage of the control plane.
                    max_reconnect_attempts=-1,
                    reconnect_to_server_handler=bus._next_try,
                    # Default 120 s x 3: a half-open NAT path would go unnoticed for minutes.
                    ping_interval=ping_interval_s,
                    max_outstanding_pings=2,
                    # 0 = publishing while disconnected fails instead of sending stale messages after the reconnect.
                    pending_size=0,
                    allow_reconnect=True,
                    **options,
                )
            if too_old := bus._too_old():
                raise BusError(too_old)
        except BusError:
            bus._closing = True
            await _quietly(client.close())
            raise
        except (TimeoutError, OSError, nats.errors.Error) as error:
            bus._closing = True
            await _quietly(client.close())
            # While it retries, nats-py tells the reason only to the error callback.
            raise BusError(_connect_advice(address, bus._authorization_error or bus._connect_error or error)) from error
        bus._connected_now()
        bus._established = True
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
        if at_once or client.waiting >= WRITE_MESSAGES:
            client.write_pending()
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
                HANDLER_FAILURES.inc()
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

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Message:
        if len(payload) > self.message_bytes_max:
            raise MessageTooLarge(f"{len(payload)} bytes for {subject}; at most {self.message_bytes_max}")
        try:
            return _as_message(await self._client.request(subject, payload, timeout=timeout_s, headers=headers))
        except nats.errors.NoRespondersError as error:
            raise NoResponders(f"nobody answers on {subject}") from error
        except (TimeoutError, nats.errors.TimeoutError) as error:
            raise RequestTimeout(f"no answer on {subject} in {timeout_s:g} s") from error
        except (nats.errors.Error, OSError) as error:
            raise BusDisconnected(f"request on {subject} failed: {error!r}") from error

    async def barrier(self) -> None:
        await self._flush_twice()
        if self._refused:
            role = self.inbox_prefix.removeprefix("_INBOX_").partition(".")[0]
            raise BusError(
                f"NATS at {self._address} refuses what {self.name} must do: {'; '.join(self._refused)}; "
                f"is its key that of the role `{role}`?"
            )

    async def _flush_twice(self) -> None:
        # One flush is no barrier: nats-py's PING overtakes SUB and PUB that are still buffered. The second's does not.
        # And while it reconnects, its flush returns at once, having asked nobody.
        connections, leaving = self._client.stats["reconnects"], self._client.leaving[:]
        try:
            for _ in range(2):
                if not self._client.is_connected:
                    raise BusDisconnected(f"not connected to NATS at {self._address}")
                await self._client.flush()
        except (nats.errors.Error, OSError) as error:
            raise BusDisconnected(f"lost NATS at {self._address}: {error!r}") from error
        if not self._client.is_connected or self._client.stats["reconnects"] != connections:
            raise BusDisconnected(f"lost NATS at {self._address} meanwhile")
        self._client.forget_handlers(leaving)

    async def self_test(
        self,
        *,
        must_publish: Sequence[str] = (),
        must_subscribe: Sequence[str] = (),
        must_not_subscribe: Sequence[str] = (),
    ) -> None:
        """Whether the server lets this connection do what it must, and nothing of what it must not: a missing
        permission is silence otherwise, and one too many is nobody's concern until it is used. Wildcards are meant as
        such, and tried in one instance. Nothing is delivered to anybody but the server's traces, to the first of
        `must_publish`, which must be a subject that nobody hears. It takes four round trips. Raises BusError with one
        line that says what to change. An open server, one that takes anybody, refuses nothing: said in the log."""
        if must_not_subscribe and not self._client._server_info.get("auth_required"):
            log.warning("bus.open_server", server=self._address.url, advice="fine on one's own machine only")
            must_not_subscribe = ()
        denied = await self._denied([*must_subscribe, *must_not_subscribe], must_publish)
        faults = [f"add {one!r} to `publish`" for one in must_publish if ("publish", _instance(one).lower()) in denied]
        faults += [f"add {one!r} to `subscribe`" for one in must_subscribe if ("subscription", one.lower()) in denied]
        faults += [
            f"take what allows {one!r} out of `subscribe`"
            for one in must_not_subscribe
            if ("subscription", one.lower()) not in denied
        ]
        if faults:
            user = self._client._public_nkey or self.name
            raise BusError(
                f"NATS at {self._address}: wrong permissions of {self.name}; in the server's configuration, for user "
                f"{user}: {'; '.join(faults)}"
            )

    async def _denied(self, subscribe: Sequence[str], publish: Sequence[str]) -> set[tuple[str, str]]:
        """What the server denies of these, as (publish or subscription, subject in lower case)."""
        client = self._client
        self._trying = []
        try:
            await self._flush_twice()
            # Not known to nats-py: what comes on them is thrown away, and nothing is left behind.
            client._sid += len(subscribe)
            numbers = range(client._sid - len(subscribe) + 1, client._sid + 1)
            lines = [f"SUB {subject} {number}\r\n" for subject, number in zip(subscribe, numbers, strict=True)]
            lines += [f"UNSUB {number}\r\n" for number in numbers]
            for line in lines:
                await client._send_command(line.encode())
            for subject in publish:
                client.append(*_traced_only(subject, traces_to=publish[0]))
            self._write()
            await self._flush_twice()
            found = (
                re.search(r'permissions violation for (publish|subscription) to "([^"]*)"', s) for s in self._trying
            )
            return {(one[1], one[2]) for one in found if one is not None}
        finally:
            self._trying = None

    def bucket(self, name: str, *, in_memory: bool = False, timeout_s: float = BUCKET_TIMEOUT_S) -> NatsBucket:
        async def request(
            subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
        ) -> bytes:
            return (await self.request(subject, payload, timeout_s, headers)).data

        return NatsBucket(request, name, in_memory=in_memory, timeout_s=timeout_s)

    def stream(self, name: str, subject: str) -> NatsStream:
        """The JetStream stream of that name, which keeps what is sent to `subject`; nothing is asked of the server
        yet."""
        return NatsStream(self.request, name, subject)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._disconnect_callbacks.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._reconnect_callbacks.append(callback)

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        self._loss_callbacks.append(callback)

    async def aclose(self) -> None:
        """Sends what was published, then closes. Unlike nats-py's drain it loses nothing: callers unsubscribe first,
        wait at a barrier, and finish their own work."""
        self._closing = True
        if self._client.is_connected:
            await _quietly(self._client.flush(timeout=2))
        await _quietly(self._client.close())

    # -- what the client says ------------------------------------------------------------------------------------

    def _next_try(self, servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
        """Which server next, and after how many seconds."""
        if self._address.nkey_file is not None:
            self._read_key_again(self._address.nkey_file)
        wait = wait_s(self._tries, self._span_s, random.random)
        self._tries += 1
        return random.choice(servers), wait

    def _read_key_again(self, path: Path) -> None:
        """nats-py reads it once; a key that was renewed on disk must count without a restart of the engine."""
        try:
            self._client._nkeys_seed_str = _read_seed(path)
            self._client._setup_nkeys_connect()
        except BusError as error:
            log.warning("bus.key_unreadable", error=str(error), effect="going on with the key read before")

    def _connected_now(self) -> None:
        self._span_s = span_s(self._client.client_id or 0, self._span_max_s)
        self._tries = self._refusals = 0
        self._losses_told.clear()

    async def _on_reconnected(self) -> None:
        self._connected_now()
        RECONNECTS.inc()
        log.info("bus.reconnected", server=self._address.url)
        if too_old := self._too_old():
            log.error("bus.old_server", error=too_old)
        for callback in self._reconnect_callbacks:
            callback()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._lose(Loss(LossReason.DROPPED, error.subject, "this process takes messages too slowly"))
            return
        text = str(error)
        if PERMISSIONS_ERR in text.lower():
            if self._trying is not None:
                self._trying.append(text.lower())
                return
            # A forbidden subscribe or publish raises nowhere else: kept, so that the next barrier fails loudly.
            self._refused[text] = None
            self._lose(Loss(LossReason.REFUSED, text.partition('"')[2].partition('"')[0], text))
            return
        if "authorization" in text.lower():
            self._authorization_error = error
            self._refusals += 1
            if self._refusals >= REFUSALS_MAX:
                self._end(f"NATS at {self._address} refuses this service's credentials now; have they expired?")
        self._connect_error = error
        log.warning("bus.error", error=text or repr(error))

    def _lose(self, loss: Loss) -> None:
        """Counted each time, told in the log once per connection."""
        LOSSES.labels(loss.reason).inc()
        if loss.reason is not LossReason.DISCONNECTED and (loss.reason, loss.subject) not in self._losses_told:
            self._losses_told.add((loss.reason, loss.subject))
            log.warning("bus.loss", reason=str(loss.reason), subject=loss.subject, detail=loss.detail, name=self.name)
        for callback in self._loss_callbacks:
            callback(loss)

    async def _on_disconnected(self) -> None:
        self._client.forget_pending()
        if self._closing:
            return
        log.warning("bus.disconnected", server=self._address.url)
        for callback in self._disconnect_callbacks:
            callback()
        self._lose(Loss(LossReason.DISCONNECTED, detail="whatever was on its way is gone"))

    def _on_ejected(self, text: str) -> None:
        """The server said why, and closed the connection."""
        now = time.monotonic()
        self._ejected_s.append(now)
        log.error("bus.ejected", server=self._address.url, error=text)
        if len(self._ejected_s) == EJECTIONS_MAX and now - self._ejected_s[0] < EJECTIONS_WITHIN_S:
            self._end(f"NATS at {self._address} closed the connection {EJECTIONS_MAX} times in a row: {text}")

    async def _on_closed(self) -> None:
        self._end(f"NATS at {self._address} closed the connection for good")

    def _end(self, reason: str) -> None:
        if self._established and not self._closing and not self.closed.done():
            self.closed.set_exception(BusError(reason))

    def _too_old(self) -> str | None:
        version = str(self._client._server_info.get("version", ""))
        numbers = re.match(r"v?(\d+)\.(\d+)", version)
        if numbers is None or (int(numbers[1]), int(numbers[2])) >= SERVER_OLDEST:
            return None
        oldest = ".".join(map(str, SERVER_OLDEST))
        return f"NATS at {self._address} is version {version}; Serai needs nats-server {oldest} or newer"


class _Subscription:
    def __init__(self, client: _DirectClient, subscription: Any) -> None:
        self._client = client
        self._subscription = subscription

    async def unsubscribe(self) -> None:
        if self._subscription._id in self._client.leaving or self._subscription._id not in self._client.direct:
            return
        self._client.leaving.append(self._subscription._id)
        try:
            await self._subscription.unsubscribe()
        except nats.errors.Error:
            pass  # Closed or disconnected: it delivers nothing any more, which is what was asked for.


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


def _with_websockets() -> None:
    """nats-py's transport over WebSockets, which needs a library of its own."""
    for name in ("aiohttp", "multidict"):
        setattr(nats.aio.transport, name, importlib.import_module(name))


def _read_seed(path: Path) -> str:
    try:
        seed = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BusError(f"cannot read the NATS key {path}: {getattr(error, 'strerror', 'not text')}") from error
    try:
        nkeys.from_seed(bytearray(seed.encode()))
    except Exception as error:  # nkeys and what is below it raise a dozen kinds.
        raise BusError(f"{path} holds no NATS key: it must be one nkey seed, a line that begins with SU") from error
    return seed


_CREDENTIALS = re.compile(r"BEGIN NATS USER JWT-+\s+\S+\s+-+END.*BEGIN USER NKEY SEED-+\s+(SU\S+)\s+-+END", re.DOTALL)


def _check_credentials(path: Path) -> None:
    """nats-py raises what is below it when a file of credentials is none. Raises BusError."""
    try:
        found = _CREDENTIALS.search(path.read_text())
        nkeys.from_seed(bytearray(found[1].encode() if found else b""))
    except OSError as error:
        raise BusError(f"cannot read the NATS credentials {path}: {error.strerror}") from error
    except Exception as error:  # nkeys and what is below it raise a dozen kinds.
        raise BusError(f"{path} holds no NATS credentials: it must have a user's JWT and its nkey seed") from error


def _traced_only(subject: str, traces_to: str) -> tuple[bytes, bytes]:
    """A message that the server checks as any other and delivers to nobody; where it would have gone is told to
    `traces_to`. When that is a subject we may not publish to, the server refuses it and looks no further."""
    headers = f"NATS/1.0\r\nNats-Trace-Dest: {_instance(traces_to)}\r\nNats-Trace-Only: true\r\n\r\n".encode()
    return f"HPUB {_instance(subject)} {len(headers)} {len(headers)}\r\n".encode(), headers


def _instance(subject: str) -> str:
    return subject.replace("*", _SELF_TEST).replace(">", _SELF_TEST)


def _connect_advice(address: NatsAddress, error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or "no answer in time"
    if isinstance(error, ConnectionError) and error.errno:
        text = os.strerror(error.errno)  # asyncio's own words are of its calls.
    if "authorization" in text.lower():
        return f"NATS at {address} refuses these credentials; check --nats-nkey-file or --nats-creds-file"
    return f"cannot reach NATS at {address} ({text}); is it running, and is --nats-url right?"
