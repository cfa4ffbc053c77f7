"""Models that nothing serves and that a site's placer starts when somebody asks for them.

Placers say which these are, every few seconds, and how long an engine takes. Who has a request for one knocks, and
knocks again while requests wait. Both may be lost: what a placer has not said for a while is not counted on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.placement import Knock, StartableModels
from serai.contracts.subjects import PLACEMENT_KNOCK, PLACEMENT_STARTABLE
from serai.runtime.bus import Bus, BusError, Message, Subscription

log = structlog.get_logger()

KNOCK_EVERY_S = 2.0
"""Of one model, however many ask for it."""
EPISODE_S = 120.0
"""After so long without a knock, the next one is the first again."""
SOON_S = 5.0
"""What is said to be left of a start that takes longer than it should."""
MODELS_MAX = 10_000
HOLDS_MAX_S = 600.0


class ColdModels:
    """As far as one ingress has heard. Time is the caller's, in seconds."""

    def __init__(self, bus: Bus, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._clock = clock
        self._sites: dict[str, tuple[float, StartableModels]] = {}
        """By subject: until when it counts, and what was said."""
        self._knocked: dict[str, tuple[float, float]] = {}
        """By model: the first and the last time of this episode."""

    async def start(self) -> Subscription:
        """Listens from now on."""
        return await self._bus.subscribe(PLACEMENT_STARTABLE.every, self.on_startable)

    def on_startable(self, message: Message) -> None:
        """One site's placer says what it would start."""
        try:
            said = decode(StartableModels, message.data)
        except MalformedMessage as error:
            log.warning("cold_models.bad_message", subject=message.subject, error=str(error), effect="ignored")
            return
        if message.subject != PLACEMENT_STARTABLE.of_site(said.site) or len(said.models) > MODELS_MAX:
            return
        self._sites[message.subject] = (self._clock() + min(max(0.0, said.holds_s), HOLDS_MAX_S), said)

    def names(self, now: float) -> tuple[str, ...]:
        """All that some placer would start, whether anything serves them or not."""
        return tuple(sorted({model for said in self._said(now) for model in said.models}))

    def load_s(self, model: str) -> float | None:
        """What an engine takes to serve, at the site that is quickest; None: nobody starts one."""
        if not self._sites:
            return None
        loads = [load_s for said in self._said(self._clock()) if (load_s := said.models.get(model)) is not None]
        return min(loads, default=None)

    def starts_in_s(self, model: str, now: float) -> float | None:
        """What is left of that, after the first knock."""
        load_s = self.load_s(model)
        if load_s is None:
            return None
        first_s, last_s = self._knocked.get(model, (now, -math.inf))
        gone_s = now - first_s if now - last_s < EPISODE_S else 0.0
        return max(min(load_s, SOON_S), load_s - gone_s)

    def knock(self, model: str, waiting: int, now: float) -> None:
        """Somebody asks for `model`, and `waiting` do in all."""
        first_s, last_s = self._knocked.get(model, (now, -math.inf))
        if now - last_s < KNOCK_EVERY_S or self.load_s(model) is None:
            return
        self._knocked[model] = (first_s if now - last_s < EPISODE_S else now, now)
        data = encode(Knock(model, max(1, waiting)))
        try:
            for said in self._said(now):
                if model in said.models:
                    self._bus.publish(PLACEMENT_KNOCK.of_site(said.site), data)
        except BusError as error:
            log.debug("cold_models.not_knocked", model=model, error=str(error))

    def tidy(self, now: float) -> None:
        """Forgets what is long over. To be called now and then."""
        self._sites = {subject: kept for subject, kept in self._sites.items() if kept[0] > now}
        self._knocked = {model: times for model, times in self._knocked.items() if now - times[1] < EPISODE_S}

    def _said(self, now: float) -> Iterable[StartableModels]:
        return [said for until_s, said in self._sites.values() if until_s > now]
