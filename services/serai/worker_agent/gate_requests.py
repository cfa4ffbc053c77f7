"""The requests of one instance as its phase gate knows them: who waits until when, who decodes. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from enum import Enum
from heapq import heappop, heappush
from math import inf

from serai.contracts.admission import Lease
from serai.worker_agent.slack_book import Place


class Stage(Enum):
    """How far a request is."""

    WAITING = "waiting"
    """Held back by the gate."""
    LATE = "late"
    """Held back; its target cannot be met, or it has none: it comes after the others."""
    RELEASED = "released"
    """The engine has it; no first token yet."""
    ENTERING = "entering"
    """Has its first token; its first decode step has not ended."""
    DECODING = "decoding"
    PREEMPTED = "preempted"


class Cohort:
    """Streams that began decoding together, while they are young: they have said as much and have the same slack."""

    __slots__ = ("began_s", "count", "steps")

    def __init__(self, began_s: float, steps: int) -> None:
        self.began_s = began_s
        self.steps = steps
        """As of which they had said 2 tokens."""
        self.count = 0


class GateRequest:
    """One request. Equality is identity."""

    __slots__ = (
        "cohort",
        "deadline_s",
        "displaces",
        "first_s",
        "key",
        "lease",
        "number",
        "offered_s",
        "older",
        "place",
        "prompt_tokens",
        "said",
        "slo_tpot_s",
        "stage",
        "steps",
        "window",
        "zero_s",
    )

    def __init__(
        self, key: str, number: int, prompt_tokens: int, lease: Lease | None, offered_s: float, deadline_s: float
    ) -> None:
        self.key = key
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.lease = lease
        self.offered_s = offered_s
        self.deadline_s = deadline_s
        """Until when it should decode."""
        self.displaces = False
        """Whether, by prediction, more requests that are still to come would miss theirs if it went by its deadline."""
        self.slo_tpot_s = 0.0
        """0: it has no target, or none that holds."""
        self.window = 0
        self.cohort: Cohort | None = None
        self.stage = Stage.WAITING
        self.first_s = 0.0
        self.said = 0
        """Tokens said, as of step `steps`."""
        self.steps = 0
        self.place: Place | None = None
        self.older = False
        """Whether its place is in the book of those older than the window."""
        self.zero_s = 0.0
        """While preempted: when its slack is zero."""


class WaitingLine:
    """Held requests: those with a deadline, and then the late ones in the order in which they became so.

    Those with a deadline go by deadline while all can be met. When not all can, the fewest are postponed: going through
    them by deadline, whenever one would miss, the longest so far is left out (Moore 1968, who lets the fewest jobs be
    late). Who is postponed keeps its deadline, and is taken up again when there is time.
    """

    def __init__(self, *, by_deadline: bool = True) -> None:
        self._in_order_of_arrival = not by_deadline
        self._by_deadline: list[tuple[float, int, GateRequest]] = []
        self._turn: list[GateRequest] = []
        """In the order of their turn, last first."""
        self._postponed: list[GateRequest] = []
        self._late: deque[GateRequest] = deque()
        self._ordered = True
        self.tokens = 0
        """Prompt tokens of those that are not late."""
        self.late_tokens = 0

    def __len__(self) -> int:
        return len(self._by_deadline) + len(self._late)

    @property
    def late(self) -> int:
        """How many are late."""
        return len(self._late)

    @property
    def in_time(self) -> int:
        """How many are neither late nor postponed."""
        return len(self._turn)

    @property
    def postponed(self) -> int:
        """How many are left for later, since not all can be met."""
        return len(self._postponed)

    def add(self, request: GateRequest) -> None:
        """By its deadline."""
        request.stage = Stage.WAITING
        insort(self._by_deadline, (request.deadline_s, request.number, request))
        self.tokens += request.prompt_tokens
        self._ordered = False

    def add_late(self, request: GateRequest) -> None:
        """At the end."""
        request.stage = Stage.LATE
        self._late.append(request)
        self.late_tokens += request.prompt_tokens

    def put_in_order(self, start_s: float, s_per_token: float) -> None:
        """Whose turn it is when, if work on the first begins at `start_s`."""
        self._ordered = True
        self._postponed.clear()
        if self._in_order_of_arrival:
            self._turn = sorted([request for _, _, request in self._by_deadline], key=_number, reverse=True)
            return
        kept: list[tuple[int, int, GateRequest]] = []
        at_s = start_s
        for _, number, request in self._by_deadline:
            at_s += request.prompt_tokens * s_per_token
            heappush(kept, (-request.prompt_tokens, number, request))
            if at_s > request.deadline_s:
                tokens, _, longest = heappop(kept)
                at_s += tokens * s_per_token
                self._postponed.append(longest)
        if not self._postponed:
            self._turn = [request for _, _, request in reversed(self._by_deadline)]
            return
        self._postponed.sort(key=_turn, reverse=True)
        self._turn = sorted([request for _, _, request in kept], key=_turn, reverse=True)

    def head(self) -> GateRequest | None:
        """Whose turn it is; who was postponed, when there is nobody else."""
        if not self._ordered:
            self.put_in_order(0.0, 0.0)
        if self._turn:
            return self._turn[-1]
        return self._postponed[-1] if self._postponed else None

    def tokens_of(self, most: int) -> int:
        """Prompt tokens of the first `most` whose turn it is, late ones left out."""
        if most >= len(self._by_deadline):
            return self.tokens
        turn = self._turn[-most:] if most > 0 else []
        rest = self._postponed[len(turn) - most :] if most > len(turn) else []
        return sum([request.prompt_tokens for request in turn]) + sum([request.prompt_tokens for request in rest])

    def first(self) -> GateRequest | None:
        """Who has the earliest deadline."""
        return self._by_deadline[0][2] if self._by_deadline else None

    def last_deadline_s(self) -> float:
        """The latest one; infinite when nobody has any."""
        return self._by_deadline[-1][0] if self._by_deadline else inf

    def head_late(self) -> GateRequest | None:
        """Who has been late for longest."""
        return self._late[0] if self._late else None

    def remove(self, request: GateRequest) -> None:
        """It was released, or left."""
        if request.stage is Stage.LATE:
            self._late.remove(request)
            self.late_tokens -= request.prompt_tokens
            return
        del self._by_deadline[bisect_left(self._by_deadline, (request.deadline_s, request.number))]
        self.tokens -= request.prompt_tokens
        for line in (self._turn, self._postponed):
            if line and line[-1] is request:
                line.pop()
                return
            if request in line:
                line.remove(request)
                return

    def ahead_of(self, deadline_s: float) -> int:
        """Prompt tokens of those with an earlier deadline. Touches each of them."""
        place = bisect_left(self._by_deadline, (deadline_s, -1))
        return sum([request.prompt_tokens for _, _, request in self._by_deadline[:place]])


def _number(request: GateRequest) -> int:
    return request.number


def _turn(request: GateRequest) -> tuple[float, int]:
    return request.deadline_s, request.number
