"""A JetStream stream of records and its one durable consumer, by plain requests to the server's API.

Nothing that a client library puts on top is used, for the reasons in `nats_kv.py`: no push, no ordered consumer, no
reading of acknowledgement subjects. A record is taken off the stream when it is acknowledged; when the stream is full
it takes no more, so that nothing is thrown away that nobody has had.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from serai.runtime.bus import Bus, BusError, Message, NoResponders, Subscription

TIMEOUT_S = 5.0
PULL_S = 2.0
"""So long a question for messages waits at the server. When NATS was away, the next one comes so much later at most."""
_SPARE_S = 1.0
_NO_STREAM, _NO_CONSUMER = 10059, 10014
_DUPLICATES_S = 120


class Request(Protocol):
    """Subject, payload, timeout in seconds, headers → the answer. Raises BusError or one of its kinds."""

    def __call__(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Awaitable[Message]: ...


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What a stream is made with when it is missing; one that is there stays as it is."""

    bytes_max: int
    ack_wait_s: float = 15.0
    """What was taken and not acknowledged for so long is given out again."""
    unacknowledged_max: int = 256


class NatsStream:
    """One stream, on which one subject's messages are kept."""

    def __init__(self, request: Request, name: str, subject: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._request = request
        self._name = name
        self._subject = subject
        self._timeout_s = timeout_s

    async def publish(self, payload: bytes, message_id: str) -> None:
        """Returns when the server has stored it. The same id within two minutes is stored once. Raises BusError."""
        try:
            answer = await self._request(self._subject, payload, self._timeout_s, {"Nats-Msg-Id": message_id})
        except NoResponders as error:
            raise NoResponders(f"no stream takes {self._subject}: the ledger has not made it yet") from error
        said = self._read(answer.data)
        if said.get("stream") != self._name or "seq" not in said:
            raise BusError(f"{self._subject}: stored in another stream than {self._name}: {said}")

    async def make(self, consumer: str, limits: StreamLimits) -> None:
        """Stream and consumer are there afterwards. Raises BusError."""
        found = await self._ask(f"STREAM.INFO.{self._name}", {}, absent=_NO_STREAM)
        if found is None:
            await self._ask(f"STREAM.CREATE.{self._name}", self._configuration(limits))
        elif self._subject not in (subjects := found["config"].get("subjects") or []):
            raise BusError(
                f"stream {self._name} keeps {', '.join(subjects)}, not {self._subject}: each site needs a JetStream "
                "domain of its own (docs/nats.md)"
            )
        if await self._ask(f"CONSUMER.INFO.{self._name}.{consumer}", {}, absent=_NO_CONSUMER) is None:
            configuration = {
                "durable_name": consumer,
                "ack_policy": "explicit",
                "ack_wait": round(limits.ack_wait_s * 1e9),
                "max_ack_pending": limits.unacknowledged_max,
                "deliver_policy": "all",
            }
            asked = {"stream_name": self._name, "config": configuration}
            await self._ask(f"CONSUMER.DURABLE.CREATE.{self._name}.{consumer}", asked)

    def _configuration(self, limits: StreamLimits) -> dict[str, Any]:
        return {
            "name": self._name,
            "subjects": [self._subject],
            "storage": "file",
            "retention": "workqueue",
            "discard": "new",
            "max_bytes": limits.bytes_max,
            "duplicate_window": _DUPLICATES_S * 1_000_000_000,
            "num_replicas": 1,
        }

    async def _ask(self, what: str, body: dict[str, Any], absent: int = 0) -> dict[str, Any] | None:
        """None when the server's error is `absent`."""
        try:
            answer = await self._request(f"$JS.API.{what}", json.dumps(body).encode(), self._timeout_s)
        except NoResponders as error:
            raise BusError("the NATS server has JetStream off for this user's account") from error
        found: dict[str, Any] | None = self._read(answer.data, absent)
        return found

    def _read(self, answer: bytes, absent: int = 0) -> Any:
        try:
            found: dict[str, Any] = json.loads(answer)
        except ValueError as error:
            raise BusError(f"stream {self._name}: cannot read the server's answer: {error}") from error
        problem = found.get("error")
        if problem is None:
            return found
        code = problem.get("err_code")
        if absent and code == absent:
            return None
        raise BusError(f"stream {self._name}: {problem.get('description')} (JetStream error {code})")


class PullConsumer:
    """Takes messages through a durable consumer, a few at a time. `start` first."""

    def __init__(self, bus: Bus, stream: str, name: str, batch: int) -> None:
        self._bus = bus
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        self._inbox = f"{bus.inbox_prefix}.pull"
        self._asked = json.dumps({"batch": batch, "expires": round(PULL_S * 1e9)}).encode()
        self._batch = batch
        self._came: deque[Message] = deque()
        self._news = asyncio.Event()
        self._owed = 0
        self._owed_until_s = 0.0
        self._gone = False

    async def start(self) -> Subscription:
        """Subscribes to the inbox; the caller puts a barrier behind it."""
        return await self._bus.subscribe(self._inbox, self.on_message)

    def on_message(self, message: Message) -> None:
        """What was asked for; or, without a reply subject, the server's word that this is all."""
        if message.reply:
            self._came.append(message)
            self._owed -= 1
        else:
            self._owed = 0
            self._gone |= message.no_responders
        self._news.set()

    async def take(self) -> list[Message]:
        """Those that are there, else the first to come; none after a few seconds. Each is to be acknowledged by `+ACK`
        to its `reply`. Raises BusError."""
        now = time.monotonic()
        if not self._came and (self._owed <= 0 or now > self._owed_until_s):
            self._owed, self._owed_until_s = self._batch, now + PULL_S + _SPARE_S
            self._bus.publish(self._next, self._asked, self._inbox)
        if not self._came:
            self._news.clear()
            try:
                async with asyncio.timeout(PULL_S):
                    await self._news.wait()
            except TimeoutError:
                pass
        if self._gone:
            self._gone = False
            raise NoResponders("the consumer of the stream has gone")
        taken = list(self._came)
        self._came.clear()
        return taken
