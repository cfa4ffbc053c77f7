"""Which requests share the beginning of their prompt: system prompts and sessions, told as keys of KV blocks.

A key is (lineage, place): a lineage is a text that only grows, a system prompt or a session. Two keys are equal exactly
when the prompts are equal up to the end of that block, which is what a prefix cache asks; no hashing, no collisions.
The block in which a system prompt ends belongs to what follows it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from serai.runtime.fields import BadInput
from serai.simulator.workloads.workload import BLOCK_TOKENS

_PLACE_BITS = 20
"""A million blocks, or 16 million tokens, in one lineage."""


class Popularity:
    """Zipf: number k (from 0) is drawn in proportion to 1 / (k + 1) ** `exponent`; 0 makes all alike."""

    __slots__ = ("_sums",)

    def __init__(self, number: int, exponent: float) -> None:
        if not (number >= 1 and 0 <= exponent <= 10):
            raise BadInput("number and zipf", f"are {number} and {exponent}", "give 1 or more, and 0 to 10")
        self._sums = list(accumulate((k + 1) ** -exponent for k in range(number)))

    def draw(self, random: Random) -> int:
        return min(bisect_right(self._sums, random.random() * self._sums[-1]), len(self._sums) - 1)


@dataclass(frozen=True, slots=True)
class SystemPrompts:
    """`number` texts of `tokens` each, before the user's; how popular they are by Zipf's law."""

    number: int
    tokens: int
    zipf: float = 1.0

    def __post_init__(self) -> None:
        if not (self.number >= 1 and self.tokens >= 1):
            raise BadInput("system_prompts", f"{self.number} of {self.tokens} tokens", "give at least 1 of each")


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations: each turn's prompt holds all that was said before. The number of turns is geometric.

    Arrivals are open-loop: `gap_s_mean` is from one turn's arrival to the next (exponential), so it holds the time of
    the answer and of reading it. The rate begins low and is reached after some gaps: leave them to the warm-up.
    """

    turns_mean: float
    gap_s_mean: float

    def __post_init__(self) -> None:
        if not (self.turns_mean >= 1 and 0 < self.gap_s_mean < 1e6):
            raise BadInput(
                "sessions",
                f"{self.turns_mean} turns, {self.gap_s_mean} s apart",
                "give turns_mean of at least 1 and gap_s_mean above 0",
            )


@dataclass(frozen=True, slots=True)
class Clients:
    """Who asks: `number` of them, by Zipf's law."""

    number: int
    zipf: float = 1.0


def keys(lineage: int, blocks_from: int, blocks_to: int) -> tuple[int, ...]:
    """The keys of a lineage's blocks."""
    base = lineage << _PLACE_BITS
    return tuple(range(base + blocks_from, base + blocks_to))


def chained(system: int | None, system_tokens: int, session: int | None, prompt_tokens: int) -> tuple[int, ...]:
    """Keys of a prompt's full blocks: those of its system prompt (a lineage), then those of its session (a lineage;
    None: said once, and nobody shares it)."""
    full = prompt_tokens // BLOCK_TOKENS
    shared = 0 if system is None else min(full, system_tokens // BLOCK_TOKENS)
    begin = () if system is None else keys(system, 0, shared)
    return begin if session is None else begin + keys(session, shared, full)
