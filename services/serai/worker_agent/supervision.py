"""What the end of an engine means, and what its agent does then. Pure.

Decided by how the engine ended, where in its start, and how often at that point; never by what it wrote, which is only
shown. The one exception are the well-known words for memory that does not suffice: they make a second try needless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

FIRST_PAUSE_S = 1.0
PAUSE_MAX_S = 60.0
HEALTHY_AFTER_S = 60.0
"""An engine that served for so long was well: what came before it is forgotten."""
WINDOW_S = 3600.0
EXIT_ACCIDENT = 1
EXIT_CONFIG = 2
EXIT_NODE = 75
"""EX_TEMPFAIL: the same job may well succeed on another node."""


class FailureClass(StrEnum):
    """What is wrong."""

    CONFIG = "config"
    """The engine as it was asked for cannot work here: the same start would fail the same way."""
    ACCIDENT = "accident"
    """It may well work the next time."""
    NODE = "node"
    """The node is at fault; elsewhere it may work."""


class Cause(StrEnum):
    """How an engine's run came to its end."""

    EXITED = "exited"
    CANNOT_START = "cannot start"
    """There is no such program, or it may not be run."""
    MISCONFIGURED = "misconfigured"
    """It runs, and shows that it will never serve what was asked for."""
    TOO_SLOW = "too slow"
    """It did not serve in time, and nothing moved any more."""
    HUNG = "hung"
    """It served, and makes no progress, not even with a canary."""
    PORT_TAKEN = "port taken"
    """Another process listens where this engine should; nothing was sent to it."""
    NODE_BUSY = "node busy"
    """Others hold the GPU's memory."""
    DEVICE_LOST = "device lost"
    """A GPU is gone that was there."""


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """One run's. `text` is for people, and says what to do."""

    cause: Cause
    text: str
    phase: str = ""
    """Of its start; empty = it served."""
    exit_code: int | None = None
    served_s: float = 0.0
    """How long it served; 0 = it never did."""
    last_lines: Sequence[str] = ()

    @property
    def point(self) -> tuple[Cause, str, int | None]:
        """Runs that end at one point fail in the same way."""
        return self.cause, self.phase, self.exit_code


@dataclass(frozen=True, slots=True)
class Restart:
    """A new session, after a pause."""

    after_s: float
    kind: FailureClass


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The agent ends with `exit_code`."""

    exit_code: int
    kind: FailureClass
    why: str


@dataclass(frozen=True, slots=True)
class _Case:
    """An end as the rules see it."""

    end: EngineEnd
    before: int
    """Ends at the same point before."""
    ever_served: bool
    """Whether any run of this command has served."""

    @property
    def at_start(self) -> bool:
        return not self.ever_served and self.end.cause in (Cause.EXITED, Cause.TOO_SLOW)

    def exited_with(self, *codes: int) -> bool:
        return self.end.cause is Cause.EXITED and self.end.exit_code in codes

    @property
    def killed(self) -> bool:
        return self.end.exit_code is not None and self.end.exit_code < 0


RULES: tuple[tuple[str, Callable[[_Case], bool], FailureClass], ...] = (
    (
        "others hold the GPU's memory, or a GPU is gone",
        lambda case: case.end.cause in (Cause.NODE_BUSY, Cause.DEVICE_LOST),
        FailureClass.NODE,
    ),
    (
        "the command cannot be run, or the engine shows that it will never serve what was asked for",
        lambda case: case.end.cause in (Cause.CANNOT_START, Cause.MISCONFIGURED),
        FailureClass.CONFIG,
    ),
    (
        "it never served and ended with exit code 2, 126 or 127",
        lambda case: case.at_start and case.exited_with(2, 126, 127),
        FailureClass.CONFIG,
    ),
    (
        "it never served and its last lines say that memory does not suffice",
        lambda case: case.at_start and case.end.cause is Cause.EXITED and says_out_of_memory(case.end.last_lines),
        FailureClass.CONFIG,
    ),
    (
        "it never served and ended at the same point for the third time, by a signal",
        lambda case: case.at_start and case.killed and case.before >= 2,
        FailureClass.CONFIG,
    ),
    (
        "it never served and ended at the same point for the second time",
        lambda case: case.at_start and not case.killed and case.before >= 1,
        FailureClass.CONFIG,
    ),
    ("anything else", lambda case: True, FailureClass.ACCIDENT),
)
"""The first that applies."""

_OUT_OF_MEMORY = (
    "out of memory",
    "outofmemory",
    "no available memory for the cache blocks",
    "free memory on device",
    "unable to allocate",
    "failed to allocate",
    "not enough memory",
)


def says_out_of_memory(lines: Sequence[str]) -> bool:
    """Whether the well-known words are among the last lines of an engine."""
    text = "\n".join(lines).lower()
    return any(words in text for words in _OUT_OF_MEMORY)


def story_of(end: EngineEnd, decided: GiveUp) -> str:
    """For the person who looks why the agent is gone: what happened, what it means, and the engine's own words."""
    lines = ("; its last lines:\n  " + "\n  ".join(end.last_lines)) if end.last_lines else ""
    return f"{end.text} ({decided.kind}: {decided.why}){lines}"


class Supervision:
    """Of one agent's engine, over all its runs."""

    def __init__(self, restarts_per_hour: int) -> None:
        self._restarts_per_hour = restarts_per_hour
        self._restarted_at_s: deque[float] = deque()
        self._points: dict[tuple[Cause, str, int | None], int] = {}
        self._in_a_row = 0
        self._ever_served = False

    def ended(self, end: EngineEnd, now: float) -> Restart | GiveUp:
        """What to do after an engine's run has ended by itself."""
        self._ever_served = self._ever_served or end.served_s > 0
        if end.served_s >= HEALTHY_AFTER_S:
            self._in_a_row = 0
        case = _Case(end, self._points.get(end.point, 0), self._ever_served)
        self._points[end.point] = case.before + 1
        kind = next(kind for _, applies, kind in RULES if applies(case))
        if kind is FailureClass.CONFIG:
            return GiveUp(EXIT_CONFIG, kind, "the same start would fail the same way, so it is not repeated")
        if kind is FailureClass.NODE:
            return GiveUp(EXIT_NODE, kind, "this node is at fault; another may do")
        return self._again(end, now)

    def _again(self, end: EngineEnd, now: float) -> Restart | GiveUp:
        while self._restarted_at_s and now - self._restarted_at_s[0] > WINDOW_S:
            self._restarted_at_s.popleft()
        if len(self._restarted_at_s) >= self._restarts_per_hour:
            limit = f"{self._restarts_per_hour} restarts an hour are the limit (--engine-restarts)"
            return GiveUp(EXIT_ACCIDENT, FailureClass.ACCIDENT, limit)
        self._restarted_at_s.append(now)
        if end.cause is Cause.PORT_TAKEN:
            return Restart(0.0, FailureClass.ACCIDENT)  # The next one gets another port; there is nothing to wait for.
        pause_s = min(PAUSE_MAX_S, FIRST_PAUSE_S * 2.0 ** min(self._in_a_row, 10))
        self._in_a_row += 1
        return Restart(pause_s, FailureClass.ACCIDENT)
