"""Asks that wait for an instance: by deadline, fair between projects where deadlines are about the same. Pure.

Fair is Virtual Token Counter (Sheng et al., OSDI '24): each project is charged for the tokens that it is served, and
the one with the least goes first; who comes back after a pause starts from the least of those who wait, so that a pause
earns nothing. Here counters only decide among deadlines of one slot, so fairness costs nobody a deadline.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from serai.macro_scheduler.admission import Request

_SLOT_SHARE = 0.1
"""Of the TTFT target: deadlines that near are about the same."""
_PROJECTS_MAX = 10_000


class Pending(NamedTuple):
    """One that waits."""

    deadline_s: float
    number: int
    request: Request
    to: object


class PendingLine:
    """All that wait at one group. `by_arrival`: first come, first served, as the paper has it."""

    def __init__(self, slo_ttft_s: float, by_arrival: bool = False) -> None:
        self._slot_s = _SLOT_SHARE * slo_ttft_s
        self._by_arrival = by_arrival
        self._line: list[tuple[float, int, Pending]] = []
        self._known: dict[str, tuple[float, int]] = {}
        self._number = 0
        self._served: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def add(self, request: Request, to: object) -> None:
        """By its deadline. Its id must not wait already."""
        self._number += 1
        key = float(self._number) if self._by_arrival else request.deadline_s
        entry = Pending(request.deadline_s, self._number, request, to)
        insort(self._line, (key, self._number, entry))
        self._known[request.ask.request_id] = (key, self._number)
        self._lift(request.ask.project)

    def remove(self, request_id: str) -> Pending | None:
        """It waits no more. None: it did not."""
        place = self._known.pop(request_id, None)
        return None if place is None else self._line.pop(bisect_left(self._line, place))[2]

    def expired(self, before_s: float) -> list[Pending]:
        """Those whose deadline is before then; they do not wait any more."""
        gone = []
        for _, _, entry in list(self._line):
            if entry.deadline_s >= before_s:
                if not self._by_arrival:
                    break
                continue
            self.remove(entry.request.ask.request_id)
            gone.append(entry)
        return gone

    def in_turn(self, most: int) -> Iterator[Pending]:
        """The first `most` in the order of their turn."""
        if self._by_arrival or len(self._line) < 2:
            yield from [entry for _, _, entry in self._line[:most]]
            return
        until_s = self._line[0][0] + self._slot_s
        slot = [entry for key, _, entry in self._line[:64] if key <= until_s]
        slot.sort(key=lambda entry: (self._served.get(entry.request.ask.project, 0.0), entry.deadline_s))
        yield from slot[:most]

    def ages_s(self, now_s: float) -> list[float]:
        """For how long each has waited, since it arrived at its ingress."""
        return [now_s - entry.request.arrived_s for _, _, entry in self._line]

    def serve(self, project: str, tokens: float) -> None:
        """A project was served so many tokens."""
        if len(self._served) >= _PROJECTS_MAX and project not in self._served:
            del self._served[max(self._served, key=self._served.__getitem__)]
        self._served[project] = self._served.get(project, 0.0) + tokens

    def _lift(self, project: str) -> None:
        waiting = {entry.request.ask.project for _, _, entry in self._line[:64]} - {project}
        if waiting and sum(1 for _, _, entry in self._line[:64] if entry.request.ask.project == project) == 1:
            least = min([self._served.get(other, 0.0) for other in waiting])
            self._served[project] = max(self._served.get(project, 0.0), least)
