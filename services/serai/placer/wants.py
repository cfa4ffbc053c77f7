"""What is asked of models, from all who know: the ledger, macro-schedulers, and ingresses that somebody knocked at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from serai.contracts.admission import ScaleWish
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.placement import Knock, StartableModels
from serai.contracts.subjects import MACRO_WISH, PLACEMENT_KNOCK, PLACEMENT_STARTABLE
from serai.placer.demand_watch import DemandWatch
from serai.placer.knocks import Knocks, with_knocks
from serai.placer.observed import Observed
from serai.placer.placement_file import PlacementFile
from serai.placer.scale_wishes import ScaleWishes
from serai.runtime.bus import Bus, BusError, Message, Subscription
from serai.runtime.registry_replica import RegistryReplica

log = structlog.get_logger()

SAY_EVERY_S = 5.0
"""Which models would be started."""


class Wants:
    """Of one site. `news` is called when a plan should be made at once."""

    def __init__(
        self, bus: Bus, site: str, demand_every_s: float, file: Callable[[], PlacementFile], news: Callable[[], None]
    ) -> None:
        self._bus = bus
        self._site = site
        self._file = file
        self._news = news
        self._demand_every_s = demand_every_s
        self.demand = DemandWatch(bus, site, demand_every_s)
        self._wished = ScaleWishes()
        self._knocks = Knocks()

    async def start(self) -> list[Subscription]:
        """Listens from now on."""
        return [
            await self._bus.subscribe(MACRO_WISH.of_site(self._site), self.on_wish),
            await self._bus.subscribe(PLACEMENT_KNOCK.of_site(self._site), self.on_knock),
        ]

    async def asking(self, acts: Callable[[], bool], loads_s: Callable[[], dict[str, float]]) -> None:
        """Asks the ledger what was asked of each model, as long as this placer acts."""
        while True:
            if acts() and self._bus.connected:
                await self.demand.ask(self._file(), loads_s())
            await asyncio.sleep(self._demand_every_s)

    async def saying(self, acts: Callable[[], bool], starts_s: Callable[[], dict[str, float]]) -> None:
        """Tells ingresses which models are started when they are asked for, and how long that takes."""
        while True:
            if acts():
                try:
                    said = StartableModels(self._site, 3 * SAY_EVERY_S, starts_s())
                    self._bus.publish(PLACEMENT_STARTABLE.of_site(self._site), encode(said))
                except BusError as error:
                    log.debug("placer.not_said", error=str(error))
            await asyncio.sleep(SAY_EVERY_S)

    def on_wish(self, message: Message) -> None:
        """How many instances a model's macro-scheduler wants."""
        try:
            wish = decode(ScaleWish, message.data)
        except MalformedMessage as error:
            log.warning("placer.bad_wish", error=str(error), effect="ignored")
            return
        now = time.monotonic()
        before = self._wished.wanted(now).get(wish.model)
        if why := self._wished.hear(wish, self._file().models, now):
            log.debug("placer.wish_ignored", model=wish.model, why=why)
        elif before != wish.instances:
            log.info("placer.wish", model=wish.model, instances=wish.instances, why=wish.why)
            self._news()

    def on_knock(self, message: Message) -> None:
        """Somebody asks an ingress for a model that nothing serves."""
        try:
            knock = decode(Knock, message.data)
        except MalformedMessage as error:
            log.warning("placer.bad_knock", error=str(error), effect="ignored")
            return
        if self._knocks.hear(knock, self._file().models, time.monotonic()):
            log.info("placer.knock", model=knock.model, waiting=knock.waiting)
            self._news()

    def usage(self, replica: RegistryReplica, now: float) -> dict[str, Observed]:
        """By model: what was served lately, and what waits where nothing serves."""
        self._knocks.answered([model for model in self._knocks.waiting(now) if replica.routable(model, now)])
        return with_knocks(self.demand.usage, self._knocks.waiting(now))

    def wished(self, now: float) -> dict[str, int]:
        """Instances by model that macro-schedulers want."""
        return self._wished.wanted(now)
