"""Asks the ledger what was asked of each model, and keeps it with what the past says of the next minutes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.subjects import USAGE_DEMAND
from serai.contracts.usage import DemandAnswer, DemandRequest
from serai.placer.observed import Observed, observed
from serai.placer.past import WEEK_BUCKET_S, WEEK_BUCKETS, Past
from serai.placer.placement_file import PlacementFile
from serai.runtime.bus import Bus, BusError

log = structlog.get_logger()

TIMEOUT_S = 5.0
BUCKETS = 20
"""A window of usage is looked at in so many spans."""
BUCKETS_MAX = 2_000


class DemandWatch:
    """Of one site. `ask` now and then."""

    def __init__(self, bus: Bus, site: str, every_s: float) -> None:
        self._bus = bus
        self._site = site
        self._every_s = every_s
        self._past = Past()
        self._heard_at_s = -math.inf
        self.usage: dict[str, Observed] = {}

    @property
    def known(self) -> bool:
        """The ledger has answered lately."""
        return time.monotonic() - self._heard_at_s < 3 * self._every_s + TIMEOUT_S

    def prewarm(self, loads_s: Mapping[str, float]) -> frozenset[str]:
        """Models that are about to be asked for."""
        return self._past.prewarm(loads_s, time.time())

    async def ask(self, file: PlacementFile, loads_s: Mapping[str, float]) -> None:
        """`loads_s`: what an engine of each model takes to serve."""
        window_s, cold_s = file.demand_window_s, file.rules.cold_after_s or 0.0
        bucket_s = float(max(1, math.ceil(window_s / BUCKETS)))
        buckets = min(BUCKETS_MAX, math.ceil(max(window_s, cold_s + 2 * bucket_s) / bucket_s) + 1)
        if not self._past.told_until_s:
            await self._ask(file, WEEK_BUCKET_S, WEEK_BUCKETS)
        answer = await self._ask(file, bucket_s, buckets)
        if answer is None:
            return
        seen = observed(answer, bucket_s=bucket_s, window_s=window_s, age_s=bucket_s)
        self.usage = self._past.with_rises(seen, loads_s, window_s, time.time())
        self._heard_at_s = time.monotonic()

    async def _ask(self, file: PlacementFile, bucket_s: float, buckets: int) -> DemandAnswer | None:
        """The last so many spans, up to now; None when nobody tells."""
        since_s = time.time() - buckets * bucket_s
        models = sorted(file.models)
        since = datetime.fromtimestamp(since_s, UTC).isoformat(timespec="milliseconds")
        request = encode(DemandRequest(since, bucket_s, buckets, models))
        try:
            message = await self._bus.request(USAGE_DEMAND.of_site(self._site), request, TIMEOUT_S)
            answer = decode(DemandAnswer, message.data)
            if answer.problem:
                raise BusError(answer.problem)
        except (BusError, MalformedMessage) as error:
            if self.known:
                log.warning("placer.no_demand", error=str(error), effect="what is known already, and the file, count")
            return None
        self._past.hear(answer, models, since_s, bucket_s, buckets)
        return answer
