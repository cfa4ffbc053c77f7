"""Asks launchers for more pools, or fewer, when that is something new; and now and then again, for they may have been
started anew."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from serai.placer.deciding import Decision
from serai.placer.launchers.base import Launcher
from serai.placer.placement_file import PlacementFile
from serai.placer.pools import PoolView
from serai.placer.wishes import wishes

log = structlog.get_logger()

AGAIN_S = 60.0


class Launching:
    """Of one site."""

    def __init__(self, launchers: Mapping[str, Launcher]) -> None:
        self._launchers = launchers
        self._asked: dict[str, int] = {}
        """Of each launchable: how many pool agents were asked for last."""
        self._asked_at_s = -math.inf
        self._empty_since_s: dict[str, float] = {}

    def note(self, views: Sequence[PoolView], now: float) -> None:
        """Which pools have no engine."""
        empty = {view.name for view in views if not view.report.runs}
        self._empty_since_s = {name: self._empty_since_s.get(name, now) for name in empty}

    async def ask(
        self,
        file: PlacementFile,
        views: Sequence[PoolView],
        decision: Decision,
        now: float,
        may: Callable[[], Awaitable[bool]],
    ) -> None:
        """`may` says, before each word, whether we still act."""
        again = now - self._asked_at_s > AGAIN_S
        for wish in wishes(
            file.launchables,
            views,
            file.models,
            decision.options.feasible,
            decision.placement.missing,
            {name: now - since_s for name, since_s in self._empty_since_s.items()},
            self._asked,
        ):
            name = wish.launchable.name
            if not again and self._asked.get(name) == wish.count:
                continue
            if not await may():
                return
            problem = await self._launchers[wish.launchable.launcher].scale(wish.launchable, wish.count, wish.why)
            self._asked[name] = wish.count
            tell = log.error if problem else log.info
            tell("placer.wish", launchable=name, count=wish.count, why=wish.why, problem=problem)
        if again:
            self._asked_at_s = now
