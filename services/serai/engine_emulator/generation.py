"""One request inside the emulated engine, and where its tokens go."""

from __future__ import annotations

from typing import Protocol

from serai.engine_emulator.batching.sequence import Sequence
from serai.engine_emulator.completion import Completion
from serai.engine_emulator.faults import Fault, FaultKind


class Reply(Protocol):
    """Where a generation's tokens go."""

    def say(self, first: int, tokens: int) -> None:
        """Tokens `first` … `first + tokens - 1` are there."""

    def reach_fault(self) -> bool:
        """The tokens that come before the fault are said: do it. True when the generation goes on all the same."""

    def finish(self) -> None:
        """All tokens are said."""

    def is_writable(self) -> bool:
        """False while the client does not read: then nothing is said."""


class Generation:
    """A completion on its way out. The engine's notes are seconds on its clock."""

    __slots__ = (
        "admitted_at",
        "completion",
        "due_at",
        "fault",
        "first_token_at",
        "is_stuck",
        "last_at",
        "produced",
        "reply",
        "rests",
        "sequence",
        "slow_factor",
        "submitted_at",
        "target",
    )

    def __init__(self, completion: Completion, reply: Reply, fault: Fault | None) -> None:
        self.completion = completion
        self.reply = reply
        self.fault = fault if fault is not None and fault.kind is not FaultKind.SLOW else None
        self.target = completion.tokens if self.fault is None else min(self.fault.tokens, completion.tokens)
        """How many tokens come before the next thing that is no token: the fault, or the end."""
        self.slow_factor = 1.0
        self.produced = 0
        """Tokens said to the client."""
        self.rests = False
        """Nothing more comes of itself: the client does not read, or a fault holds it."""
        self.is_stuck = False
        """A fault holds it for good."""
        self.submitted_at = 0.0
        self.admitted_at = 0.0
        self.first_token_at = 0.0
        self.last_at = 0.0
        """When it last said something."""
        # One of these belongs to the schedule that runs it.
        self.due_at = 0.0
        self.sequence: Sequence | None = None

    def pass_fault(self) -> None:
        """The fault is done and the answer goes on."""
        self.fault = None
        self.target = self.completion.tokens

    @property
    def kv_tokens(self) -> int:
        """How much of the KV cache it holds."""
        return self.completion.answer.prompt_tokens + self.produced
