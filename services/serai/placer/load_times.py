"""When engines were assigned, and how long they took from there to their first token. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from serai.contracts.placement import PoolRun, RunState
from serai.placer.pools import PoolView

LOAD_WEIGHT = 0.3
"""Of the last load time that was seen, against those before."""


class LoadTimes:
    """Of all pools."""

    def __init__(self) -> None:
        self._born_s: dict[str, float] = {}
        self._loading: set[str] = set()
        """Engines that were seen before they served."""
        self.seen_s: dict[tuple[str, str], float] = {}
        """By model and kind of GPU."""

    def note(self, views: Sequence[PoolView], now: float) -> list[tuple[str, float]]:
        """What all pools say now. Models whose engines serve since, and how long each took."""
        there: set[str] = set()
        served: list[tuple[str, float]] = []
        for view in views:
            for run in view.report.runs:
                id = run.assignment.id
                there.add(id)
                self._born_s.setdefault(id, now - run.age_s)
                if run.state is RunState.STARTING:
                    self._loading.add(id)
                elif run.state is RunState.SERVING and id in self._loading:
                    served.append((run.assignment.model, self._served(view, run, now)))
        self._born_s = {id: born_s for id, born_s in self._born_s.items() if id in there}
        self._loading &= there
        return served

    def ages_s(self, now: float) -> dict[str, float]:
        """Of all engines, since they were assigned, as far as is known."""
        return {id: now - born_s for id, born_s in self._born_s.items()}

    def _served(self, view: PoolView, run: PoolRun, now: float) -> float:
        """The next one is expected to take the same."""
        self._loading.discard(run.assignment.id)
        took_s = max(0.1, now - run.age_s - self._born_s[run.assignment.id])
        key = (run.assignment.model, view.gpu)
        before_s = self.seen_s.get(key, took_s)
        self.seen_s[key] = before_s + LOAD_WEIGHT * (took_s - before_s)
        return took_s
