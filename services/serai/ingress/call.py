"""One client's request on its way through this ingress, and what is known of it in the end."""

from __future__ import annotations

import math

import msgspec
from opentelemetry.trace import Span

from serai.contracts.admission import Lease
from serai.contracts.session_record import SessionRecord
from serai.contracts.usage import Outcome as Outcome
from serai.ingress.caller import Caller
from serai.ingress.choosing import Wish
from serai.ingress.endpoints import Endpoint
from serai.ingress.gpu_share import Share
from serai.ingress.token_counts import TokenCounts


class Call(msgspec.Struct, eq=False):  # A dataclass costs three times as much to make.
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
    asked_path: str = ""
    """What the client asked; another than `path` where its words were translated."""
    deadline_s: float = math.inf
    """When its time is over, on the clock of `started_s`."""
    priority: int = 1
    """Place of its class in `queueing.CLASSES`."""
    prompt_tokens: int = 0
    """Estimated."""
    output_tokens_max: int = 0
    """For each answer, as asked for; 0 = not said."""
    outputs: int = 1
    """How many answers it asks for."""
    hides_usage: bool = False
    """The engine is asked to tell the usage in the stream; its client has not asked for that."""
    tracked: bool = True
    """False: its caller wants to be in no record by name, and may."""
    best_effort: bool = True
    """False: better refused than late."""
    lease: Lease | None = None
    """What a macro-scheduler promised it at the session that it goes to now."""
    leases_refused: tuple[str, ...] = ()
    """Sessions that could not keep what was promised. They have done no wrong, and may be tried without a lease."""
    lease_refusals: tuple[int, ...] = ()
    """Which of `tried` those refusals were."""
    named_by_client: bool = False
    """Its id is its client's word, and others may have the same."""
    traceparent: str = ""
    span: Span | None = None
    tried: list[SessionRecord] = []
    tries_of_earlier_turns: int = 0
    """So many of `tried` were before it went back to its queue."""
    answer_headers: dict[str, str] = {}
    """Ours, on whatever its client is answered."""
    status: int = 0
    """Of the engine's answer; 0 = there was none."""
    first_byte_s: float = 0.0
    queued_s: float = 0.0
    resumed: int = 0
    """How often a broken stream went on at another session."""
    usage: dict[str, object] | None = None
    """The engine's last word on tokens, in its own names (`prompt_tokens`, …)."""
    tokens: TokenCounts | None = None
    """That it took, once its last bytes are about to go out."""
    events: int = 0
    """About how many a stream had that did not end whole."""
    shares: list[tuple[int, Share]] = []
    """Of the time of those of its sessions that have GPUs, and how many."""
    last_answer: bytes = b""
    """Of a request whose span is kept: the answer, or its last events."""
    outcome: Outcome = Outcome.REFUSED
    error_code: str = ""

    @property
    def tried_now(self) -> list[SessionRecord]:
        """Since its turn came."""
        return self.tried[self.tries_of_earlier_turns :] if self.tries_of_earlier_turns else self.tried

    @property
    def tried_in_vain(self) -> list[SessionRecord]:
        """Of these, those that may not be tried again."""
        refused = self.lease_refusals
        if not refused:
            return self.tried_now
        first = self.tries_of_earlier_turns
        return [record for place, record in enumerate(self.tried) if place >= first and place not in refused]

    @property
    def path(self) -> str:
        return self.endpoint.path
