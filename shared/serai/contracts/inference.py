"""The inference conversation: one request with many replies on core NATS, as frames.

A NATS message is one or more frames, one after the other; frames of several streams to the same ingress share a
message when they are ready in the same instant. The layout is in `codec.py`.

Upstream (ingress → agent)                       Downstream (agent → ingress, on the request's reply subject)
  REQUEST      json `InferenceRequest`             ALIVE        taken, still at work (sent at least once a second)
  BODY         raw bytes, sequence 0, 1, …         BODY_CREDIT  sequence = how many BODY frames may be sent in all
  CREDIT       sequence = KiB of DATA consumed      HEAD         json `ResponseHead`, sequence 0
  CANCEL       (on `cancel.<session>`)             DATA         raw bytes, sequence 1, 2, …
                                                   END          json `ResponseEnd`; the only whole end
                                                   ERROR        json `InferenceFailure`; the other end

HEAD, DATA, END and ERROR are numbered without gaps per attempt: a gap is an error, never silence. ALIVE, BODY_CREDIT
and CREDIT stand outside the numbering, since losing one loses no bytes.

The messages here are msgspec structs, not dataclasses like the others: several are made per request, and a frozen
dataclass costs ten times as much to make.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

from serai.contracts.admission import Lease


class FrameKind(IntEnum):
    """One byte on the wire. Numbers are never reused."""

    REQUEST = 1
    BODY = 2
    CREDIT = 3
    CANCEL = 4
    ALIVE = 16
    BODY_CREDIT = 17
    HEAD = 18
    DATA = 19
    END = 20
    ERROR = 21


class Frame:
    """One frame. `stream` names the request within its ingress; `attempt` counts its tries, so that late frames of
    an earlier try are told apart. A plain class with slots: some are made per token."""

    __slots__ = ("attempt", "kind", "payload", "sequence", "stream")

    def __init__(self, kind: int, stream: int, attempt: int, sequence: int, payload: bytes = b"") -> None:
        self.kind = kind
        self.stream = stream
        self.attempt = attempt
        self.sequence = sequence
        self.payload = payload

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frame):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Frame.__slots__)

    def __hash__(self) -> int:
        return hash((self.kind, self.stream, self.attempt, self.sequence, self.payload))

    def __repr__(self) -> str:
        kind = FrameKind(self.kind).name if self.kind in FrameKind.__members__.values() else str(self.kind)
        return f"Frame({kind} stream={self.stream} attempt={self.attempt} seq={self.sequence} {self.payload[:60]!r})"


WINDOW_BYTES_MAX = 16 * 1024 * 1024
"""No ingress may ask for a larger window: it is what the agent may have to hold of one stream."""


class InferenceRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Head of a request. The body follows in BODY frames: the first with the head, the rest as BODY_CREDIT allows."""

    request_id: str
    path: str
    """Of the engine's HTTP API, e.g. `/v1/chat/completions`."""
    body_bytes: int
    body_frames: int
    window_bytes: int
    """How many DATA bytes the agent may have sent beyond the last CREDIT; then it stops reading the engine."""
    deadline_s: float
    """Time left for the whole request, in seconds: durations travel, clock readings do not."""
    method: str = "POST"
    headers: dict[str, str] = {}
    stream: bool = False
    traceparent: str = ""
    operation: str = ""
    """What it is called in traces: `gen_ai.operation.name`."""
    lease: Lease | None = None
    """What the macro-scheduler promised it here; None = nobody was asked, or nobody answered."""


class ResponseHead(msgspec.Struct, frozen=True):
    """Status and headers of the engine's answer."""

    status: int
    headers: dict[str, str]


class ResponseEnd(msgspec.Struct, frozen=True):
    """The engine's answer is whole."""

    data_bytes: int


class FailureCode(StrEnum):
    """Closed set: why a request could not be finished. `docs/request-path.md` says whose fault each is."""

    UNKNOWN_SESSION = "unknown_session"
    DRAINING = "draining"
    BUSY = "busy"
    BODY_TOO_LARGE = "body_too_large"
    BAD_REQUEST_FRAME = "bad_request_frame"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_CUT = "engine_cut"
    ENGINE_PROTOCOL = "engine_protocol"
    ENGINE_SILENT = "engine_silent"
    DEADLINE = "deadline"
    CREDIT_STARVED = "credit_starved"
    CANCELLED = "cancelled"
    AGENT_LEFT = "agent_left"
    LEASE_REFUSED = "lease_refused"
    # Found by the ingress itself:
    NO_RESPONDERS = "no_responders"
    AGENT_SILENT = "agent_silent"
    FRAME_GAP = "frame_gap"
    BUS_LOST = "bus_lost"
    STOPPED = "stopped"


class InferenceFailure(msgspec.Struct, frozen=True):
    """The request ends here and its answer is not whole."""

    code: FailureCode
    message: str
    retry_safe: bool = False
    """True when the engine cannot have begun to work on it, so another session may be tried without doubling work."""
    retry_after_s: float | None = None
