"""An answer of events on its way to its client, and what is known when it breaks off."""

from __future__ import annotations

from dataclasses import dataclass

from serai.ingress.http_server import ClientRequest, ClientStream
from serai.ingress.openai_format import ApiError
from serai.ingress.sent_events import Transcript
from serai.ingress.splice import Splice
from serai.ingress.sse_relay import SseRelay
from serai.ingress.stream_usage import CHOICES_LAST, without_usage_event


@dataclass(slots=True)
class EventAnswer:
    """A stream of events to one client, from one session or, one after the other, from several."""

    request: ClientRequest
    out: ClientStream
    relay: SseRelay
    """Of the session that speaks now."""
    said: Transcript | None
    """A copy of what went out; None when it would be of no use."""
    splice: Splice | None = None
    """Makes events of a session that continues fit behind those of the first, which pass as they came."""
    hides_usage: bool = False
    """Its client has not asked for the event that has nothing but the usage."""
    last: bytes = b""
    """What went out last."""

    def take(self, data: bytes) -> bytes:
        """Once per token: what may go to the client of what came."""
        events = self.relay.feed(data)
        if self.splice is not None:
            events = self.splice.edit(events)
        if self.hides_usage and not events.endswith(CHOICES_LAST):
            events = without_usage_event(events)
        if events:
            self.last = events
            if self.said is not None:
                self.said.add(events)
        return events

    def rest(self) -> bytes:
        """What the relay held back, for a session that has said that it is done."""
        rest = self.relay.rest()
        if self.splice is not None:
            rest = self.splice.edit(rest)
        return without_usage_event(rest) if self.hides_usage else rest

    def sent(self, events: bytes) -> None:
        """Notes events that went out with the head."""
        self.last = events
        if self.said is not None:
            self.said.add(events)

    @property
    def contradicted(self) -> bool:
        """The session that continues does not say what the client has already."""
        return self.splice is not None and self.splice.mismatch

    def usage(self) -> dict[str, object] | None:
        """The last `usage` that was told, of the whole answer."""
        return self.relay.usage() if self.splice is None else self.splice.usage

    def events_in(self, data_bytes: int) -> int:
        """About how many events are in so many bytes, by the size of the last: counting would cost something for each
        token."""
        count = self.last.count(b"\n\n") + self.last.count(b"\n\r\n")
        return round(data_bytes * count / len(self.last)) if self.last else 0


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream of events that broke off, and what its client is told if it cannot go on."""

    answer: EventAnswer
    error: ApiError
    survivable: bool
    """Another session may well do better."""
