"""One request inside one engine."""

from __future__ import annotations

from enum import Enum
from typing import Any


class Place(Enum):
    """Where in the engine a sequence is."""

    OUTSIDE = "outside"
    """Not submitted yet."""
    WAITING = "waiting"
    """For a slot, and room for its prompt."""
    ARRIVED = "arrived"
    """With its KV computed elsewhere; waits for a slot and room for it."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    KEPT = "kept"
    """Has said everything; its blocks wait for `release`."""
    ENDED = "ended"


class Sequence:
    """What is asked of an engine, and the engine's notes on it. Made by the caller, for one engine, used once.

    Equality is identity: two requests with the same text are two sequences.
    """

    __slots__ = (
        "block_keys",
        "blocks",
        "cached_tokens",
        "computed",
        "decode_began_at_s",
        "finish_step",
        "finished_at_s",
        "first_token_at_s",
        "goal",
        "held_keys",
        "joined_at",
        "joined_kv",
        "keeps_blocks",
        "output_tokens",
        "owner",
        "place",
        "preemptions",
        "prefill_only",
        "prefilled",
        "prompt_tokens",
        "request_id",
        "said",
        "scheduled_at_s",
        "submitted_at_s",
    )

    def __init__(
        self,
        request_id: str | int,
        prompt_tokens: int,
        output_tokens: int,
        *,
        block_keys: tuple[int, ...] = (),
        prefill_only: bool = False,
        prefilled: bool = False,
        owner: Any = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """How many tokens it will say: a stand-in knows."""
        self.block_keys = block_keys
        """One key per full KV block of the prompt that may be shared, chained: equal key = equal prefix."""
        self.prefill_only = prefill_only
        """Disaggregated prefill: ends with its first token, but keeps its blocks until `release`."""
        self.keeps_blocks = prefill_only
        """Keeps its blocks when it has said everything, until `release` or `abort`."""
        self.prefilled = prefilled
        """Disaggregated decode: arrives with its KV computed; its first token was said elsewhere."""
        self.owner = owner
        """Whatever the caller wants to find again."""
        # The engine's notes for the caller: seconds on the caller's clock, None until it happened.
        self.submitted_at_s: float | None = None
        self.scheduled_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.decode_began_at_s: float | None = None
        """Start of the first decode step that holds it."""
        self.finished_at_s: float | None = None
        self.cached_tokens = 0
        """Tokens of the prompt found in the prefix cache when it was first scheduled."""
        self.preemptions = 0
        # The engine's own bookkeeping. While it decodes, everything follows from the number of decode steps since
        # it joined, so that a step need not touch it.
        self.place = Place.OUTSIDE
        self.said = 1 if prefilled else 0
        """Tokens said until it joined the decoding ones; `BatchEngine.produced` knows the count of now."""
        self.goal = prompt_tokens
        """Tokens to have in the cache before it decodes: the prompt, after a preemption also what it has said."""
        self.computed = 0
        """How many of them are there."""
        self.blocks = 0
        """KV blocks held, shared ones included; not kept up while it decodes."""
        self.held_keys: list[int] = []
        """Shared blocks it holds, by key."""
        self.joined_at = 0
        """Number of decode steps when it joined the decoding ones."""
        self.joined_kv = 0
        """Tokens it had in the cache then."""
        self.finish_step = 0
        """Number of decode steps when it will have said everything."""

    @property
    def to_say(self) -> int:
        """Tokens it says in this engine after those already said; exact while it does not decode."""
        return (1 if self.prefill_only else self.output_tokens) - self.said

    def __repr__(self) -> str:
        return f"<Sequence {self.request_id!r} {self.place.value} {self.prompt_tokens}+{self.output_tokens}>"
