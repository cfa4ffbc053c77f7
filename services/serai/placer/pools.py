"""What the placer knows of pool agents: their last words, and why some of them are not to be used. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from serai.contracts.placement import PoolReport, RunState
from serai.performance.hardware import UnknownHardware, find_gpu
from serai.placer.fleet import Fleet, Node

SILENT_INTERVALS = 4.0
"""A pool that has missed so many reports gets nothing new."""
GONE_S = 60.0
"""One that was silent for so long is taken for gone, with what it ran."""
TWICE_S = 15.0
"""Two agents that both speak for one pool within so many seconds are two, not one that was started anew."""
STORAGE_BYTES_S = 2e9
"""Where a pool does not say how fast it reads weights."""


@dataclass(slots=True)
class _Known:
    report: PoolReport
    heard_at_s: float
    others: dict[str, float] = field(default_factory=dict)
    """When other agents have last spoken for this pool."""
    twice_until_s: float = -1.0


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool, as the placer sees it."""

    report: PoolReport
    gpu: str
    """Kind, by the catalogue; as the pool says it where that is not known."""
    problem: str = ""
    """Why nothing new is placed there; empty = it can be used."""
    silent_s: float = 0.0

    @property
    def name(self) -> str:
        return self.report.pool

    @property
    def gpus(self) -> int:
        return len(self.report.gpus)

    @property
    def node(self) -> Node:
        """For the solver. Only of a pool without a problem."""
        report = self.report
        return Node(
            report.pool,
            self.gpu,
            self.gpus,
            report.site,
            report.provider,
            report.failure_domain or report.host,
            report.allocation_remaining_s,
            report.storage_bytes_s or STORAGE_BYTES_S,
            report.pool,
        )


class Pools:
    """Of one site."""

    def __init__(self, site: str) -> None:
        self._site = site
        self._known: dict[str, _Known] = {}

    def hear(self, report: PoolReport, now: float) -> bool:
        """Whether this is news beyond the pool being there."""
        if report.site != self._site:
            return False
        known = self._known.get(report.pool)
        if known is None:
            self._known[report.pool] = _Known(report, now)
            return True
        if report.instance != known.report.instance:
            spoke_at_s = known.others.get(report.instance)
            if spoke_at_s is not None and now - spoke_at_s < TWICE_S:
                known.twice_until_s = now + TWICE_S
            known.others = {known.report.instance: known.heard_at_s, report.instance: now}
        elif report.sequence < known.report.sequence:
            return False  # Overtaken on its way.
        before, known.report, known.heard_at_s = known.report, report, now
        return _matters(before) != _matters(report)

    def views(self, now: float) -> list[PoolView]:
        """All that are there, by name."""
        for name in [name for name, known in self._known.items() if now - known.heard_at_s > GONE_S]:
            del self._known[name]
        return [self._view(known, now) for _, known in sorted(self._known.items())]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def _view(self, known: _Known, now: float) -> PoolView:
        report = known.report
        silent_s = now - known.heard_at_s
        try:
            gpu, problem = find_gpu(report.gpu).name, ""
        except UnknownHardware as error:
            gpu, problem = report.gpu, str(error)
        if now < known.twice_until_s:
            problem = f"two agents speak for pool {report.pool}; give each --pool-name"
        elif not report.gpus:
            problem = "it has no GPUs"
        elif report.stopping:
            problem = "its agent is about to end"
        elif not report.engines:
            problem = "it has no engine's program"
        elif silent_s > SILENT_INTERVALS * report.interval_s:
            problem = f"it has been silent for {silent_s:.0f} s"
        return PoolView(report, gpu, problem, silent_s)


def judged(views: Sequence[PoolView], quarantined: Mapping[str, str], leaving_s: float) -> list[PoolView]:
    """`views`, and why some of them get nothing new for reasons that are not in their own words. `quarantined`: hosts,
    and why; `leaving_s`: an allocation that ends sooner is left, so that its engines are started elsewhere in time."""
    return [_judged(view, quarantined, leaving_s) for view in views]


def _judged(view: PoolView, quarantined: Mapping[str, str], leaving_s: float) -> PoolView:
    remaining_s = view.report.allocation_remaining_s
    if view.problem:
        return view
    if why := quarantined.get(view.report.host):
        return replace(view, problem=f"its host is in quarantine: {why}")
    if remaining_s is not None and remaining_s < leaving_s:
        return replace(view, problem=f"its allocation ends in {remaining_s:.0f} s")
    return view


def fleet_of(views: list[PoolView]) -> Fleet:
    """Of the pools that can be used. Raises BadFleet."""
    return Fleet([view.node for view in views if not view.problem])


def _matters(report: PoolReport) -> object:
    runs = [(run.assignment.id, run.state, run.session) for run in report.runs]
    return (report.instance, report.gpu, len(report.gpus), report.engines, runs, report.stopping, report.generation)


LIVE = (RunState.WAITING, RunState.STARTING, RunState.SERVING)
"""States of what has, or will have, its GPUs, and is not about to end."""
