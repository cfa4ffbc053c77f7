"""An answer of events on its way to its client, and what is known when it breaks off."""

from __future__ import annotations

from dataclasses import dataclass

from serai.ingress.http_server import ClientRequest, ClientStream
from serai.ingress.openai_format import ApiError
from serai.ingress.sent_events import Transcript
from serai.ingress.splice import Splice
from serai.ingress.sse_relay import SseRelay


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
    last: bytes = b""
    """What went out last."""

    def take(self, data: bytes) -> bytes:
        """Once per token: what may go to the client of what came."""
        events = self.relay.feed(data)
        if self.splice is not None:
            events = self.splice.edit(events)
        if events:
            self.last = events
            if self.said is not None:
                self.said.add(events)
        return events

    def rest(self) -> bytes:
        """What the relay held back, for a session that has said that it is done."""
        rest = self.relay.rest()
        return rest if self.splice is None else self.splice.edit(rest)

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


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream of events that broke off, and what its client is told if it cannot go on."""

    answer: EventAnswer
    error: ApiError
    survivable: bool
    """Another session may well do better."""
