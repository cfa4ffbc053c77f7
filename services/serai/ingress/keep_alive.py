"""Signs of life for clients that wait for events: proxies, load balancers and SDKs give up on connections that say
nothing for a while, and a long prompt, or a queue, may take longer than that.

No timer for each stream, and nothing done per token: one look at all of them now and then sees which have said
nothing since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from serai.ingress.dialects import KEEP_ALIVE
from serai.ingress.endpoints import Dialect
from serai.ingress.event_answer import EventAnswer
from serai.ingress.http_server import ClientGone, ClientRequest, ClientStream

EVENT_HEADERS = {"content-type": "text/event-stream; charset=utf-8"}


class Line:
    """The way to one client, from its request to the end of its answer."""

    __slots__ = ("_dialect", "_early_headers", "_said", "_silent_since_s", "answer", "out", "request")

    def __init__(
        self, request: ClientRequest, dialect: Dialect, early_headers: Callable[[], Mapping[str, str]], now: float
    ) -> None:
        """`early_headers` tells what is known of the answer's headers when a head must leave before a session
        answers."""
        self.request = request
        self.out: ClientStream | None = None
        """The stream of events, once its head has been sent."""
        self.answer: EventAnswer | None = None
        """What is sent on it, once a session answers."""
        self._dialect = dialect
        self._early_headers = early_headers
        self._said: bytes | None = None
        self._silent_since_s = now

    def begin(self, headers: Mapping[str, str], first: bytes) -> ClientStream:
        """The stream, with its first events; its head leaves now, unless it has had to leave before there were any."""
        if self.out is None:
            self.out = self.request.start(200, headers, first)
        else:
            self.out.send(first)
        return self.out

    def look(self, now: float, after_s: float) -> None:
        """Says something when nothing has been said for `after_s`."""
        said = None if self.answer is None else self.answer.last
        if said is not self._said:
            self._said, self._silent_since_s = said, now
        elif now - self._silent_since_s >= after_s:
            self._silent_since_s = now
            try:
                self._say(KEEP_ALIVE[self._dialect])
            except ClientGone:
                pass  # Whoever answers it is being cancelled.

    def _say(self, sign: bytes) -> None:
        if self.out is None:
            self.out = self.request.start(200, {**EVENT_HEADERS, **self._early_headers()}, sign)
        else:
            self.out.send(sign)


class KeepAlive:
    """All lines of one ingress."""

    def __init__(self, after_s: float) -> None:
        """`after_s` 0: never says anything."""
        self._after_s = after_s
        self._open: set[Line] = set()

    @contextmanager
    def watched(self, line: Line) -> Iterator[None]:
        """To be left when the answer has ended, before anything else is waited for."""
        self._open.add(line)
        try:
            yield
        finally:
            self._open.discard(line)

    def look(self, now: float) -> None:
        """To be called every half second or so."""
        if self._after_s:
            for line in tuple(self._open):
                line.look(now, self._after_s)
