"""Which work a step may hold. Pure; one thread plans, another may set the target.

A phase orders work, it never idles the engine: DECODE with nothing to decode prefills (vLLM's own throttle sees to
that), PREFILL with nothing to prefill decodes.
"""

from __future__ import annotations

from enum import StrEnum

_PATIENCE_MAX = 16


class Phase(StrEnum):
    """What the agent asks for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    """As vLLM does it by itself."""


class Phases:
    """The phase of one engine core."""

    def __init__(self) -> None:
        self.target = Phase.MIXED
        """Set from the channel's thread: one reference, so nobody has to wait for it."""
        self.prompt_tokens_max: int | None = None
        """Of prompts, in one step; None: as many as vLLM's settings allow."""
        self._skips = 0
        self._patience = 0

    def plan(self, *, prefillable: bool, decodable: bool) -> Phase:
        """What the next step does, given whether prompts and whether decodes could run."""
        target = self.target
        if target is Phase.PREFILL and (not prefillable or not decodable):
            # Nothing to keep apart. A step that skipped everybody would be empty, and the engine would spin.
            return Phase.MIXED
        if target is Phase.PREFILL and self._skips > 0:
            self._skips -= 1
            return Phase.MIXED
        return target

    def planned(self, phase: Phase, tokens: int) -> None:
        """What came of it. A prefill step without a token means that no prompt that waits can be taken (no KV, no
        slot, a grammar that is not compiled): decodes must go on, or nothing ever changes. For longer each time."""
        if phase is not Phase.PREFILL:
            return
        self._patience = 0 if tokens else min(_PATIENCE_MAX, max(1, self._patience * 2))
        self._skips = self._patience
