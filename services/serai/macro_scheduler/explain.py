"""Decisions as data, with their reasons, kept for a while. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from serai.contracts.admission import Decision
from serai.macro_scheduler.admission import Verdict


class Decided(NamedTuple):
    """One decision on one request."""

    at_s: float
    request_id: str
    decision: Decision
    session: str
    prompt_tokens: int
    left_s: float
    """Of its TTFT target."""
    verdicts: Sequence[Verdict]
    """In the order in which instances were asked."""
    why: str = ""

    def lines(self, now_s: float) -> list[str]:
        """For people."""
        where = f" on {self.session}" if self.session else ""
        head = f"{now_s - self.at_s:.3f} s ago: {self.decision.value}{where}"
        head += f" ({self.prompt_tokens} prompt tokens, {self.left_s:.3f} s left to its first decode step)"
        if self.why:
            head += f": {self.why}"
        return [head, *(f"  {_line(verdict)}" for verdict in self.verdicts)]


class DecisionRing:
    """The last `most` decisions."""

    def __init__(self, most: int = 4096) -> None:
        self._ring: deque[Decided] = deque(maxlen=most)

    def note(self, decided: Decided) -> None:
        """Keep one more."""
        self._ring.append(decided)

    def of(self, request_id: str) -> list[Decided]:
        """All on one request, oldest first."""
        return [one for one in self._ring if one.request_id == request_id]

    def last(self, count: int) -> list[Decided]:
        """The newest, oldest first."""
        return list(self._ring)[-count:]


def _line(verdict: Verdict) -> str:
    word = "fits" if verdict.fits else f"fails by {verdict.failed}"
    figures = ", ".join([f"{name} {_number(value)}" for name, value in verdict.figures])
    return f"{verdict.session}: {word}" + (f" ({figures})" if figures else "")


def _number(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
