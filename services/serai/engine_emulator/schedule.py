"""The seam between the engine and its timing: who has tokens when.

Two implementations: `fixed_schedule` gives every request the same time to first token and per output token;
`batched_schedule` runs the batch scheduler on the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from serai.engine_emulator.batching.engine import BatchEngine
from serai.engine_emulator.generation import Generation


class Schedule(Protocol):
    """Who runs, who waits, and who has tokens when. `now` is the time of the engine's clock, in seconds."""

    @property
    def batch(self) -> BatchEngine | None:
        """The batch scheduler behind it, for those who want to look inside."""

    @property
    def running(self) -> int:
        """Generations that hold a slot."""

    @property
    def waiting(self) -> int:
        """Generations that wait for one."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the running generations hold in the KV cache."""

    @property
    def throughput_tokens_s(self) -> float:
        """Tokens said a second, lately; 0 when it does not count them."""

    def submit(self, generation: Generation, now: float) -> None:
        """Take `generation` in. Raises TooLong when it can never run."""

    def remove(self, generation: Generation, now: float) -> None:
        """It has ended or is not wanted any more: what it holds is free. Nothing when it is not there."""

    def resume(self, generation: Generation, now: float) -> None:
        """Its client reads again."""

    def wake(self, now: float) -> None:
        """Something it goes by was changed from outside."""

    def next_at(self) -> float | None:
        """When `due` has something next; None when nothing is to come."""

    def due(self, now: float) -> Iterator[tuple[Generation, int]]:
        """Who has tokens now, and how many each has in all. Between two of them everything else may be called."""
