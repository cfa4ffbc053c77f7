"""One engine in the simulated cluster, with the notes that are made on it as it runs."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from serai.engine_emulator.batching.engine import BatchEngine
from serai.engine_emulator.batching.sequence import Sequence
from serai.engine_emulator.batching.settings import BatchSettings
from serai.performance.latency_model import LatencyModel, Step
from serai.simulator.fast.dispatch import StepKind
from serai.simulator.fast.kv_connectors import Connector


class Role(StrEnum):
    """What an instance does with a request."""

    WHOLE = "whole"
    PREFILL = "prefill"
    """Says first tokens, then gives the KV away."""
    DECODE = "decode"
    """Gets KV and says the rest."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance as it is set up."""

    model: LatencyModel
    settings: BatchSettings
    role: Role = Role.WHOLE
    node: int = 0
    gpus: int = 1
    serves: str = ""
    """Model name; empty: whatever is asked for."""
    energy_j: Callable[[Step], float] | None = None
    """Energy of a step, as `RooflineModel.energy_j`; None: not counted, which makes a run faster by a third."""
    idle_power_w: float = 0.0
    """Of all its GPUs together, while no step runs."""
    joins_at_s: float = 0.0
    """From when it serves; it has its GPUs from the start of the run."""
    connector: Connector | None = None
    """How it hands KV over, where it prefills or decodes only. None: over a link, at no cost to itself."""

    def __post_init__(self) -> None:
        if not 0 <= self.joins_at_s < math.inf:
            raise ValueError(f"joins_at_s is {self.joins_at_s}: must be a time of the run, at least 0")


class Phases:
    """What an instance did when: intervals of one kind of step, in columns. Steps that follow each other without a gap
    and are of one kind are one interval."""

    KINDS: tuple[StepKind, ...] = ("prefill", "decode", "mixed")

    def __init__(self) -> None:
        self.began_ns = array("q")
        self.ended_ns = array("q")
        self.kinds = array("b")

    def add(self, kind: StepKind, began_ns: int, ended_ns: int) -> None:
        """A step has ended."""
        number = self.KINDS.index(kind)
        if self.ended_ns and self.ended_ns[-1] == began_ns and self.kinds[-1] == number:
            self.ended_ns[-1] = ended_ns
            return
        self.began_ns.append(began_ns)
        self.ended_ns.append(ended_ns)
        self.kinds.append(number)

    def __len__(self) -> int:
        return len(self.kinds)

    def intervals(self) -> list[tuple[int, int, StepKind]]:
        """Begin, end and kind of each, in order."""
        return [
            (began, ended, self.KINDS[kind])
            for began, ended, kind in zip(self.began_ns, self.ended_ns, self.kinds, strict=True)
        ]


class TokenGaps:
    """The longest gap between a request's tokens, without touching each request at each step.

    All decoding requests of an engine say a token at the end of each decode step, so a request's gaps are the gaps
    between the ends of the decode steps it took part in. Their maximum over the last steps is read off a stack of
    gaps that no later gap has exceeded.
    """

    def __init__(self) -> None:
        self._ends_ns = array("q")
        self._numbers: list[int] = []
        self._gaps: list[int] = []

    def decoded(self, end_ns: int) -> None:
        """One more decode step has ended."""
        ends = self._ends_ns
        if ends:
            gap = end_ns - ends[-1]
            gaps, numbers = self._gaps, self._numbers
            while gaps and gaps[-1] <= gap:
                gaps.pop()
                numbers.pop()
            gaps.append(gap)
            numbers.append(len(ends))
        ends.append(end_ns)

    def longest(self, since_ns: int, joined_at: int) -> tuple[int, int]:
        """For a request that said a token at `since_ns`, when the engine had made `joined_at` decode steps, and one in
        each step since: its longest gap, and when it spoke last."""
        if len(self._ends_ns) <= joined_at:
            return 0, since_ns
        longest = self._ends_ns[joined_at] - since_ns
        place = bisect_left(self._numbers, joined_at + 1)
        if place < len(self._gaps):
            longest = max(longest, self._gaps[place])
        return longest, self._ends_ns[-1]


class Instance:
    """An engine, its phases, and who is on the way to it."""

    __slots__ = (
        "arriving",
        "coming",
        "engine",
        "expected",
        "gaps",
        "held_until_ns",
        "left_ns",
        "number",
        "phases",
        "reserved_tokens",
        "retired",
        "serving",
        "spec",
        "taken_ns",
        "to_put",
    )

    def __init__(self, number: int, spec: InstanceSpec, taken_ns: int = 0) -> None:
        self.number = number
        self.spec = spec
        self.taken_ns = taken_ns
        """From when it has its GPUs."""
        self.left_ns: int | None = None
        """When it gave them back."""
        self.serving = False
        self.retired = False
        self.coming: set[int] = set()
        """Requests on the way to it, by number."""
        self.engine = BatchEngine(spec.model, spec.settings, energy_j=spec.energy_j)
        self.phases = Phases()
        self.gaps = TokenGaps()
        self.expected: deque[tuple[int, int]] = deque()
        """Transfers that wait for room here: number of the request, number of the instance that has its KV."""
        self.held_until_ns = 0
        """It begins no step before."""
        self.reserved_tokens = 0
        """Room promised to KV that is on its way or not admitted yet."""
        self.arriving: list[Sequence] = []
        """Whose KV has come but that the engine has not admitted."""
        self.to_put: list[Sequence] = []
        """Computed in the step that has just ended, to go to a store."""

    @property
    def is_done(self) -> bool:
        """It was retired, and nothing is left of what it had."""
        engine = self.engine
        return self.retired and not (self.coming or self.expected or engine.running or engine.waiting or engine.step)

    def room_for(self, prompt_tokens: int) -> int:
        """Tokens that a request whose prompt comes computed takes at first: the prompt and its next token, in whole
        blocks."""
        block = self.spec.settings.block_tokens
        return -(-(prompt_tokens + 1) // block) * block
