"""Requests to agents and the frames that come back: one inbox per ingress, a table of streams, no task per stream.

A stream's place in the table is its place in the in-flight count of its session; both end with its `with`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import structlog

from serai.contracts.codec import MalformedMessage, decode, decode_frames, encode, frame_bytes
from serai.contracts.inference import (
    FailureCode,
    Frame,
    FrameKind,
    InferenceFailure,
    InferenceRequest,
    ResponseEnd,
    ResponseHead,
)
from serai.contracts.subjects import CANCEL, INFERENCE
from serai.runtime.bus import Bus, BusDisconnected, BusError, Message, Subscription

log = structlog.get_logger()

BODY_FRAME_BYTES = 512 * 1024
WATCH_EVERY_S = 0.5
CANCELS_KEPT_S = 60.0
"""A CANCEL may be lost with the connection: for so long it is sent again after a reconnect."""
CANCELS_KEPT_MAX = 10_000
FRAME_BYTES_SPARE = 2 * 1024 * 1024
"""An agent stops when its credit is used up, which may be in the midst of what its engine has just said. One that goes
on would fill the memory."""
PROBE_AFTER_S = 1.2
"""A stream silent for so long is asked after: if nobody receives the question, its agent is gone."""

# As plain numbers: to look up a member of an enum takes as long as to compare five.
_ALIVE, _BODY_CREDIT = int(FrameKind.ALIVE), int(FrameKind.BODY_CREDIT)
_HEAD, _DATA, _END, _ERROR = int(FrameKind.HEAD), int(FrameKind.DATA), int(FrameKind.END), int(FrameKind.ERROR)


class StreamFailed(Exception):
    """The answer is not whole, and why."""

    def __init__(self, failure: InferenceFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


Sink = Callable[[bytes], bool]
"""Takes what came, at once, and says whether it can take more now."""


class InferenceStream:
    """One try of one request. Read it with `head`, then `data` until None."""

    __slots__ = (
        "_body",
        "_chunks",
        "_client",
        "_consumed_bytes",
        "_consumed_kib_told",
        "_expected",
        "_head",
        "_next_body_frame",
        "_received_bytes",
        "_sink",
        "_waiter",
        "attempt",
        "blocked_since_s",
        "end",
        "failure",
        "first_frame_at_s",
        "id",
        "last_frame_at_s",
        "opened_at_s",
        "reply",
        "request",
        "session",
    )

    def __init__(
        self,
        client: InferenceClient,
        stream_id: int,
        reply: str,
        session: str,
        attempt: int,
        request: InferenceRequest,
        body: bytes,
    ) -> None:
        self.id = stream_id
        self.reply = reply
        self.session = session
        self.attempt = attempt
        self.request = request
        self.end: ResponseEnd | None = None
        self.opened_at_s = self.last_frame_at_s = time.monotonic()
        self.first_frame_at_s = 0.0
        self.blocked_since_s: float | None = None
        """Since when the reader waits for its client to take what it has."""
        self._client = client
        self._body = body
        self._next_body_frame = 1
        self._head: ResponseHead | None = None
        self._chunks: list[bytes] = []
        self.failure: InferenceFailure | None = None
        """Why the answer is not whole, once that is known."""
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._expected = 0
        self._received_bytes = 0
        self._consumed_bytes = 0
        self._consumed_kib_told = 0

    def __enter__(self) -> InferenceStream:
        self._client._open(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client._close(self)

    # -- reading -------------------------------------------------------------------------------------------------

    async def head(self) -> ResponseHead:
        """Status and headers. Raises StreamFailed."""
        while self._head is None:
            self._raise_if_failed()
            if self.end is not None:
                raise StreamFailed(InferenceFailure(FailureCode.FRAME_GAP, "the answer ended without a beginning"))
            await self._news()
        return self._head

    async def data(self, sink: Sink | None = None) -> bytes | None:
        """What came since the last call, joined; None at the whole end. Raises StreamFailed, but only after all
        that came before the failure has been given out.

        With a sink, what comes while this waits goes straight to it: no task is woken per token. When the sink can
        take no more, this returns nothing (`b""`), and what comes then is kept for the next call.
        """
        while not self._chunks:
            if self.end is not None:
                return None
            self._raise_if_failed()
            self._sink = sink
            try:
                await self._news()
                stopped = self._sink is not sink
            finally:
                self._sink = None
            if stopped and not self.over:
                return b""
        return self.data_now()

    def data_now(self) -> bytes:
        """What has come already, joined; nothing when nothing has."""
        chunks, self._chunks = self._chunks, []
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._consume(len(data))
        return data

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.end is not None or self.failure is not None

    @property
    def received_bytes(self) -> int:
        """Of the answer, so far."""
        return self._received_bytes

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise StreamFailed(self.failure)

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _consume(self, size: int) -> None:
        self._consumed_bytes += size
        kib = self._consumed_bytes // 1024
        if (kib - self._consumed_kib_told) * 2048 >= self.request.window_bytes and not self.over:
            self._consumed_kib_told = kib
            self.send_credit()

    # -- from the bus --------------------------------------------------------------------------------------------

    def feed(self, frame: Frame, now: float) -> None:
        """One frame of this stream."""
        if frame.attempt != self.attempt or self.end is not None or self.failure is not None:
            return
        self.last_frame_at_s = now
        kind = frame.kind
        if not self.first_frame_at_s:
            self.first_frame_at_s = now
        if kind == _ALIVE:
            return
        if kind == _BODY_CREDIT:
            self.send_body(frame.sequence)
            return
        if frame.sequence != self._expected:
            self.fail(
                InferenceFailure(FailureCode.FRAME_GAP, f"frame {self._expected} of the answer was lost on its way")
            )
            return
        self._expected += 1
        if kind == _DATA:
            size = len(frame.payload)
            self._received_bytes += size
            if self._sink is None:
                self._chunks.append(frame.payload)
                if self._received_bytes - self._consumed_bytes > self.request.window_bytes + FRAME_BYTES_SPARE:
                    self._chunks.clear()
                    self.failure = InferenceFailure(FailureCode.FRAME_GAP, _NO_CREDIT)
            else:
                self._consume(size)
                if self._sink(frame.payload):
                    return
                self._sink = None
        else:
            self._feed_other(frame)
        self._wake()

    def _feed_other(self, frame: Frame) -> None:
        try:
            if frame.kind == _HEAD:
                self._head = decode(ResponseHead, frame.payload)
            elif frame.kind == _END:
                self._take_end(decode(ResponseEnd, frame.payload))
            elif frame.kind == _ERROR:
                self.failure = decode(InferenceFailure, frame.payload)
        except MalformedMessage as error:
            self.failure = InferenceFailure(FailureCode.FRAME_GAP, f"a frame cannot be read: {error}")

    def _take_end(self, end: ResponseEnd) -> None:
        if end.data_bytes == self._received_bytes:
            self.end = end
        else:
            told = f"the answer has {end.data_bytes} bytes, {self._received_bytes} of which came"
            self.failure = InferenceFailure(FailureCode.FRAME_GAP, told)

    def fail(self, failure: InferenceFailure) -> None:
        """Ends the stream from this side."""
        if not self.over:
            self.failure = failure
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- to the agent --------------------------------------------------------------------------------------------

    def send_request(self) -> None:
        """The request and the first part of its body, in one message."""
        frame_size = self._client.body_frame_bytes
        head = frame_bytes(FrameKind.REQUEST, self.id, self.attempt, 0, encode(self.request))
        first = frame_bytes(FrameKind.BODY, self.id, self.attempt, 0, self._body[:frame_size])
        self._publish(head + first if self._body else head)

    def send_body(self, upto: int) -> None:
        """BODY frames until `upto` in all have been sent."""
        frame_size = self._client.body_frame_bytes
        while self._next_body_frame < min(upto, self.request.body_frames) and not self.over:
            number = self._next_body_frame
            part = self._body[number * frame_size : (number + 1) * frame_size]
            self._next_body_frame += 1
            self._publish(frame_bytes(FrameKind.BODY, self.id, self.attempt, number, part))

    def send_credit(self) -> None:
        """Tells the agent how much has been passed on. Harmless to repeat, so it is also the question whether
        anybody is there."""
        self._publish(frame_bytes(FrameKind.CREDIT, self.id, self.attempt, self._consumed_bytes // 1024))

    def _publish(self, payload: bytes) -> None:
        try:
            self._client.bus.publish(INFERENCE.of(self.session), payload, self.reply)
        except BusDisconnected:
            self.fail(_BUS_LOST)


_NO_CREDIT = "the session sends more than its credit lets it"
_BUS_LOST = InferenceFailure(FailureCode.BUS_LOST, "the gateway has lost its connection to NATS")
_STOPPED = InferenceFailure(FailureCode.STOPPED, "the gateway has stopped before the answer was whole")


class InferenceClient:
    """All streams of this ingress. `start` before the first request."""

    def __init__(
        self,
        bus: Bus,
        *,
        accept_timeout_s: float,
        silence_timeout_s: float,
        on_unreachable: Callable[[str], None],
        first_stream_id: int = 1,
    ) -> None:
        self.bus = bus
        self.body_frame_bytes = min(BODY_FRAME_BYTES, bus.message_bytes_max - 16 * 1024)
        self._accept_timeout_s = accept_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._on_unreachable = on_unreachable
        self._streams: dict[int, InferenceStream] = {}
        self._by_session: dict[str, set[int]] = {}
        self._next_id = first_stream_id
        self._inbox = f"{bus.inbox_prefix}.stream"
        self._idle: asyncio.Event | None = None
        self._cancels: deque[tuple[float, str, bytes, str]] = deque(maxlen=CANCELS_KEPT_MAX)
        """When which CANCEL was sent: subject, frame, reply; the oldest first."""

    async def start(self) -> Subscription:
        """Subscribes to the inbox; the caller puts a barrier behind it."""
        self.bus.on_disconnect(self._on_disconnect)
        self.bus.on_reconnect(self._on_reconnect)
        return await self.bus.subscribe(f"{self._inbox}.*", self.on_frames)

    def in_flight(self, session: str) -> int:
        """Streams of this ingress that are open at `session`."""
        return len(self._by_session.get(session, ()))

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    async def until_idle(self, timeout_s: float) -> None:
        """Returns when no stream is open, or after `timeout_s`."""
        self._idle = asyncio.Event()
        if self._streams:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                pass

    def fail_all(self) -> None:
        """The ingress ends: whoever still waits for an answer is told."""
        for stream in tuple(self._streams.values()):
            stream.fail(_STOPPED)

    def body_frames(self, body_bytes: int) -> int:
        """How many BODY frames a body of that size makes."""
        return -(-body_bytes // self.body_frame_bytes)

    def stream(self, session: str, attempt: int, request: InferenceRequest, body: bytes) -> InferenceStream:
        """A try of a request; it is sent when its `with` is entered."""
        stream_id = self._next_id
        self._next_id += 1
        return InferenceStream(self, stream_id, f"{self._inbox}.{stream_id}", session, attempt, request, body)

    # -- bus handler ---------------------------------------------------------------------------------------------

    def on_frames(self, message: Message) -> None:
        """Frames of any of our streams; or the server's word that nobody received what one of them sent."""
        if message.no_responders:
            self._on_no_responders(message.subject)
            return
        try:
            frames = decode_frames(message.data)
        except MalformedMessage as error:
            # Which streams lost frames will show in their numbering.
            log.warning("inference.malformed", error=str(error))
            return
        now = time.monotonic()
        streams = self._streams
        for frame in frames:
            stream = streams.get(frame.stream)
            if stream is not None:
                stream.feed(frame, now)

    def _on_no_responders(self, subject: str) -> None:
        number = subject.rpartition(".")[2]
        stream = self._streams.get(int(number)) if number.isdigit() else None
        if stream is not None:
            self._on_unreachable(stream.session)
            begun = "; it left while it worked" if stream.first_frame_at_s else ""
            code = FailureCode.AGENT_LEFT if stream.first_frame_at_s else FailureCode.NO_RESPONDERS
            stream.fail(InferenceFailure(code, f"the session that had the request is gone{begun}"))

    def _on_disconnect(self) -> None:
        for stream in tuple(self._streams.values()):
            stream.fail(_BUS_LOST)

    def _on_reconnect(self) -> None:
        """An engine must not finish for nobody because the word that we gave up was lost with the connection."""
        self._forget_cancels()
        for _, subject, frame, reply in self._cancels:
            self._publish_cancel(subject, frame, reply)

    # -- watching ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """To be called every WATCH_EVERY_S seconds: asks after silent streams, and gives up on them."""
        now = time.monotonic()
        for stream in tuple(self._streams.values()):
            silent_s = now - stream.last_frame_at_s
            limit_s = self._silence_timeout_s if stream.first_frame_at_s else self._accept_timeout_s
            if stream.over:
                continue
            if silent_s > limit_s:
                self._on_unreachable(stream.session)
                stream.fail(InferenceFailure(FailureCode.AGENT_SILENT, f"the session was silent for {silent_s:.1f} s"))
            elif silent_s > PROBE_AFTER_S:
                stream.send_credit()

    def ask_after(self, session: str) -> None:
        """Asks after all streams at `session` now: where nobody is any more, NATS says so at once, and they need not
        wait until their silence is noticed."""
        for stream_id in tuple(self._by_session.get(session, ())):
            stream = self._streams[stream_id]
            if not stream.over:
                stream.send_credit()

    def stalled(self, stall_s: float) -> list[InferenceStream]:
        """Streams whose client has taken nothing for `stall_s` seconds."""
        limit = time.monotonic() - stall_s
        return [s for s in self._streams.values() if s.blocked_since_s is not None and s.blocked_since_s < limit]

    # -- for streams ---------------------------------------------------------------------------------------------

    def _open(self, stream: InferenceStream) -> None:
        self._streams[stream.id] = stream
        self._by_session.setdefault(stream.session, set()).add(stream.id)
        try:
            stream.send_request()
        except BaseException:
            self._close(stream)
            raise

    def _close(self, stream: InferenceStream) -> None:
        self._streams.pop(stream.id, None)
        there = self._by_session.get(stream.session)
        if there is not None:
            there.discard(stream.id)
            if not there:
                del self._by_session[stream.session]
        if self._idle is not None and not self._streams:
            self._idle.set()
        if stream.end is None:  # It may still be at work on it.
            self._cancel(stream)

    def _cancel(self, stream: InferenceStream) -> None:
        subject = CANCEL.of(stream.session)
        frame = frame_bytes(FrameKind.CANCEL, stream.id, stream.attempt, 0)
        self._cancels.append((time.monotonic(), subject, frame, stream.reply))
        self._forget_cancels()
        self._publish_cancel(subject, frame, stream.reply)

    def _forget_cancels(self) -> None:
        limit = time.monotonic() - CANCELS_KEPT_S
        while self._cancels and self._cancels[0][0] < limit:
            self._cancels.popleft()

    def _publish_cancel(self, subject: str, frame: bytes, reply: str) -> None:
        try:
            self.bus.publish(subject, frame, reply)
        except BusError:
            pass  # Said again after the reconnect; and the agent ends it by itself when it gets no more credit.
