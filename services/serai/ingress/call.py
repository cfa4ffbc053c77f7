"""One client's request on its way through this ingress, and what is known of it in the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.trace import Span

from serai.contracts.session_record import SessionRecord
from serai.contracts.usage import Outcome as Outcome
from serai.ingress.caller import Caller
from serai.ingress.choosing import Wish
from serai.ingress.endpoints import Endpoint


@dataclass(slots=True)
class Call:
    """Made when its head and body have been read; `Accounting.ended` sees it last."""

    request_id: str
    endpoint: Endpoint
    caller: Caller
    model: str
    """Never an alias: what the client meant by `asked_model`."""
    stream: bool
    body: bytes
    headers: dict[str, str]
    """Those that go to the engine."""
    started_s: float
    started_ns: int
    """The same moment, since the epoch: for records and traces only."""
    wish: Wish
    asked_model: str = ""
    """As it stands in the body."""
    traceparent: str = ""
    span: Span | None = None
    tried: list[SessionRecord] = field(default_factory=list)
    first_byte_s: float = 0.0
    queued_s: float = 0.0
    resumed: int = 0
    """How often a broken stream went on at another session."""
    usage: dict[str, object] | None = None
    """The engine's last word on tokens, in its own names (`prompt_tokens`, …)."""
    outcome: Outcome = Outcome.REFUSED
    error_code: str = ""

    @property
    def path(self) -> str:
        return self.endpoint.path
