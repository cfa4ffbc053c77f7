"""One request at the agent: frames in, one HTTP request to the engine, its answer out as frames.

Written as callbacks, not as a task: this runs once per token. Back-pressure: `window_bytes` may be on their way
beyond what the ingress has confirmed; then the engine's socket is not read, and TCP does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from serai.contracts.codec import encode, frame_bytes
from serai.contracts.inference import (
    FailureCode,
    FrameKind,
    InferenceFailure,
    InferenceRequest,
    ResponseEnd,
    ResponseHead,
)
from serai.runtime.http1 import BadAnswer, HttpConnection, HttpFailure
from serai.worker_agent.outbox import Outbox
from serai.worker_agent.spans import RequestSpans

DATA_FRAME_BYTES_MAX = 256 * 1024
"""A frame larger than this is split, so that one stream's burst cannot hold up the others' tokens."""

_HEADERS_KEPT_HERE = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server", "access-control-allow-origin"}
)

_HEAD, _DATA, _END, _ERROR = int(FrameKind.HEAD), int(FrameKind.DATA), int(FrameKind.END), int(FrameKind.ERROR)


class Exchange:
    """A `ResponseHandler` for the engine's answer and a `Source` of frames for the outbox."""

    __slots__ = (
        "_frames",
        "_outbox",
        "_pending",
        "_sent_kib_confirmed",
        "_sequence",
        "attempt",
        "body",
        "body_bytes",
        "connection",
        "deadline_at_s",
        "done",
        "events",
        "first_byte_at_s",
        "first_data_at_s",
        "gate_key",
        "last_data",
        "last_engine_byte_at_s",
        "last_frame_at_s",
        "on_done",
        "on_first",
        "paused_at_s",
        "posted_at_s",
        "received_at_s",
        "received_ns",
        "reply",
        "request",
        "sent_bytes",
        "spans",
        "status",
        "stream",
        "tokens_max",
    )

    def __init__(
        self,
        reply: str,
        stream: int,
        attempt: int,
        request: InferenceRequest,
        outbox: Outbox,
        on_done: Callable[[Exchange, FailureCode | None], None],
    ) -> None:
        now = time.monotonic()
        self.reply = reply
        self.stream = stream
        self.attempt = attempt
        self.request = request
        self.on_done = on_done
        self.on_first: Callable[[Exchange], None] | None = None
        """Called when the first bytes of the answer's body come."""
        self.gate_key = ""
        """What the phase gate calls it."""
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.connection: HttpConnection | None = None
        self.done = False
        self.status = 0
        self.spans: RequestSpans | None = None
        self.received_at_s = now
        self.received_ns = time.time_ns()
        self.posted_at_s = 0.0
        self.first_byte_at_s = 0.0
        self.first_data_at_s = 0.0
        self.last_engine_byte_at_s = now
        self.last_frame_at_s = now
        self.deadline_at_s = now + request.deadline_s
        self.paused_at_s: float | None = None
        self.sent_bytes = 0
        self.events = 0
        """Of a stream, so far: about as many as tokens."""
        self.last_data = b""
        """What came last of it."""
        self.tokens_max: int | None = None
        """As its body says; None = nobody has looked."""
        self._sent_kib_confirmed = 0
        self._outbox = outbox
        self._sequence = 0
        self._frames: list[bytes] = []
        self._pending: list[bytes] = []

    @property
    def whole(self) -> bool:
        """Its body has come."""
        return (
            not self.done and len(self.body) == self.request.body_frames and self.body_bytes == self.request.body_bytes
        )

    # -- from the engine -----------------------------------------------------------------------------------------

    def lent(self, connection: HttpConnection) -> None:
        """The connection this request goes out on; called again when a stale one had to be replaced."""
        self.connection = connection
        self.posted_at_s = self.last_engine_byte_at_s = time.monotonic()
        if self.done:
            connection.abort()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        if self.done:
            return
        self.first_byte_at_s = self.last_engine_byte_at_s = time.monotonic()
        self.status = status
        kept = {name: value for name, value in headers.items() if name not in _HEADERS_KEPT_HERE}
        self._frame(_HEAD, encode(ResponseHead(status, kept)))

    def on_data(self, data: bytes) -> None:
        if self.done:
            return
        self.last_engine_byte_at_s = time.monotonic()
        self._pending.append(data)
        if not self.sent_bytes:
            self.first_data_at_s = self.last_engine_byte_at_s
            if self.on_first is not None:
                self.on_first(self)
        self.last_data = data
        self.sent_bytes += len(data)
        self.events += data.count(b"data:")
        self._outbox.ready(self, patient=self.request.stream)
        if self.paused_at_s is None and self._unconfirmed_bytes() >= self.request.window_bytes and self.connection:
            self.paused_at_s = self.last_engine_byte_at_s
            self.connection.pause_reading()

    def on_complete(self) -> None:
        if self.done:
            return
        self._seal_pending()
        self._frame(_END, encode(ResponseEnd(self.sent_bytes)))
        self._finish(None)

    def on_failure(self, failure: HttpFailure) -> None:
        if not failure.sent:
            self.fail(FailureCode.ENGINE_UNREACHABLE, str(failure), retry_safe=True)
        elif isinstance(failure, BadAnswer):
            self.fail(FailureCode.ENGINE_PROTOCOL, str(failure))
        else:
            self.fail(FailureCode.ENGINE_CUT, f"the engine's answer broke off: {failure}")

    # -- from the ingress ----------------------------------------------------------------------------------------

    def confirm(self, kib: int) -> None:
        """The ingress has passed on `kib` KiB of the answer: the window moves."""
        self._sent_kib_confirmed = max(self._sent_kib_confirmed, kib)
        if self.paused_at_s is not None and self._unconfirmed_bytes() < self.request.window_bytes and self.connection:
            self.paused_at_s = None
            self.last_engine_byte_at_s = time.monotonic()  # It was we who did not listen.
            self.connection.resume_reading()

    def cancel(self) -> None:
        """The ingress wants no more of it: the engine's connection closes at once, nothing more is sent."""
        if not self.done:
            self._drop_engine()
            self._frames.clear()
            self._pending.clear()
            self._finish(FailureCode.CANCELLED)

    def fail(
        self,
        code: FailureCode,
        message: str,
        *,
        retry_safe: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        """Ends the request with an ERROR frame, after what the engine has said so far."""
        if self.done:
            return
        self._drop_engine()
        self._seal_pending()
        self._frame(_ERROR, encode(InferenceFailure(code, message, retry_safe, retry_after_s)))
        self._finish(code)

    # -- to the outbox -------------------------------------------------------------------------------------------

    def control(self, kind: FrameKind, sequence: int = 0) -> None:
        """A frame outside the numbering: ALIVE or BODY_CREDIT."""
        self._frames.append(frame_bytes(kind, self.stream, self.attempt, sequence))
        self._outbox.ready(self)

    def take_frames(self) -> list[bytes]:
        self._seal_pending()
        frames, self._frames = self._frames, []
        self.last_frame_at_s = time.monotonic()
        return frames

    # -- inside --------------------------------------------------------------------------------------------------

    def _unconfirmed_bytes(self) -> int:
        return self.sent_bytes - self._sent_kib_confirmed * 1024

    def _frame(self, kind: int, payload: bytes) -> None:
        self._frames.append(frame_bytes(kind, self.stream, self.attempt, self._sequence, payload))
        self._sequence += 1
        # The first and last frames of a stream: its reader waits for the one, and its next request for the other.
        # Answers in one piece are many and short, and cheaper when they share a write.
        self._outbox.ready(self, at_once=self.request.stream)

    def _seal_pending(self) -> None:
        """Turns the bytes read since the last turn into DATA frames."""
        if not self._pending:
            return
        data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending.clear()
        size = min(DATA_FRAME_BYTES_MAX, self._outbox.frame_bytes_max)
        for start in range(0, len(data), size):
            piece = data if len(data) <= size else data[start : start + size]
            self._frames.append(frame_bytes(_DATA, self.stream, self.attempt, self._sequence, piece))
            self._sequence += 1

    def _drop_engine(self) -> None:
        if self.connection is not None:
            self.connection.abort()

    def _finish(self, code: FailureCode | None) -> None:
        self.done = True
        self.connection = None
        self.last_data = b""
        self.body.clear()
        self.on_done(self, code)
